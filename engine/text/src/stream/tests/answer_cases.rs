//! Single rules of answers in parts.

use std::sync::Arc;

use super::answers::{count_complete_calls, make_format, see_answer};
use super::fixtures::{read_answer, reader_options};
use super::piece_tokens::PieceTokens;
use crate::stream::TextRules;
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::markers::MarkerRole;
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::reasoning::{BlockText, ReasoningFamily, ReasoningStart};
use crate::stream::tools::ToolFamily;
use crate::tokenizer::TextTokenizer;
use crate::tokenizer::golden::load;

fn hermes() -> (AnswerFormat, PieceTokens) {
    make_format((ToolFamily::Hermes, ReasoningFamily::ThinkTags), true)
}

const TWO_CALLS: &str = "I look.<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n\
    <tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>\n\nDone.";

#[test]
fn single_call_ends_the_answer() {
    let (format, mut tokens) = hermes();
    let ids = tokens.cut(TWO_CALLS, &|_| true);
    let options = ReaderOptions {
        parallel_tool_calls: false,
        ..reader_options(None)
    };
    let seen = see_answer(
        &format,
        &options,
        &TextRules::default(),
        &tokens,
        &[],
        &ids,
        &[7],
    );
    let mut expected = AnswerParts::default();
    expected.push_content("I look.");
    expected.begin_call("f");
    expected.push_arguments("{}");
    expected.end_call();
    assert_eq!(seen.parts, expected);
    assert_eq!(seen.completed_calls, 1);
    let call = "I look.<tool_call>\n{\"name\": \"f\", \"arguments\": {}}";
    assert_eq!(ids[..seen.counted], tokens.cut(call, &|_| true)[..]);
}

#[test]
fn stop_strings_end_content_only() {
    let (format, mut tokens) = hermes();
    let text = format!("<think>STOP\n\n</think>{TWO_CALLS}").replace("{}", "{\"a\": \"STOP\"}");
    let ids = tokens.cut(&text, &|_| true);
    let read = |stops: &[&str], start, include_stop| {
        let rules = TextRules {
            stops: stops.iter().map(|stop| (*stop).to_owned()).collect(),
            include_stop,
            ..TextRules::default()
        };
        see_answer(
            &format,
            &reader_options(start),
            &rules,
            &tokens,
            &[],
            &ids,
            &[3],
        )
    };
    let undecided = Some(ReasoningStart::Undecided);
    let unstopped = read(&["STOP"], undecided, false);
    assert_eq!(unstopped.matched_stop, None);
    assert_eq!(unstopped.parts.content(), "I look.\n\nDone.");
    assert_eq!(unstopped.parts.reasoning(), "STOP");
    // The newlines between calls are no content, those in front of the last text are.
    let stopped = read(&["no", "\n\n"], undecided, true);
    assert_eq!(stopped.matched_stop, Some(1));
    assert_eq!(stopped.completed_calls, 2);
    assert_eq!(stopped.parts.content(), "I look.\n\n");
    let done = text.find("Done").unwrap() + 1;
    assert_eq!(
        ids[..stopped.counted],
        tokens.clone().cut(&text[..done], &|_| true)[..]
    );
    // A stop string does not extend over a call.
    assert_eq!(read(&["look.\n"], undecided, false).matched_stop, None);
    assert_eq!(read(&["ST"], None, false).parts.content(), "<think>");
}

#[test]
fn white_space_in_front_of_stop_string_is_content() {
    let (format, mut tokens) = hermes();
    let ids = tokens.cut("a \nSTOP b", &|_| true);
    let rules = TextRules {
        stops: vec!["STOP".to_owned()],
        ..TextRules::default()
    };
    let seen = see_answer(
        &format,
        &reader_options(None),
        &rules,
        &tokens,
        &[],
        &ids,
        &[1],
    );
    assert_eq!(seen.parts.content(), "a \n");
    assert_eq!((seen.matched_stop, seen.counted), (Some(0), 7));
}

#[test]
fn typed_marker_is_text_where_the_marker_is_a_token() {
    let (format, mut tokens) = hermes();
    let text = "<think>a</think><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    // The same characters as bytes.
    let mut bytes = PieceTokens::default().cut(text, &|_| true);
    let added = format.table().markers().len() as u32;
    bytes.iter_mut().for_each(|id| *id += added);
    for (ids, has_call) in [(bytes, false), (tokens.cut(text, &|_| true), true)] {
        for skip_special_tokens in [false, true] {
            let rules = TextRules {
                skip_special_tokens,
                ..TextRules::default()
            };
            let options = reader_options(Some(ReasoningStart::Undecided));
            let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
            assert_eq!(count_complete_calls(&parts) == 1, has_call);
            assert_eq!(parts.content(), if has_call { "" } else { text });
        }
    }
}

#[test]
fn without_tools_calls_are_text() {
    let (format, mut tokens) = hermes();
    let ids = tokens.cut(TWO_CALLS, &|_| false);
    let options = ReaderOptions {
        tools: Arc::new([]),
        ..reader_options(None)
    };
    let parts = read_answer(&format, &options, &TextRules::default(), &tokens, &ids, 1);
    assert_eq!(parts.content(), TWO_CALLS);
}

#[test]
fn text_is_shown_as_soon_as_it_is_no_call() {
    let (format, mut tokens) = hermes();
    let text = "Hi <tool_call>{\"name\": \"f\", \"arguments\": {\"a\"";
    let ids = tokens.cut(text, &|_| true);
    let rules = Arc::new(TextRules::default());
    let mut reader = AnswerReader::new(&format, reader_options(None), rules, &tokens, &[]);
    let mut shown = Vec::new();
    for id in ids {
        let mut parts = AnswerParts::default();
        reader.feed(&tokens, &[id], &mut parts);
        shown.push(parts);
    }
    let shown: Vec<Vec<AnswerPart>> = shown
        .iter()
        .map(|parts| parts.iter().cloned().collect())
        .collect();
    let content = |text: &str| vec![AnswerPart::Content(text.to_owned())];
    assert_eq!(shown[0], content("H"));
    assert_eq!(shown[1], content("i"));
    let certain = shown.len() - 3;
    assert!(shown[2..certain].iter().all(Vec::is_empty));
    let begin = AnswerPart::CallBegin("f".to_owned());
    assert_eq!(
        shown[certain],
        [begin, AnswerPart::Arguments("{\"".to_owned())]
    );
    assert_eq!(shown[certain + 1], [AnswerPart::Arguments("a".to_owned())]);
}

#[test]
fn held_text_is_bounded() {
    let (format, mut tokens) = hermes();
    let long = "x".repeat(64 << 10);
    let text =
        format!("<tool_call>{{\"arguments\": {{\"a\": \"{long}\"}}, \"name\": \"f\"}}</tool_call>");
    let ids = tokens.cut(&text, &|place| place % 1000 == 0);
    let parts = read_answer(
        &format,
        &reader_options(None),
        &TextRules::default(),
        &tokens,
        &ids,
        9,
    );
    assert_eq!(parts.content(), text);
    let blank = format!("<tool_call>{}", " ".repeat(80 << 10));
    let ids = tokens.cut(&blank, &|place| place % 1000 == 0);
    let parts = read_answer(
        &format,
        &reader_options(None),
        &TextRules::default(),
        &tokens,
        &ids,
        9,
    );
    assert_eq!(parts.content(), blank);
}

#[test]
fn reasoning_tokens_include_the_end_marker() {
    let (format, mut tokens) = hermes();
    let undecided = Some(ReasoningStart::Undecided);
    let inside = Some(ReasoningStart::Inside(BlockText::Blank));
    for (text, start, expected) in [
        ("\n<think>ab</think>\n\nc", undecided, 5),
        ("ab</think>c", inside, 3),
        ("<think>a</think>\n<think>b</think>c", undecided, 7),
        ("<think>ab", undecided, 3),
        ("<think>a\n<tool_call>{\"name\"", undecided, 3),
        ("ab<think>c</think>", undecided, 0),
        ("ab</think>c", Some(ReasoningStart::Content), 0),
    ] {
        let ids = tokens.cut(text, &|_| true);
        for separate_reasoning in [false, true] {
            let options = ReaderOptions {
                separate_reasoning,
                ..reader_options(start)
            };
            let rules = TextRules::default();
            let seen = see_answer(&format, &options, &rules, &tokens, &[], &ids, &[4]);
            assert_eq!(seen.reasoning_tokens, expected, "{text}");
        }
    }
}

/// Sources: vLLM 0.33 (parser/qwen3, parser/glm47_moe, parser/kimi_k2), SGLang 0.5 (the start token
/// of calls in its detectors of Qwen3, GLM-4.5 and Kimi K2), llama.cpp (Kimi K2 without a section).
#[test]
fn call_within_a_line_ends_an_open_reasoning() {
    let kimi_call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>\
        {\"a\": \"x\"}<|tool_call_end|>";
    let kimi_section = format!("<|tool_calls_section_begin|>{kimi_call}<|tool_calls_section_end|>");
    let glm_call =
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>".to_owned();
    let hermes_call =
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}</tool_call>".to_owned();
    let coder_call =
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>".to_owned();
    for (family, call) in [
        (ToolFamily::KimiK2, kimi_call.to_owned()),
        (ToolFamily::KimiK2, kimi_section),
        (ToolFamily::Glm45, glm_call.clone()),
        (ToolFamily::Glm47, glm_call),
        (ToolFamily::Hermes, hermes_call),
        (ToolFamily::Qwen3Coder, coder_call),
    ] {
        let text = format!("<think>Let me look it up.{call}");
        for are_tokens in [true, false] {
            let (format, mut tokens) =
                make_format((family, ReasoningFamily::ThinkTags), are_tokens);
            let mut expected = AnswerParts::default();
            if are_tokens {
                expected.push_reasoning("Let me look it up.");
                expected.begin_call("f");
                expected.push_arguments("{\"a\": \"x\"}");
                expected.end_call();
            } else {
                expected.push_reasoning(&text["<think>".len()..]);
            }
            for size in [1, 3, 7, usize::MAX] {
                let ids = tokens.cut(&text, &|place| place.is_multiple_of(size));
                let options = reader_options(Some(ReasoningStart::Undecided));
                let parts = read_answer(&format, &options, &TextRules::default(), &tokens, &ids, 1);
                assert_eq!(parts, expected, "{family:?} {call}");
            }
        }
    }
}

/// No peer ends a reasoning at the marker of a call in these formats.
#[test]
fn reasoning_of_other_formats_ends_at_its_marker_alone() {
    for family in [
        ToolFamily::DeepseekV3,
        ToolFamily::DeepseekV31,
        ToolFamily::DeepseekV32,
        ToolFamily::MistralV13,
        ToolFamily::Mistral,
        ToolFamily::Granite,
        ToolFamily::Phi4,
    ] {
        let (format, _) = make_format((family, ReasoningFamily::ThinkTags), true);
        let markers = format.table().markers();
        let ends_reasoning = markers
            .iter()
            .any(|marker| marker.role == MarkerRole::CallBegin);
        assert!(!ends_reasoning, "{family:?}");
    }
}

#[test]
fn start_is_found_behind_the_last_header() {
    use ReasoningStart::{Behind, Content, Inside, Undecided};
    let added = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_start|>",
        "<｜User｜>",
    ];
    for is_special in [false, true] {
        let tokens = PieceTokens::new(&added, is_special);
        let format = AnswerFormat::new(
            Some(ToolFamily::Hermes),
            Some(ReasoningFamily::ThinkTags),
            &tokens,
        );
        for (prompt, expected) in [
            ("", Undecided),
            ("<|im_start|>assistant\n", Undecided),
            ("<think><|im_start|>assistant\n", Undecided),
            ("<think><｜User｜>Hi", Undecided),
            ("<|im_start|>assistant\n<think>", Inside(BlockText::Blank)),
            ("<|im_start|>assistant\n<think>\n", Inside(BlockText::Blank)),
            (
                "<|im_start|>assistant\n<think>\nso\n",
                Inside(BlockText::Begun),
            ),
            (
                "<|im_start|>assistant\n<think>\nso",
                Inside(BlockText::Begun),
            ),
            (
                "<|im_start|>assistant\n<think><tool_call>",
                Inside(BlockText::Begun),
            ),
            ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Behind),
            ("<|im_start|>assistant\n<think>a</think>b", Content),
            (
                "<|im_start|>assistant\n<think>a</think>\n<tool_call>",
                Content,
            ),
            ("<|im_start|>assistant\nabc", Undecided),
        ] {
            let ids = tokens.encode(prompt, false).unwrap();
            assert_eq!(
                format.reasoning_start(&ids, &tokens),
                Some(expected),
                "{prompt}"
            );
        }
    }
    let (no_reasoning, tokens) = (
        AnswerFormat::new(None, None, &PieceTokens::default()),
        hermes().1,
    );
    assert_eq!(no_reasoning.reasoning_start(&[0], &tokens), None);
}

#[test]
fn start_is_found_where_markers_are_text() {
    let tokens = PieceTokens::new(&["<|im_start|>"], true);
    let format = AnswerFormat::new(None, Some(ReasoningFamily::ThinkTags), &tokens);
    for (prompt, expected) in [
        ("<think><|im_start|>assistant\n", ReasoningStart::Undecided),
        (
            "<|im_start|>a\n</think><think>\n",
            ReasoningStart::Inside(BlockText::Blank),
        ),
        ("<|im_start|>a\n<think></think>\n", ReasoningStart::Behind),
        ("<|im_start|>a\n<think></think>b", ReasoningStart::Content),
    ] {
        let ids = tokens.encode(prompt, false).unwrap();
        assert_eq!(
            format.reasoning_start(&ids, &tokens),
            Some(expected),
            "{prompt}"
        );
    }
}

#[test]
fn answers_of_loaded_tokenizers_have_their_parts() {
    let text = "<think>\nHm, é世  a.\n</think>\n\nHello  world <think>\n<tool_call>\n\
        {\"name\": \"f\", \"arguments\": {\"a\": \"x  y</tool_call>\\n😀\"}}\n</tool_call>\n Bye\n";
    let mut expected = AnswerParts::default();
    expected.push_reasoning("Hm, é世  a.");
    expected.push_content("Hello  world <think>");
    expected.begin_call("f");
    expected.push_arguments("{\"a\": \"x  y</tool_call>\\n😀\"}");
    expected.end_call();
    expected.push_content("\n Bye\n");
    // The decoders of the other golden tokenizers do not give back what was encoded.
    for name in ["demo", "chatml", "llama3"] {
        let tokenizer = load(name);
        let ids = tokenizer.encode(text, false).unwrap();
        let format = AnswerFormat::new(
            Some(ToolFamily::Hermes),
            Some(ReasoningFamily::ThinkTags),
            &tokenizer,
        );
        let options = reader_options(Some(ReasoningStart::Undecided));
        let rules = TextRules {
            skip_special_tokens: true,
            ..TextRules::default()
        };
        for size in 1..4 {
            let seen = see_answer(&format, &options, &rules, &tokenizer, &[], &ids, &[size]);
            assert_eq!(seen.parts, expected, "{name}");
            assert_eq!(seen.counted, ids.len());
        }
    }
}

/// Content behind the reasoning where a rank's grammar begins there, as the rank counts it
/// (`_advance_behind` of engine/baton/runtime/grammar/reasoning_tracker.py).
#[test]
fn newlines_that_a_grammar_has_counted_are_content() {
    let (format, mut tokens) = hermes();
    let options = ReaderOptions {
        tools: Arc::new([]),
        is_gated: true,
        ..reader_options(Some(ReasoningStart::Inside(BlockText::Blank)))
    };
    let rules = TextRules {
        follows_grammar: true,
        ..TextRules::default()
    };
    for (pieces, expected) in [
        (&["a", "</think>", "\n", "\n", "\n", "x"][..], "\nx"),
        (&["a", "</think>", "\n\n", "x"], "x"),
        (&["a", "</think>", "\n\n\n", "x"], "\n\n\nx"),
        (&["a", "</think>", "\n", "\n\n", "x"], "\n\nx"),
        (&["a", "</think>", "\n", "\nx"], "\nx"),
        (&["a", "</think>", "\r\n", "x"], "\r\nx"),
        (
            &["</think>", "\n\n", "<think>", "b", "</think>", "\n\n", "\n"],
            "\n",
        ),
    ] {
        let cut = pieces.iter().map(|piece| tokens.cut(piece, &|_| false));
        let ids = cut.collect::<Vec<_>>().concat();
        let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
        assert_eq!(parts.content(), expected, "{pieces:?}");
        let free = ReaderOptions {
            is_gated: false,
            ..options.clone()
        };
        let parts = read_answer(&format, &free, &rules, &tokens, &ids, 1);
        assert_eq!(parts.content(), expected.trim_start(), "{pieces:?}");
    }
}

/// docs/guide/structured-output.md: all messages in front of the channel `final` are reasoning.
#[test]
fn content_of_a_constrained_harmony_answer_is_its_final_message() {
    let family = (ToolFamily::GptOss, ReasoningFamily::GptOss);
    let (format, mut tokens) = make_format(family, true);
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant\
        <|channel|>commentary<|message|>A note.<|end|><|start|>assistant\
        <|channel|>final<|message|>\n\n\n{}";
    let ids = tokens.cut(text, &|_| true);
    let rules = TextRules {
        follows_grammar: true,
        skip_special_tokens: true,
        ..TextRules::default()
    };
    for (is_gated, reasoning, content) in [
        (true, "Hm.\nA note.", "\n\n\n{}"),
        (false, "Hm.", "A note.\n\n\n\n{}"),
    ] {
        let options = ReaderOptions {
            tools: Arc::new([]),
            is_gated,
            ..reader_options(None)
        };
        let parts = read_answer(&format, &options, &rules, &tokens, &ids, 1);
        assert_eq!(parts.reasoning(), reasoning);
        assert_eq!(parts.content(), content);
    }
}
