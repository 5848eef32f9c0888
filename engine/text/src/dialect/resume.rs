//! Resumption of a stream: the comments that report its tokens, and the field that asks for its
//! rest (docs/protocol.md §2).
//!
//! 1. A header asks workers with the feature `resume` for a comment in front of the last event of
//!    each write: the tokens sent with the events so far. The first one has the seed and the time
//!    of the answer, too;
//! 2. the body that asks another worker for the rest has the tokens that the client has in a field
//!    of its own ([`ResumeRequest`]).

use std::collections::BTreeMap;

use memchr::memchr;
use serde::Deserialize;

/// Header that asks a worker for the comments.
pub const EMIT_TOKENS_HEADER: &str = "x-baton-emit-tokens";
/// Feature of workers that understand the header and the field.
pub const FEATURE: &str = "resume";
/// Field of the body that asks for the rest of a stream.
pub const FIELD: &str = "baton_resume";
/// Front of a comment; its JSON and a line end follow.
pub const COMMENT: &[u8] = b": baton ";

/// Digits that make a `u32` whatever they are.
const SAFE_DIGITS: usize = 9;

/// A comment in front of an event.
#[derive(Debug, Clone, Copy)]
pub struct ResumeComment<'a> {
    json: &'a [u8],
    /// Length of the line, with its end.
    pub len: usize,
}

/// Facts of the whole answer in a comment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerIdentity {
    pub seed: Option<u64>,
    pub created: Option<u64>,
    /// Events so far, where they are numbered.
    pub events: Option<u64>,
}

/// Reason why a comment was not read to its end.
#[derive(Debug, PartialEq, Eq)]
pub enum CommentError<E> {
    /// The comment is not that of docs/protocol.md §2.
    Malformed,
    /// The caller takes no more tokens.
    Refused(E),
}

#[derive(Deserialize)]
struct CommentJson {
    ids: Vec<u32>,
    seed: Option<u64>,
    created: Option<u64>,
    events: Option<u64>,
}

impl<'a> ResumeComment<'a> {
    /// The comment that `event` begins with, if it does.
    #[inline]
    pub fn leading(event: &'a [u8]) -> Option<Self> {
        if !event.starts_with(COMMENT) {
            return None;
        }
        let len = memchr(b'\n', event).map_or(event.len(), |at| at + 1);
        Some(Self {
            json: &event[COMMENT.len()..len],
            len,
        })
    }

    /// Read the tokens, each of which goes to `push` in order. Cost: the usual form, which comes
    /// with nearly every event, is read without a general parser.
    #[inline]
    pub fn read<E>(
        &self,
        mut push: impl FnMut(u32) -> Result<(), E>,
    ) -> Result<AnswerIdentity, CommentError<E>> {
        let mut pushed = 0;
        let is_read = self.read_usual_form(|id| {
            pushed += 1;
            push(id)
        });
        if is_read.map_err(CommentError::Refused)? {
            return Ok(AnswerIdentity::default());
        }
        let comment: CommentJson =
            serde_json::from_slice(self.json).map_err(|_| CommentError::Malformed)?;
        // The usual form was left behind the last of its tokens.
        for id in comment.ids.into_iter().skip(pushed) {
            push(id).map_err(CommentError::Refused)?;
        }
        Ok(AnswerIdentity {
            seed: comment.seed,
            created: comment.created,
            events: comment.events,
        })
    }

    /// Read `{"ids":[1,2]}`. False: the JSON has another form, and the tokens pushed are the first
    /// ones of its list.
    #[inline]
    fn read_usual_form<E>(&self, mut push: impl FnMut(u32) -> Result<(), E>) -> Result<bool, E> {
        let list = self.json.trim_ascii_end().strip_prefix(b"{\"ids\":[");
        let Some(list) = list.and_then(|rest| rest.strip_suffix(b"]}")) else {
            return Ok(false);
        };
        for number in list.split(|b| *b == b',') {
            let mut id: u32 = 0;
            if number.is_empty() || number.len() > SAFE_DIGITS {
                return Ok(false);
            }
            for digit in number {
                if !digit.is_ascii_digit() {
                    return Ok(false);
                }
                id = id * 10 + u32::from(digit - b'0');
            }
            push(id)?;
        }
        Ok(true)
    }
}

/// Beginning of an answer, for the worker that gives the rest of it.
#[derive(Debug, Clone, Copy)]
pub struct ResumeRequest<'a> {
    /// Tokens that the client has.
    pub ids: &'a [u32],
    pub seed: u64,
    pub created: u64,
    /// Events that the client has, where they are numbered.
    pub events: Option<u64>,
    /// Fingerprint of the worker that gave the tokens. May be empty.
    pub fingerprint: &'a BTreeMap<String, String>,
}

impl ResumeRequest<'_> {
    /// Member of the body.
    pub fn to_member(&self) -> String {
        let seed = self.seed;
        let created = self.created;
        let ids: Vec<String> = self.ids.iter().map(u32::to_string).collect();
        let ids = ids.join(",");
        let events = match self.events {
            Some(events) => format!(",\"events\":{events}"),
            None => String::new(),
        };
        let fingerprint = if self.fingerprint.is_empty() {
            String::new()
        } else {
            format!(",\"fingerprint\":{}", serde_json::json!(self.fingerprint))
        };
        format!(
            "\"{FIELD}\":{{\"ids\":[{ids}],\"seed\":{seed},\"created\":{created}{events}{fingerprint}}}"
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    type Read = Result<(Vec<u32>, AnswerIdentity), CommentError<Infallible>>;

    fn read(json: &str) -> Read {
        let event = format!(": baton {json}\ndata: {{}}\n\n");
        let comment = ResumeComment::leading(event.as_bytes()).unwrap();
        assert_eq!(&event[comment.len..], "data: {}\n\n");
        let mut ids = Vec::new();
        let identity = comment.read(|id| {
            ids.push(id);
            Ok(())
        })?;
        Ok((ids, identity))
    }

    /// The same by a general parser.
    fn parsed(json: &str) -> Option<(Vec<u32>, AnswerIdentity)> {
        let value: Value = serde_json::from_str(json).ok()?;
        let ids = value.get("ids")?.as_array()?;
        let ids = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok());
        let identity = AnswerIdentity {
            seed: value["seed"].as_u64(),
            created: value["created"].as_u64(),
            events: value["events"].as_u64(),
        };
        Some((ids.collect::<Option<_>>()?, identity))
    }

    proptest! {
        #[test]
        fn comments_are_read_as_json_however_they_are_written(
            ids in proptest::collection::vec(any::<u32>(), 0..6),
            spaces in any::<u8>(),
            identity in proptest::option::of((any::<u64>(), any::<u64>())),
            is_first: bool,
        ) {
            let space = |bit: u8| if spaces >> bit & 1 == 1 { " " } else { "" };
            let list: Vec<String> = ids
                .iter()
                .enumerate()
                .map(|(at, id)| format!("{}{id}", space(at as u8 % 4)))
                .collect();
            let list = format!("\"ids\":{}[{}{}]", space(4), list.join(","), space(5));
            let facts = identity.map(|(seed, created)| format!("\"seed\":{seed},\"created\":{created}"));
            let members = match (facts, is_first) {
                (None, _) => list,
                (Some(facts), true) => format!("{list},{facts}"),
                (Some(facts), false) => format!("{facts},{list}"),
            };
            let json = format!("{{{members}}}{}", space(6));
            prop_assert_eq!(read(&json).ok(), parsed(&json));
        }
    }

    #[test]
    fn other_text_is_malformed() {
        for json in [
            "",
            "what",
            "{}",
            "{\"ids\":[1,-2]}",
            "{\"ids\":[1,2",
            "{\"ids\":[1,9999999999]}",
        ] {
            assert_eq!(read(json), Err(CommentError::Malformed), "{json}");
        }
    }

    #[test]
    fn events_without_the_comment_have_none() {
        for event in [": keep-alive\n\n", "data: \": baton {}\"\n\n", ": bato", ""] {
            assert!(
                ResumeComment::leading(event.as_bytes()).is_none(),
                "{event}"
            );
        }
    }

    #[test]
    fn refusal_of_a_token_ends_the_reading() {
        let comment = ResumeComment::leading(b": baton {\"ids\":[1,2,3]}\n").unwrap();
        let mut taken = Vec::new();
        let read = comment.read(|id| {
            if id == 2 {
                return Err("full");
            }
            taken.push(id);
            Ok(())
        });
        assert_eq!(read, Err(CommentError::Refused("full")));
        assert_eq!(taken, [1]);
    }

    #[test]
    fn member_names_the_fingerprint_if_there_is_one() {
        let mut fingerprint = BTreeMap::new();
        let to_member = |fingerprint: &BTreeMap<String, String>| {
            let request = ResumeRequest {
                ids: &[5, 6],
                seed: 7,
                created: 9,
                events: fingerprint.get("model").map(|_| 12),
                fingerprint,
            };
            request.to_member()
        };
        assert_eq!(
            to_member(&fingerprint),
            r#""baton_resume":{"ids":[5,6],"seed":7,"created":9}"#
        );
        fingerprint.insert("model".to_owned(), "f00".to_owned());
        assert_eq!(
            to_member(&fingerprint),
            r#""baton_resume":{"ids":[5,6],"seed":7,"created":9,"events":12,"fingerprint":{"model":"f00"}}"#
        );
    }
}
