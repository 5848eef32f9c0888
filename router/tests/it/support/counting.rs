//! An engine that counts: token i of its answer is 100 + i and reads "w<i> ". It sends
//! token ids on request and continues after `baton_resume`, as in docs/protocol.md §2.

use baton_text::dialect::Dialect;
use serde_json::{Value, json};

/// Tokens of its answer.
pub const TOKENS: usize = 6;
const SEED: u64 = 1 << 60;
const CREATED: u64 = 1_700_000_000;

/// A streamed request to the API.
pub fn request(api: Dialect) -> Value {
    match api {
        Dialect::Responses => json!({"model": "m", "input": "hi", "stream": true}),
        Dialect::Messages => json!({
            "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": true,
        }),
        _ => super::chat(true),
    }
}

/// The writes of one answer to `body`, in order.
pub fn writes(api: Dialect, body: &Value, is_asked: bool) -> Vec<String> {
    let resume = &body["baton_resume"];
    let known = resume["ids"].as_array().map_or(0, Vec::len);
    for (at, id) in resume["ids"].as_array().into_iter().flatten().enumerate() {
        assert_eq!(*id, json!(100 + at), "{resume}");
    }
    // Events are numbered from 0 on over all workers that send them.
    let mut number: usize = (0..known).map(|at| events(api, at).len()).sum();
    if known > 0 {
        assert_eq!(
            (&resume["seed"], &resume["created"]),
            (&json!(SEED), &json!(CREATED))
        );
        let is_numbered = api == Dialect::Responses;
        assert_eq!(resume["events"], json!(is_numbered.then_some(number)));
    }
    (known..TOKENS)
        .map(|at| {
            let is_last = at + 1 == TOKENS;
            let mut write = String::new();
            let all = events(api, at);
            let last = all.len() - 1;
            for (place, event) in all.into_iter().enumerate() {
                if is_asked && !is_last && place == last {
                    let mut comment = json!({"ids": [100 + at]});
                    if at == known {
                        comment["seed"] = json!(SEED);
                        comment["created"] = json!(CREATED);
                    }
                    if api == Dialect::Responses {
                        comment["events"] = json!(number + 1);
                    }
                    write += &format!(": baton {comment}\n");
                }
                write += &written(api, event, number);
                number += 1;
            }
            if is_last {
                write += "data: [DONE]\n\n";
            }
            write
        })
        .collect()
}

/// Data of the events that come with token `at`.
fn events(api: Dialect, at: usize) -> Vec<Value> {
    let is_first = at == 0;
    let is_last = at + 1 == TOKENS;
    let word = format!("w{at} ");
    let (begin, token, end) = match api {
        Dialect::Responses => (
            vec![
                json!({"type": "response.created"}),
                json!({"type": "response.output_item.added"}),
            ],
            json!({"type": "response.output_text.delta", "delta": word}),
            vec![
                json!({"type": "response.output_item.done"}),
                json!({"type": "response.completed"}),
            ],
        ),
        Dialect::Messages => (
            vec![
                json!({"type": "message_start"}),
                json!({"type": "content_block_start", "index": 0}),
            ],
            json!({"type": "content_block_delta", "delta": {"text": word}}),
            vec![
                json!({"type": "message_delta"}),
                json!({"type": "message_stop"}),
            ],
        ),
        _ => (
            vec![chunk(&json!({"role": "assistant"}), false)],
            chunk(&json!({"content": word}), is_last),
            vec![json!({
                "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS},
            })],
        ),
    };
    let begin = begin.into_iter().filter(|_| is_first);
    let end = end.into_iter().filter(|_| is_last);
    begin.chain([token]).chain(end).collect()
}

fn chunk(delta: &Value, is_last: bool) -> Value {
    let finish = is_last.then_some("length");
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    json!({"created": CREATED, "choices": [choice]})
}

fn written(api: Dialect, mut event: Value, number: usize) -> String {
    if api == Dialect::Responses {
        event["sequence_number"] = json!(number);
    }
    match event["type"].as_str() {
        Some(name) => format!("event: {name}\ndata: {event}\n\n"),
        None => format!("data: {event}\n\n"),
    }
}

/// The whole answer as a client is to see it.
pub fn whole_of(api: Dialect) -> String {
    writes(api, &Value::Null, false).concat()
}

/// The same for a chat request.
pub fn whole() -> String {
    whole_of(Dialect::Chat)
}
