//! Files of a tokenizer's directory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use baton_router::read_regular_file;
use baton_text::template::{ChatTemplate, UserTextGuard};
use baton_text::tokenizer::TokenizerFiles;
use jiff::Zoned;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::template::PyChatTemplate;
use super::tokenizer::PyTokenizer;

/// Tokenizer and chat template, as the files of a directory define them.
#[pyclass(frozen, name = "TokenizerFiles", module = "baton._native")]
pub struct PyTokenizerFiles {
    files: TokenizerFiles,
    template: Arc<ChatTemplate>,
}

#[pymethods]
impl PyTokenizerFiles {
    /// Read `dir`. `chat_template`: file of --chat-template. Raises ValueError with a sentence that
    /// names the file.
    #[new]
    #[pyo3(signature = (dir, chat_template=None))]
    fn new(py: Python<'_>, dir: PathBuf, chat_template: Option<PathBuf>) -> PyResult<Self> {
        py.detach(|| {
            let files = TokenizerFiles::read(&read_regular_file, &dir, chat_template.as_deref())?;
            let source = files.chat_template.as_deref();
            let special_tokens = files.added_tokens.special_tokens.clone();
            let guard = UserTextGuard::new(&files.control_tokens)?;
            let template = ChatTemplate::new(source, special_tokens, Zoned::now).with_guard(guard);
            Ok(Self {
                files,
                template: Arc::new(template),
            })
        })
        .map_err(PyValueError::new_err::<String>)
    }

    /// Source of the chat template; None: the checkpoint has none.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        self.files.chat_template.as_deref()
    }

    /// The compiled template.
    #[getter]
    fn template(&self) -> PyChatTemplate {
        PyChatTemplate(self.template.clone())
    }

    /// By name, as chat templates read them.
    #[getter]
    fn special_tokens(&self) -> BTreeMap<String, String> {
        self.files.added_tokens.special_tokens.clone()
    }

    /// tokenizer_config.json describes how answers are read; the description is not used.
    #[getter]
    fn has_response_template(&self) -> bool {
        self.files.has_response_template
    }

    /// Tokens that the other files add to the vocabulary's, and their flags (single_word, lstrip,
    /// rstrip, normalized, special), 1 for those that are set.
    #[getter]
    fn added_tokens(&self) -> Vec<(String, String)> {
        self.files.added_tokens.contents_and_flags()
    }

    /// Special tokens in a text are encoded like any other characters.
    #[getter]
    fn split_special_tokens(&self) -> bool {
        self.files.added_tokens.split_special_tokens
    }

    /// Control tokens that the texts of users do not contain, but the template's own text does.
    #[getter]
    fn control_tokens(&self) -> Vec<String> {
        self.files.control_tokens.clone()
    }

    /// Added tokens of the vocabulary's file itself: id, content, and True for special ones. Raises
    /// ValueError with a sentence that names the file.
    fn own_tokens(&self, py: Python<'_>) -> PyResult<Vec<(u32, String, bool)>> {
        let tokens = py.detach(|| self.files.own_tokens());
        let tokens = tokens.map_err(PyValueError::new_err)?.into_iter();
        Ok(tokens
            .map(|token| (token.id, token.content, token.special))
            .collect())
    }

    /// Text of tokenizer.json, or of one with the same tokens. Raises ValueError with a sentence
    /// that names the file.
    fn tokenizer_json(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.files.tokenizer_json())
            .map_err(PyValueError::new_err)
    }

    /// Parts of a tokenizer's fingerprint that are not in the file with the vocabulary.
    #[getter]
    fn fingerprint_parts<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let parts = self.files.fingerprint_parts();
        parts.iter().map(|part| PyBytes::new(py, part)).collect()
    }

    /// SHA-256 over all that decides the ids of a prompt; empty without a vocabulary.
    fn fingerprint(&self, py: Python<'_>) -> String {
        py.detach(|| self.files.fingerprint(self.template.caps()))
    }

    /// Load the tokenizer. Raises ValueError with a sentence that names the file.
    fn load_tokenizer(&self, py: Python<'_>) -> PyResult<PyTokenizer> {
        let loaded = py.detach(|| self.files.load_tokenizer());
        let tokenizer = loaded.map_err(PyValueError::new_err)?;
        Ok(PyTokenizer(Arc::new(tokenizer)))
    }
}
