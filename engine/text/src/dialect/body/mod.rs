//! Request bodies: read once for what routing needs, forwarded byte for byte with fields spliced
//! in.
//!
//! ```text
//! client:  { "model": "m", "bootstrap_room": 7, "temperature": 1e0 , "weird": {…} }
//! worker:  { "model": "m",                      "temperature": 1e0 , "weird": {…} ,"bootstrap_room":91…}
//!          └── slice of the client's bytes ───────────────────────────────────────┘└── new bytes ───────┘
//! ```
//!
//! Unknown fields, number formats and whitespace survive, and the prompt is never copied: both legs
//! of a pair share one buffer. Invariant: what leaves is valid JSON if and only if what came in
//! was.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;
use router_core::{PromptBlocks, TextScope, cache_namespace, token_blocks};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::RouteError;
use crate::request::media;
use crate::transport::request_body::BodySegments;

/// Most answers one request may ask for (prompts × n): the rooms of a request are one array.
const MAX_ITEMS: usize = 4096;

/// Longest beginning of a prompt that policies compare as text: a million tokens at the usual
/// ratio. They compare it on the event loop's thread, under the lock of their role [bytes].
const MAX_ROUTING_TEXT: usize = 4 << 20;

/// Members beside the prompt's text that change its KV, or say who may share it.
const SCOPE: [&str; 6] = [
    "model",
    "lora_path",
    "cache_salt",
    "extra_key",
    "tools",
    "chat_template_kwargs",
];

/// The three endpoints that generate. They differ in where the prompt is and in the id they give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ApiKind {
    Chat,
    Completions,
    Generate,
}

impl ApiKind {
    /// API of a path that takes generation requests.
    pub fn of_path(path: &str) -> Option<Self> {
        [Self::Chat, Self::Completions, Self::Generate]
            .into_iter()
            .find(|api| api.path() == path)
    }

    pub fn path(self) -> &'static str {
        match self {
            ApiKind::Chat => "/v1/chat/completions",
            ApiKind::Completions => "/v1/completions",
            ApiKind::Generate => "/generate",
        }
    }

    /// Prefix of request ids the router makes up.
    pub fn id_prefix(self) -> &'static str {
        match self {
            ApiKind::Chat => "chatcmpl-",
            ApiKind::Completions => "cmpl-",
            ApiKind::Generate => "gnt-",
        }
    }

    /// Returns `id` without the prefix of an API: engines answer `x-request-id: ID` with the body's
    /// `"id": "chatcmpl-ID"`, and both name the same request.
    pub fn without_prefix(id: &str) -> &str {
        [Self::Chat, Self::Completions, Self::Generate]
            .into_iter()
            .find_map(|api| id.strip_prefix(api.id_prefix()))
            .unwrap_or(id)
    }
}

/// Index of a body: what routing needs to know of it.
#[derive(Debug, Clone)]
pub struct BodyIndex {
    pub api: ApiKind,
    pub stream: bool,
    /// `Some(len)`: the request is a batch, PD fields are arrays of this length. `None`: one item,
    /// scalars.
    pub batch: Option<usize>,
    /// Where the prompt lies in the body: JSON text of messages, prompt or token ids. Two requests
    /// with a common prompt prefix have a common prefix here, so it serves as routing text without
    /// being decoded.
    prompt: Option<Range<usize>>,
    /// Name of the member that holds it.
    pub prompt_param: &'static str,
    /// Where the prompt lies as token ids, if the client sent it as such: one list, or one per
    /// prompt.
    ids: Option<Range<usize>>,
    /// Namespace whose prompts may share a cache with this one, as our engines name it.
    pub namespace: String,
    /// Where the members named in `SCOPE` lie.
    scope: [Option<Range<usize>>; SCOPE.len()],
    /// The model asked for; `None`: any, and /generate, which has no such member.
    pub model: Option<String>,
    /// Tenant that the body names.
    pub tenant: Option<String>,
    /// /generate with `return_logprob`: the prefill leg's input logprobs belong into the answer.
    pub wants_input_logprobs: bool,
    pub deadlines: RequestDeadlines,
    /// Members the client sent under names that the router sets, each from the end of the member
    /// before (so with its comma).
    ours: Vec<(ManagedField, Range<usize>)>,
    /// Index of the last `}`.
    close: usize,
    /// Top-level members.
    count: usize,
}

/// Times a client gives, from the arrival of the request [ms].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestDeadlines {
    /// The first token is of use within this.
    pub ttft: Option<u64>,
    /// The whole answer is.
    pub whole: Option<u64>,
}

/// Groups of members that the router sets; when it does, a client's are left out. Parsed from the
/// name of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString)]
pub enum ManagedField {
    #[strum(serialize = "bootstrap_host", serialize = "bootstrap_port")]
    #[strum(serialize = "bootstrap_room")]
    Bootstrap,
    #[strum(
        serialize = "data_parallel_rank",
        serialize = "data_parallel_rank_decode"
    )]
    #[strum(serialize = "routed_dp_rank", serialize = "disagg_prefill_dp_rank")]
    Rank,
    /// How much of an answer, and in which form: a vLLM prefill worker is asked for one token.
    #[strum(
        serialize = "stream",
        serialize = "stream_options",
        serialize = "max_tokens"
    )]
    #[strum(serialize = "max_completion_tokens", serialize = "min_tokens")]
    Output,
    /// vLLM's counterpart of `Bootstrap`.
    #[strum(serialize = "kv_transfer_params")]
    KvParams,
    /// The client's deadlines: another attempt is sent what is left of them.
    #[strum(serialize = "ttft_deadline_ms", serialize = "deadline_ms")]
    Deadlines,
    /// The beginning of an answer (failover.rs).
    #[strum(serialize = "baton_resume")]
    Resume,
}

impl BodyIndex {
    /// Read the top level of `body`. Cost: one pass over the bytes, no copy of any value.
    pub fn of(body: &[u8], api: ApiKind) -> Result<BodyIndex, RouteError> {
        let last_end = body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1);
        let mut members = TopLevelFields {
            body,
            last_end,
            ..TopLevelFields::default()
        };
        let mut json = serde_json::Deserializer::from_slice(body);
        // Nothing but whitespace may follow the object.
        let read = json.deserialize_map(&mut members).and_then(|()| json.end());
        read.map_err(|err| RouteError::InvalidJson {
            detail: err.to_string(),
        })?;
        members.finish(api)
    }

    /// The beginning of the prompt's JSON, at most `MAX_ROUTING_TEXT` of it, behind a character
    /// that stands for what else it belongs to. Cost: a copy, if there is such.
    pub fn routing_text<'a>(&self, body: &'a [u8]) -> Cow<'a, str> {
        let prompt = beginning(self.prompt(body), MAX_ROUTING_TEXT);
        match self.scope_of(body).marker() {
            Some(marker) => Cow::Owned(format!("{marker}{prompt}")),
            None => Cow::Borrowed(prompt),
        }
    }

    fn scope_of(&self, body: &[u8]) -> TextScope {
        let parts = SCOPE.iter().zip(&self.scope);
        parts.fold(TextScope::NONE, |scope, (name, span)| match span {
            Some(span) => scope.with_part(name, &body[span.clone()]),
            None => scope,
        })
    }

    /// True if the client sent a member of this group.
    pub fn has(&self, group: ManagedField) -> bool {
        self.ours.iter().any(|(its, _)| *its == group)
    }

    /// The prompt's JSON; empty without one.
    pub fn prompt<'a>(&self, body: &'a [u8]) -> &'a [u8] {
        self.prompt
            .clone()
            .map(|span| &body[span])
            .unwrap_or_default()
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

    /// Hashes of the prompt's text, in which images and the like have a constant size (media.rs).
    /// Cost: one pass over it.
    pub fn text_blocks(&self, body: &[u8]) -> PromptBlocks {
        let prompt = self.prompt(body);
        let scope = self.scope_of(body);
        match media::condensed(prompt) {
            Some(text) => PromptBlocks::of_text_in(scope, &text, None).with_media(),
            None => PromptBlocks::of_text_in(scope, prompt, None),
        }
    }

    /// Hashes of its token ids.
    pub fn token_blocks(&self, ids: &[u32], block_size: usize) -> PromptBlocks {
        token_blocks(ids, block_size, &self.namespace)
    }

    /// The client's bytes without its own fields of the groups in `replaced`, then `added`
    /// (`,"name":value`; only to a body with members that stay) and `fields` (`"name":value,…`, no
    /// braces), then `}`.
    pub fn splice(
        &self,
        body: &Bytes,
        replaced: &[ManagedField],
        added: Option<&Bytes>,
        fields: &str,
    ) -> BodySegments {
        let out = self
            .ours
            .iter()
            .filter(|(group, _)| replaced.contains(group));
        let out: Vec<_> = out.map(|(_, span)| span.clone()).collect();
        let has_members = self.count > out.len();
        let mut parts = BodySegments::default();
        let mut from = 0;
        for span in spans_with_commas(body, out) {
            parts.push(body.slice(from..span.start.max(from)));
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

/// Visitor over the top-level members. Of duplicate names the last one counts, as in most JSON
/// readers.
#[derive(Default)]
struct TopLevelFields<'a> {
    body: &'a [u8],
    count: usize,
    ours: Vec<(ManagedField, Range<usize>)>,
    /// End of the member before the present one, or just behind `{`.
    last_end: usize,
    stream: bool,
    n: Option<&'a RawValue>,
    messages: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
    text: Option<&'a RawValue>,
    input_ids: Option<&'a RawValue>,
    sampling_params: Option<&'a RawValue>,
    tenant: Option<&'a RawValue>,
    return_logprob: bool,
    /// Deadlines that are numbers; the engine refuses others.
    deadlines: RequestDeadlines,
    scope: [Option<Range<usize>>; SCOPE.len()],
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> TopLevelFields<'a> {
    /// Where `value` lies in the body.
    fn span(&self, value: &RawValue) -> Range<usize> {
        let start = value.get().as_ptr() as usize - self.body.as_ptr() as usize;
        start..start + value.get().len()
    }

    fn member(&mut self, name: &str, value: &'a RawValue) {
        let end = self.span(value).end;
        if let Ok(group) = name.parse() {
            self.ours.push((group, self.last_end..end));
        }
        self.last_end = end;
        self.count += 1;
        if let Some(at) = SCOPE.iter().position(|scope| *scope == name) {
            self.scope[at] = (value.get() != "null").then(|| self.span(value));
        }
        match name {
            "stream" => self.stream = value.get() == "true",
            "n" => self.n = Some(value),
            "messages" => self.messages = Some(value),
            "prompt" => self.prompt = Some(value),
            "text" => self.text = Some(value),
            "input_ids" => self.input_ids = Some(value),
            "sampling_params" => self.sampling_params = Some(value),
            "tenant" => self.tenant = Some(value),
            "return_logprob" => self.return_logprob = value.get() == "true",
            "ttft_deadline_ms" => self.deadlines.ttft = ms_of(value),
            "deadline_ms" => self.deadlines.whole = ms_of(value),
            _ => {}
        }
    }

    fn finish(self, api: ApiKind) -> Result<BodyIndex, RouteError> {
        let close =
            self.body
                .iter()
                .rposition(|b| *b == b'}')
                .ok_or_else(|| RouteError::Internal {
                    detail: "a JSON object without a closing brace".into(),
                })?;
        let (prompt, prompt_param) = match api {
            ApiKind::Chat => (self.messages, "messages"),
            ApiKind::Completions => (self.prompt, "prompt"),
            ApiKind::Generate if self.text.is_some() => (self.text, "text"),
            ApiKind::Generate => (self.input_ids, "input_ids"),
        };
        let n = match api {
            ApiKind::Generate => self.sampling_params.and_then(n_of_sampling_params),
            _ => self.n,
        };
        let n = n.map_or(1, n_of);
        let prompts = prompt.filter(|_| api != ApiKind::Chat).and_then(batch_len);
        let items = prompts.unwrap_or(1).saturating_mul(n);
        if items > MAX_ITEMS {
            let problem = format!("asks for {items} answers, at most {MAX_ITEMS} are possible");
            return Err(RouteError::InvalidValue {
                param: "n",
                problem,
            });
        }
        // Beside a text, ids are the same prompt tokenized (docs/protocol.md).
        let ids = self.input_ids.or(prompt.filter(|_| api != ApiKind::Chat));
        let ids = ids.filter(|value| holds_ids(value.get()));
        // In the order of `SCOPE`. What is no string is left to the engine's validation.
        let [model, _, cache_salt, extra_key, ..] = &self.scope;
        let text = |span: &Option<Range<usize>>| -> Option<String> {
            serde_json::from_slice(&self.body[span.clone()?]).ok()
        };
        let model = if api == ApiKind::Generate {
            None
        } else {
            text(model)
        };
        let salt = text(cache_salt);
        let key = text(extra_key);
        Ok(BodyIndex {
            api,
            ids: ids.map(|value| self.span(value)),
            namespace: cache_namespace(&salt.unwrap_or_default(), &key.unwrap_or_default()),
            stream: self.stream,
            batch: (prompts.is_some() || n > 1).then_some(items),
            prompt: prompt.map(|value| self.span(value)),
            prompt_param,
            wants_input_logprobs: api == ApiKind::Generate && self.return_logprob,
            deadlines: self.deadlines,
            scope: self.scope,
            model,
            tenant: self
                .tenant
                .and_then(|name| serde_json::from_str(name.get()).ok()),
            ours: self.ours,
            close,
            count: self.count,
        })
    }
}

/// At most `most` bytes of a text, cut between two characters.
fn beginning(text: &[u8], most: usize) -> &str {
    let cut = &text[..text.len().min(most)];
    match std::str::from_utf8(cut) {
        Ok(text) => text,
        Err(err) => std::str::from_utf8(&cut[..err.valid_up_to()]).unwrap_or_default(),
    }
}

/// Spans run from the end of the member before (so they begin with its comma). The members at the
/// very beginning have no comma before them: the one behind goes instead, so a span may overlap the
/// next by it.
fn spans_with_commas(body: &[u8], mut spans: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut open_end = body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1);
    for span in &mut spans {
        if span.start != open_end {
            break; // a member that stays comes before, and so does a comma
        }
        open_end = span.end;
        let behind = body[span.end..].trim_ascii_start();
        if behind.starts_with(b",") {
            span.end = body.len() - behind.len() + 1;
        }
    }
    spans
}

impl<'a> Visitor<'a> for &mut TopLevelFields<'a> {
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
fn n_of(value: &RawValue) -> usize {
    let n = serde_json::from_str::<Option<u64>>(value.get())
        .ok()
        .flatten()
        .unwrap_or(1);
    usize::try_from(n).unwrap_or(usize::MAX).max(1)
}

#[derive(Deserialize)]
struct SamplingParams<'a> {
    #[serde(borrow)]
    n: Option<&'a RawValue>,
}

/// `n` inside sampling_params; a list of them (one per prompt) has none.
fn n_of_sampling_params(value: &RawValue) -> Option<&RawValue> {
    serde_json::from_str::<SamplingParams<'_>>(value.get())
        .ok()?
        .n
}

fn ms_of(value: &RawValue) -> Option<u64> {
    value
        .get()
        .parse::<f64>()
        .ok()
        .filter(|ms| *ms >= 0.0)
        .map(|ms| ms as u64)
}

/// True for a list of numbers, or of lists.
fn holds_ids(value: &str) -> bool {
    let inside = value.strip_prefix('[').map(str::trim_start);
    inside.is_some_and(|inside| inside.starts_with(|c: char| c == '[' || c.is_ascii_digit()))
}

/// How many prompts: `Some` for a list of strings or of token lists, `None` for one string or one
/// token list.
fn batch_len(prompt: &RawValue) -> Option<usize> {
    let inside = prompt.get().strip_prefix('[')?.trim_start();
    if !inside.starts_with(['"', '[']) {
        return None;
    }
    serde_json::from_str::<Vec<IgnoredAny>>(prompt.get())
        .ok()
        .map(|items| items.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
