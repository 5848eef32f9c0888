//! The prompt in tokens: rendered and encoded once, here, so that policies count the tokens that
//! engines compute and cache, and engines need not encode again.
//!
//! The life of a prompt:
//!
//! 1. `server::api::generate` has read the body; [`PromptTokenizer::read`] takes a place among the
//!    tokenizing threads, or gives up;
//! 2. [`prompt`] reads the body as our engines do: the rendered template, or the texts as they are;
//! 3. the layer that engines use too ([`baton_text`]) turns text into ids, of which it remembers
//!    many;
//! 4. the ids become block hashes for the policies and, with --forward-input-ids, a member of the
//!    body for workers with a fingerprint that promises the same ids.
//!
//! Each failure is a counted [`TokenizeFallback`] to the text's bytes, because engines refuse
//! requests, not the tokenizer here. Off the async threads: encoding takes 1 ms for about a
//! thousand tokens.

mod prompt;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_text::dialect::Dialect;
use baton_text::prompt::PromptCut;
use baton_text::template::ChatTemplate;
use baton_text::tokenizer::{
    CacheLimits, CacheLookups, LookupCounts, PromptEncoder, TextTokenizer, TokenizerFiles,
};
use bytes::Bytes;
use jiff::Zoned;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

pub use self::prompt::TokenizeFallback;
use crate::config::TokenizerFlags;
use crate::observability::metrics::RouterMetrics;
use crate::transport::files::read_regular_file;

/// Longest prompt that is tokenized, as it stands in the body: about 250 000 tokens of English,
/// half a second [bytes].
const MAX_BYTES: usize = 1 << 20;
/// A prompt up to this size is tokenized whatever the context length: it costs about 30 ms [bytes].
const UNCHECKED_BYTES: usize = 64 << 10;
/// Threads that tokenize at the same time, at most: routing needs the rest.
const MAX_THREADS: usize = 8;
/// Requests that wait for one of them, at most, and how long.
const MAX_WAITING: usize = 256;
const MAX_WAIT: Duration = Duration::from_secs(1);

/// See the module.
pub struct PromptTokenizer {
    encoder: PromptEncoder,
    template: ChatTemplate,
    /// As in our engines' /get_server_info.
    pub fingerprint: String,
    places: Arc<Semaphore>,
    waiting: Semaphore,
    metrics: Arc<RouterMetrics>,
}

/// A request's prompts in token ids.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptIds {
    prompts: Vec<Arc<[u32]>>,
    is_list: bool,
}

impl PromptIds {
    /// Join them, one behind the other.
    pub fn joined(&self) -> Vec<u32> {
        self.prompts.concat()
    }

    /// The same, as engines cut them.
    pub fn cut(mut self, cut: Option<PromptCut>) -> Self {
        let Some(cut) = cut else { return self };
        for ids in &mut self.prompts {
            let kept = cut.kept(ids.len());
            if kept.len() < ids.len() {
                *ids = Arc::from(&ids[kept]);
            }
        }
        self
    }

    /// `,"input_ids":[…],"tokenizer_fingerprint":"…"`: one list, or a list of lists where the body
    /// holds a list of prompts, and the tokenizer that it was made for.
    pub fn to_members(&self, fingerprint: &str) -> Bytes {
        let prompts: Vec<&[u32]> = self.prompts.iter().map(|ids| &**ids).collect();
        let len = prompts.iter().map(|ids| 2 + 7 * ids.len()).sum::<usize>();
        let mut out = Vec::with_capacity(len + fingerprint.len() + 48);
        out.extend_from_slice(b",\"input_ids\":");
        match &*prompts {
            [ids] if !self.is_list => serde_json::to_writer(&mut out, ids),
            lists => serde_json::to_writer(&mut out, lists),
        }
        .expect("writing numbers to a Vec cannot fail");
        out.extend_from_slice(b",\"tokenizer_fingerprint\":\"");
        out.extend_from_slice(fingerprint.as_bytes()); // hexadecimal digits
        out.push(b'"');
        Bytes::from(out)
    }
}

impl PromptTokenizer {
    /// `Ok(None)`: the flags name no tokenizer. Cost: reads and parses tokenizer.json, half a
    /// second for 10 MB.
    pub fn load(
        config: &TokenizerFlags,
        metrics: Arc<RouterMetrics>,
    ) -> Result<Option<Self>, String> {
        let Some(files) = read_files(config)? else {
            return Ok(None);
        };
        let begun = Instant::now();
        let encoder = files
            .load_tokenizer()
            .and_then(|tokenizer| PromptEncoder::new(tokenizer, cache_limits(config)))
            .map_err(|err| format!("{err}; or drop --model-path and --tokenizer-path"))?;
        let special_tokens = files.added_tokens.special_tokens.clone();
        let source = files.chat_template.as_deref();
        let template = ChatTemplate::new(source, special_tokens, Zoned::now)
            .with_guard(encoder.tokenizer().guard().clone());
        let fingerprint = files.fingerprint(template.caps());
        if let Some(problem) = template.defect().or(template.warning()) {
            tracing::warn!("{problem}; chat prompts are counted in characters");
        }
        tracing::info!(
            vocabulary = encoder.tokenizer().vocab_size(),
            fingerprint = &fingerprint[..12],
            took_ms = begun.elapsed().as_millis() as u64,
            "prompts are counted in tokens"
        );
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let places = Arc::new(Semaphore::new(threads.min(MAX_THREADS)));
        let waiting = Semaphore::new(MAX_WAITING);
        Ok(Some(Self {
            encoder,
            template,
            fingerprint,
            places,
            waiting,
            metrics,
        }))
    }

    /// Token ids of a body without any. `prompt_bytes`: of its prompt. `context_tokens` is the
    /// longest prompt that any worker takes, if all tell. Dropping the future does not stop the
    /// thread.
    pub async fn read(
        self: &Arc<Self>,
        api: Dialect,
        body: &Bytes,
        prompt_bytes: usize,
        context_tokens: impl FnOnce() -> Option<u64>,
    ) -> Result<PromptIds, TokenizeFallback> {
        let begun = Instant::now();
        let context = if prompt_bytes > UNCHECKED_BYTES {
            context_tokens()
        } else {
            None
        };
        let made = async {
            if prompt_bytes > MAX_BYTES {
                return Err(TokenizeFallback::TooLong);
            }
            let place = {
                let _waiting = self
                    .waiting
                    .try_acquire()
                    .map_err(|_| TokenizeFallback::Busy)?;
                let place = timeout(MAX_WAIT, self.places.clone().acquire_owned()).await;
                place
                    .ok()
                    .and_then(Result::ok)
                    .ok_or(TokenizeFallback::Busy)?
            };
            let tokens = self.clone();
            let body = body.clone();
            let work = tokio::task::spawn_blocking(move || {
                let made = tokens.ids_of(api, &body, context);
                drop(place);
                made
            });
            // A panic of the tokenizer or the template engine costs this request its token count,
            // nothing more.
            work.await.unwrap_or(Err(TokenizeFallback::Failed))
        }
        .await;
        match &made {
            Ok(_) => {
                let took = self.metrics.tokenize.with_label_values(&[api.path()]);
                took.observe(begun.elapsed().as_secs_f64());
            }
            Err(why) => self
                .metrics
                .tokenize_fallbacks
                .with_label_values(&[why.into_str()])
                .inc(),
        }
        made
    }

    fn ids_of(
        &self,
        api: Dialect,
        body: &[u8],
        context_tokens: Option<u64>,
    ) -> Result<PromptIds, TokenizeFallback> {
        let given = prompt::texts_of(body, api, &self.template)?;
        if let Some(tokens) = context_tokens {
            let most = usize::try_from(tokens).unwrap_or(usize::MAX);
            let most = most.saturating_mul(self.encoder.tokenizer().max_chars_per_token());
            if given.texts.iter().any(|text| text.chars().count() > most) {
                return Err(TokenizeFallback::TooLong);
            }
        }
        let mut lookups = CacheLookups::default();
        let encode = |text: &String| {
            self.encoder
                .encode(text, given.add_special_tokens, &mut lookups)
                .map_err(|err| {
                    tracing::debug!(err, "the tokenizer fails on a prompt");
                    TokenizeFallback::Failed
                })
        };
        let prompts = given.texts.iter().map(encode).collect::<Result<_, _>>();
        self.report_caches(lookups);
        let prompts = prompts?;
        Ok(PromptIds {
            prompts,
            is_list: given.is_list,
        })
    }

    fn report_caches(&self, lookups: CacheLookups) {
        let caches = [("l0", lookups.whole), ("l1", lookups.segments)];
        for ((cache, counts), bytes) in caches.into_iter().zip(self.encoder.cache_bytes()) {
            let LookupCounts { hits, misses } = counts;
            let looked_up = |result| {
                self.metrics
                    .tokenizer_lookups
                    .with_label_values(&[cache, result])
            };
            looked_up("hit").inc_by(hits);
            looked_up("miss").inc_by(misses);
            self.metrics
                .tokenizer_cache_bytes
                .with_label_values(&[cache])
                .set(bytes as f64);
        }
    }
}

/// Files of the tokenizer that the flags name; `Ok(None)`: they name none, so the router counts
/// characters.
fn read_files(config: &TokenizerFlags) -> Result<Option<TokenizerFiles>, String> {
    let (flag, given) = match (&config.tokenizer_path, &config.model_path) {
        (Some(path), _) => ("--tokenizer-path", path),
        (None, Some(path)) => ("--model-path", path),
        (None, None) => return Ok(None),
    };
    let dir = Path::new(given);
    if !dir.is_dir() {
        return Err(format!(
            "{flag} {given}: not a directory here; give the model's files (its tokenizer's are enough), or drop the flag: \
             the router then counts characters"
        ));
    }
    let chat_template = config.chat_template.as_deref().map(Path::new);
    TokenizerFiles::read(&read_regular_file, dir, chat_template)
        .map(Some)
        .map_err(|err| format!("{flag} {given}: {err}"))
}

fn cache_limits(config: &TokenizerFlags) -> CacheLimits {
    let entries = config.tokenizer_cache_l0_max_entries;
    let bytes = config.tokenizer_cache_l0_max_memory;
    CacheLimits {
        whole: config.tokenizer_cache_enable_l0.then_some((entries, bytes)),
        segment_bytes: config
            .tokenizer_cache_enable_l1
            .then_some(config.tokenizer_cache_l1_max_memory),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
