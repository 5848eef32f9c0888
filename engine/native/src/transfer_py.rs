//! Python bindings of the `kv_transfer` crate: converts arguments, releases the GIL, calls the
//! crate.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::node::PageGrant;
use kv_transfer::pool::{KvPool, PoolError};
use kv_transfer::protocol::{ClusterKeys, GroupPages};
use kv_transfer::transport::checksum_copy::copy_hash_pages;
use kv_transfer::transport::communicator::CommBackend;
use kv_transfer::{BootstrapServer, NodeError, NodeEvent, TransferNode};
use parking_lot::Mutex;
use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};

use crate::comm_py::PyBackend;
use crate::device_py::PyDevicePages;
use crate::logs_py::start_default_logs;

create_exception!(
    _native,
    DuplicateRoom,
    PyValueError,
    "The room is live on this node; every request needs a room of its own."
);

fn pool_error(err: PoolError) -> PyErr {
    match err {
        PoolError::Create { .. } | PoolError::Sealing { .. } => PyOSError::new_err(err.to_string()),
        _ => PyValueError::new_err(err.to_string()),
    }
}

/// Memory of one rank's KV pages: page `p` is the bytes `[p * page_bytes, (p + 1) * page_bytes)`.
///
/// A sealed memfd: this process is the only one that can ever write it.
/// `torch.frombuffer(pool.buffer(), dtype=torch.uint8)` is zero-copy and writable, and the tensor
/// keeps the pool alive. (The buffer protocol itself is not part of the stable ABI of Python 3.10,
/// hence `buffer()`; it returns a memoryview over a ctypes array over this memory.) With `device`,
/// an object that moves pages (baton.layers.cuda.device_pages), the pages are there, and this is
/// their generations.
#[pyclass(frozen, name = "KvPool", module = "baton._native")]
pub struct PyKvPool {
    pool: Arc<KvPool>,
}

#[pymethods]
impl PyKvPool {
    /// `page_bytes` is a multiple of 8, at least 64. Raises ValueError for the shape, OSError when
    /// the kernel refuses.
    #[new]
    #[pyo3(signature = (num_pages, page_bytes, device=None))]
    fn new(
        py: Python<'_>,
        num_pages: usize,
        page_bytes: usize,
        device: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let pool = py
            .detach(|| match device {
                None => KvPool::create(num_pages, page_bytes),
                Some(device) => {
                    KvPool::create_on(num_pages, page_bytes, Arc::new(PyDevicePages(device)))
                }
            })
            .map_err(pool_error)?;
        Ok(Self {
            pool: Arc::new(pool),
        })
    }

    /// ValueError for pages on a device.
    #[getter]
    fn data_ptr(&self) -> PyResult<usize> {
        if self.on_device() {
            return Err(PyValueError::new_err(
                "the pages of this pool are on a device, not in its memory",
            ));
        }
        Ok(self.pool.data_ptr() as usize)
    }

    #[getter]
    fn on_device(&self) -> bool {
        self.pool.device().is_some()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.pool.nbytes()
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.pool.num_pages()
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.pool.page_bytes()
    }

    /// Writable memoryview of `nbytes` bytes, for torch.frombuffer or numpy.frombuffer (its format
    /// is ctypes' `<B`, which memoryview itself does not index). It, and everything made from it,
    /// keeps the pool alive.
    fn buffer<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let pool = &slf.get().pool;
        let array_type = py
            .import("ctypes")?
            .getattr("c_ubyte")?
            .mul(pool.nbytes())?;
        let array = array_type.call_method1("from_address", (slf.get().data_ptr()?,))?;
        array.setattr("_pool", slf)?;
        py.import("builtins")?
            .getattr("memoryview")?
            .call1((array,))
    }

    /// The pages (int32 little endian ids) get a new owner: their generation becomes the next odd
    /// number.
    fn begin_write(&self, pages: &[u8]) -> PyResult<()> {
        let pages = self.pool.check_pages(pages).map_err(pool_error)?;
        self.pool.begin_write(&pages);
        Ok(())
    }

    /// The pages' content is final: their generation becomes even. Idempotent.
    fn seal(&self, pages: &[u8]) -> PyResult<()> {
        let pages = self.pool.check_pages(pages).map_err(pool_error)?;
        self.pool.seal_pages(&pages);
        Ok(())
    }

    /// The page's generation (even = final), for tests and for the ledger.
    fn generation(&self, page: u32) -> PyResult<u64> {
        let pages = self
            .pool
            .check_pages(&page.to_le_bytes())
            .map_err(pool_error)?;
        Ok(self.pool.generation(pages[0]))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.pool)
    }
}

fn node_error(err: NodeError) -> PyErr {
    let text = err.to_string();
    match err {
        NodeError::DuplicateRoom(_) => DuplicateRoom::new_err(text),
        NodeError::Pages(err) => pool_error(err),
        NodeError::Config(_)
        | NodeError::TooLarge { .. }
        | NodeError::UnknownCode(_)
        | NodeError::Groups(_) => PyValueError::new_err(text),
        NodeError::Start { .. } | NodeError::Register(_) => PyOSError::new_err(text),
        NodeError::Full(_) | NodeError::Unhealthy(_) => PyRuntimeError::new_err(text),
    }
}

/// A group's pages as (group, first_page, total_pages, last_page_tokens, tokens_at).
type GroupTuple = (u32, u32, u32, u32, Option<u32>);

fn group_tuple(pages: &GroupPages) -> GroupTuple {
    (
        pages.group,
        pages.first_page,
        pages.total_pages,
        pages.last_page_tokens,
        pages.tokens_at,
    )
}

/// The event as the tuple the contract names.
fn event_tuple<'py>(py: Python<'py>, event: NodeEvent) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        NodeEvent::Committed {
            room,
            payload,
            groups,
            stats,
        } => {
            let stats = serde_json::to_string(&stats)
                .map_err(|err| PyRuntimeError::new_err(err.to_string()))?;
            (
                "committed",
                room,
                PyBytes::new(py, &payload),
                groups.iter().map(group_tuple).collect::<Vec<_>>(),
                stats,
            )
                .into_pyobject(py)
        }
        NodeEvent::Failed {
            room,
            code,
            message,
        } => ("failed", room, code.as_str(), message, code.is_retryable()).into_pyobject(py),
        NodeEvent::Aborted { room } => ("aborted", room).into_pyobject(py),
        NodeEvent::Announced { room } => ("announced", room).into_pyobject(py),
        NodeEvent::Revoked { room } => ("revoked", room).into_pyobject(py),
        NodeEvent::Released { room, code } => {
            ("released", room, code.map_or("DONE", |code| code.as_str())).into_pyobject(py)
        }
    }
}

/// Transfer node of one rank, prefill (P) or decode (D). No call waits for the network, except
/// `register` and `close`; ends of rooms are reported by `poll`, and `event_fd` is readable while
/// there are any.
///
/// `config_json`: {"role": "prefill"|"decode", "host", "advertise_host"?, "port" (0 = free),
/// "transports": ["shm", "tcp"] (or "cuda_ipc", "gloo", "nccl"), "cluster_key"?,
/// "second_cluster_key"?, "insecure"?, "layout": {"groups": [{"id", "page_bytes", …}], …}, "dp_rank", "dp_size",
/// "lease_ms", "heartbeat_ms", "copy_threads", "tcp_streams", "max_rooms", "park_ttl_ms",
/// "data_idle_ms", "slabs", "slab_bytes", "max_communicators", "comm_open_ms", "comm_op_ms",
/// "comm_abort_ms", "fault"? (tests only)}. `backend`: makes the communicators of "gloo" or "nccl",
/// when the list has one of them. Raises ValueError for the configuration, OSError if it cannot
/// start.
#[pyclass(frozen, name = "TransferNode", module = "baton._native")]
pub struct PyTransferNode {
    node: TransferNode,
}

impl Drop for PyTransferNode {
    /// Close without the GIL, for which the node's threads may be waiting.
    fn drop(&mut self) {
        Python::attach(|py| py.detach(|| self.node.close()));
    }
}

#[pymethods]
impl PyTransferNode {
    #[new]
    #[pyo3(signature = (pool, config_json, backend=None))]
    fn new(
        py: Python<'_>,
        pool: &Bound<'_, PyKvPool>,
        config_json: &str,
        backend: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        start_default_logs();
        let pool = pool.get().pool.clone();
        let backend = backend
            .map(|object| PyBackend::new(object).map(|b| Arc::new(b) as Arc<dyn CommBackend>))
            .transpose()?;
        let node = py
            .detach(|| TransferNode::start_with(pool, config_json, backend))
            .map_err(node_error)?;
        Ok(Self { node })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.node.port()
    }

    /// uuid of this start of the process's node.
    #[getter]
    fn incarnation(&self) -> &str {
        self.node.incarnation()
    }

    /// eventfd, readable while `poll` has events. Owned by the node: wait on it, do not read or
    /// close it.
    #[getter]
    fn event_fd(&self) -> i32 {
        self.node.event_fd()
    }

    #[getter]
    fn healthy(&self) -> bool {
        self.node.is_healthy()
    }

    /// P: PUT /route for this rank until it succeeds (then it is repeated in the background).
    /// OSError after `timeout_ms`.
    fn register(
        &self,
        py: Python<'_>,
        bootstrap_host: &str,
        bootstrap_port: u16,
        timeout_ms: u64,
    ) -> PyResult<()> {
        py.detach(|| {
            self.node.register_rank(
                bootstrap_host,
                bootstrap_port,
                Duration::from_millis(timeout_ms),
            )
        })
        .map_err(node_error)
    }

    /// P: a request was accepted; `deadline_ms` from now it is given up unless finished. Raises
    /// DuplicateRoom (a ValueError).
    fn offer(
        &self,
        py: Python<'_>,
        room: u64,
        attempt: u32,
        prompt_hash: &[u8],
        deadline_ms: u64,
    ) -> PyResult<()> {
        py.detach(|| {
            self.node
                .offer_room(room, attempt, prompt_hash, deadline_ms)
        })
        .map_err(node_error)
    }

    /// P: the group's prompt pages [first_page, first_page + n), at these pool pages (int32 little
    /// endian), are final. Seals them. A group's first call may begin at any page, each later one
    /// continues it without a gap.
    fn publish(
        &self,
        py: Python<'_>,
        room: u64,
        group: u32,
        first_page: u32,
        pages: &[u8],
    ) -> PyResult<()> {
        py.detach(|| self.node.publish_pages(room, group, first_page, pages))
            .map_err(node_error)
    }

    /// P: prefill is over. `groups`: (group, first_page, total_pages, last_page_tokens, tokens_at)
    /// of each, whose pages [first_page, total_pages) must all be published. `tokens_at`: how many
    /// tokens a state has seen; None in groups without states. `payload` (at most 2 MiB) reaches D
    /// unread. The lease starts.
    fn finish(
        &self,
        py: Python<'_>,
        room: u64,
        groups: Vec<GroupTuple>,
        payload: &[u8],
    ) -> PyResult<()> {
        let groups = groups
            .into_iter()
            .map(
                |(group, first_page, total_pages, last_page_tokens, tokens_at)| GroupPages {
                    group,
                    first_page,
                    total_pages,
                    last_page_tokens,
                    tokens_at,
                },
            )
            .collect();
        py.detach(|| self.node.finish_prompt(room, groups, payload.to_vec()))
            .map_err(node_error)
    }

    /// D: fetch a prompt's pages from the prefill rank behind this bootstrap server.
    /// `prefill_dp_rank` < 0: room modulo its dp size. `deadline_ms` counts from now. Raises
    /// DuplicateRoom (a ValueError).
    #[allow(clippy::too_many_arguments, reason = "called with names")]
    fn open(
        &self,
        py: Python<'_>,
        room: u64,
        attempt: u32,
        bootstrap_host: &str,
        bootstrap_port: u16,
        prefill_dp_rank: i64,
        prompt_hash: &[u8],
        deadline_ms: u64,
    ) -> PyResult<()> {
        py.detach(|| {
            self.node.open_room(
                room,
                attempt,
                bootstrap_host,
                bootstrap_port,
                prefill_dp_rank,
                prompt_hash,
                deadline_ms,
            )
        })
        .map_err(node_error)
    }

    /// D: `groups`: (group, start_page, dst_pages, tokens_at) of each. The group's pages of the
    /// prompt before `start_page` are here or not needed; the others go to these pool pages (int32
    /// little endian), all of them. They are written until the room ends, and not after.
    /// `tokens_at`: how many tokens a state must have seen; None in groups without states.
    fn grant(
        &self,
        py: Python<'_>,
        room: u64,
        groups: Vec<(u32, u32, PyBackedBytes, Option<u32>)>,
    ) -> PyResult<()> {
        let groups: Vec<PageGrant<'_>> = groups
            .iter()
            .map(|(group, start_page, dst_pages, tokens_at)| {
                (*group, *start_page, &dst_pages[..], *tokens_at)
            })
            .collect();
        py.detach(|| self.node.grant_pages(room, &groups))
            .map_err(node_error)
    }

    /// D: revoke the grant. `poll` answers "revoked" (the pages are not written any more) or
    /// "announced" (too late: they stay granted, and P finishes the room by itself), unless the
    /// room ends before.
    fn revoke(&self, py: Python<'_>, room: u64) -> PyResult<()> {
        py.detach(|| self.node.revoke_grant(room))
            .map_err(node_error)
    }

    /// Either side; idempotent. `code` is a reason code (ValueError otherwise). On P also for a
    /// room that was never offered: a D that waits for it is refused at once.
    fn abort(&self, py: Python<'_>, room: u64, code: &str) -> PyResult<()> {
        py.detach(|| self.node.abort_room(room, code))
            .map_err(node_error)
    }

    /// Up to `max` events. Exactly one of these ends each room: D: ("committed", room, payload,
    /// groups as for `finish`, stats_json), ("failed", room, code, message, retryable),
    /// ("aborted", room); P: ("released", room, "DONE" or code). Before it on D: ("announced",
    /// room) when P holds pages for a room without a grant, and the answers to `revoke`.
    fn poll<'py>(&self, py: Python<'py>, max: usize) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.node
            .poll_events(max)
            .into_iter()
            .map(|event| event_tuple(py, event))
            .collect()
    }

    /// {"gauges", "counters": by metric name with labels; "detail": more, for people; "healthy",
    /// "unhealthy_reason"}
    fn stats_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.node.stats_json())
    }

    /// Live rooms and the remembered transitions, of one room or of all.
    #[pyo3(signature = (room=None))]
    fn rooms_json(&self, py: Python<'_>, room: Option<u64>) -> String {
        py.detach(|| self.node.rooms_json(room))
    }

    /// Refuse OPENs of rooms not offered here; live rooms continue.
    fn drain(&self) {
        self.node.drain();
    }

    /// End all connections and threads; afterwards nothing writes the pool. Rooms still alive get
    /// no event. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.node.close());
    }
}

/// SGLang-compatible bootstrap server: PUT, GET, DELETE /route and GET /health, on a thread of its
/// own. `port` 0 = any free one.
#[pyclass(frozen, name = "BootstrapServer", module = "baton._native")]
pub struct PyBootstrapServer {
    server: Mutex<BootstrapServer>,
    port: u16,
}

#[pymethods]
impl PyBootstrapServer {
    /// Raises OSError if the address cannot be bound.
    #[new]
    #[pyo3(signature = (host, port, cluster_key=None, second_cluster_key=None))]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        cluster_key: Option<String>,
        second_cluster_key: Option<String>,
    ) -> PyResult<Self> {
        start_default_logs();
        let keys = cluster_key.map(|own| ClusterKeys::new(own, second_cluster_key));
        let server = py
            .detach(|| BootstrapServer::start(host, port, keys))
            .map_err(|err| {
                PyOSError::new_err(format!("bootstrap server on {host}:{port}: {err}"))
            })?;
        Ok(Self {
            port: server.port(),
            server: Mutex::new(server),
        })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Requests about routes that were refused so far.
    #[getter]
    fn refused(&self) -> u64 {
        self.server.lock().refused_total()
    }

    /// Those of them that were not signed with the cluster's key.
    #[getter]
    fn refused_unsigned(&self) -> u64 {
        self.server.lock().refused_unsigned()
    }

    /// True while its thread serves.
    #[getter]
    fn healthy(&self) -> bool {
        self.server.lock().is_serving()
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.server.lock().stop());
    }
}

/// Copies whole pages between two blocks of host memory, given by their addresses. Page ids are
/// int32, little endian. Returns the XXH3 of the bytes read, uint64 each, little endian.
///
/// Nothing is checked here: `baton.layers.host_pool` is the only caller, takes the addresses from
/// tensors that it keeps alive, and the ids from the allocators of both blocks.
#[pyfunction]
fn copy_pages<'py>(
    py: Python<'py>,
    source: usize,
    source_pages: &[u8],
    target: usize,
    target_pages: &[u8],
    page_bytes: usize,
) -> Bound<'py, PyBytes> {
    let pages: Vec<(usize, usize)> = page_ids(source_pages).zip(page_ids(target_pages)).collect();
    let hashes = py.detach(|| {
        let source = source as *const u8;
        let target = target as *mut u8;
        // SAFETY: the caller's promise, see above.
        unsafe { copy_hash_pages(target, source, page_bytes, &pages) }
    });
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}

fn page_ids(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|id| u32::from_le_bytes(*id) as usize)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("DuplicateRoom", m.py().get_type::<DuplicateRoom>())?;
    m.add_function(wrap_pyfunction!(copy_pages, m)?)?;
    m.add_class::<PyKvPool>()?;
    m.add_class::<PyTransferNode>()?;
    m.add_class::<PyBootstrapServer>()
}
