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
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::dialect::{AnswerCountPlace, Dialect, PromptKind, PromptLogprobsForm, SessionKeyField};
use crate::prompt::PromptTruncation;

pub use prompt_logprobs::PromptLogprobs;
use prompt_logprobs::PromptLogprobsFields;
use router_fields::is_router_field;

/// Fields that ask for logprobs of the prompt.
mod prompt_logprobs;
/// Fields and headers that only routers set.
pub mod router_fields;

/// Most answers one request may ask for (prompts × n): the rooms of a request are one array.
const MAX_ITEMS: usize = 4096;

/// Fields beside the prompt's text that change its KV, or say who may share it.
const SCOPE: [&str; 8] = [
    "model",
    "lora_path",
    "cache_salt",
    "extra_key",
    "tools",
    "chat_template_kwargs",
    "instructions",
    "system",
];

/// Longest session key [bytes]. OpenAI allows 64 for `prompt_cache_key`; Claude Code's
/// `metadata.user_id` is JSON of about 200.
const MAX_SESSION_KEY_BYTES: usize = 1024;

/// Most fields of one API that may hold the prompt.
const MAX_PROMPT_FIELDS: usize = 2;

/// Deadline for the first token [ms].
pub const TTFT_DEADLINE: &str = "ttft_deadline_ms";
/// Deadline for the whole answer [ms].
pub const DEADLINE: &str = "deadline_ms";

/// Reason why a body cannot be routed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body is not a JSON object: {detail}")]
    InvalidJson { detail: String },
    #[error("{param} {problem}")]
    InvalidValue {
        param: &'static str,
        problem: String,
    },
}

/// Index of a body: what routing needs to know of it.
#[derive(Debug, Clone)]
pub struct BodyIndex {
    pub dialect: Dialect,
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
    /// Truncation of prompts that are longer than the client wants.
    pub truncation: PromptTruncation,
    /// Salt of the cache that the prompt may share.
    pub cache_salt: Option<String>,
    /// Key of the cache that the prompt may share.
    pub extra_key: Option<String>,
    /// Where the members named in `SCOPE` lie.
    scope: [Option<Range<usize>>; SCOPE.len()],
    /// The model asked for; `None`: any, and /generate, which has no such member.
    pub model: Option<String>,
    /// Tenant that the body names.
    pub tenant: Option<String>,
    /// Conversation, agent or user that the body names; one of more than `MAX_SESSION_KEY_BYTES`
    /// is none.
    pub session_key: Option<String>,
    /// /generate with `return_logprob`: the prefill leg's input logprobs belong into the answer.
    pub wants_input_logprobs: bool,
    /// Logprobs of the prompt that the answer has; `None`: it has none.
    pub prompt_logprobs: Option<PromptLogprobs>,
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

/// Groups of members that the router sets or leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManagedField {
    /// Members that only routers set ([`router_fields`]): a client's are always left out.
    Router,
    /// How much of an answer, and in which form: a vLLM prefill worker is asked for one token.
    Output,
    /// The client's deadlines: another attempt is sent what is left of them.
    Deadlines,
}

impl ManagedField {
    /// Group of a member, if the router sets it or leaves it out.
    fn of_name(name: &str) -> Option<Self> {
        match name {
            "stream" | "stream_options" | "max_tokens" | "max_completion_tokens" | "min_tokens" => {
                Some(Self::Output)
            }
            TTFT_DEADLINE | DEADLINE => Some(Self::Deadlines),
            _ => is_router_field(name).then_some(Self::Router),
        }
    }
}

impl BodyIndex {
    /// Read the top level of `body`. Cost: one pass over the bytes, no copy of any value.
    pub fn of(body: &[u8], dialect: Dialect) -> Result<BodyIndex, BodyError> {
        let last_end = body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1);
        let mut members = TopLevelFields::new(body, dialect, last_end);
        let mut json = serde_json::Deserializer::from_slice(body);
        // Nothing but whitespace may follow the object.
        let read = json.deserialize_map(&mut members).and_then(|()| json.end());
        read.map_err(|err| BodyError::InvalidJson {
            detail: err.to_string(),
        })?;
        members.finish()
    }

    /// Name and JSON of the members that change the prompt's KV, or say who may share it.
    pub fn scope_parts<'a>(
        &self,
        body: &'a [u8],
    ) -> impl Iterator<Item = (&'static str, &'a [u8])> {
        let parts = SCOPE.into_iter().zip(&self.scope);
        parts.filter_map(|(name, span)| Some((name, &body[span.clone()?])))
    }

    /// True if the client sent a member that only routers set.
    pub fn has_router_fields(&self) -> bool {
        self.ours
            .iter()
            .any(|(group, _)| *group == ManagedField::Router)
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

    /// The client's own token ids as engines cut them, those of several prompts one behind the
    /// other.
    pub fn ids(&self, body: &[u8]) -> Option<Vec<u32>> {
        let list = self.ids_json(body)?;
        let one = serde_json::from_slice(list).ok().map(|ids| vec![ids]);
        let mut rows: Vec<Vec<u32>> = one.or_else(|| serde_json::from_slice(list).ok())?;
        if let Some(cut) = self.truncation.cut() {
            for ids in &mut rows {
                *ids = ids[cut.kept(ids.len())].to_vec();
            }
        }
        Some(rows.concat())
    }

    /// Pieces of the body that a worker gets: the client's bytes without fields of routers and
    /// without its own fields of the groups in `replaced`, then `added` (`,"name":value`; only to a
    /// body with members that stay) and `fields` (`"name":value,…`, no braces), then `}`. Pieces
    /// may be empty.
    pub fn splice(
        &self,
        body: &Bytes,
        replaced: &[ManagedField],
        added: Option<&Bytes>,
        fields: &str,
    ) -> impl Iterator<Item = Bytes> {
        let out = self
            .ours
            .iter()
            .filter(|(group, _)| *group == ManagedField::Router || replaced.contains(group));
        let out: Vec<_> = out.map(|(_, span)| span.clone()).collect();
        let has_members = self.count > out.len();
        let mut tail = String::with_capacity(fields.len() + 2);
        if has_members && !fields.is_empty() {
            tail.push(',');
        }
        tail.push_str(fields);
        tail.push('}');
        let added = added.cloned().unwrap_or_default();
        pieces_without(body, out, self.close).chain([added, Bytes::from(tail)])
    }
}

/// Visitor over the top-level members. Of duplicate names the last one counts, as in most JSON
/// readers.
struct TopLevelFields<'a> {
    body: &'a [u8],
    dialect: Dialect,
    count: usize,
    ours: Vec<(ManagedField, Range<usize>)>,
    /// End of the member before the present one, or just behind `{`.
    last_end: usize,
    stream: bool,
    n: Option<&'a RawValue>,
    /// Values of the fields that may hold the prompt, in the order of [`Dialect::fields`].
    prompts: [Option<&'a RawValue>; MAX_PROMPT_FIELDS],
    input_ids: Option<&'a RawValue>,
    truncate_prompt_tokens: Option<&'a RawValue>,
    truncation_side: Option<&'a RawValue>,
    sampling_params: Option<&'a RawValue>,
    tenant: Option<&'a RawValue>,
    logprobs: PromptLogprobsFields,
    prompt_cache_key: Option<&'a RawValue>,
    metadata: Option<&'a RawValue>,
    /// Deadlines that are numbers; the engine refuses others.
    deadlines: RequestDeadlines,
    scope: [Option<Range<usize>>; SCOPE.len()],
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> TopLevelFields<'a> {
    /// `start`: where the first member may begin.
    fn new(body: &'a [u8], dialect: Dialect, start: usize) -> Self {
        Self {
            body,
            dialect,
            count: 0,
            ours: Vec::new(),
            last_end: start,
            stream: false,
            n: None,
            prompts: [None; MAX_PROMPT_FIELDS],
            input_ids: None,
            truncate_prompt_tokens: None,
            truncation_side: None,
            sampling_params: None,
            tenant: None,
            logprobs: PromptLogprobsFields::default(),
            prompt_cache_key: None,
            metadata: None,
            deadlines: RequestDeadlines::default(),
            scope: [const { None }; SCOPE.len()],
        }
    }

    /// Where `value` lies in the body.
    fn span(&self, value: &RawValue) -> Range<usize> {
        let start = value.get().as_ptr() as usize - self.body.as_ptr() as usize;
        start..start + value.get().len()
    }

    fn member(&mut self, name: &str, value: &'a RawValue) {
        let end = self.span(value).end;
        if let Some(group) = ManagedField::of_name(name) {
            self.ours.push((group, self.last_end..end));
        }
        self.last_end = end;
        self.count += 1;
        if let Some(at) = SCOPE.iter().position(|scope| *scope == name) {
            self.scope[at] = (value.get() != "null").then(|| self.span(value));
        }
        let mut prompts = self.prompts.iter_mut().zip(self.dialect.fields().prompt);
        if let Some((prompt, _)) = prompts.find(|(_, field)| **field == name) {
            *prompt = Some(value);
        }
        match name {
            "stream" => self.stream = value.get() == "true",
            "n" => self.n = Some(value),
            "input_ids" => self.input_ids = Some(value),
            "truncate_prompt_tokens" => self.truncate_prompt_tokens = Some(value),
            "truncation_side" => self.truncation_side = Some(value),
            "sampling_params" => self.sampling_params = Some(value),
            "tenant" => self.tenant = Some(value),
            "prompt_cache_key" => self.prompt_cache_key = Some(value),
            "metadata" => self.metadata = Some(value),
            TTFT_DEADLINE => self.deadlines.ttft = ms_of(value),
            DEADLINE => self.deadlines.whole = ms_of(value),
            _ => self.logprobs.member(name, value),
        }
    }

    /// The prompt and the name of its field, which is the last one where there is none.
    fn prompt(&self) -> (Option<&'a RawValue>, &'static str) {
        let names = self.dialect.fields().prompt;
        let mut given = self.prompts.iter().zip(names);
        match given.find(|(value, _)| value.is_some()) {
            Some((value, name)) => (*value, name),
            None => (None, names.last().copied().unwrap_or_default()),
        }
    }

    /// Key of the field that the API has for it. A value of another type is no key: the engine
    /// refuses or ignores it.
    fn session_key(&self) -> Option<String> {
        let value = match self.dialect.fields().session_key {
            SessionKeyField::PromptCacheKey => self.prompt_cache_key?,
            SessionKeyField::MetadataUserId => {
                let metadata = serde_json::from_str::<Metadata<'_>>(self.metadata?.get());
                metadata.ok()?.user_id?
            }
            SessionKeyField::Nowhere => return None,
        };
        let key: String = serde_json::from_str(value.get()).ok()?;
        (1..=MAX_SESSION_KEY_BYTES)
            .contains(&key.len())
            .then_some(key)
    }

    fn finish(self) -> Result<BodyIndex, BodyError> {
        let fields = self.dialect.fields();
        let close =
            self.body
                .iter()
                .rposition(|b| *b == b'}')
                .ok_or_else(|| BodyError::InvalidJson {
                    detail: "it has no closing brace".into(),
                })?;
        let (prompt, prompt_param) = self.prompt();
        let n = match fields.answer_count {
            AnswerCountPlace::Body => self.n,
            AnswerCountPlace::SamplingParams => self.sampling_params.and_then(n_of_sampling_params),
            AnswerCountPlace::Nowhere => None,
        };
        let n = n.map_or(1, n_of);
        let texts = prompt.filter(|_| fields.prompt_kind == PromptKind::Texts);
        let prompts = texts.and_then(batch_len);
        let items = prompts.unwrap_or(1).saturating_mul(n);
        if items > MAX_ITEMS {
            let problem = format!("asks for {items} answers, at most {MAX_ITEMS} are possible");
            return Err(BodyError::InvalidValue {
                param: "n",
                problem,
            });
        }
        // Beside a text, ids are the same prompt tokenized (docs/protocol.md).
        let ids = self.input_ids.or(texts);
        let ids = ids.filter(|value| holds_ids(value.get()));
        // In the order of `SCOPE`. What is no string is left to the engine's validation.
        let [model, _, cache_salt, extra_key, ..] = &self.scope;
        let text = |span: &Option<Range<usize>>| -> Option<String> {
            serde_json::from_slice(&self.body[span.clone()?]).ok()
        };
        let model = if fields.names_model {
            text(model)
        } else {
            None
        };
        Ok(BodyIndex {
            dialect: self.dialect,
            ids: ids.map(|value| self.span(value)),
            truncation: PromptTruncation::read(self.truncate_prompt_tokens, self.truncation_side),
            cache_salt: text(cache_salt),
            extra_key: text(extra_key),
            stream: self.stream,
            batch: (prompts.is_some() || n > 1).then_some(items),
            prompt: prompt.map(|value| self.span(value)),
            prompt_param,
            wants_input_logprobs: self.logprobs.return_logprob
                && fields.prompt_logprobs == PromptLogprobsForm::Triples,
            prompt_logprobs: self
                .logprobs
                .read(fields, self.stream, self.sampling_params),
            deadlines: self.deadlines,
            model,
            session_key: self.session_key(),
            tenant: self
                .tenant
                .and_then(|name| serde_json::from_str(name.get()).ok()),
            scope: self.scope,
            ours: self.ours,
            close,
            count: self.count,
        })
    }
}

/// Pieces of a body up to `close` without the members in `spans`.
fn pieces_without(
    body: &Bytes,
    spans: Vec<Range<usize>>,
    close: usize,
) -> impl Iterator<Item = Bytes> {
    let spans = spans_with_commas(body, spans);
    let last_end = spans.last().map_or(0, |span| span.end);
    let mut from = 0;
    let kept = spans.into_iter().map(move |span| {
        let piece = body.slice(from..span.start.max(from));
        from = span.end;
        piece
    });
    kept.chain([body.slice(last_end..close)])
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
struct Metadata<'a> {
    #[serde(borrow)]
    user_id: Option<&'a RawValue>,
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
