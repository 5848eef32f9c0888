//! Staged transports: the interface of a two-rank communicator, and the thread that drives one.
//!
//! A `Communicator` knows slabs, not pages. Its thread gathers pages into a slab before a send, and
//! scatters a received slab to the granted pages, taking their checksums. Slabs are host memory, or
//! on the device of the pool for a communicator that works there. The order of operations comes
//! from `state_machine::communicator`; every operation blocks, hence a thread per communicator. An
//! abort runs on a second thread, which may be leaked together with the first.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::checksum_copy;
use super::copy_threads::{
    check_sum, check_sums_on, corrupt_for_test, panic_text, scatter_to_device,
};
use super::fault_injection::Faults;
use crate::pool::device::{DeviceError, DevicePages, DeviceSlabs};
use crate::pool::{KvPool, SumKind};
use crate::reason_code::ReasonCode;
use crate::state_machine::PullError;
use crate::state_machine::communicator::{
    CommEnd, CommEvent, ReceiverEvent, SenderEvent, SlabReceive, SlabSend,
};
use crate::state_machine::decode::PullPage;

/// Alignment of slabs, for the copy kernels and pinned memory.
const SLAB_ALIGN: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommError(pub String);

impl From<DeviceError> for CommError {
    fn from(DeviceError(reason): DeviceError) -> Self {
        Self(reason)
    }
}

/// P is rank 0 and sends, D is rank 1 and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommRank {
    Sender,
    Receiver,
}

impl CommRank {
    pub fn number(self) -> u32 {
        match self {
            CommRank::Sender => 0,
            CommRank::Receiver => 1,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct CommTimeouts {
    pub open: Duration,
    /// Timeout of one send or receive.
    pub op: Duration,
}

/// Makes communicators of one kind. Called from the threads of communicators, several at a time.
pub trait CommBackend: Send + Sync {
    /// As in the list of transports: "gloo", "nccl".
    fn name(&self) -> &'static str;
    /// True if its communicators send from a device; a pool on a device then stages there.
    fn works_on_device(&self) -> bool;
    /// P: unique id by which both ranks find each other; sent over the control connection.
    fn unique_id(&self) -> Result<Vec<u8>, CommError>;
    /// Both: wait for the other rank, at most `timeouts.open`.
    fn open(
        &self,
        unique_id: &[u8],
        rank: CommRank,
        slabs: &Slabs,
        timeouts: CommTimeouts,
    ) -> Result<Arc<dyn Communicator>, CommError>;
}

/// Side of an open two-rank communicator.
///
/// The k-th `send` meets the peer's k-th `recv`; both are of the same size. Each blocks until it is
/// done, fails, or its timeout is over.
pub trait Communicator: Send + Sync {
    fn send(&self, slab: usize, bytes: usize) -> Result<(), CommError>;
    fn recv(&self, slab: usize, bytes: usize) -> Result<(), CommError>;
    /// Make the blocked call return soon. Called once, from another thread. May hang.
    fn abort(&self) -> Result<(), CommError>;
}

/// Staging memory of one communicator. Leaked with it if its abort hangs.
pub enum Slabs {
    Host(Arc<SlabRing>),
    Device(Arc<dyn DeviceSlabs>),
}

/// Slabs in host memory.
pub struct SlabRing {
    base: NonNull<u8>,
    layout: std::alloc::Layout,
    slab_bytes: usize,
    slabs: usize,
    /// Copies to and from this device's pages go through it.
    pinned_for: Option<Arc<dyn DevicePages>>,
}

// SAFETY: plain memory; which thread may touch which slab when is the order of operations of the
// communicator's thread.
unsafe impl Send for SlabRing {}
// SAFETY: as above.
unsafe impl Sync for SlabRing {}

impl SlabRing {
    pub fn new(slabs: usize, bytes: usize) -> Result<Self, CommError> {
        let slab_bytes = bytes.next_multiple_of(SLAB_ALIGN);
        let refused = |_| {
            CommError(format!(
                "{slabs} slabs of {bytes} bytes are no possible memory"
            ))
        };
        let layout = std::alloc::Layout::from_size_align(slab_bytes * slabs.max(1), SLAB_ALIGN)
            .map_err(refused)?;
        if slab_bytes == 0 {
            return Err(CommError("a slab of 0 bytes".into()));
        }
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(|| {
            CommError(format!("no memory for {slabs} slabs of {slab_bytes} bytes"))
        })?;
        Ok(Self {
            base,
            layout,
            slab_bytes,
            slabs,
            pinned_for: None,
        })
    }

    /// Pin the ring for fast copies from and to the device.
    fn pin(&mut self, device: &Arc<dyn DevicePages>) -> Result<(), DeviceError> {
        device.pin(self.bytes())?;
        self.pinned_for = Some(device.clone());
        Ok(())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the whole allocation, without other references: the ring is being created or
        // dropped.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }

    pub fn slabs(&self) -> usize {
        self.slabs
    }

    /// Bytes of a slab: the requested size, rounded up to `SLAB_ALIGN`.
    pub fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// Start of a slab; valid as long as the ring lives.
    pub fn ptr(&self, slab: usize) -> *mut u8 {
        assert!(
            slab < self.slabs,
            "the state machine hands out slabs of its ring"
        );
        self.base.as_ptr().wrapping_add(slab * self.slab_bytes)
    }
}

impl Drop for SlabRing {
    fn drop(&mut self) {
        if let Some(device) = self.pinned_for.take()
            && let Err(err) = device.unpin(self.bytes())
        {
            tracing::error!(%err, "slabs cannot be unpinned: they are kept");
            return;
        }
        // SAFETY: allocated with this layout; no reference to the ring is left.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// Ownership of the pages of one receive: the thread's, from the moment it begins to write, or the
/// control loop's, if it revokes them before.
#[derive(Debug, Default)]
pub struct WriteClaim(AtomicU8);

impl WriteClaim {
    const WRITING: u8 = 1;
    const REVOKED: u8 = 2;

    fn try_claim(&self, what: u8) -> bool {
        self.0
            .compare_exchange(0, what, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// True: the pages are not and will not be written.
    pub fn revoke(&self) -> bool {
        self.try_claim(Self::REVOKED)
    }

    fn begin_writing(&self) -> bool {
        self.try_claim(Self::WRITING)
    }
}

pub enum CommJob {
    /// Make the unique id, report it, and join as the sender.
    Host,
    /// Join as the receiver.
    Join(Vec<u8>),
    Send(SlabSend),
    Receive(SlabReceive, Arc<WriteClaim>),
}

/// Event of a communicator's thread for its state machine. After `Failed` the thread does nothing
/// more.
#[derive(Debug)]
pub enum CommReport {
    Sender(SenderEvent),
    Receiver(ReceiverEvent),
    Either(CommEvent),
}

pub struct CommContext {
    pub pool: Arc<KvPool>,
    pub faults: Arc<Faults>,
    pub backend: Arc<dyn CommBackend>,
    pub slabs: usize,
    pub slab_bytes: usize,
    pub timeouts: CommTimeouts,
    /// Kind of the peer's checksums.
    pub sums: SumKind,
}

type Report = Arc<dyn Fn(CommReport) + Send + Sync>;

/// State shared by the thread and those that end it.
#[derive(Default)]
pub struct CommGuard {
    stopped: AtomicBool,
    open: Mutex<Option<Arc<dyn Communicator>>>,
    /// True: no page is written any more. Held while pages are written.
    shut: Mutex<bool>,
}

impl CommGuard {
    /// After this returns the thread writes no page, whatever it still does. Waits for the pages of
    /// one slab at most.
    pub fn stop_writes(&self) {
        *self.shut.lock() = true;
    }
}

/// Thread of one communicator. Dropped without `abort_thread`, it ends after its current job.
pub struct CommThread {
    jobs: mpsc::Sender<CommJob>,
    guard: Arc<CommGuard>,
    report: Report,
    thread: JoinHandle<()>,
}

impl CommThread {
    pub fn start(context: CommContext, report: Report) -> std::io::Result<Self> {
        let (jobs, inbox) = mpsc::channel();
        let guard = Arc::new(CommGuard::default());
        let worker = Worker {
            context,
            guard: guard.clone(),
            report: report.clone(),
            slabs: None,
        };
        let thread = std::thread::Builder::new()
            .name("kv-comm".into())
            .spawn(move || worker.run(&inbox))?;
        Ok(Self {
            jobs,
            guard,
            report,
            thread,
        })
    }

    /// Jobs run in order. The queue is bounded by the slabs.
    pub fn submit_job(&self, job: CommJob) {
        let _ = self.jobs.send(job); // the thread ended and reported it
    }

    pub fn guard(&self) -> Arc<CommGuard> {
        self.guard.clone()
    }

    /// Start no further job, abort the one that runs, report `Ended` when the thread is gone, and
    /// drop `running`. All of it on a thread that is leaked if it hangs.
    pub fn abort_thread(self, running: mpsc::Sender<()>) {
        let Self {
            jobs,
            guard,
            report,
            thread,
        } = self;
        guard.stopped.store(true, Ordering::Release);
        drop(jobs);
        let body = move || {
            let open = guard.open.lock().clone();
            if let Some(communicator) = open
                && let Err(err) = communicator.abort()
            {
                tracing::warn!(%err, "the abort of a communicator failed: its thread ends by a timeout, or is leaked");
            }
            let _ = thread.join(); // its panics are caught and reported
            drop(guard.open.lock().take()); // its slabs are free before its end is known
            report(CommReport::Either(CommEvent::ThreadEnded));
            drop(running);
        };
        if let Err(err) = std::thread::Builder::new()
            .name("kv-comm-abort".into())
            .spawn(body)
        {
            tracing::error!(%err, "no thread to abort a communicator on: it is leaked");
        }
    }
}

struct Worker {
    context: CommContext,
    guard: Arc<CommGuard>,
    report: Report,
    slabs: Option<Slabs>,
}

impl Worker {
    fn run(mut self, inbox: &mpsc::Receiver<CommJob>) {
        while let Ok(job) = inbox.recv() {
            if self.guard.stopped.load(Ordering::Acquire) {
                break;
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| self.run_job(job)));
            let broken = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(CommError(reason))) => reason,
                Err(panic) => format!("internal: {}", panic_text(panic.as_ref())),
            };
            (self.report)(CommReport::Either(CommEvent::End(CommEnd::Failed(broken))));
            break;
        }
        *self.guard.open.lock() = None;
    }

    fn run_job(&mut self, job: CommJob) -> Result<(), CommError> {
        match job {
            CommJob::Host => {
                let id = self.context.backend.unique_id()?;
                (self.report)(CommReport::Sender(SenderEvent::Id(id.clone())));
                self.open(&id, CommRank::Sender)
            }
            CommJob::Join(id) => self.open(&id, CommRank::Receiver),
            CommJob::Send(send) => self.send(&send),
            CommJob::Receive(receive, claim) => self.receive(&receive, &claim),
        }
    }

    fn open(&mut self, id: &[u8], rank: CommRank) -> Result<(), CommError> {
        let slabs = self.make_slabs()?;
        let open = self
            .context
            .backend
            .open(id, rank, &slabs, self.context.timeouts)?;
        self.slabs = Some(slabs);
        *self.guard.open.lock() = Some(open);
        (self.report)(CommReport::Either(CommEvent::Opened));
        Ok(())
    }

    fn make_slabs(&self) -> Result<Slabs, CommError> {
        let slabs = self.context.slabs;
        let bytes = self.context.slab_bytes;
        match self.context.pool.device() {
            Some(device) if self.context.backend.works_on_device() => {
                Ok(Slabs::Device(device.slabs(slabs, bytes)?))
            }
            device => {
                let mut ring = SlabRing::new(slabs, bytes)?;
                if let Some(device) = device {
                    ring.pin(device)?;
                }
                Ok(Slabs::Host(Arc::new(ring)))
            }
        }
    }

    fn open_communicator(&self) -> Result<(Arc<dyn Communicator>, &Slabs), CommError> {
        let open = self.guard.open.lock().clone();
        open.zip(self.slabs.as_ref()).ok_or_else(|| {
            CommError("internal: an operation before the communicator is open".into())
        })
    }

    fn send(&self, send: &SlabSend) -> Result<(), CommError> {
        let ticket = send.ticket;
        let slab = send.slab;
        let pages = &send.pages[..];
        let (open, slabs) = self.open_communicator()?;
        let faults = &self.context.faults;
        faults.delay_page();
        let mut stale = self.context.pool.first_stale(pages);
        if stale.is_none() {
            let ids: Vec<u32> = pages.iter().map(|&(page, _)| page).collect();
            self.gather(&ids, slabs, slab)?;
            faults.wait_copied();
            fence(Ordering::SeqCst); // the bytes were read before the second check
            stale = self.context.pool.first_stale(pages);
        }
        if let Some(page) = stale {
            (self.report)(CommReport::Sender(SenderEvent::Stale { ticket, page }));
            return Ok(());
        }
        (self.report)(CommReport::Sender(SenderEvent::Gathered { ticket }));
        open.send(slab, pages.len() * self.context.pool.page_bytes())?;
        (self.report)(CommReport::Sender(SenderEvent::Sent { ticket }));
        Ok(())
    }

    /// `first_stale` checked the page ids. The scheduler may write the pages meanwhile: the second
    /// generation check detects that.
    fn gather(&self, pages: &[u32], slabs: &Slabs, slab: usize) -> Result<(), CommError> {
        let pool = &self.context.pool;
        let page_bytes = pool.page_bytes();
        let ring = match slabs {
            Slabs::Device(slabs) => return Ok(slabs.gather(pages, slab)?),
            Slabs::Host(ring) => ring,
        };
        if let Some(device) = pool.device() {
            // SAFETY: the slab holds this many pages (`CommContext`) and is used by this thread
            // only until it is sent.
            let to =
                unsafe { std::slice::from_raw_parts_mut(ring.ptr(slab), pages.len() * page_bytes) };
            return Ok(device.gather(pages, to)?);
        }
        for (i, &page) in pages.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let to = ring.ptr(slab).add(i * page_bytes);
                std::ptr::copy_nonoverlapping(pool.page_ptr(page), to, page_bytes);
            }
        }
        Ok(())
    }

    fn receive(&self, receive: &SlabReceive, claim: &WriteClaim) -> Result<(), CommError> {
        let ticket = receive.ticket;
        let slab = receive.slab;
        let count = receive.count;
        let pages = &receive.pages[..];
        let (open, slabs) = self.open_communicator()?;
        open.recv(slab, count * self.context.pool.page_bytes())?;
        if self.context.faults.transport_broken() {
            return Err(CommError("fault injection".into()));
        }
        let verdict = {
            let shut = self.guard.shut.lock();
            if *shut {
                Err((
                    ReasonCode::TransportBroken,
                    "the node is closing".to_owned(),
                ))
            } else if !claim.begin_writing() {
                Ok(())
            } else {
                match self.scatter(slabs, slab, pages) {
                    Ok(()) => Ok(()),
                    Err(PullError::Failed(code, reason)) => Err((code, reason)),
                    Err(PullError::Broken(reason)) => return Err(CommError(reason)),
                    Err(PullError::Cancelled) => Ok(()),
                }
            }
        };
        (self.report)(CommReport::Receiver(ReceiverEvent::Received {
            ticket,
            verdict,
        }));
        Ok(())
    }

    fn scatter(&self, slabs: &Slabs, slab: usize, pages: &[PullPage]) -> Result<(), PullError> {
        let pool = &self.context.pool;
        let faults = &self.context.faults;
        let kind = self.context.sums;
        let page_bytes = pool.page_bytes();
        let ring = match (slabs, pool.device()) {
            (Slabs::Device(slabs), Some(device)) => {
                let dst: Vec<u32> = pages.iter().map(|page| page.dst).collect();
                slabs
                    .scatter(slab, &dst)
                    .map_err(|err| PullError::Broken(err.to_string()))?;
                return check_sums_on(device.as_ref(), pages);
            }
            (Slabs::Host(ring), Some(device)) => {
                // SAFETY: the slab holds this many pages (`CommContext`), was just received and is
                // this thread's.
                let from = unsafe {
                    std::slice::from_raw_parts_mut(ring.ptr(slab), pages.len() * page_bytes)
                };
                return scatter_to_device(device.as_ref(), from, pages, kind, faults);
            }
            (Slabs::Host(ring), None) => ring,
            (Slabs::Device(_), None) => {
                return Err(PullError::Broken("slabs on a device, pages on none".into()));
            }
        };
        for (i, page) in pages.iter().enumerate() {
            let dst = pool.page_ptr(page.dst);
            // SAFETY: the slab was just received and is this thread's; dst is a page of our pool
            // that the engine granted to this pull, which does not end while the claim is ours.
            let mut sum = unsafe {
                checksum_copy::copy_hash_by(
                    kind,
                    dst,
                    ring.ptr(slab).add(i * page_bytes),
                    page_bytes,
                )
            };
            if faults.flip_page() {
                // SAFETY: the same page, still ours alone.
                sum = unsafe { corrupt_for_test(kind, dst, page_bytes) };
            }
            check_sum(page.src, sum)?;
        }
        Ok(())
    }
}
