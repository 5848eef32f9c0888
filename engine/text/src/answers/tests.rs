//! Scripts of ranks, and what clients get of them.

use std::borrow::Cow;
use std::sync::Arc;

use proptest::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

use super::{AnswerSpec, AnswerTable, FedBatch};
use crate::stream::answer::AnswerFormat;
use crate::tokenizer::{FourByteTokenizer, TokenDecoder};

const WORDS: [&str; 8] = ["", "<end>", "the", " relay", " ", "\"a\n", "é", "😀"];
pub const END: u32 = 1;
const PANICS: u32 = 99;

/// Token i is `WORDS[i]`; 0 has no text, 1 is special.
struct WordDecoder;

impl TokenDecoder for WordDecoder {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let shown = ids
            .iter()
            .filter(|id| !(skip_special_tokens && self.is_special(**id)));
        shown
            .map(|id| String::from_utf8_lossy(&self.token_bytes(*id)).into_owned())
            .collect()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        assert_ne!(id, PANICS, "a decoder that panics");
        let word = WORDS.get(id as usize).copied().unwrap_or_default();
        Cow::Borrowed(word.as_bytes())
    }

    fn is_special(&self, id: u32) -> bool {
        id == END
    }

    fn is_bytewise(&self) -> bool {
        true
    }
}

/// A row as ranks encode it.
#[derive(Clone, Serialize)]
pub struct Row(
    u64,
    Vec<u32>,
    Option<u8>,
    u64,
    /// Logprob of the token, and its alternatives.
    pub Option<(f64, Vec<u32>, Vec<f64>)>,
    Option<(String, String, Option<String>)>,
    Option<u64>,
    Option<()>,
    Option<()>,
    /// Drafted tokens: accepted, rejected.
    Option<(u64, u64)>,
);

#[derive(Serialize)]
struct Message {
    r#type: &'static str,
    dp_rank: u32,
    rows: Vec<Row>,
}

pub fn row(handle: u64, tokens: &[u32], finish: Option<u8>) -> Row {
    let tokens = tokens.to_vec();
    Row(
        handle, tokens, finish, 3, None, None, None, None, None, None,
    )
}

pub fn spec(dialect: &str, handles: &[u64], more: Value) -> AnswerSpec {
    let choice = |handle: &u64| {
        json!({
            "handle": handle, "counts_prompt": *handle == handles[0], "prompt_tokens": 5,
            "left_context": [], "prompt_end": [], "stop_token_ids": [END], "echo": "",
        })
    };
    let mut spec = json!({
        "dialect": dialect, "rid": null, "request_id": "7", "model": "m", "created": 9, "arrived": 1.0,
        "stream": true, "include_usage": true, "continuous_usage_stats": false,
        "return_token_ids": false, "logprobs": null, "is_batch": false, "stops": [],
        "include_stop": false, "skip_special_tokens": true, "min_tokens": 0, "comment_seed": null,
        "is_metered": false, "is_empty": false, "resumed_ids": [], "reading": null,
        "choices": handles.iter().map(choice).collect::<Vec<_>>(),
    });
    for (name, value) in more.as_object().unwrap() {
        spec[name] = value.clone();
    }
    serde_json::from_value(spec).unwrap()
}

fn table() -> AnswerTable {
    let format = AnswerFormat::new(None, None, &FourByteTokenizer);
    AnswerTable::new(Arc::new(WordDecoder), Arc::new(format), vec![0.5, 1.0])
}

pub fn feed(table: &mut AnswerTable, rows: &[Row], now: f64) -> FedBatch {
    let message = Message {
        r#type: "tokens",
        dp_rank: 0,
        rows: rows.to_vec(),
    };
    let packed = rmp_serde::to_vec_named(&message).unwrap();
    table.feed(&packed, now).unwrap().unwrap()
}

pub fn text_of(fed: &FedBatch) -> String {
    let chunks = fed.chunks.iter().flat_map(|(_, chunk)| chunk.clone());
    String::from_utf8(chunks.collect()).unwrap()
}

/// The data of a stream's events.
pub fn events_of(stream: &str) -> Vec<Value> {
    let data = stream.split("\n\n").filter_map(|event| {
        let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
        (data != "[DONE]").then(|| serde_json::from_str(data).unwrap())
    });
    data.collect()
}

#[test]
fn chat_stream_has_a_role_texts_a_finish_usage_and_done() {
    let mut table = table();
    let id = table.open(spec("chat", &[1], json!({}))).unwrap();
    let first = feed(&mut table, &[row(1, &[2], None)], 1.0);
    assert_eq!(
        text_of(&first),
        "data: {\"id\":\"chatcmpl-7\",\"object\":\"chat.completion.chunk\",\"created\":9,\"model\":\"m\",\
         \"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\
         \"finish_reason\":null}],\"usage\":null}\n\n\
         data: {\"id\":\"chatcmpl-7\",\"object\":\"chat.completion.chunk\",\"created\":9,\"model\":\"m\",\
         \"choices\":[{\"index\":0,\"delta\":{\"content\":\"the\"},\"logprobs\":null,\
         \"finish_reason\":null}],\"usage\":null}\n\n"
    );
    assert_eq!(first.first_tokens.len(), 1);
    table.begin_framing(id);
    let second = feed(&mut table, &[row(1, &[5], None)], 1.7);
    let (size, rest) = text_of(&second)
        .split_once("\r\n")
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .unwrap();
    assert_eq!(usize::from_str_radix(&size, 16).unwrap(), rest.len() - 2);
    assert!(rest.contains("{\"content\":\"\\\"a\\n\"}"), "{rest}");
    let last = feed(&mut table, &[row(1, &[END], Some(1))], 1.8);
    let text = text_of(&last);
    assert!(
        text.contains(
            "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\",\"matched_stop\":1}"
        ),
        "{text}"
    );
    assert!(text.ends_with("data: [DONE]\n\n\r\n"), "{text}");
    assert_eq!(events_of(&text)[1]["usage"]["completion_tokens"], 3);
    assert_eq!((last.finished, last.ended), (vec![id], vec![1]));
    assert_eq!(table.gaps.counts, [1, 1, 0]);
    let counts = table.close(id).unwrap();
    assert_eq!(
        (
            counts.prompt_tokens,
            counts.cached_tokens,
            counts.completion_tokens
        ),
        (5, 3, 3)
    );
    assert!(table.close(id).is_none());
}

#[test]
fn usage_has_last_counts_of_drafts_of_all_choices() {
    let mut table = table();
    let more = json!({"stream": false});
    table.open(spec("chat", &[1, 2], more)).unwrap();
    let with_drafts = |mut row: Row, drafts| {
        row.9 = Some(drafts);
        row
    };
    let rows = [
        with_drafts(row(1, &[2], None), (1, 0)),
        with_drafts(row(1, &[2], Some(2)), (3, 4)),
        with_drafts(row(2, &[2], None), (7, 1)),
        row(2, &[2], Some(2)),
    ];
    let fed = feed(&mut table, &rows, 1.0);
    let answer: Value = serde_json::from_str(&text_of(&fed)).unwrap();
    assert_eq!(
        answer["usage"]["completion_tokens_details"],
        json!({"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 5})
    );
    assert_eq!(answer["usage"]["completion_tokens"], 4);
}

#[test]
fn messages_of_other_types_are_passed_over_and_malformed_ones_are_errors() {
    let mut table = table();
    assert!(table.feed(b"\x82\xa4type\xa5stats", 0.0).unwrap().is_none());
    assert!(table.feed(b"", 0.0).unwrap().is_none());
    assert!(table.feed(b"\x83\xa4type\xa6tokens\xa4rows", 0.0).is_err());
}

#[test]
fn failed_item_is_reported_behind_earlier_output() {
    let mut table = table();
    let id = table
        .open(spec("completions", &[1, 2], json!({"is_metered": true})))
        .unwrap();
    let mut failed = row(2, &[], Some(4));
    let param = Some("prompt".to_owned());
    failed.5 = Some(("queue_full".to_owned(), "full".to_owned(), param));
    failed.6 = Some(17);
    let fed = feed(
        &mut table,
        &[row(1, &[2], None), failed, row(77, &[2], None)],
        0.0,
    );
    assert_eq!(events_of(&text_of(&fed))[0]["choices"][0]["text"], "the");
    let error = fed.failed[0].error.as_ref().unwrap();
    assert_eq!(
        (error.code.as_str(), error.param.as_deref()),
        ("queue_full", Some("prompt"))
    );
    assert_eq!(fed.failed[0].retry_after_secs, Some(17));
    assert_eq!((fed.failed[0].answer, fed.ended), (id, vec![2]));
    assert_eq!(fed.metered, [(id, 1)]);
    let fed = feed(&mut table, &[row(1, &[], Some(3))], 0.0);
    assert_eq!(fed.failed[0].error, None, "aborted");
    assert!(!fed.has_output);
}

#[test]
fn panic_of_a_decoder_ends_its_answer_only() {
    let mut table = table();
    let broken = table.open(spec("chat", &[1], json!({}))).unwrap();
    table.open(spec("chat", &[2], json!({}))).unwrap();
    let fed = feed(
        &mut table,
        &[row(1, &[PANICS], None), row(2, &[2], None)],
        0.0,
    );
    assert_eq!(fed.failed[0].answer, broken);
    assert_eq!(fed.failed[0].error.as_ref().unwrap().code, "internal_error");
    assert_eq!(events_of(&text_of(&fed)).len(), 2);
}

#[test]
fn panic_of_a_decoder_at_the_start_is_an_error() {
    let mut table = table();
    let resumed = spec("completions", &[1], json!({"resumed_ids": [PANICS]}));
    assert!(table.open(resumed).is_err());
    let next = table.open(spec("completions", &[1], json!({}))).unwrap();
    let fed = feed(&mut table, &[row(1, &[2], None)], 0.0);
    assert_eq!(fed.chunks[0].0, next);
}

#[test]
fn stop_string_ends_choice_and_stops_its_item() {
    let mut table = table();
    table
        .open(spec(
            "generate",
            &[1],
            json!({"stops": [" re"], "stream": false}),
        ))
        .unwrap();
    let fed = feed(
        &mut table,
        &[row(1, &[2, 3, 2], None), row(1, &[2], None)],
        0.0,
    );
    assert_eq!(fed.stopped, [1]);
    let answer: Value = serde_json::from_str(&text_of(&fed)).unwrap();
    assert_eq!(answer["text"], "the");
    assert_eq!(answer["output_ids"], json!([2, 3]));
    assert_eq!(
        answer["meta_info"]["finish_reason"],
        json!({"type": "stop", "matched": " re"})
    );
}

#[test]
fn answer_without_anything_to_generate_is_released_at_once() {
    let mut table = table();
    let mut echo = spec(
        "completions",
        &[0],
        json!({"is_empty": true, "stream": false}),
    );
    echo.choices[0].echo = "x".to_owned();
    let id = table.open(echo).unwrap();
    let (body, is_last) = table.release(id, 0.0).unwrap();
    let answer: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(answer["choices"][0]["text"], "x");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(is_last);
}

/// Output of one rank for one item: bursts of tokens, and whether it ends with a stop token.
fn script() -> impl Strategy<Value = (Vec<Vec<u32>>, bool)> {
    (
        proptest::collection::vec(proptest::collection::vec(2..WORDS.len() as u32, 1..4), 1..6),
        any::<bool>(),
    )
}

proptest! {
    /// A stream, wherever its client was slow, a whole answer, and a stream that was resumed behind
    /// any of its tokens say the same.
    #[test]
    fn stream_whole_and_resumed_answers_agree(
        (bursts, stops) in script(),
        dialect in proptest::sample::select(vec!["chat", "completions"]),
        held in proptest::collection::vec(any::<bool>(), 6),
        stop_strings in proptest::sample::subsequence(vec!["ere", "é ", "the the"], 0..2),
        cut in 0usize..16,
    ) {
        let mut tokens: Vec<u32> = bursts.concat();
        let finish = if stops { 1 } else { 2 };
        if stops {
            tokens.push(END);
        }
        let rules = json!({"stops": stop_strings, "comment_seed": 4});
        let mut whole_table = table();
        let mut whole_spec = rules.clone();
        whole_spec["stream"] = json!(false);
        whole_table.open(spec(dialect, &[1], whole_spec)).unwrap();
        let fed = feed(&mut whole_table, &[row(1, &tokens, Some(finish))], 0.0);
        let whole: Value = serde_json::from_str(&text_of(&fed)).unwrap();
        let expected = &whole["choices"][0];
        let expected_text = if dialect == "chat" { &expected["message"]["content"] } else { &expected["text"] };

        let mut streamed = table();
        let id = streamed.open(spec(dialect, &[1], rules.clone())).unwrap();
        let mut stream = String::new();
        for (step, burst) in bursts.iter().enumerate() {
            if held[step] {
                streamed.hold(id);
            }
            stream += &text_of(&feed(&mut streamed, &[row(1, burst, None)], 0.0));
            if held[step] && step % 2 == 1 {
                stream += std::str::from_utf8(&streamed.release(id, 0.0).unwrap().0).unwrap();
            }
        }
        stream += std::str::from_utf8(&streamed.release(id, 0.0).unwrap().0).unwrap();
        let last: &[u32] = if stops { &[END] } else { &[] };
        stream += &text_of(&feed(&mut streamed, &[row(1, last, Some(finish))], 0.0));
        prop_assert_eq!(&joined_text(dialect, &stream), expected_text.as_str().unwrap());
        let events = events_of(&stream);
        prop_assert_eq!(&events.last().unwrap()["usage"], &whole["usage"]);
        let finish_event = &events[events.len() - 2]["choices"][0];
        prop_assert_eq!(&finish_event["finish_reason"], &expected["finish_reason"]);
        prop_assert_eq!(&finish_event["matched_stop"], &expected["matched_stop"]);

        // Another engine goes on behind the first `cut` tokens, of a client that has their events.
        let count = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        let cut = cut % count;
        let mut begun = table();
        begun.open(spec(dialect, &[1], rules.clone())).unwrap();
        let before = text_of(&feed(&mut begun, &[row(1, &tokens[..cut], None)], 0.0));
        let mut resumed = table();
        let mut more = rules.clone();
        more["resumed_ids"] = json!(tokens[..cut]);
        resumed.open(spec(dialect, &[1], more)).unwrap();
        let after = text_of(&feed(&mut resumed, &[row(1, &tokens[cut..], Some(finish))], 0.0));
        let both = joined_text(dialect, &before) + &joined_text(dialect, &after);
        prop_assert_eq!(&both, expected_text.as_str().unwrap());
        let usage = events_of(&after).last().unwrap()["usage"].clone();
        prop_assert_eq!(&usage["completion_tokens"], &whole["usage"]["completion_tokens"]);
    }

    /// Comments report every token whose event is out, in order.
    #[test]
    fn comments_report_every_token((bursts, _) in script()) {
        let mut streamed = table();
        streamed.open(spec("chat", &[1], json!({"comment_seed": 4}))).unwrap();
        let mut reported = Vec::new();
        for (step, burst) in bursts.iter().enumerate() {
            let text = text_of(&feed(&mut streamed, &[row(1, burst, None)], 0.0));
            let comments: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(": baton ")).collect();
            prop_assert_eq!(comments.len(), 1);
            let comment: Value = serde_json::from_str(comments[0]).unwrap();
            prop_assert_eq!(comment.get("seed").is_some(), step == 0);
            let ids = comment["ids"].as_array().unwrap();
            reported.extend(ids.iter().map(|id| id.as_u64().unwrap() as u32));
        }
        prop_assert_eq!(reported, bursts.concat());
    }
}

/// Data of a stream's events without the comments of routers.
fn without_comments(stream: &str) -> String {
    let lines = stream.split_inclusive('\n');
    lines.filter(|line| !line.starts_with(": baton")).collect()
}

/// JSON of the last comment; null without one.
fn last_comment(stream: &str) -> Value {
    let mut comments = stream
        .lines()
        .rev()
        .filter_map(|line| line.strip_prefix(": baton "));
    let last = comments.next();
    last.map_or(Value::Null, |comment| {
        serde_json::from_str(comment).unwrap()
    })
}

proptest! {
    /// An engine that goes on behind any write sends the bytes that the first one would have sent.
    #[test]
    fn resumed_stream_has_the_bytes_of_the_first_engine(
        (bursts, stops) in script(),
        dialect in proptest::sample::select(vec!["responses", "messages"]),
        stop_strings in proptest::sample::subsequence(vec!["ere", "é ", "the the"], 0..2),
        cut in 0usize..8,
    ) {
        let rules = json!({"stops": stop_strings, "comment_seed": 4});
        let finish = if stops { 1 } else { 2 };
        let last: &[u32] = if stops { &[END] } else { &[] };
        let mut first = table();
        first.open(spec(dialect, &[1], rules.clone())).unwrap();
        let mut writes = Vec::new();
        for burst in &bursts {
            writes.push(text_of(&feed(&mut first, &[row(1, burst, None)], 0.0)));
        }
        writes.push(text_of(&feed(&mut first, &[row(1, last, Some(finish))], 0.0)));
        let whole = without_comments(&writes.concat());
        prop_assert!(whole.ends_with("data: [DONE]\n\n"));
        let shown: String = events_of(&whole)
            .iter()
            .filter_map(|event| {
                let delta = &event["delta"];
                delta.as_str().or(delta["text"].as_str()).map(str::to_owned)
            })
            .collect();
        prop_assert!(!shown.is_empty() || !stop_strings.is_empty());

        let cut = cut % bursts.len();
        let before = writes[..=cut].concat();
        prop_assume!(!before.contains("[DONE]"));
        let mut reported = Vec::new();
        for line in before.lines().filter_map(|line| line.strip_prefix(": baton ")) {
            let comment: Value = serde_json::from_str(line).unwrap();
            let ids = comment["ids"].as_array().unwrap();
            reported.extend(ids.iter().map(|id| id.as_u64().unwrap() as u32));
        }
        let mut tokens = bursts.concat();
        tokens.extend_from_slice(last);
        let mut second = table();
        let mut more = rules;
        more["resumed_ids"] = json!(reported);
        more["resumed_events"] = last_comment(&before)["events"].clone();
        second.open(spec(dialect, &[1], more)).unwrap();
        let mut after = String::new();
        let mut behind = &tokens[reported.len()..];
        let mut rest = bursts[cut + 1..].iter().map(Vec::len).sum::<usize>() + last.len();
        prop_assert!(rest <= behind.len());
        // Tokens without an event are sent again with the next ones.
        let (unreported, remaining) = behind.split_at(behind.len() - rest);
        behind = remaining;
        let mut carried = unreported.to_vec();
        for burst in &bursts[cut + 1..] {
            carried.extend_from_slice(burst);
            rest -= burst.len();
            after += &text_of(&feed(&mut second, &[row(1, &carried, None)], 0.0));
            carried.clear();
            behind = &behind[burst.len()..];
        }
        carried.extend_from_slice(behind);
        prop_assert_eq!(rest, last.len());
        after += &text_of(&feed(&mut second, &[row(1, &carried, Some(finish))], 0.0));
        prop_assert_eq!(without_comments(&before) + &without_comments(&after), whole);
    }
}

#[test]
fn broken_stream_ends_in_the_form_of_its_api() {
    let error =
        br#"{"error":{"message":"m","type":"server_error","param":null,"code":"engine_dead"}}"#;
    for (dialect, name) in [("responses", "response.failed"), ("messages", "error")] {
        let mut table = table();
        let id = table.open(spec(dialect, &[1], json!({}))).unwrap();
        let begin = text_of(&feed(&mut table, &[row(1, &[2], None)], 0.0));
        let end = table.write_failure(id, error).unwrap().unwrap();
        let stream = begin + std::str::from_utf8(&end).unwrap();
        assert_eq!(events_of(&stream).last().unwrap()["type"], name);
        assert!(stream.ends_with("data: [DONE]\n\n"));
        table.close(id);
        assert!(table.write_failure(id, error).unwrap().is_none());
    }
}

fn joined_text(dialect: &str, stream: &str) -> String {
    let choices = events_of(stream).into_iter().filter_map(|event| {
        let choice = event["choices"].get(0)?.clone();
        let text = if dialect == "chat" {
            &choice["delta"]["content"]
        } else {
            &choice["text"]
        };
        text.as_str().map(str::to_owned)
    });
    choices.collect()
}

/// A row with logprobs of prompt tokens: the ids of each position, most likely first.
#[derive(Serialize)]
struct PromptRow(
    u64,
    [u32; 0],
    Option<u8>,
    u64,
    Option<()>,
    Option<()>,
    Option<()>,
    Option<()>,
    PromptPart,
);

#[derive(Serialize)]
struct PromptPart {
    position: u64,
    count: u64,
    top: u64,
    #[serde(serialize_with = "bytes")]
    records: Vec<u8>,
}

#[derive(Serialize)]
struct PromptMessage {
    r#type: &'static str,
    dp_rank: u32,
    rows: [PromptRow; 1],
}

fn bytes<S: serde::Serializer>(value: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(value)
}

/// Token `position` has the logprob -position; two alternatives are above it.
fn feed_prompt(table: &mut AnswerTable, handle: u64, positions: std::ops::Range<u64>) -> FedBatch {
    let mut records = Vec::new();
    for position in positions.clone() {
        records.extend_from_slice(&(-(position as f32)).to_le_bytes());
        records.extend_from_slice(&3_u32.to_le_bytes());
        for id in [6_u32, 7] {
            records.extend_from_slice(&id.to_le_bytes());
        }
        for logprob in [-0.25_f32, -0.5] {
            records.extend_from_slice(&logprob.to_le_bytes());
        }
    }
    let part = PromptPart {
        position: positions.start,
        count: positions.end - positions.start,
        top: 2,
        records,
    };
    let row = PromptRow(handle, [], None, 3, None, None, None, None, part);
    let message = PromptMessage {
        r#type: "tokens",
        dp_rank: 0,
        rows: [row],
    };
    let packed = rmp_serde::to_vec_named(&message).unwrap();
    table.feed(&packed, 1.0).unwrap().unwrap()
}

fn with_prompt(stream: bool, more: Value) -> AnswerSpec {
    let mut fields = json!({
        "stream": stream, "logprobs": 2,
        "prompt_logprobs": {"start": 0, "joins_logprobs": true, "objects": null},
        "choices": [{
            "handle": 1, "counts_prompt": true, "prompt_tokens": 5, "left_context": [],
            "prompt_end": [], "stop_token_ids": [END], "echo": "the relay the",
            "prompt_ids": [2, 3, 4, 2, 5],
        }],
    });
    for (name, value) in more.as_object().unwrap() {
        fields[name] = value.clone();
    }
    spec("completions", &[1], fields)
}

#[test]
fn prompt_logprobs_of_any_parts_stand_in_front_of_the_answers() {
    for stream in [false, true] {
        let whole = 1..5;
        for parts in [vec![whole], vec![1..2, 2..4, 4..5], vec![1..3, 1..3, 3..5]] {
            let mut table = table();
            table.open(with_prompt(stream, json!({}))).unwrap();
            let mut text = String::new();
            for part in parts {
                assert!(text.is_empty(), "no event before the prompt is complete");
                text += &text_of(&feed_prompt(&mut table, 1, part));
            }
            text += &text_of(&feed(&mut table, &[row(1, &[2], Some(2))], 2.0));
            let answers = if stream {
                events_of(&text)
            } else {
                vec![serde_json::from_str(&text).unwrap()]
            };
            let column = |name: &str| -> Vec<Value> {
                let choices = answers.iter().filter_map(|a| a["choices"].get(0));
                let values = choices.filter_map(|c| c["logprobs"][name].as_array());
                values.flatten().cloned().collect()
            };
            let tokens = ["the", " relay", " ", "the", "\"a\n"];
            assert_eq!(column("tokens"), tokens);
            let logprobs = json!([null, -1.0, -2.0, -3.0, -4.0]);
            assert_eq!(Value::from(column("token_logprobs")), logprobs);
            assert_eq!(column("text_offset"), [0, 3, 9, 10, 13]);
            let top = column("top_logprobs");
            assert_eq!(top[0], Value::Null);
            assert_eq!(
                top[1],
                json!({"é": -0.25, "😀": -0.5, " relay": -1.0}),
                "the token itself stands behind the most likely ones"
            );
        }
    }
}

#[test]
fn choices_of_a_prompt_wait_for_the_logprobs_that_its_first_one_brings() {
    for stream in [false, true] {
        let mut spec = with_prompt(stream, json!({}));
        let mut other = with_prompt(stream, json!({})).choices.remove(0);
        other.handle = 2;
        other.counts_prompt = false;
        spec.choices.push(other);
        let mut table = table();
        table.open(spec).unwrap();
        let early = text_of(&feed(&mut table, &[row(2, &[2], Some(2))], 1.0));
        assert!(early.is_empty(), "{early}");
        let mut text = text_of(&feed_prompt(&mut table, 1, 1..5));
        text += &text_of(&feed(&mut table, &[row(1, &[2], Some(2))], 2.0));
        let answers = if stream {
            events_of(&text)
        } else {
            vec![serde_json::from_str(&text).unwrap()]
        };
        for index in 0..2 {
            let choices = answers
                .iter()
                .flat_map(|answer| answer["choices"].as_array().into_iter().flatten());
            let logprobs = choices
                .filter(|choice| choice["index"] == index)
                .filter_map(|choice| choice["logprobs"]["token_logprobs"].as_array())
                .flatten()
                .cloned();
            let found: Vec<Value> = logprobs.collect();
            assert_eq!(Value::from(found), json!([null, -1.0, -2.0, -3.0, -4.0]));
        }
    }
}

#[test]
fn answer_that_is_its_prompt_hides_the_token_that_comes_with_it() {
    for finish in [1, 2] {
        let mut table = table();
        let id = table
            .open(with_prompt(false, json!({"is_empty": true})))
            .unwrap();
        feed_prompt(&mut table, 1, 1..5);
        let text = text_of(&feed(&mut table, &[row(1, &[END], Some(finish))], 2.0));
        let answer: Value = serde_json::from_str(&text).unwrap();
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], "the relay the");
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 5);
        assert_eq!(table.close(id).unwrap().completion_tokens, 0);
    }
}
