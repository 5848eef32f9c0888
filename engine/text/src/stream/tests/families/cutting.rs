//! Random texts of a family's tags, markers and calls: however they are cut, the parts are the
//! same.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::feeding::{
    FAMILIES, cut_lexemes, join_calls, lexemes_of, markers_of, push_text, read_parts, sample_tools,
};
use crate::stream::tools::ToolFamily;

/// Pieces of texts: those of every family, for each reads the others' as text.
const FRAGMENTS: &[&str] = &[
    "f",
    "g",
    "zz",
    "typed",
    "ns.get-data",
    "\n",
    " ",
    "\n\n",
    "text",
    "é",
    "😀",
    "<",
    "</",
    ">",
    "\"",
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    "=",
    ":",
    "1",
    "true",
    "a",
    "{\"a\": \"x\"}",
    "{}",
    "{\"a\": \"",
    "{ \"",
    "\"}",
    "{a: 1}",
    "{\"a\": [1, {\"b\": \"}\"}]}",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=a>",
    "<parameter=count>",
    "</parameter>",
    "<parameter=",
    "<function=zz>",
    "<tool_call>\n<function=typed>\n<parameter=count>\n5\n",
    "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<tool_call>g",
    "count",
    "<｜DSML｜function_calls>\n",
    "<｜DSML｜invoke name=\"f\">\n",
    "</｜DSML｜invoke>\n",
    "<｜DSML｜parameter name=\"a\" string=\"true\">",
    "</｜DSML｜parameter>",
    "<｜DSML｜parameter name=\"count\" string=\"false\">",
    "</｜DSML｜function_calls>",
    "[f(a=\"x\"), g()]",
    "[f(",
    "f(a=",
    "g()",
    ", ",
    "[typed(1, \"",
    "[zz(a=1), f(b='",
    "'''",
    "'x 'y' z'",
    "a='it's ",
    "**{'a': ",
    "f'{x}'",
    "007",
    "a=\"",
    "function",
    "```json\n",
    "\n```",
    "functions.f:0",
    "functions.zz:1",
    "commentary to=functions.f ",
    "analysis",
    "final",
    "commentary",
    " to=functions.g",
    "json",
    "assistant",
    "<|channel|>commentary to=functions.f<|message|>",
];

fn fragment_of(family: ToolFamily) -> impl Strategy<Value = (String, bool)> {
    let markers = markers_of(family);
    let own = FRAGMENTS
        .iter()
        .filter(|text| markers.iter().any(|marker| text.contains(marker)));
    let mut likely: Vec<&'static str> = markers.to_vec();
    likely.extend(own);
    let any_text = select(FRAGMENTS).prop_map(str::to_owned);
    let likely_text = select(likely).prop_map(str::to_owned);
    let text = prop_oneof![3 => any_text, 3 => likely_text, 1 => "[a-z <\"\\n]{0,4}"];
    // A typed fragment has no markers.
    (text, prop::bool::weighted(0.1))
}

fn fragments() -> impl Strategy<Value = (ToolFamily, Vec<(String, bool)>)> {
    select(FAMILIES).prop_flat_map(|family| (Just(family), vec(fragment_of(family), 0..24)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn parts_do_not_depend_on_cuts(
        (family, fragments) in fragments(),
        piece_lens in vec(1..9usize, 1..6),
    ) {
        let markers = markers_of(family);
        let mut lexemes = Vec::new();
        for (text, is_typed) in &fragments {
            if *is_typed {
                push_text(&mut lexemes, text);
            } else {
                lexemes.extend(lexemes_of(text, markers));
            }
        }
        let whole = read_parts(family, sample_tools(), &lexemes);
        // The order of the parts is one that an answer can have.
        join_calls(&whole);
        for lens in [&piece_lens[..], &[1]] {
            let cut = cut_lexemes(&lexemes, lens);
            let parts = read_parts(family, sample_tools(), &cut);
            prop_assert_eq!(&parts, &whole);
        }
    }
}
