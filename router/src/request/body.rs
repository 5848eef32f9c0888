//! Request bodies: read once for what routing needs, forwarded byte for byte with fields spliced in.
//!
//! ```text
//! client:  { "model": "m", "bootstrap_room": 7, "temperature": 1e0 , "weird": {…} }
//! worker:  { "model": "m",                      "temperature": 1e0 , "weird": {…} ,"bootstrap_room":91…}
//!          └── slice of the client's bytes ───────────────────────────────────────┘└── new bytes ───────┘
//! ```
//!
//! Unknown fields, number formats and whitespace survive, and the prompt is never copied: both legs of a pair share one
//! buffer. Invariant: what leaves is valid JSON if and only if what came in was.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use router_core::{Blocks, TextScope, namespace, token_blocks};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::RouteError;
use crate::request::media;
use crate::transport::request_body::Parts;

/// Most answers one request may ask for (prompts × n): the rooms of a request are one array.
const MAX_ITEMS: usize = 4096;

/// Longest beginning of a prompt that policies compare as text: a million tokens at the usual ratio. They compare it on the
/// event loop's thread, under the lock of their role [bytes].
const MAX_ROUTING_TEXT: usize = 4 << 20;

/// Members beside the prompt's text that change its KV, or say who may share it.
const SCOPE: [&str; 6] =
    ["model", "lora_path", "cache_salt", "extra_key", "tools", "chat_template_kwargs"];

/// The three endpoints that generate. They differ in where the prompt is and in the id they give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    Chat,
    Completions,
    Generate,
}

impl Api {
    pub fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
            Api::Generate => "/generate",
        }
    }

    /// Prefix of request ids the router makes up.
    pub fn id_prefix(self) -> &'static str {
        match self {
            Api::Chat => "chatcmpl-",
            Api::Completions => "cmpl-",
            Api::Generate => "gnt-",
        }
    }
}

/// Index of a body: what routing needs to know of it.
#[derive(Debug, Clone)]
pub struct Scan {
    pub stream: bool,
    /// `Some(len)`: the request is a batch, PD fields are arrays of this length. `None`: one item, scalars.
    pub batch: Option<usize>,
    /// Where the prompt lies in the body: JSON text of messages, prompt or token ids. Two requests with a common prompt
    /// prefix have a common prefix here, so it serves as routing text without being decoded.
    prompt: Option<Range<usize>>,
    /// Name of the member that holds it.
    pub prompt_param: &'static str,
    /// Where the prompt lies as token ids, if the client sent it as such: one list, or one per prompt.
    ids: Option<Range<usize>>,
    /// Namespace whose prompts may share a cache with this one, as our engines name it.
    pub namespace: String,
    /// Where the members named in `SCOPE` lie.
    scope: [Option<Range<usize>>; SCOPE.len()],
    /// The model asked for; `None`: any, and /generate, which has no such member.
    pub model: Option<String>,
    /// /generate with `return_logprob`: the prefill leg's input logprobs belong into the answer.
    pub wants_input_logprobs: bool,
    pub deadlines: Deadlines,
    /// Members the client sent under names that the router sets, each from the end of the member before (so with its comma).
    ours: Vec<(Ours, Range<usize>)>,
    /// Index of the last `}`.
    close: usize,
    /// Top-level members.
    count: usize,
}

/// Times a client gives, from the arrival of the request [ms].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// The first token is of use within this.
    pub ttft: Option<u64>,
    /// The whole answer is.
    pub whole: Option<u64>,
}

/// Groups of members that the router sets; when it does, a client's are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ours {
    Bootstrap,
    Rank,
    /// How much of an answer, and in which form: a vLLM prefill worker is asked for one token.
    Output,
    /// vLLM's counterpart of `Bootstrap`.
    KvParams,
    /// The client's deadlines: another attempt is told what is left of them.
    Deadlines,
    /// The beginning of an answer (failover.rs).
    Resume,
}

impl Ours {
    fn of(name: &str) -> Option<Ours> {
        match name {
            "bootstrap_host" | "bootstrap_port" | "bootstrap_room" => Some(Ours::Bootstrap),
            "data_parallel_rank"
            | "data_parallel_rank_decode"
            | "routed_dp_rank"
            | "disagg_prefill_dp_rank" => Some(Ours::Rank),
            "stream" | "stream_options" | "max_tokens" | "max_completion_tokens" | "min_tokens" => {
                Some(Ours::Output)
            }
            "kv_transfer_params" => Some(Ours::KvParams),
            "ttft_deadline_ms" | "deadline_ms" => Some(Ours::Deadlines),
            "baton_resume" => Some(Ours::Resume),
            _ => None,
        }
    }
}

impl Scan {
    /// Read the top level of `body`. Cost: one pass over the bytes, no copy of any value.
    pub fn of(body: &[u8], api: Api) -> Result<Scan, RouteError> {
        let mut members = Members::new(body);
        serde_json::Deserializer::from_slice(body)
            .deserialize_end(&mut members)
            .map_err(|err| RouteError::InvalidJson { detail: err.to_string() })?;
        members.finish(api)
    }

    /// The beginning of the prompt's JSON, at most `MAX_ROUTING_TEXT` of it, behind a character that stands for what else it
    /// belongs to. Cost: a copy, if there is such.
    pub fn routing_text<'a>(&self, body: &'a [u8]) -> Cow<'a, str> {
        let prompt = beginning(self.prompt(body), MAX_ROUTING_TEXT);
        match self.scope_of(body).marker() {
            Some(marker) => Cow::Owned(format!("{marker}{prompt}")),
            None => Cow::Borrowed(prompt),
        }
    }

    fn scope_of(&self, body: &[u8]) -> TextScope {
        let parts = SCOPE.iter().zip(&self.scope);
        parts.fold(TextScope::default(), |scope, (name, span)| match span {
            Some(span) => scope.with(name, &body[span.clone()]),
            None => scope,
        })
    }

    /// True if the client sent a member of this group.
    pub fn has(&self, group: Ours) -> bool {
        self.ours.iter().any(|(its, _)| *its == group)
    }

    /// The prompt's JSON; empty without one.
    pub fn prompt<'a>(&self, body: &'a [u8]) -> &'a [u8] {
        let prompt = self.prompt.clone().map(|span| &body[span]);
        prompt.unwrap_or_default()
    }

    /// JSON of the token ids that the client sent: one list, or one for each prompt.
    pub fn ids_json<'a>(&self, body: &'a [u8]) -> Option<&'a [u8]> {
        self.ids.clone().map(|span| &body[span])
    }

    /// Bytes of the prompt's JSON.
    pub fn prompt_len(&self) -> usize {
        self.prompt.as_ref().map_or(0, |span| span.len())
    }

    /// The client's own token ids, those of several prompts one behind the other.
    pub fn ids(&self, body: &[u8]) -> Option<Vec<u32>> {
        let list = self.ids_json(body)?;
        let one = serde_json::from_slice(list).ok();
        one.or_else(|| Some(serde_json::from_slice::<Vec<Vec<u32>>>(list).ok()?.concat()))
    }

    /// Hashes of the prompt's text, in which images and the like have a constant size (media.rs). Cost: one pass over it.
    pub fn text_blocks(&self, body: &[u8]) -> Blocks {
        let prompt = self.prompt(body);
        let scope = self.scope_of(body);
        match media::condensed(prompt) {
            Some(text) => Blocks::of_text_in(scope, &text, None).with_media(),
            None => Blocks::of_text_in(scope, prompt, None),
        }
    }

    /// Hashes of its token ids.
    pub fn token_blocks(&self, ids: &[u32], block_size: usize) -> Blocks {
        token_blocks(ids, block_size, &self.namespace)
    }

    /// The client's bytes without its own fields of the groups in `replaced`, then `added` (`,"name":value`; only to a
    /// body with members that stay) and `fields` (`"name":value,…`, no braces), then `}`.
    pub fn splice(
        &self,
        body: &Bytes,
        replaced: &[Ours],
        added: Option<&Bytes>,
        fields: &str,
    ) -> Parts {
        let out = self.ours.iter().filter(|(group, _)| replaced.contains(group));
        let out: Vec<_> = out.map(|(_, span)| span.clone()).collect();
        let has_members = self.count > out.len();
        let mut parts = Parts::default();
        let mut from = 0;
        for span in spans_with_commas(body, out) {
            parts.push(body.slice(from..span.start));
            from = span.end;
        }
        parts.push(body.slice(from..self.close));
        parts.push(added.cloned().unwrap_or_default());
        let mut tail = String::with_capacity(fields.len() + 2);
        if has_members && !fields.is_empty() {
            tail.push(',');
        }
        tail.push_str(fields);
        tail.push('}');
        parts.push(Bytes::from(tail));
        parts
    }
}

trait DeserializeEnd<'a> {
    /// Visit the object, then insist that nothing but whitespace follows.
    fn deserialize_end(self, members: &mut Members<'a>) -> serde_json::Result<()>;
}

impl<'a> DeserializeEnd<'a> for serde_json::Deserializer<serde_json::de::SliceRead<'a>> {
    fn deserialize_end(mut self, members: &mut Members<'a>) -> serde_json::Result<()> {
        self.deserialize_map(members)?;
        self.end()
    }
}

/// Visitor over the top-level members. Of duplicate names the last one counts, as in most JSON readers.
struct Members<'a> {
    body: &'a [u8],
    count: usize,
    ours: Vec<(Ours, Range<usize>)>,
    /// End of the member before the present one, or just behind `{`.
    last_end: usize,
    stream: Option<&'a RawValue>,
    n: Option<&'a RawValue>,
    messages: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
    text: Option<&'a RawValue>,
    input_ids: Option<&'a RawValue>,
    sampling_params: Option<&'a RawValue>,
    return_logprob: Option<&'a RawValue>,
    model: Option<&'a RawValue>,
    /// Deadlines that are numbers; the engine refuses others.
    deadlines: Deadlines,
    scope: [Option<Range<usize>>; SCOPE.len()],
    cache_salt: Option<&'a RawValue>,
    extra_key: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> Members<'a> {
    fn new(body: &'a [u8]) -> Self {
        Self {
            body,
            count: 0,
            ours: Vec::new(),
            last_end: body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1),
            stream: None,
            n: None,
            messages: None,
            prompt: None,
            text: None,
            input_ids: None,
            sampling_params: None,
            return_logprob: None,
            model: None,
            deadlines: Deadlines::default(),
            scope: Default::default(),
            cache_salt: None,
            extra_key: None,
        }
    }

    /// Where `value` lies in the body.
    fn span(&self, value: &RawValue) -> Range<usize> {
        let start = value.get().as_ptr() as usize - self.body.as_ptr() as usize;
        start..start + value.get().len()
    }

    fn member(&mut self, name: &str, value: &'a RawValue) {
        let end = self.span(value).end;
        if let Some(group) = Ours::of(name) {
            self.ours.push((group, self.last_end..end));
        }
        self.last_end = end;
        self.count += 1;
        if let Some(at) = SCOPE.iter().position(|scope| *scope == name) {
            self.scope[at] = (value.get() != "null").then(|| self.span(value));
        }
        match name {
            "stream" => self.stream = Some(value),
            "model" => self.model = Some(value),
            "n" => self.n = Some(value),
            "messages" => self.messages = Some(value),
            "prompt" => self.prompt = Some(value),
            "text" => self.text = Some(value),
            "input_ids" => self.input_ids = Some(value),
            "sampling_params" => self.sampling_params = Some(value),
            "return_logprob" => self.return_logprob = Some(value),
            "ttft_deadline_ms" => self.deadlines.ttft = ms_of(value),
            "deadline_ms" => self.deadlines.whole = ms_of(value),
            "cache_salt" => self.cache_salt = Some(value),
            "extra_key" => self.extra_key = Some(value),
            _ => {}
        }
    }

    fn finish(self, api: Api) -> Result<Scan, RouteError> {
        let close = self.body.iter().rposition(|b| *b == b'}').ok_or_else(|| {
            RouteError::Internal { detail: "a JSON object without a closing brace".into() }
        })?;
        let prompt = match api {
            Api::Chat => self.messages,
            Api::Completions => self.prompt,
            Api::Generate => self.text.or(self.input_ids),
        };
        let prompt_param = match api {
            Api::Chat => "messages",
            Api::Completions => "prompt",
            Api::Generate if self.text.is_some() => "text",
            Api::Generate => "input_ids",
        };
        let n = match api {
            Api::Generate => self.sampling_params.map_or(Ok(1), n_of_sampling_params)?,
            _ => self.n.map_or(Ok(1), n_of)?,
        };
        let prompts = match api {
            Api::Chat => None,
            _ => prompt.and_then(batch_len),
        };
        let items = prompts.unwrap_or(1).saturating_mul(n);
        if items > MAX_ITEMS {
            return Err(RouteError::InvalidValue {
                param: "n",
                problem: format!("asks for {items} answers, at most {MAX_ITEMS} are possible"),
            });
        }
        // Beside a text, ids are the same prompt tokenized (docs/protocol.md).
        let ids = self.input_ids.or(prompt.filter(|_| api != Api::Chat));
        let ids = ids.filter(|value| holds_ids(value.get()));
        Ok(Scan {
            ids: ids.map(|value| self.span(value)),
            namespace: namespace(&text_of(self.cache_salt), &text_of(self.extra_key)),
            stream: self.stream.is_some_and(|v| v.get() == "true"),
            batch: (prompts.is_some() || n > 1).then_some(items),
            prompt: prompt.map(|value| self.span(value)),
            prompt_param,
            wants_input_logprobs: api == Api::Generate
                && self.return_logprob.is_some_and(|v| v.get() == "true"),
            deadlines: self.deadlines,
            scope: self.scope,
            model: self
                .model
                .filter(|_| api != Api::Generate)
                .and_then(|value| serde_json::from_str(value.get()).ok()),
            ours: self.ours,
            close,
            count: self.count,
        })
    }
}

/// At most `most` bytes of a text, cut between two characters.
fn beginning(text: &[u8], most: usize) -> &str {
    let cut = &text[..text.len().min(most)];
    let whole = match std::str::from_utf8(cut) {
        Ok(_) => cut.len(),
        Err(err) => err.valid_up_to(),
    };
    std::str::from_utf8(&cut[..whole]).unwrap_or_default()
}

/// Spans run from the end of the member before (so they begin with its comma). The members at the very beginning have
/// no comma before them: the one behind goes instead.
fn spans_with_commas(body: &[u8], mut spans: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut open_end = body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1);
    for span in &mut spans {
        if span.start != open_end {
            break; // a member that stays comes before, and so does a comma
        }
        let comma = body[span.end..]
            .iter()
            .position(|b| !b.is_ascii_whitespace())
            .map(|offset| span.end + offset)
            .filter(|at| body[*at] == b',');
        open_end = span.end;
        if let Some(at) = comma {
            // The next span, if it follows directly, begins at this member's end: let it begin behind the comma.
            span.end = at + 1;
        }
    }
    // Spans that now overlap by a comma are joined.
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => joined.push(span),
        }
    }
    joined
}

impl<'a> Visitor<'a> for &mut Members<'a> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((Key(name), value)) = map.next_entry::<Key<'a>, &'a RawValue>()? {
            self.member(&name, value);
        }
        Ok(())
    }
}

/// `n` of an OpenAI request; null is 1. Anything odd is left to the engine's validation.
fn n_of(value: &RawValue) -> Result<usize, RouteError> {
    let Ok(n) = serde_json::from_str::<Option<u64>>(value.get()) else {
        return Ok(1);
    };
    Ok(usize::try_from(n.unwrap_or(1)).unwrap_or(usize::MAX).max(1))
}

#[derive(Deserialize)]
struct SamplingParams<'a> {
    #[serde(borrow)]
    n: Option<&'a RawValue>,
}

/// `n` inside sampling_params; a list of them (one per prompt) counts as n = 1.
fn n_of_sampling_params(value: &RawValue) -> Result<usize, RouteError> {
    match serde_json::from_str::<SamplingParams<'_>>(value.get()) {
        Ok(SamplingParams { n: Some(n) }) => n_of(n),
        _ => Ok(1),
    }
}

fn ms_of(value: &RawValue) -> Option<u64> {
    let given = value.get().parse::<f64>().ok();
    given.filter(|ms| *ms >= 0.0).map(|ms| ms as u64)
}

/// True for a list of numbers, or of lists.
fn holds_ids(value: &str) -> bool {
    let inside = value.strip_prefix('[').map(str::trim_start);
    inside.is_some_and(|inside| inside.starts_with(|c: char| c == '[' || c.is_ascii_digit()))
}

/// A string's text; anything else is left to the engine's validation.
fn text_of(value: Option<&RawValue>) -> String {
    let text = value.and_then(|value| serde_json::from_str(value.get()).ok());
    text.unwrap_or_default()
}

/// How many prompts: `Some` for a list of strings or of token lists, `None` for one string or one token list.
fn batch_len(prompt: &RawValue) -> Option<usize> {
    let inside = prompt.get().strip_prefix('[')?.trim_start();
    if !inside.starts_with(['"', '[']) {
        return None;
    }
    serde_json::from_str::<Vec<IgnoredAny>>(prompt.get()).ok().map(|items| items.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn spliced(body: &str, fields: &str) -> String {
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let scan = Scan::of(&bytes, Api::Chat).unwrap();
        let parts = scan.splice(&bytes, &[Ours::Bootstrap, Ours::Rank], None, fields);
        let len = parts.len();
        let out: Vec<u8> = parts.into_pieces().concat();
        assert_eq!(out.len() as u64, len);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn splice_keeps_every_byte_and_adds_before_the_brace() {
        assert_eq!(spliced("{}", r#""a":1"#), r#"{"a":1}"#);
        assert_eq!(spliced(" {\n} \n", r#""a":1"#), " {\n\"a\":1}");
        assert_eq!(
            spliced(r#"{"t":1e0 ,"x":{"}":[1.50]} } "#, r#""a":1"#),
            r#"{"t":1e0 ,"x":{"}":[1.50]} ,"a":1}"#
        );
        assert_eq!(spliced(r#"{"t":1}"#, ""), r#"{"t":1}"#);
    }

    #[test]
    fn splice_leaves_out_client_fields_wherever_they_stand() {
        let ours = [
            r#""bootstrap_room" : 5"#,
            r#""bootstrap_host":"h""#,
            r#""bootstrap_\u0070ort":[1,{}]"#,
        ];
        // every pattern of kept (k) and ours (o) members up to length 4
        for len in 1..=4usize {
            for mask in 0..(1u32 << len) {
                for (sep, pad) in [(",", ""), (" , ", " ")] {
                    let members: Vec<String> = (0..len)
                        .map(|i| {
                            if mask >> i & 1 == 1 {
                                ours[i % ours.len()].to_owned()
                            } else {
                                format!("\"k{i}\":{i}")
                            }
                        })
                        .collect();
                    let body = format!("{{{pad}{}{pad}}}", members.join(sep));
                    let out = spliced(&body, r#""bootstrap_room":9"#);
                    let value: serde_json::Value = serde_json::from_str(&out)
                        .unwrap_or_else(|err| panic!("{body} became {out}: {err}"));
                    let kept = len - mask.count_ones() as usize;
                    assert_eq!(value.as_object().unwrap().len(), kept + 1, "{body} became {out}");
                    assert_eq!(value["bootstrap_room"], 9);
                    assert_eq!(out.matches("bootstrap").count(), 1, "{body} became {out}");
                }
            }
        }
    }

    #[test]
    fn token_ids_are_read_where_the_client_sent_them() {
        let read = |api, body: &str| Scan::of(body.as_bytes(), api).unwrap().ids(body.as_bytes());
        for (prompt, ids) in [
            ("[1,22 , 333]", Some(vec![1, 22, 333])),
            ("[ [1,2],\n[3] ]", Some(vec![1, 2, 3])),
            ("\"1,2\"", None),
            ("[\"1,2\",\"3\"]", None),
            ("[1,-2]", None),
            ("[1.0]", None),
            ("[]", None),
        ] {
            assert_eq!(
                read(Api::Completions, &format!("{{\"prompt\":{prompt}}}")),
                ids,
                "{prompt}"
            );
            assert_eq!(
                read(Api::Generate, &format!("{{\"input_ids\":{prompt}}}")),
                ids,
                "{prompt}"
            );
            // Beside a text they are the same prompt.
            assert_eq!(
                read(Api::Generate, &format!("{{\"text\":\"a\",\"input_ids\":{prompt}}}")),
                ids
            );
            assert_eq!(
                read(Api::Chat, &format!("{{\"messages\":[],\"input_ids\":{prompt}}}")),
                ids
            );
        }
        assert_eq!(read(Api::Chat, r#"{"messages":[1,2]}"#), None);
        let scan = Scan::of(b"{}", Api::Chat).unwrap();
        assert_eq!(scan.text_blocks(b"{}").prompt().units, 0);
    }

    #[test]
    fn prompts_with_another_salt_share_no_block() {
        let blocks = |body: &str| {
            let scan = Scan::of(body.as_bytes(), Api::Chat).unwrap();
            scan.token_blocks(&[1, 2, 3, 4], 2)
        };
        let bare = blocks("{}");
        assert_eq!(bare, blocks(r#"{"cache_salt":null,"extra_key":7}"#));
        let salted = blocks(r#"{"cache_salt":"a"}"#);
        assert_eq!(salted, blocks(r#"{"cache_salt":"\u0061"}"#));
        for other in [&bare, &blocks(r#"{"extra_key":"a"}"#), &blocks(r#"{"cache_salt":"b"}"#)] {
            assert_ne!(salted.prompt().hashes[0], other.prompt().hashes[0]);
        }
    }

    #[test]
    fn what_is_added_stands_before_the_fields_and_once() {
        let body = Bytes::from_static(br#"{"a":1, "routed_dp_rank":1}"#);
        let scan = Scan::of(&body, Api::Chat).unwrap();
        let added = Bytes::from_static(br#","input_ids":[1,2]"#);
        for (fields, expected) in [
            ("", r#"{"a":1,"input_ids":[1,2]}"#),
            (r#""x":0"#, r#"{"a":1,"input_ids":[1,2],"x":0}"#),
        ] {
            let parts = scan.splice(&body, &[Ours::Rank], Some(&added), fields);
            assert_eq!(parts.len(), expected.len() as u64);
            assert_eq!(parts.into_pieces().concat(), expected.as_bytes());
        }
    }

    #[test]
    fn only_the_groups_that_are_replaced_go() {
        let body = Bytes::from_static(br#"{"routed_dp_rank":1,"bootstrap_room":2,"a":3}"#);
        let scan = Scan::of(&body, Api::Chat).unwrap();
        let spliced = |replaced: &[Ours]| {
            let parts = scan.splice(&body, replaced, None, r#""x":0"#);
            String::from_utf8(parts.into_pieces().concat()).unwrap()
        };
        assert_eq!(spliced(&[Ours::Bootstrap]), r#"{"routed_dp_rank":1,"a":3,"x":0}"#);
        assert_eq!(spliced(&[Ours::Rank]), r#"{"bootstrap_room":2,"a":3,"x":0}"#);
        assert_eq!(spliced(&[Ours::Rank, Ours::Bootstrap]), r#"{"a":3,"x":0}"#);
    }

    #[test]
    fn duplicate_fields_are_read_last_and_removed_all() {
        let body = r#"{"stream":true,"bootstrap_room":1,"stream":false,"bootstrap_room":2}"#;
        assert!(!Scan::of(body.as_bytes(), Api::Chat).unwrap().stream);
        assert_eq!(
            spliced(body, r#""bootstrap_room":3"#),
            r#"{"stream":true,"stream":false,"bootstrap_room":3}"#
        );
    }

    #[test]
    fn batches_are_prompts_times_n() {
        let batch = |api, body: &str| Scan::of(body.as_bytes(), api).unwrap().batch;
        assert_eq!(batch(Api::Chat, r#"{"messages":[{},{}]}"#), None);
        assert_eq!(batch(Api::Chat, r#"{"n":3}"#), Some(3));
        assert_eq!(batch(Api::Chat, r#"{"n":null}"#), None);
        assert_eq!(batch(Api::Completions, r#"{"prompt":"a"}"#), None);
        assert_eq!(batch(Api::Completions, r#"{"prompt":[1,2,3]}"#), None);
        assert_eq!(batch(Api::Completions, r#"{"prompt":["a"]}"#), Some(1));
        assert_eq!(batch(Api::Completions, r#"{"prompt":[ [1],[2]],"n":2}"#), Some(4));
        assert_eq!(batch(Api::Generate, r#"{"text":["a","b"]}"#), Some(2));
        assert_eq!(batch(Api::Generate, r#"{"input_ids":[1,2]}"#), None);
        assert_eq!(batch(Api::Generate, r#"{"text":"a","sampling_params":{"n":2}}"#), Some(2));
        let err = Scan::of(br#"{"n":99999999999}"#, Api::Chat).unwrap_err();
        assert_eq!(err.code(), "invalid_value");
    }

    #[test]
    fn routing_text_is_the_raw_prompt() {
        let body = r#"{"messages":[{"role":"user","content":"hé\n"}],"stream":true}"#;
        let scan = Scan::of(body.as_bytes(), Api::Chat).unwrap();
        assert!(scan.stream);
        assert_eq!(scan.routing_text(body.as_bytes()), r#"[{"role":"user","content":"hé\n"}]"#);
    }

    #[test]
    fn routing_text_of_a_long_prompt_is_its_beginning_in_whole_characters() {
        let body = format!("{{\"prompt\":\"{}\"}}", "é".repeat(MAX_ROUTING_TEXT));
        let scan = Scan::of(body.as_bytes(), Api::Completions).unwrap();
        let text = scan.routing_text(body.as_bytes());
        // The quotation mark, then characters of two bytes.
        assert_eq!(text.len(), MAX_ROUTING_TEXT - 1);
        assert!(text.starts_with("\"é") && text.ends_with('é'));
    }

    #[test]
    fn what_is_not_a_json_object_is_refused() {
        for body in
            ["", " ", "[]", "1", "{", "{} x", r#"{"a":tru}"#, r#"{"a":1,}"#, "{\"a\":\"\u{1}\"}"]
        {
            let err = Scan::of(body.as_bytes(), Api::Chat).unwrap_err();
            assert_eq!(err.code(), "invalid_json", "{body:?}");
        }
        assert!(Scan::of(b"{\"a\":\"\xff\"}", Api::Chat).is_err());
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(300), "]".repeat(300));
        assert!(Scan::of(deep.as_bytes(), Api::Chat).is_ok());
    }

    #[test]
    fn members_that_change_the_kv_keep_equal_texts_apart() {
        let first = |members: &str| {
            let text = "x".repeat(600);
            let body = format!("{{\"messages\":[{{\"content\":\"{text}\"}}]{members}}}");
            let scan = Scan::of(body.as_bytes(), Api::Chat).unwrap();
            let hash = scan.text_blocks(body.as_bytes()).prompt().hashes[0];
            (hash, scan.routing_text(body.as_bytes()).chars().next())
        };
        let plain = first("");
        assert_eq!(plain.1, Some('['));
        let mut all = vec![plain];
        for members in [
            r#","model":"a""#,
            r#","model":"b""#,
            r#","cache_salt":"a""#,
            r#","extra_key":"a""#,
            r#","tools":[{"type":"function"}]"#,
            r#","chat_template_kwargs":{"enable_thinking":false}"#,
            r#","model":"a","lora_path":"b""#,
        ] {
            let (hash, marker) = first(members);
            let is_new = all.iter().all(|known| known.0 != hash && known.1 != marker);
            assert!(is_new, "{members}");
            all.push((hash, marker));
        }
        assert_eq!(first(r#","temperature":1,"cache_salt":null"#), plain);
        assert_eq!(
            first(r#","cache_salt":"b","model":"a""#),
            first(r#","model":"a","cache_salt":"b""#)
        );
    }
}
