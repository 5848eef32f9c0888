//! The copy threads: checksums of published pages, and the pulls of shm and cuda_ipc.
//!
//! Jobs run in order of arrival on `copy_threads` threads, which sleep on a condition variable when
//! there is none. The queue is bounded by its feeders: a room has at most one hash job and
//! `pulls_in_flight` pulls at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::fault_injection::Faults;
use super::{Pull, PullEnd, checksum_copy};
use crate::pool::device::{DeviceError, DevicePages, PeerPages};
use crate::pool::{KvPool, RemotePool, SumKind};
use crate::protocol::PageDigest;
use crate::reason_code::ReasonCode;
use crate::state_machine::decode::PullPage;
use crate::state_machine::{PromptPage, PullError};

pub enum CopyJob {
    /// Pages of a room, as (place in the prompt, page, generation).
    Hash {
        room: u64,
        pages: Vec<(PromptPage, u32, u64)>,
    },
    /// Copy pages from a peer's memory and verify them.
    Pull { pull: Pull, from: Arc<RemotePool> },
    /// The peer is disconnected: release its pages on the device, after the running copies.
    Close(Arc<RemotePool>),
}

pub enum CopyReport {
    /// Checksums of a room's pages, by place in the prompt.
    Hashed {
        room: u64,
        sums: Vec<(PromptPage, PageDigest)>,
    },
    /// A pull has ended.
    Pulled(PullEnd),
    /// A peer's pages on the device are released.
    Closed,
    /// A job panicked, or the device failed; the thread continues, but the node is unhealthy. A
    /// room whose checksums are lost must end.
    Broken { what: String, room: Option<u64> },
}

/// Bytes of one copy between devices; in between a pull can be stopped. Each copy takes the GIL and
/// waits for the device, which costs more than the copy itself below some 100 MiB.
pub(crate) const DEVICE_COPY_BYTES: usize = 128 << 20;

type Report = Arc<dyn Fn(CopyReport) + Send + Sync>;

struct Queue {
    jobs: Mutex<(VecDeque<CopyJob>, bool)>, // (jobs, closed)
    ready: Condvar,
}

/// Joined when closed or dropped.
pub struct CopyThreads {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl CopyThreads {
    pub fn start(
        pool: &Arc<KvPool>,
        threads: usize,
        faults: &Arc<Faults>,
        report: Report,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue {
            jobs: Mutex::default(),
            ready: Condvar::new(),
        });
        let threads = (0..threads.max(1))
            .map(|i| {
                let worker = Worker {
                    pool: pool.clone(),
                    faults: faults.clone(),
                    report: report.clone(),
                };
                let queue = queue.clone();
                std::thread::Builder::new()
                    .name(format!("kv-copy-{i}"))
                    .spawn(move || worker.run(&queue))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { queue, threads })
    }

    pub fn submit_job(&self, job: CopyJob) {
        self.queue.jobs.lock().0.push_back(job);
        self.queue.ready.notify_one();
    }

    /// Drop jobs that have not started and wait for the others. After this no thread writes the
    /// pool.
    fn stop_threads(&mut self) {
        {
            let mut jobs = self.queue.jobs.lock();
            jobs.0.clear();
            jobs.1 = true;
        }
        self.queue.ready.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // its jobs cannot panic through catch_unwind
        }
    }
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

impl Queue {
    fn next_job(&self) -> Option<CopyJob> {
        let mut jobs = self.jobs.lock();
        loop {
            if jobs.1 {
                return None;
            }
            if let Some(job) = jobs.0.pop_front() {
                return Some(job);
            }
            self.ready.wait(&mut jobs);
        }
    }
}

struct Worker {
    pool: Arc<KvPool>,
    faults: Arc<Faults>,
    report: Report,
}

impl Worker {
    fn run(&self, queue: &Queue) {
        while let Some(job) = queue.next_job() {
            let (room, pull) = match &job {
                CopyJob::Hash { room, .. } => (Some(*room), None),
                CopyJob::Pull { pull, .. } => (None, Some(pull.id)),
                CopyJob::Close(_) => (None, None),
            };
            match catch_unwind(AssertUnwindSafe(|| self.run_job(job))) {
                Ok(done) => (self.report)(done),
                Err(panic) => {
                    let message = panic_text(panic.as_ref());
                    if let Some(id) = pull {
                        let result = Err(PullError::Failed(
                            ReasonCode::TransportBroken,
                            format!("internal: {message}"),
                        ));
                        (self.report)(CopyReport::Pulled(PullEnd {
                            id,
                            bytes: 0,
                            result,
                        }));
                    }
                    (self.report)(CopyReport::Broken {
                        what: message,
                        room,
                    });
                }
            }
        }
    }

    fn run_job(&self, job: CopyJob) -> CopyReport {
        match job {
            CopyJob::Hash { room, pages } => match self.digests_of(&pages) {
                Ok(sums) => CopyReport::Hashed { room, sums },
                Err(err) => CopyReport::Broken {
                    what: format!("no checksums of {} pages: {err}", pages.len()),
                    room: Some(room),
                },
            },
            CopyJob::Pull { pull, from } => {
                let mut bytes = 0;
                let result = match (self.pool.device(), from.device()) {
                    (Some(own), Some(theirs)) => {
                        self.pull_on_device(&pull, &from, own.as_ref(), theirs.as_ref(), &mut bytes)
                    }
                    _ => self.pull_pages(&pull, &from, &mut bytes),
                };
                CopyReport::Pulled(PullEnd {
                    id: pull.id,
                    bytes,
                    result,
                })
            }
            CopyJob::Close(pool) => {
                if let Some(pages) = pool.device()
                    && let Err(err) = pages.close()
                {
                    tracing::error!(%err, "the pages of a disconnected peer cannot be closed");
                }
                CopyReport::Closed
            }
        }
    }

    /// Checksums of the pages under these generations. If a page was reassigned meanwhile, its
    /// checksum is useless, and so is the generation: a pull finds it stale.
    fn digests_of(
        &self,
        pages: &[(PromptPage, u32, u64)],
    ) -> Result<Vec<(PromptPage, PageDigest)>, DeviceError> {
        let cached_sums: Vec<Option<u64>> = pages
            .iter()
            .map(|&(_, page, generation)| self.pool.sums().get(page, generation))
            .collect();
        let missing: Vec<u32> = pages
            .iter()
            .zip(&cached_sums)
            .filter(|(_, cached_sum)| cached_sum.is_none())
            .map(|(&(_, page, _), _)| page)
            .collect();
        let mut computed_sums = match self.pool.device() {
            Some(device) if !missing.is_empty() => sums_of(device.as_ref(), &missing)?,
            Some(_) => Vec::new(),
            None => missing.iter().map(|&page| self.hash_page(page)).collect(),
        }
        .into_iter();
        let digest =
            pages
                .iter()
                .zip(cached_sums)
                .map(|(&(place, page, generation), cached_sum)| {
                    let sum = cached_sum
                        .or_else(|| computed_sums.next())
                        .unwrap_or_default();
                    if cached_sum.is_none() && self.pool.generation(page) == generation {
                        self.pool.sums().put(page, generation, sum);
                    }
                    let digest = PageDigest {
                        page,
                        generation,
                        sum,
                    };
                    (place, digest)
                });
        Ok(digest.collect())
    }

    fn hash_page(&self, page: u32) -> u64 {
        // SAFETY: page ids are checked when published; the range is inside our mapping, which
        // `self.pool` keeps alive.
        unsafe { checksum_copy::hash_page(self.pool.page_ptr(page), self.pool.page_bytes()) }
    }

    fn pull_pages(&self, pull: &Pull, from: &RemotePool, bytes: &mut u64) -> Result<(), PullError> {
        let page_bytes = self.pool.page_bytes();
        for page in &pull.pages {
            if pull.cancel.load(Ordering::Relaxed) {
                return Err(PullError::Cancelled);
            }
            if self.faults.transport_broken() {
                return Err(PullError::Broken("fault injection".into()));
            }
            self.faults.delay_page();
            check_generation(page.src, from.generation(page.src.page))?;
            from.prefault_page(page.src.page);
            // SAFETY: src is inside the peer's read-only mapping (ids are checked when announced),
            // which `from` keeps alive; dst is a page of our pool that the engine granted to this
            // room and that no other thread uses until this pull has ended. The peer may rewrite
            // src meanwhile; the second generation check detects that.
            let mut sum = unsafe {
                checksum_copy::copy_hash(
                    self.pool.page_ptr(page.dst),
                    from.page_ptr(page.src.page),
                    page_bytes,
                )
            };
            if self.faults.flip_page() {
                // SAFETY: the same page, still ours alone.
                sum = unsafe {
                    corrupt_for_test(SumKind::Xxh3, self.pool.page_ptr(page.dst), page_bytes)
                };
            }
            self.faults.wait_copied();
            check_generation(page.src, from.generation_after(page.src.page))?;
            check_sum(page.src, sum)?;
            *bytes += page_bytes as u64;
        }
        Ok(())
    }

    /// Pull by cuda_ipc: a few kernels read the peer's pages and write ours.
    fn pull_on_device(
        &self,
        pull: &Pull,
        from: &RemotePool,
        own: &dyn DevicePages,
        theirs: &dyn PeerPages,
        bytes: &mut u64,
    ) -> Result<(), PullError> {
        let page_bytes = self.pool.page_bytes();
        let broken = |err: DeviceError| PullError::Broken(err.to_string());
        for part in pull.pages.chunks((DEVICE_COPY_BYTES / page_bytes).max(1)) {
            if pull.cancel.load(Ordering::Relaxed) {
                return Err(PullError::Cancelled);
            }
            if self.faults.transport_broken() {
                return Err(PullError::Broken("fault injection".into()));
            }
            for page in part {
                self.faults.delay_page();
                check_generation(page.src, from.generation(page.src.page))?;
            }
            let src: Vec<u32> = part.iter().map(|page| page.src.page).collect();
            let dst: Vec<u32> = part.iter().map(|page| page.dst).collect();
            // The peer may rewrite src meanwhile; the second generation check detects that. dst are
            // pages that the engine granted to this room and that no other thread uses until this
            // pull has ended.
            let copied = theirs.copy(&src, &dst);
            let mut sums = copied
                .and_then(|sums| one_each(sums, part.len()))
                .map_err(broken)?;
            if self.faults.flip_page() {
                corrupt_on_device(own, dst[0], page_bytes).map_err(broken)?;
                sums = sums_of(own, &dst).map_err(broken)?;
            }
            self.faults.wait_copied();
            for page in part {
                check_generation(page.src, from.generation_after(page.src.page))?;
            }
            check_sums(part, &sums)?;
            *bytes += (part.len() * page_bytes) as u64;
        }
        Ok(())
    }
}

/// Checksums of these pages, one each.
fn sums_of(device: &dyn DevicePages, pages: &[u32]) -> Result<Vec<u64>, DeviceError> {
    one_each(device.sums(pages)?, pages.len())
}

fn one_each(sums: Vec<u64>, pages: usize) -> Result<Vec<u64>, DeviceError> {
    if sums.len() == pages {
        return Ok(sums);
    }
    let reason = format!("{} checksums of {pages} pages", sums.len());
    Err(DeviceError(reason))
}

/// Compare the pages on our device with their announced checksums.
pub(super) fn check_sums_on(device: &dyn DevicePages, pages: &[PullPage]) -> Result<(), PullError> {
    let dst: Vec<u32> = pages.iter().map(|page| page.dst).collect();
    let sums = sums_of(device, &dst).map_err(|err| PullError::Broken(err.to_string()))?;
    check_sums(pages, &sums)
}

pub(super) fn check_sums(pages: &[PullPage], sums: &[u64]) -> Result<(), PullError> {
    pages
        .iter()
        .zip(sums)
        .try_for_each(|(page, &sum)| check_sum(page.src, sum))
}

/// Scatter pages from host memory to our device. They are verified there if the device can compute
/// the announcer's checksum, else in host memory before.
pub(super) fn scatter_to_device(
    device: &dyn DevicePages,
    from: &mut [u8],
    pages: &[PullPage],
    kind: SumKind,
    faults: &Faults,
) -> Result<(), PullError> {
    let page_bytes = from.len() / pages.len().max(1);
    let broken = |err: DeviceError| PullError::Broken(err.to_string());
    if faults.flip_page() {
        from[page_bytes / 2] ^= 4; // a test's broken link
    }
    if kind == SumKind::Xxh3 {
        for (page, bytes) in pages.iter().zip(from.chunks(page_bytes)) {
            // SAFETY: a slice is readable.
            let sum = unsafe { checksum_copy::hash_by(kind, bytes.as_ptr(), bytes.len()) };
            check_sum(page.src, sum)?;
        }
    }
    let dst: Vec<u32> = pages.iter().map(|page| page.dst).collect();
    device.scatter(from, &dst).map_err(broken)?;
    if kind == SumKind::Weighted {
        check_sums_on(device, pages)?;
    }
    Ok(())
}

/// Fault injection: damage a page on a device.
fn corrupt_on_device(
    device: &dyn DevicePages,
    page: u32,
    page_bytes: usize,
) -> Result<(), DeviceError> {
    let mut content = vec![0; page_bytes];
    device.gather(&[page], &mut content)?;
    content[page_bytes / 2] ^= 4;
    device.scatter(&mut content, &[page])
}

/// Fault injection: damage a page that was just copied, and return its checksum.
///
/// # Safety
/// `page` is writable for `len` bytes and no other thread uses it.
pub(super) unsafe fn corrupt_for_test(kind: SumKind, page: *mut u8, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let at = page.add(len / 2);
        at.write(at.read() ^ 4);
        checksum_copy::hash_by(kind, page, len)
    }
}

fn check_generation(src: PageDigest, now: u64) -> Result<(), PullError> {
    if now == src.generation {
        return Ok(());
    }
    let reason = format!(
        "page {} of the prefill node was generation {}, is {now}: it was given to another request",
        src.page, src.generation
    );
    Err(PullError::Failed(ReasonCode::StalePage, reason))
}

pub(super) fn check_sum(src: PageDigest, sum: u64) -> Result<(), PullError> {
    if sum == src.sum {
        return Ok(());
    }
    let reason = format!(
        "page {} of the prefill node arrived with checksum {sum:016x}, announced was {:016x}",
        src.page, src.sum
    );
    Err(PullError::Failed(ReasonCode::Checksum, reason))
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a thread panicked: {}", text.unwrap_or("no message"))
}
