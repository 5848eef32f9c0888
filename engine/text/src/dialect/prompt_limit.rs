//! The longest prompt that workers take. A request whose prompt is longer is refused before any
//! worker receives it.
//!
//! Our engines announce the limit in /get_server_info (docs/protocol.md §2) and apply the same
//! rule, through `baton._native`, to requests that reach them directly. Workers that announce
//! nothing limit nothing.

use std::num::NonZeroU64;

use memchr::memchr;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::dialect::body::{BodyError, BodyIndex};
use crate::dialect::{Dialect, PromptKind};
use crate::prompt::{CUT_TEXT_CHARS, PromptTruncation};

/// Most bytes of JSON for one character: an escaped surrogate pair, `\ud83d\ude00`.
const JSON_BYTES_PER_CHAR: u64 = 12;

/// Most JSON beside the prompt, and the part of that for each token of the context, since an answer
/// that is resumed comes with its ids: 4 MiB of tools or options take an engine up to 50 ms to
/// read, and all its streams wait [bytes].
pub const REST_BYTES: u64 = 4 << 20;
const REST_BYTES_PER_TOKEN: u64 = 8;

/// Most bytes of JSON for one token id: ten digits, a comma and a space.
const JSON_BYTES_PER_ID: u64 = 12;

/// Longest body that our engines read, whatever is in it: several prompts, or one
/// (docs/protocol.md).
pub const MAX_ENGINE_BODY_BYTES: u64 = 32 << 20;

/// Refusal of a body that no engine takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OversizedBody {
    #[error(
        "this model's maximum context length is {limit_tokens} tokens here, but the prompt {size}; \
         shorten it, or start the engine with a larger --context-length or --max-total-tokens"
    )]
    Prompt {
        param: &'static str,
        /// Size of the prompt, as a predicate.
        size: String,
        limit_tokens: u64,
    },
    #[error(
        "the members beside the prompt have {bytes} bytes, at most {limit_bytes} are accepted; \
         shorten them"
    )]
    Rest { bytes: u64, limit_bytes: u64 },
}

impl OversizedBody {
    /// Stable code of the error (docs/protocol.md).
    pub fn code(&self) -> &'static str {
        match self {
            OversizedBody::Prompt { .. } => "context_length_exceeded",
            OversizedBody::Rest { .. } => "payload_too_large",
        }
    }

    /// Member that is too long; `None`: all members together.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            OversizedBody::Prompt { param, .. } => Some(param),
            OversizedBody::Rest { .. } => None,
        }
    }
}

/// Longest prompt of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimit {
    /// As token ids [tokens].
    pub tokens: NonZeroU64,
    /// As text, whatever its tokens [characters].
    pub chars: u64,
}

impl PromptLimit {
    /// `None` where either number is missing or 0.
    pub fn of(tokens: Option<u64>, chars: Option<u64>) -> Option<Self> {
        let tokens = NonZeroU64::new(tokens?)?;
        let chars = chars.filter(|chars| *chars > 0)?;
        Some(Self { tokens, chars })
    }

    /// Limit of a request that any of two workers may take.
    pub fn or(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.max(other.tokens),
            chars: self.chars.max(other.chars),
        }
    }

    /// Limit of a request that two workers must take.
    pub fn and(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.min(other.tokens),
            chars: self.chars.min(other.chars),
        }
    }

    /// Longest body in which a request of `dialect` with such a prompt may come: all its characters
    /// escaped, its token ids beside it, and the largest rest. Requests with texts may hold several
    /// prompts, so that only an engine's own limit bounds them.
    pub fn body_bytes(self, dialect: Dialect) -> u64 {
        if dialect.fields().prompt_kind == PromptKind::Texts {
            return MAX_ENGINE_BODY_BYTES;
        }
        let messages = self.chars.saturating_mul(JSON_BYTES_PER_CHAR);
        let ids = self.tokens.get().saturating_mul(JSON_BYTES_PER_ID);
        let all = messages
            .saturating_add(ids)
            .saturating_add(self.rest_bytes());
        all.min(MAX_ENGINE_BODY_BYTES)
    }

    /// Limit of a prompt that is cut to the context.
    fn before_cut(self) -> Self {
        Self {
            tokens: NonZeroU64::MAX,
            chars: self.chars.max(CUT_TEXT_CHARS),
        }
    }

    fn rest_bytes(self) -> u64 {
        self.tokens
            .get()
            .saturating_mul(REST_BYTES_PER_TOKEN)
            .saturating_add(REST_BYTES)
    }
}

/// Refusal of a `body` whose prompt, or whose members beside it, exceed `limit`. Cost: one pass
/// over the prompt's JSON where that is longer than the limit; else nothing.
pub fn oversized(scan: &BodyIndex, body: &[u8], limit: PromptLimit) -> Option<OversizedBody> {
    let prompt = scan.prompt(body);
    let ids = scan.ids_json(body);
    let kind = scan.dialect.fields().prompt_kind;
    let longest = match scan.truncation {
        PromptTruncation::Off => limit,
        PromptTruncation::ToContext | PromptTruncation::To(_) => limit.before_cut(),
    };
    let size = match (kind, ids) {
        (PromptKind::Messages, None) => size_of_messages(prompt, longest),
        (PromptKind::Messages, Some(ids)) => {
            size_of_messages(prompt, longest).or_else(|| size_of_ids(ids, longest))
        }
        (PromptKind::Texts, Some(ids)) => size_of_ids(ids, longest),
        (PromptKind::Texts, None) => size_of_text(prompt, longest, limit),
    };
    if let Some(size) = size {
        let param = scan.prompt_param;
        let limit_tokens = limit.tokens.get();
        return Some(OversizedBody::Prompt {
            param,
            size,
            limit_tokens,
        });
    }
    let beside = ids.filter(|ids| ids.as_ptr() != prompt.as_ptr());
    let prompt_bytes = prompt.len() + beside.map_or(0, <[u8]>::len);
    let bytes = body.len().saturating_sub(prompt_bytes) as u64;
    let limit_bytes = limit.rest_bytes();
    (bytes > limit_bytes).then_some(OversizedBody::Rest { bytes, limit_bytes })
}

/// The same for a body that was not scanned yet. Errors say why it is no JSON object.
pub fn oversized_body(
    path: &str,
    body: &[u8],
    limit: PromptLimit,
) -> Result<Option<OversizedBody>, BodyError> {
    let Some(dialect) = Dialect::of_path(path) else {
        return Ok(None);
    };
    match BodyIndex::of(body, dialect) {
        Ok(scan) => Ok(oversized(&scan, body, limit)),
        Err(err @ BodyError::InvalidJson { .. }) => Err(err),
        // The engine refuses it in its own words.
        Err(BodyError::InvalidValue { .. }) => Ok(None),
    }
}

/// Size of a conversation's JSON. Templates may drop text, so its characters are not compared with
/// `limit.chars`, which would fill the context several times over.
fn size_of_messages(json: &[u8], limit: PromptLimit) -> Option<String> {
    let bytes = json.len() as u64;
    let most = limit.chars.saturating_mul(JSON_BYTES_PER_CHAR);
    (bytes > most).then(|| format!("has {bytes} bytes of messages, at most {most} are accepted"))
}

/// A text, or the longest of several. `context`: the limit by which characters are tokens at least.
fn size_of_text(json: &[u8], limit: PromptLimit, context: PromptLimit) -> Option<String> {
    if json.len() as u64 <= limit.chars {
        return None;
    }
    let chars = if json.starts_with(b"[") {
        let texts: Vec<&RawValue> = serde_json::from_slice(json).ok()?;
        let texts = texts.iter().map(|text| text.get().as_bytes());
        texts
            .filter(|text| text.len() as u64 > limit.chars)
            .filter_map(chars_of)
            .max()
    } else {
        chars_of(json)
    };
    let chars = chars.filter(|chars| *chars > limit.chars)?;
    let tokens = chars.div_ceil(context.chars.div_ceil(context.tokens.get()));
    Some(format!("has {chars} characters, at least {tokens} tokens"))
}

/// Size of a list of ids, or of the first long one of several.
fn size_of_ids(json: &[u8], limit: PromptLimit) -> Option<String> {
    // A comma or bracket goes with each id.
    if json.len() as u64 / 2 <= limit.tokens.get() {
        return None;
    }
    let inside = json.strip_prefix(b"[")?.trim_ascii_start();
    let lengths = if inside.starts_with(b"[") {
        let rows: Vec<Vec<IgnoredAny>> = serde_json::from_slice(json).ok()?;
        rows.iter().map(Vec::len).collect()
    } else {
        let ids: Vec<IgnoredAny> = serde_json::from_slice(json).ok()?;
        vec![ids.len()]
    };
    let mut lengths = lengths.into_iter().map(|length| length as u64);
    let tokens = lengths.find(|tokens| *tokens > limit.tokens.get())?;
    Some(format!("has {tokens}"))
}

/// Characters of a JSON string; `None`: it is none.
fn chars_of(json: &[u8]) -> Option<u64> {
    let text = json.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut chars = text.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
    let mut at = 0;
    let mut is_high = None;
    while let Some(offset) = memchr(b'\\', &text[at..]) {
        at += offset;
        if text.get(at + 1) != Some(&b'u') {
            chars -= 1;
            at += 2;
            continue;
        }
        chars -= 5;
        let digits = text.get(at + 2..at + 4).unwrap_or_default();
        let begins = |with: &[u8]| {
            digits.first().is_some_and(|digit| digit | 0x20 == b'd')
                && digits
                    .get(1)
                    .is_some_and(|digit| with.contains(&(digit | 0x20)))
        };
        // Digits keep their value under `| 0x20`.
        if is_high == Some(at) && begins(b"cdef") {
            chars -= 1;
        }
        is_high = begins(b"89ab").then_some(at + 6);
        at += 6;
    }
    Some(chars as u64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const LIMIT: PromptLimit = PromptLimit {
        tokens: NonZeroU64::new(4).unwrap(),
        chars: 40,
    };

    fn find(api: Dialect, body: &str) -> Option<(&'static str, String)> {
        let found = oversized_body(api.path(), body.as_bytes(), LIMIT).unwrap();
        found.map(|refusal| match refusal {
            OversizedBody::Prompt { param, size, .. } => (param, size),
            OversizedBody::Rest { bytes, limit_bytes } => ("", format!("{bytes} of {limit_bytes}")),
        })
    }

    #[test]
    fn text_is_too_long_by_its_characters_and_not_by_its_bytes() {
        let too_long = |param| Some((param, "has 41 characters, at least 5 tokens".to_owned()));
        for character in ["a", "é", "😀", "\\n", "\\u00e9", "\\ud83d\\ude00"] {
            for (count, is_refused) in [(40, false), (41, true)] {
                let text = format!("\"{}\"", character.repeat(count));
                for (api, member) in [
                    (Dialect::Completions, "prompt"),
                    (Dialect::Generate, "text"),
                ] {
                    let expected = is_refused.then(|| too_long(member)).flatten();
                    let body = format!("{{\"{member}\": {text}}}");
                    assert_eq!(find(api, &body), expected, "{body}");
                    let body = format!("{{\"{member}\": [\"a\", {text}, \"b\"]}}");
                    assert_eq!(find(api, &body), expected, "{body}");
                }
            }
        }
        let many = json!({"prompt": vec!["a".repeat(40); 9]}).to_string();
        assert_eq!(find(Dialect::Completions, &many), None);
    }

    #[test]
    fn ids_are_counted_where_they_take_the_place_of_a_text() {
        let fitting = "[1, 22, 333, 4]";
        let long = "[1, 22, 333, 4, 5]";
        let too_long = |param| Some((param, "has 5".to_owned()));
        for (ids, is_refused) in [(fitting, false), (long, true)] {
            let expected = |param| is_refused.then(|| too_long(param)).flatten();
            for ids in [ids.to_owned(), format!("[[1, 2], {ids}]")] {
                let body = format!("{{\"prompt\": {ids}}}");
                assert_eq!(find(Dialect::Completions, &body), expected("prompt"));
                let body = format!("{{\"input_ids\": {ids}}}");
                assert_eq!(find(Dialect::Generate, &body), expected("input_ids"));
                let body = format!("{{\"text\": \"{}\", \"input_ids\": {ids}}}", "x".repeat(99));
                assert_eq!(find(Dialect::Generate, &body), expected("text"));
                let body = format!("{{\"messages\": [], \"input_ids\": {ids}}}");
                assert_eq!(find(Dialect::Chat, &body), expected("messages"));
            }
        }
    }

    #[test]
    fn messages_may_have_the_json_of_a_text_that_is_all_escapes() {
        let body = |content: &str| {
            format!("{{\"messages\": [{{\"role\":\"user\",\"content\":\"{content}\"}}]}}")
        };
        assert_eq!(
            find(Dialect::Chat, &body(&"\\ud83d\\ude00".repeat(36))),
            None
        );
        let long = find(Dialect::Chat, &body(&"x".repeat(480)));
        let size = "has 510 bytes of messages, at most 480 are accepted";
        assert_eq!(long, Some(("messages", size.to_owned())));
    }

    #[test]
    fn prompts_that_are_cut_may_be_longer_than_the_context() {
        for tokens in ["2", "-1"] {
            let cut = format!("\"truncate_prompt_tokens\": {tokens}");
            let body = format!("{{\"input_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9], {cut}}}");
            assert_eq!(find(Dialect::Generate, &body), None);
            let text = |chars| format!("{{\"prompt\": \"{}\", {cut}}}", "x".repeat(chars));
            let most = CUT_TEXT_CHARS as usize;
            assert_eq!(find(Dialect::Completions, &text(most)), None);
            let size = format!(
                "has {} characters, at least {} tokens",
                most + 1,
                most / 10 + 1
            );
            assert_eq!(
                find(Dialect::Completions, &text(most + 1)),
                Some(("prompt", size))
            );
        }
        let body = "{\"input_ids\": [1, 2, 3, 4, 5], \"truncate_prompt_tokens\": 0}";
        assert!(find(Dialect::Generate, body).is_some());
    }

    #[test]
    fn what_is_no_prompt_is_left_to_the_engine() {
        let long = "x".repeat(999);
        for body in [
            format!("{{\"text\": \"{long}\"}}"),
            format!("{{\"prompt\": {{\"{long}\": 1}}}}"),
            format!("{{\"prompt\": [[\"{long}\"], 1]}}"),
            format!("{{\"prompt\": [[1], \"{long}\"]}}"),
            format!("{{\"prompt\": \"a\", \"n\": 99999999, \"user\": \"{long}\"}}"),
        ] {
            assert_eq!(find(Dialect::Completions, &body), None, "{body}");
        }
        let broken = oversized_body("/generate", b"{\"text\": ", LIMIT);
        assert!(matches!(broken, Err(BodyError::InvalidJson { .. })));
        assert_eq!(oversized_body("/tokenize", b"{", LIMIT), Ok(None));
    }

    #[test]
    fn members_beside_the_prompt_are_bounded_together() {
        let most = LIMIT.rest_bytes() as usize;
        let overhead = r#"{"messages":,"tools":"","input_ids":}"#.len();
        let messages = r#"[{"content":"some text"}]"#;
        let ids = "[1, 2]";
        for (excess, is_refused) in [(0, false), (1, true)] {
            let tools = "x".repeat(most - overhead + excess);
            let body = format!(r#"{{"messages":{messages},"tools":"{tools}","input_ids":{ids}}}"#);
            let expected = is_refused.then(|| ("", format!("{} of {most}", most + 1)));
            assert_eq!(find(Dialect::Chat, &body), expected);
        }
        let texts = json!({"prompt": vec!["x".repeat(40); 1 + most / 40]}).to_string();
        assert_eq!(
            find(Dialect::Completions, &texts),
            None,
            "many prompts are no excess"
        );
        let ids = json!({"prompt": vec![vec![1; 4]; 1 + most / 8]}).to_string();
        assert_eq!(
            find(Dialect::Completions, &ids),
            None,
            "many prompts are no excess"
        );
    }

    #[test]
    fn limits_of_workers_combine_number_by_number() {
        let limit = |tokens, chars| PromptLimit::of(Some(tokens), Some(chars)).unwrap();
        let small = limit(8, 64);
        let large = limit(9, 60);
        assert_eq!(small.or(large), limit(9, 64));
        assert_eq!(small.and(large), limit(8, 60));
        for (tokens, chars) in [
            (None, Some(1)),
            (Some(1), None),
            (Some(0), Some(1)),
            (Some(1), Some(0)),
        ] {
            assert_eq!(PromptLimit::of(tokens, chars), None);
        }
    }

    #[test]
    fn longest_body_holds_the_longest_request() {
        let most = LIMIT.body_bytes(Dialect::Chat) as usize;
        let messages = format!(
            r#"[{{"role":"user","content":"{}"}}]"#,
            "\\ud83d\\ude00".repeat(36)
        );
        let ids = "[4294967295, 4294967295, 4294967295, 4294967295]";
        let overhead = r#"{"messages":,"tools":"","input_ids":}"#.len();
        let tools = "x".repeat(LIMIT.rest_bytes() as usize - overhead);
        let body = format!(r#"{{"messages":{messages},"tools":"{tools}","input_ids":{ids}}}"#);
        assert_eq!(find(Dialect::Chat, &body), None);
        assert!(body.len() <= most, "{} of {most}", body.len());
        let long = PromptLimit::of(Some(1 << 20), Some(1 << 30)).unwrap();
        for (limit, api) in [(long, Dialect::Chat), (LIMIT, Dialect::Completions)] {
            assert_eq!(limit.body_bytes(api), MAX_ENGINE_BODY_BYTES);
        }
    }

    proptest! {
        #[test]
        fn characters_of_a_json_string_are_those_of_its_text(text in "(\\PC|[\\x00-\\x7f]|😀|é){0,40}", escapes in any::<u64>()) {
            let mut json = String::from("\"");
            for (at, character) in text.chars().enumerate() {
                if escapes >> (at % 64) & 1 == 1 {
                    let mut units = [0; 2];
                    for unit in character.encode_utf16(&mut units) {
                        let digits = if at % 2 == 0 { format!("{unit:04x}") } else { format!("{unit:04X}") };
                        json += &format!("\\u{digits}");
                    }
                } else {
                    json += serde_json::to_string(&character).unwrap().trim_matches('"');
                    if character == '"' { json.push('"'); }
                }
            }
            json.push('"');
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text.clone());
            prop_assert_eq!(chars_of(json.as_bytes()), Some(text.chars().count() as u64));
        }
    }
}
