//! The running answers of a front: `AnswerTable`.

use baton_text::answers::{AnswerSpec, AnswerTable, FedBatch};
use baton_text::dialect::Dialect;
use baton_text::dialect::sse::error_end;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::format::PyAnswerFormat;
use super::tokenizer::PyTokenizer;

/// Answers in progress. Its methods are for one thread.
#[pyclass(name = "AnswerTable", frozen, module = "baton._native")]
pub struct PyAnswerTable {
    table: Mutex<AnswerTable>,
}

/// Effects of a rank's message on the front; see baton_text::answers::FedBatch.
#[pyclass(name = "FedBatch", frozen, get_all, module = "baton._native")]
struct PyFedBatch {
    dp_rank: u32,
    /// list[tuple[int, bytes]]
    chunks: Py<PyList>,
    first_tokens: Vec<Py<PyFirstToken>>,
    ended: Vec<u64>,
    stopped: Vec<u64>,
    failed: Vec<Py<PyFailedAnswer>>,
    metered: Vec<(u64, u32)>,
    finished: Vec<u64>,
    has_output: bool,
}

/// First tokens of a choice. `stages`: FirstTokenStages as msgpack, where the rank measured them.
#[pyclass(name = "FirstToken", frozen, get_all, module = "baton._native")]
struct PyFirstToken {
    answer: u64,
    choice: usize,
    stages: Option<Py<PyBytes>>,
}

/// Answer that ends with an error: code, message and param; `error` None: an item was aborted.
#[pyclass(name = "FailedAnswer", frozen, get_all, module = "baton._native")]
struct PyFailedAnswer {
    answer: u64,
    error: Option<(String, String, Option<String>)>,
    retry_after_secs: Option<u64>,
}

/// Token counts of an answer: each prompt once, however many choices it has.
#[pyclass(name = "AnswerCounts", frozen, get_all, module = "baton._native")]
struct PyAnswerCounts {
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}

#[pymethods]
impl PyAnswerTable {
    /// `gap_bounds`: upper bounds of the buckets of `gaps` [seconds].
    #[new]
    fn new(tokenizer: &PyTokenizer, format: &PyAnswerFormat, gap_bounds: Vec<f64>) -> Self {
        let table = AnswerTable::new(tokenizer.0.clone(), format.0.clone(), gap_bounds);
        Self {
            table: Mutex::new(table),
        }
    }

    /// Begin an answer: its id. `spec`: AnswerSpec as msgpack. Raises ValueError.
    fn open(&self, py: Python<'_>, spec: &[u8]) -> PyResult<u64> {
        py.detach(|| {
            let spec: AnswerSpec = rmp_serde::from_slice(spec).map_err(|err| err.to_string())?;
            let opened = self.table.lock().open(spec);
            opened.map_err(|err| err.to_string())
        })
        .map_err(PyValueError::new_err::<String>)
    }

    /// Forget an answer. Returns what it counted; None: there is no such answer.
    fn close(&self, answer: u64) -> Option<PyAnswerCounts> {
        let counts = self.table.lock().close(answer)?;
        Some(PyAnswerCounts {
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            completion_tokens: counts.completion_tokens,
        })
    }

    /// Take a rank's message; None: it has no tokens. Raises ValueError. Releases the GIL.
    fn feed(&self, py: Python<'_>, message: &[u8], now: f64) -> PyResult<Option<PyFedBatch>> {
        let fed = py.detach(|| self.table.lock().feed(message, now));
        let fed = fed.map_err(|err| PyValueError::new_err(err.to_string()))?;
        fed.map(|fed| to_python(py, fed)).transpose()
    }

    /// Chunks of this answer have HTTP/1.1's framing from here on.
    fn begin_framing(&self, answer: u64) {
        self.table.lock().begin_framing(answer);
    }

    /// Let the output of an answer gather until `release`.
    fn hold(&self, answer: u64) {
        self.table.lock().hold(answer);
    }

    /// End of a stream that breaks off, `[DONE]` included, without the framing of HTTP/1.1; None:
    /// there is no such answer. `error`: `{"error":{…}}`. Raises ValueError.
    fn write_failure<'py>(
        &self,
        py: Python<'py>,
        answer: u64,
        error: &[u8],
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let end = self.table.lock().write_failure(answer, error);
        let end = end.map_err(|err| PyValueError::new_err(err.to_string()))?;
        Ok(end.map(|end| PyBytes::new(py, &end)))
    }

    /// Output that has gathered, and whether the answer ends with it. Raises ValueError.
    fn release<'py>(
        &self,
        py: Python<'py>,
        answer: u64,
        now: f64,
    ) -> PyResult<(Bound<'py, PyBytes>, bool)> {
        let released = self.table.lock().release(answer, now);
        let (chunk, is_last) = released.map_err(|err| PyValueError::new_err(err.to_string()))?;
        Ok((PyBytes::new(py, &chunk), is_last))
    }

    /// Gaps between tokens since the start: observations by bucket, and their sum [seconds].
    fn gaps(&self) -> (Vec<u64>, f64) {
        let table = self.table.lock();
        (table.gaps.counts.clone(), table.gaps.sum)
    }
}

fn to_python(py: Python<'_>, fed: FedBatch) -> PyResult<PyFedBatch> {
    let chunks = fed.chunks.iter();
    let chunks = chunks.map(|(answer, chunk)| (*answer, PyBytes::new(py, chunk)));
    let first_tokens = fed.first_tokens.into_iter().map(|first| {
        let stages = first.stages.as_ref().map(rmp_serde::to_vec_named);
        let stages = stages.transpose();
        let stages = stages.map_err(|err| PyValueError::new_err(err.to_string()))?;
        Py::new(
            py,
            PyFirstToken {
                answer: first.answer,
                choice: first.choice,
                stages: stages.map(|packed| PyBytes::new(py, &packed).unbind()),
            },
        )
    });
    let failed = fed.failed.into_iter().map(|item| {
        Py::new(
            py,
            PyFailedAnswer {
                answer: item.answer,
                error: item
                    .error
                    .map(|error| (error.code, error.message, error.param)),
                retry_after_secs: item.retry_after_secs,
            },
        )
    });
    Ok(PyFedBatch {
        dp_rank: fed.dp_rank,
        chunks: PyList::new(py, chunks.collect::<Vec<_>>())?.unbind(),
        first_tokens: first_tokens.collect::<PyResult<_>>()?,
        ended: fed.ended,
        stopped: fed.stopped,
        failed: failed.collect::<PyResult<_>>()?,
        metered: fed.metered,
        finished: fed.finished,
        has_output: fed.has_output,
    })
}

/// End of a stream that broke: the error's event and `[DONE]`. `body`: `{"error":{…}}`.
#[pyfunction]
fn broken_stream_end<'py>(py: Python<'py>, body: &[u8]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &error_end(body))
}

/// A request's id without the prefix of an API.
#[pyfunction]
fn plain_id(request_id: &str) -> &str {
    Dialect::without_prefix(request_id)
}

/// Ids that name the same request: this one first, then those with another prefix or none.
#[pyfunction]
fn id_spellings(request_id: &str) -> Vec<String> {
    baton_text::dialect::id_spellings(request_id)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyAnswerTable>()?;
    m.add_class::<PyFedBatch>()?;
    m.add_class::<PyFirstToken>()?;
    m.add_class::<PyFailedAnswer>()?;
    m.add_class::<PyAnswerCounts>()?;
    m.add_function(wrap_pyfunction!(broken_stream_end, m)?)?;
    m.add_function(wrap_pyfunction!(plain_id, m)?)?;
    m.add_function(wrap_pyfunction!(id_spellings, m)?)
}
