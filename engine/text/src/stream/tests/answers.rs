//! Answers in parts: grouping, stop strings, ends, and texts that are read back.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use strum::IntoEnumIterator;

use super::decoders::*;
use super::fixtures::{json_formats, read_answer, reader_options};
use super::model::stream_answer;
use super::piece_tokens::PieceTokens;
use crate::stream::TextRules;
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::markers::{Lexeme, MarkerLexer, MarkerRole, MarkerTable};
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::reasoning::{BlockText, ReasoningFamily, ReasoningStart};
use crate::stream::tools::ToolFamily;
use crate::tokenizer::TokenDecoder;

/// All formats.
fn any_format() -> impl Strategy<Value = (ToolFamily, ReasoningFamily)> {
    let others = ToolFamily::iter().map(|family| (family, ReasoningFamily::ThinkTags));
    prop_oneof![select(json_formats()), select(others.collect::<Vec<_>>()),]
}

/// Parts of answers; `{B}`, `{E}`, `{R}` and `{S}` stand for markers of the format.
const FRAGMENTS: [&str; 43] = [
    "{B}",
    "{B}",
    "{E}",
    "{R}",
    "{S}",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "\\",
    ",",
    ":",
    "; ",
    " ",
    "\n",
    "\n\n",
    "name",
    "\"name\": \"f\", ",
    "\"name\": \"zz\", ",
    "\"arguments\": {",
    "\"a\": \"é😀",
    "\"parameters\": {}",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    "{\"arguments\": \"{\\\"a\\\": 2}\", \"name\": \"g\"}",
    "text",
    "func",
    "<tool",
    "Here is",
    "null",
    "{\"name\": \"f\", \"arguments\": {",
    "STOP",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>a</arg_key><arg_value>",
    "f",
    "f(a=\"x\")",
    "{M}",
    "```",
    "[1, ",
    ", {\"b\": [\"}\"]}",
    "true",
];

/// A format, with its markers as tokens or as text.
pub fn make_format(
    (tools, reasoning): (ToolFamily, ReasoningFamily),
    are_tokens: bool,
) -> (AnswerFormat, PieceTokens) {
    let as_text = AnswerFormat::new(Some(tools), Some(reasoning), &PieceTokens::default());
    if !are_tokens {
        return (as_text, PieceTokens::default());
    }
    let markers = as_text.table().markers().iter();
    let texts: Vec<&str> = markers.map(|marker| marker.text).collect();
    let tokens = PieceTokens::new(&texts, true);
    let format = AnswerFormat::new(Some(tools), Some(reasoning), &tokens);
    (format, tokens)
}

fn answer_text(format: &AnswerFormat, fragments: &[&str]) -> String {
    let markers = format.table().markers();
    let calls = markers
        .iter()
        .filter(|marker| matches!(marker.role, MarkerRole::Call | MarkerRole::CallBegin));
    let calls: Vec<&str> = calls.map(|marker| marker.text).collect();
    let replaced = fragments.concat();
    let replaced = replaced.replace("{B}", calls.first().unwrap_or(&"{"));
    let replaced = replaced.replace("{E}", calls.last().unwrap_or(&"}"));
    let middle = calls.get(calls.len() / 2);
    let replaced = replaced.replace("{M}", middle.unwrap_or(&"["));
    let replaced = replaced.replace("{R}", markers[0].text);
    let end = markers
        .iter()
        .find(|marker| marker.role == MarkerRole::ReasoningEnd);
    replaced.replace("{S}", end.unwrap().text)
}

fn any_start() -> impl Strategy<Value = Option<ReasoningStart>> {
    select(vec![
        None,
        Some(ReasoningStart::Undecided),
        Some(ReasoningStart::Inside(BlockText::Blank)),
        Some(ReasoningStart::Inside(BlockText::Begun)),
        Some(ReasoningStart::Behind),
        Some(ReasoningStart::Content),
    ])
}

/// Everything that a caller sees of an answer.
#[derive(Debug, PartialEq)]
pub struct SeenAnswer {
    pub parts: AnswerParts,
    pub counted: usize,
    pub matched_stop: Option<usize>,
    pub reasoning_tokens: u64,
    pub completed_calls: usize,
}

pub fn see_answer(
    format: &AnswerFormat,
    options: &ReaderOptions,
    rules: &TextRules,
    tokens: &dyn TokenDecoder,
    prompt: &[u32],
    ids: &[u32],
    group_sizes: &[usize],
) -> SeenAnswer {
    let rules = Arc::new(rules.clone());
    let mut reader = AnswerReader::new(format, options.clone(), rules, tokens, prompt);
    let mut parts = AnswerParts::default();
    let mut counted = 0;
    let mut matched_stop = None;
    let mut has_ended = false;
    let mut rest = ids;
    for &size in group_sizes.iter().cycle() {
        let (group, behind) = rest.split_at(size.min(rest.len()));
        rest = behind;
        let mut new_parts = AnswerParts::default();
        let fed = reader.feed(tokens, group, &mut new_parts);
        parts.extend(&new_parts);
        counted += fed.counted;
        matched_stop = fed.matched_stop;
        has_ended = fed.ends_here;
        if has_ended || rest.is_empty() {
            break;
        }
    }
    if !has_ended {
        let mut new_parts = AnswerParts::default();
        matched_stop = reader.finish(tokens, &mut new_parts);
        parts.extend(&new_parts);
    }
    SeenAnswer {
        parts,
        counted,
        matched_stop,
        reasoning_tokens: reader.reasoning_tokens(),
        completed_calls: reader.completed_calls(),
    }
}

pub fn count_complete_calls(parts: &AnswerParts) -> usize {
    parts
        .iter()
        .filter(|part| **part == AnswerPart::CallEnd)
        .count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn grouping_of_tokens_changes_nothing(
        format in any_format(),
        are_tokens in any::<bool>(),
        fragments in vec(select(FRAGMENTS.to_vec()), 0..24),
        start in any_start(),
        cut_places in vec(1..40usize, 1..6),
        group_sizes in vec(1..5usize, 1..4),
        (separate_reasoning, parallel_tool_calls) in any::<(bool, bool)>(),
        stops in vec(select(vec!["STOP", "e", "\n\n", "x}"]), 0..2),
        (include_stop, min_tokens) in (any::<bool>(), 0..6u32),
    ) {
        let (format, mut tokens) = make_format(format, are_tokens);
        let text = answer_text(&format, &fragments);
        let ids = tokens.cut(&text, &|place| cut_places.iter().any(|len| place % len == 0));
        let options = ReaderOptions {
            separate_reasoning,
            parallel_tool_calls,
            ..reader_options(start)
        };
        let rules = TextRules {
            stops: stops.into_iter().map(str::to_owned).collect(),
            include_stop,
            skip_special_tokens: true,
            min_tokens,
            ..TextRules::default()
        };
        let one_by_one = see_answer(&format, &options, &rules, &tokens, &[], &ids, &[1]);
        let grouped = see_answer(&format, &options, &rules, &tokens, &[], &ids, &group_sizes);
        prop_assert_eq!(&one_by_one, &grouped);
        let whole = see_answer(&format, &options, &rules, &tokens, &[], &ids, &[ids.len().max(1)]);
        prop_assert_eq!(&one_by_one, &whole);
        prop_assert_eq!(count_complete_calls(&whole.parts), whole.completed_calls);
        if !parallel_tool_calls {
            prop_assert!(whole.completed_calls <= 1);
        }
    }

    #[test]
    fn cuts_of_the_text_change_nothing(
        format in any_format(),
        are_tokens in any::<bool>(),
        fragments in vec(select(FRAGMENTS.to_vec()), 0..24),
        start in any_start(),
        cut_places in vec(1..40usize, 1..6),
        separate_reasoning in any::<bool>(),
    ) {
        let (format, mut tokens) = make_format(format, are_tokens);
        let text = answer_text(&format, &fragments);
        let whole = tokens.cut(&text, &|_| false);
        let cut = tokens.cut(&text, &|place| cut_places.iter().any(|len| place % len == 0));
        let bytes = tokens.cut(&text, &|_| true);
        let options = ReaderOptions { separate_reasoning, ..reader_options(start) };
        let rules = TextRules::default();
        let expected = read_answer(&format, &options, &rules, &tokens, &whole, 1);
        for ids in [cut, bytes] {
            let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
            prop_assert_eq!(&parts, &expected);
        }
    }

    /// Without calls and reasoning every character of the answer is content, but for a begin marker
    /// at its end.
    #[test]
    fn text_that_is_no_call_stays_as_it_is(
        format in any_format(),
        are_tokens in any::<bool>(),
        fragments in vec(select(FRAGMENTS.to_vec()), 0..24),
    ) {
        let (format, mut tokens) = make_format(format, are_tokens);
        let text = answer_text(&format, &fragments);
        let ids = tokens.cut(&text, &|_| false);
        let options = reader_options(Some(ReasoningStart::Content));
        let rules = TextRules { skip_special_tokens: true, ..TextRules::default() };
        let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
        let has_channels = format.tools() == Some(ToolFamily::GptOss);
        let has_calls = has_channels || parts.iter().any(|part| matches!(part, AnswerPart::CallBegin(_)));
        if !has_calls {
            let begin = format.table().text_of(0);
            let kept = text.trim_ascii_end().strip_suffix(begin);
            prop_assert_eq!(parts.content(), kept.unwrap_or(&text));
        }
    }

    /// An answer with its reasoning in the content is the text as it was generated.
    #[test]
    fn joined_reasoning_stays_as_it_is(
        are_tokens in any::<bool>(),
        fragments in vec(select(vec!["{R}", "{S}", "a", "\n", "\n\n", " ", "é"]), 0..16),
        start in any_start(),
    ) {
        let (format, mut tokens) = make_format((ToolFamily::Mistral, ReasoningFamily::Mistral), are_tokens);
        let text = answer_text(&format, &fragments);
        let ids = tokens.cut(&text, &|_| false);
        let options = ReaderOptions { separate_reasoning: false, ..reader_options(start) };
        let rules = TextRules::default();
        let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
        prop_assert_eq!(parts.reasoning(), "");
        prop_assert_eq!(parts.content(), text);
    }

    /// Without a format an answer is the text of a stream.
    #[test]
    fn answer_without_format_is_its_text(
        decoder in byte_tokens(true),
        ids in vec(0..26u32, 1..40),
        stops in vec("[ab<]{0,3}", 0..3),
        (include_stop, skip_special_tokens, min_tokens) in (any::<bool>(), any::<bool>(), 0..8u32),
        group_sizes in vec(1..5usize, 1..4),
    ) {
        let rules = TextRules {
            stops,
            include_stop,
            skip_special_tokens,
            min_tokens,
            ..TextRules::default()
        };
        check_against_text_stream(&decoder, &rules, &[], &ids, &group_sizes)?;
    }

    #[test]
    fn answer_without_format_continues_its_prompt(
        prompt in vec(0..SPACED_IDS, 0..12),
        ids in vec(0..SPACED_IDS, 1..24),
        skip_special_tokens in any::<bool>(),
        group_sizes in vec(1..5usize, 1..4),
    ) {
        let rules = TextRules { skip_special_tokens, ..TextRules::default() };
        check_against_text_stream(&SpacedTokens, &rules, &prompt, &ids, &group_sizes)?;
    }

    /// Decoders that look at the tokens before see those of the markers.
    #[test]
    fn text_beside_markers_is_decoded_in_its_context(
        ids in vec(0..12u32, 0..24),
        skip_special_tokens in any::<bool>(),
    ) {
        // The special tokens of `SpacedTokens`, under the same ids.
        let vocabulary = PieceTokens::new(&["<unk>", "<s>"], true);
        let markers = [("<unk>", MarkerRole::Call), ("<s>", MarkerRole::Call)];
        let table = Arc::new(MarkerTable::new(&markers, &vocabulary));
        let mut lexer = MarkerLexer::new(table.clone(), 0..2, &SpacedTokens, skip_special_tokens, &[]);
        let mut joined = String::new();
        let mut found = 0;
        let mut read = |lexeme: Lexeme<'_>| match lexeme {
            Lexeme::Text(text) => joined.push_str(text),
            Lexeme::Marker(index) => {
                found += 1;
                if !skip_special_tokens {
                    joined.push_str(table.text_of(index));
                }
            }
        };
        for &id in &ids {
            lexer.feed(&SpacedTokens, id, false, &mut read);
        }
        lexer.finish(&SpacedTokens, &mut read);
        prop_assert_eq!(found, ids.iter().filter(|id| **id < 2).count());
        prop_assert_eq!(joined, SpacedTokens.decode(&ids, skip_special_tokens));
    }


}

fn check_against_text_stream(
    decoder: &dyn TokenDecoder,
    rules: &TextRules,
    prompt: &[u32],
    ids: &[u32],
    group_sizes: &[usize],
) -> Result<(), TestCaseError> {
    let (expected, _) = stream_answer(decoder, rules, prompt, ids, group_sizes);
    let format = AnswerFormat::new(None, None, &PieceTokens::default());
    let options = ReaderOptions {
        tools: Arc::new([]),
        ..reader_options(None)
    };
    let answer = see_answer(&format, &options, rules, decoder, prompt, ids, group_sizes);
    prop_assert_eq!(answer.parts.content(), expected.text);
    prop_assert_eq!(answer.counted, expected.counted);
    prop_assert_eq!(answer.matched_stop, expected.matched_stop);
    Ok(())
}
