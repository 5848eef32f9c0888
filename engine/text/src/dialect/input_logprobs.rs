//! Input logprobs of an answer to /generate that two workers give together: the prefill worker has
//! them, and the client gets the decode worker's answer.
//!
//! A whole answer is merged item by item. In a stream, the prefill worker's logprobs go in front of
//! those in the first event; streams of several answers pass as they are. Text that is no JSON, or
//! JSON of another form, is not merged.

use bytes::Bytes;
use serde_json::Value;

use crate::dialect::sse::{comments_len, line_data};

const FIELD: &str = "input_token_logprobs";
const META: &str = "meta_info";

/// The answer `to` with the logprobs of `from`; `None`: they cannot be merged.
pub fn merge_whole(from: &[u8], to: &[u8]) -> Option<Bytes> {
    let from: Value = serde_json::from_slice(from).ok()?;
    let mut to: Value = serde_json::from_slice(to).ok()?;
    match (&from, &mut to) {
        (Value::Array(from), Value::Array(to)) => {
            from.iter().zip(to).for_each(|(from, to)| merge(from, to));
        }
        (from, to) => merge(from, to),
    }
    Some(Bytes::from(to.to_string()))
}

/// `run` of whole events with the logprobs of `from`, which is a whole answer or a stream, in its
/// first event; `None`: they cannot be merged.
pub fn merge_first_event(from: &[u8], run: &[u8]) -> Option<Bytes> {
    let start = comments_len(run);
    let end = start + run[start..].iter().position(|b| *b == b'\n')?;
    let mut event: Value = serde_json::from_slice(line_data(&run[start..end])?).ok()?;
    if event.get("index").is_some() {
        return None;
    }
    merge(&logprobs_of(from)?, &mut event);
    let event = event.to_string();
    Some(
        [&run[..start], b"data: ", event.as_bytes(), &run[end..]]
            .concat()
            .into(),
    )
}

/// The prefill worker's answer: one JSON, or the last event of a stream, which has the text of all
/// events before it.
fn logprobs_of(response: &[u8]) -> Option<Value> {
    if let Ok(whole) = serde_json::from_slice(response) {
        return Some(whole);
    }
    let lines = response.split(|b| *b == b'\n').rev();
    lines
        .filter_map(|line| serde_json::from_slice::<Value>(line_data(line)?).ok())
        .find(|event| event[META][FIELD].is_array())
}

/// Put the logprobs of `from` in front of those of `to`.
fn merge(from: &Value, to: &mut Value) {
    let Some(meta) = to.get_mut(META).and_then(Value::as_object_mut) else {
        return;
    };
    let first = from[META][FIELD].as_array();
    let second = meta.get(FIELD).and_then(Value::as_array);
    let logprobs: Vec<Value> = [first, second]
        .into_iter()
        .flatten()
        .flatten()
        .cloned()
        .collect();
    meta.insert(FIELD.to_owned(), logprobs.into());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FIRST: &str = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[[-0.25,3,null]]}}\n\ndata: {\"text\":\"ab\"}\n\n";

    fn merge_text(response: &str, run: &str) -> Option<String> {
        let merged = merge_first_event(response.as_bytes(), run.as_bytes())?;
        Some(String::from_utf8(merged.to_vec()).unwrap())
    }

    #[test]
    fn first_event_gets_them_and_the_rest_stays_as_it_is() {
        let whole = r#"{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null]]}}"#;
        let stream = format!("data: {{\"meta_info\":{{}}}}\n\ndata: {whole}\n\ndata: [DONE]\n\n");
        for response in [whole, stream.as_str()] {
            for comments in ["", ": keep-alive\n\n", ": baton {\"ids\":[5]}\n"] {
                let merged = merge_text(response, &format!("{comments}{FIRST}")).unwrap();
                let merged = merged.strip_prefix(comments).unwrap();
                let (event, rest) = merged.split_once('\n').unwrap();
                let event: Value = serde_json::from_str(&event["data: ".len()..]).unwrap();
                assert_eq!(
                    event["meta_info"][FIELD],
                    serde_json::json!([[null, 1, null], [-0.5, 2, null], [-0.25, 3, null]])
                );
                assert_eq!(event["text"], "a");
                assert_eq!(rest, FIRST.split_once('\n').unwrap().1);
            }
        }
    }

    #[test]
    fn what_cannot_be_merged_passes() {
        for (response, piece) in [
            ("oops", FIRST),
            ("data: {\"text\":1}\n\n", FIRST),
            ("{}", "data: [DONE]\n\n"),
            ("{}", "data: {\"index\":1,\"meta_info\":{}}\n\n"),
            ("{}", "data: {\"half"),
        ] {
            assert_eq!(merge_text(response, piece), None, "{response} {piece}");
        }
        assert_eq!(merge_whole(b"{}", b"oops"), None);
    }
}
