//! Drafts of speculative decoding: `baton_drafts`. Ids of tokens are int32, little endian.

use baton_drafts::{DraftStart, DrafterError, NgramDrafter};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

fn drafter_error(err: DrafterError) -> PyErr {
    PyValueError::new_err(err.to_string())
}

fn ids(bytes: &[u8]) -> PyResult<Vec<i32>> {
    let (ids, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err(format!(
            "{} bytes are no int32 token ids",
            bytes.len()
        )));
    }
    Ok(ids.iter().map(|&id| i32::from_le_bytes(id)).collect())
}

fn bytes_of(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Drafts from texts that went the same way before: a request's own, its client's prediction,
/// recent answers of its group.
///
/// A request is known by a handle of the caller from `start` to `finish`. One that was never
/// started has no drafts, and `append` and `finish` ignore it. Any thread may call.
#[pyclass(name = "NgramDrafter", frozen, module = "baton._native")]
struct PyNgramDrafter {
    drafter: Mutex<NgramDrafter>,
}

#[pymethods]
impl PyNgramDrafter {
    /// `min_match`: tokens that must agree before a draft, 1 to 64. `store_tokens`: capacity of the
    /// store of recent answers, each of which counts 32 tokens more than it has; 0: no store.
    /// Raises ValueError.
    #[new]
    #[pyo3(signature = (*, min_match, store_tokens))]
    fn new(min_match: usize, store_tokens: usize) -> PyResult<Self> {
        let drafter = NgramDrafter::new(min_match, store_tokens).map_err(drafter_error)?;
        Ok(Self {
            drafter: Mutex::new(drafter),
        })
    }

    /// Begin a request, or begin it again. `group`: name of the answers that may be proposed and
    /// that its answer joins. `tokens`: prompt and, of a resumed request, the answer so far.
    /// `prediction`: the answer that its client expects. Raises ValueError: `prompt_len` is more
    /// than there are tokens. Releases the GIL.
    #[pyo3(signature = (handle, group, tokens, prompt_len, prediction=None))]
    fn start(
        &self,
        py: Python<'_>,
        handle: u64,
        group: PyBackedBytes,
        tokens: PyBackedBytes,
        prompt_len: usize,
        prediction: Option<PyBackedBytes>,
    ) -> PyResult<()> {
        py.detach(|| {
            let tokens = ids(&tokens)?;
            let prediction = ids(prediction.as_deref().unwrap_or_default())?;
            let start = DraftStart {
                group: &group,
                tokens: &tokens,
                prompt_len,
                prediction: &prediction,
            };
            let mut drafter = self.drafter.lock();
            drafter.start(handle, &start).map_err(drafter_error)
        })
    }

    /// Append tokens of the answer, in the order in which they were drawn. Raises ValueError.
    fn append(&self, handle: u64, tokens: &[u8]) -> PyResult<()> {
        self.drafter.lock().append(handle, &ids(tokens)?);
        Ok(())
    }

    /// At most `most` tokens that may come next; empty: nothing agrees with the end of the text.
    fn propose<'py>(&self, py: Python<'py>, handle: u64, most: usize) -> Bound<'py, PyBytes> {
        let draft = py.detach(|| self.drafter.lock().propose(handle, most));
        PyBytes::new(py, &bytes_of(&draft))
    }

    /// A draft for each handle. Raises ValueError: the lists differ in length. Releases the GIL.
    fn propose_all<'py>(
        &self,
        py: Python<'py>,
        handles: Vec<u64>,
        most: Vec<usize>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        if handles.len() != most.len() {
            return Err(PyValueError::new_err(format!(
                "{} handles, but {} limits",
                handles.len(),
                most.len()
            )));
        }
        let drafts: Vec<Vec<u8>> = py.detach(|| {
            let mut drafter = self.drafter.lock();
            let rows = handles.into_iter().zip(most);
            rows.map(|(handle, most)| bytes_of(&drafter.propose(handle, most)))
                .collect()
        });
        Ok(drafts.iter().map(|draft| PyBytes::new(py, draft)).collect())
    }

    /// End a request: its answer joins the store of its group. Releases the GIL.
    fn finish(&self, py: Python<'_>, handle: u64) {
        py.detach(|| self.drafter.lock().finish(handle));
    }

    /// Requests that are started and not finished.
    #[getter]
    fn requests(&self) -> usize {
        self.drafter.lock().requests()
    }

    /// What the stored answers count, at most `store_tokens`.
    #[getter]
    fn stored_tokens(&self) -> usize {
        self.drafter.lock().stored_tokens()
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyNgramDrafter>()
}
