//! Tokenizers.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_text::prompt::{ContextLimit, PromptRules, encode_text};
use baton_text::tokenizer::{FourByteTokenizer, TextTokenizer};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{id_bytes, refused};

/// Turns text into token ids and back. Thread-safe.
#[pyclass(frozen, name = "Tokenizer", module = "baton._native")]
pub struct PyTokenizer(pub Arc<dyn TextTokenizer>);

#[pymethods]
impl PyTokenizer {
    /// Tokenizer of simulated engines: four bytes of text are one token.
    #[staticmethod]
    fn four_byte() -> Self {
        Self(Arc::new(FourByteTokenizer))
    }

    /// All ids are below it.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.0.vocab_size()
    }

    /// A text has at least as many tokens as this goes into its length.
    #[getter]
    fn max_chars_per_token(&self) -> usize {
        self.0.max_chars_per_token()
    }

    /// The text of every sequence is the bytes of its tokens, joined.
    #[getter]
    fn is_bytewise(&self) -> bool {
        self.0.is_bytewise()
    }

    /// Ids of a text, as Python's `array("i", …)` takes them. Raises TextRefusal, that names `param`,
    /// for a text that is too long for `context_length`; `is_bounded`: for more ids too.
    #[pyo3(signature = (text, *, add_special_tokens, context_length, is_bounded, param))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        text: &str,
        add_special_tokens: bool,
        context_length: usize,
        is_bounded: bool,
        param: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let rules = PromptRules {
            add_special_tokens,
            limit: ContextLimit {
                context_length,
                is_bounded,
            },
            param,
        };
        let ids = py.detach(|| encode_text(&*self.0, text, rules));
        id_bytes(py, &ids.map_err(refused)?)
    }

    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special_tokens: bool) -> String {
        py.detach(|| self.0.decode(&ids, skip_special_tokens))
    }

    fn decode_batch(
        &self,
        py: Python<'_>,
        rows: Vec<Vec<u32>>,
        skip_special_tokens: bool,
    ) -> Vec<String> {
        py.detach(|| {
            let rows = rows.iter();
            rows.map(|ids| self.0.decode(ids, skip_special_tokens))
                .collect()
        })
    }

    /// Bytes that a token stands for: it may be a part of a character. Empty for ids without one.
    fn token_bytes<'py>(&self, py: Python<'py>, id: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.token_bytes(id))
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        self.0.id_of(token)
    }

    /// Names of tokens in the vocabulary; None for ids without one.
    fn names_of(&self, ids: Vec<u32>) -> Vec<Option<String>> {
        ids.into_iter().map(|id| self.0.name_of(id)).collect()
    }

    /// The tokens whose id is `first_id` or larger, by id.
    fn tokens_from(&self, first_id: u32) -> BTreeMap<u32, String> {
        self.0.tokens_from(first_id).into_iter().collect()
    }
}
