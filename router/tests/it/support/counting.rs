//! An engine that counts: token i of its answer is 100 + i and reads "w<i> ". It sends
//! token ids on request and continues after `baton_resume`, as in docs/protocol.md §2.

use serde_json::{Value, json};

/// Tokens of its answer.
pub const TOKENS: usize = 6;
const SEED: u64 = 1 << 60;
const CREATED: u64 = 1_700_000_000;

/// The writes of one answer to `body`, in order.
pub fn writes(body: &Value, is_asked: bool) -> Vec<String> {
    let resume = &body["baton_resume"];
    let known = resume["ids"].as_array().map_or(0, Vec::len);
    for (at, id) in resume["ids"].as_array().into_iter().flatten().enumerate() {
        assert_eq!(*id, json!(100 + at), "{resume}");
    }
    if known > 0 {
        assert_eq!(
            (&resume["seed"], &resume["created"]),
            (&json!(SEED), &json!(CREATED))
        );
    }
    (known..TOKENS)
        .map(|at| {
            let is_last = at + 1 == TOKENS;
            let mut write = String::new();
            if at == 0 {
                write += &event(&json!({"role": "assistant"}), false);
            }
            if is_asked && !is_last {
                let mut comment = json!({"ids": [100 + at]});
                if at == known {
                    comment["seed"] = json!(SEED);
                    comment["created"] = json!(CREATED);
                }
                write += &format!(": baton {comment}\n");
            }
            write += &event(&json!({"content": format!("w{at} ")}), is_last);
            if is_last {
                let usage = json!({"prompt_tokens": 3, "completion_tokens": TOKENS});
                write += &format!(
                    "data: {}\n\ndata: [DONE]\n\n",
                    json!({"choices": [], "usage": usage})
                );
            }
            write
        })
        .collect()
}

fn event(delta: &Value, is_last: bool) -> String {
    let finish = is_last.then_some("length");
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
    format!(
        "data: {}\n\n",
        json!({"created": CREATED, "choices": [choice]})
    )
}

/// The whole answer as a client is to see it.
pub fn whole() -> String {
    writes(&Value::Null, false).concat()
}
