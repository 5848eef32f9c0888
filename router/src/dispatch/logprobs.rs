//! Input logprobs of a pair's answer: the prefill leg has them, the client is given the decode leg's words.
//!
//! `/generate` with `return_logprob` only. A whole answer is merged item by item. In a stream, the prefill leg's go in
//! front of those in the first event; streams of several answers pass as they are. Held for it: the prefill leg's words
//! (`attempt` bounds them) and one event. What is no JSON, or no such JSON, passes as it is.

use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::time::timeout;

use crate::dispatch::attempt::UpstreamResponse;
use crate::dispatch::disaggregated::prefill_leg::PrefillAttempt;

const FIELD: &str = "input_token_logprobs";
/// The decode leg has begun, so the prefill leg's answer is complete or on its way: a stream waits this long for it.
const STREAM_WAIT: Duration = Duration::from_secs(2);
/// Longest first event that is held to be merged [bytes].
const MAX_EVENT: usize = 8 << 20;

/// `opened` with the prefill leg's input logprobs, if it says them within `limit`.
pub async fn merged(
    mut opened: UpstreamResponse,
    prefill: &mut PrefillAttempt,
    limit: Duration,
) -> UpstreamResponse {
    let limit = match opened.is_sse {
        true => limit.min(STREAM_WAIT),
        false => limit,
    };
    if prefill.words().is_none()
        && !matches!(timeout(limit, prefill.ended()).await, Ok(Some(Ok(()))))
    {
        tracing::debug!("the prefill leg did not tell its input logprobs");
        return opened;
    }
    let Some(words) = prefill.words().map(<[Bytes]>::concat) else {
        return opened;
    };
    if !opened.is_sse {
        if let Some(whole) = merge_whole(&words, &opened.pieces.concat()) {
            opened.pieces = vec![whole];
        }
        return opened;
    }
    read_first_event(&mut opened, limit).await;
    if let Some(pieces) = merge_first_event(&words, &opened.pieces) {
        opened.pieces = pieces;
    }
    opened
}

/// Read on until the first event's line is complete.
async fn read_first_event(opened: &mut UpstreamResponse, limit: Duration) {
    let mut held: usize = opened.pieces.iter().map(Bytes::len).sum();
    while !opened.pieces.iter().any(|piece| piece.contains(&b'\n')) && held < MAX_EVENT {
        let Some(rest) = &mut opened.rest else { return };
        // What breaks or stays silent here does so again when the answer is relayed.
        let Ok(Some(Ok(piece))) = timeout(limit, rest.piece()).await else {
            return;
        };
        held += piece.len();
        opened.pieces.push(piece);
    }
}

fn merge_whole(from: &[u8], to: &[u8]) -> Option<Bytes> {
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

fn merge_first_event(words: &[u8], pieces: &[Bytes]) -> Option<Vec<Bytes>> {
    let whole = pieces.concat();
    let start = whole.iter().position(|b| *b == b'd')?;
    let end = start + whole[start..].iter().position(|b| *b == b'\n')?;
    let mut event: Value =
        serde_json::from_slice(whole[start..end].strip_prefix(b"data:")?).ok()?;
    if event.get("index").is_some() {
        return None;
    }
    let logprobs = logprobs_of(words)?;
    merge(&logprobs, &mut event);
    let mut merged = whole[..start].to_vec();
    merged.extend_from_slice(b"data: ");
    merged.extend_from_slice(event.to_string().as_bytes());
    merged.extend_from_slice(&whole[end..]);
    Some(vec![Bytes::from(merged)])
}

/// The prefill leg's words: one JSON, or a stream, whose events each have all that was said before.
fn logprobs_of(words: &[u8]) -> Option<Value> {
    if let Ok(whole) = serde_json::from_slice(words) {
        return Some(whole);
    }
    let lines = words.split(|b| *b == b'\n').rev();
    lines
        .filter_map(|line| serde_json::from_slice::<Value>(line.strip_prefix(b"data:")?).ok())
        .find(|event| event["meta_info"][FIELD].is_array())
}

/// `from`'s in front of `to`'s.
fn merge(from: &Value, to: &mut Value) {
    let first = from["meta_info"][FIELD].as_array();
    let meta = to.get_mut("meta_info").and_then(Value::as_object_mut);
    let Some(meta) = meta else { return };
    let first = first.cloned().unwrap_or_default();
    let second = meta.get(FIELD).and_then(Value::as_array);
    let all: Vec<_> = first.into_iter().chain(second.into_iter().flatten().cloned()).collect();
    meta.insert(FIELD.to_owned(), all.into());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FIRST: &str = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[[-0.25,3,null]]}}\n\ndata: {\"text\":\"ab\"}\n\n";

    fn streamed(words: &str, pieces: &[&str]) -> Option<String> {
        let pieces: Vec<_> =
            pieces.iter().map(|piece| Bytes::copy_from_slice(piece.as_bytes())).collect();
        let merged = merge_first_event(words.as_bytes(), &pieces)?;
        Some(String::from_utf8(merged.concat()).unwrap())
    }

    #[test]
    fn the_first_event_gets_them_and_the_rest_stays_as_it_is() {
        let whole = r#"{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,null]]}}"#;
        let stream = format!("data: {{\"meta_info\":{{}}}}\n\ndata: {whole}\n\ndata: [DONE]\n\n");
        for words in [whole, stream.as_str()] {
            for pieces in [&[FIRST][..], &[&FIRST[..20], &FIRST[20..]]] {
                let merged = streamed(words, pieces).unwrap();
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
        for (words, piece) in [
            ("oops", FIRST),
            ("data: {\"text\":1}\n\n", FIRST),
            ("{}", "data: [DONE]\n\n"),
            ("{}", "data: {\"index\":1,\"meta_info\":{}}\n\n"),
            ("{}", "data: {\"half"),
        ] {
            assert_eq!(streamed(words, &[piece]), None, "{words} {piece}");
        }
        assert_eq!(merge_whole(b"{}", b"oops"), None);
    }
}
