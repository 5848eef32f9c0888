//! Input logprobs of an answer to /generate that two workers give together: the prefill worker has
//! them, and the client gets the decode worker's answer.
//!
//! A whole answer is merged item by item. In a stream, the prefill worker's logprobs go in front of
//! those in the first event; streams of several answers pass as they are. Text that is no JSON, or
//! JSON of another form, is not merged.

use bytes::Bytes;
use serde_json::Value;

use crate::dialect::sse::{
    event_data, event_len, events, first_data_event, line_data, whole_lines, without_mark,
};

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
    let mark_len = run.len() - without_mark(run).len();
    let start = mark_len + first_data_event(&run[mark_len..])?;
    let end = start + event_len(&run[start..])?;
    let mut event: Value = serde_json::from_slice(&event_data(&run[start..end])?).ok()?;
    if event.get("index").is_some() {
        return None;
    }
    merge(&logprobs_of(from)?, &mut event);
    let mut merged = run[..start].to_vec();
    let mut data = Some(event.to_string());
    for (line, line_end) in whole_lines(&run[start..end]) {
        if line_data(line).is_none() {
            merged.extend_from_slice(line);
            merged.extend_from_slice(line_end);
        } else if let Some(data) = data.take() {
            merged.extend_from_slice(b"data: ");
            merged.extend_from_slice(data.as_bytes());
            merged.extend_from_slice(line_end);
        }
    }
    merged.extend_from_slice(&run[end..]);
    Some(Bytes::from(merged))
}

/// True if each answer of a whole response to /generate has a reason of its end, as SGLang writes
/// it.
pub fn is_finished(whole: &[u8]) -> bool {
    let has_end = |answer: &Value| answer[META]["finish_reason"].is_object();
    match serde_json::from_slice(whole) {
        Ok(Value::Array(answers)) => answers.iter().all(has_end),
        Ok(answer) => has_end(&answer),
        Err(_) => false,
    }
}

/// The prefill worker's answer: one JSON, or the last event of a stream, which has the text of all
/// events before it.
fn logprobs_of(response: &[u8]) -> Option<Value> {
    if let Ok(whole) = serde_json::from_slice(response) {
        return Some(whole);
    }
    events(response)
        .filter_map(|event| serde_json::from_slice::<Value>(&event_data(event)?).ok())
        .filter(|event| event[META][FIELD].is_array())
        .last()
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
    fn data_in_several_lines_is_merged_as_one() {
        let whole = r#"{"meta_info":{"input_token_logprobs":[[null,1,null]]}}"#;
        let run = "\u{feff}id: 1\r\n\r\n: c\r\nid: 2\r\ndata: {\"text\":\r\ndata: 1,\"meta_info\":{}}\r\n\r\ndata: x\r\n\r\n";
        let marked = merge_text(whole, "\u{feff}data: {\"meta_info\":{}}\n\n").unwrap();
        assert!(marked.contains("[null,1,null]"), "{marked}");
        let merged = "\u{feff}id: 1\r\n\r\n: c\r\nid: 2\r\ndata: {\"text\":1,\"meta_info\":{\"input_token_logprobs\":[[null,1,null]]}}\r\n\r\ndata: x\r\n\r\n";
        assert_eq!(merge_text(whole, run).as_deref(), Some(merged));
    }

    #[test]
    fn answer_is_finished_by_its_reasons_alone() {
        let finished = r#"{"text":"a","meta_info":{"finish_reason":{"type":"stop"}}}"#;
        let open = r#"{"text":"a","meta_info":{"finish_reason":null}}"#;
        for (answer, is_whole) in [
            (finished.to_owned(), true),
            (format!("[{finished},{finished}]"), true),
            (format!("[{finished},{open}]"), false),
            (open.to_owned(), false),
            ("{}".to_owned(), false),
            ("oops".to_owned(), false),
        ] {
            assert_eq!(is_finished(answer.as_bytes()), is_whole, "{answer}");
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
