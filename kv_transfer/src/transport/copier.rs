//! The copy threads: checksums of published pages, and shm pulls.
//!
//! Jobs run in order of arrival on `copy_threads` threads, which sleep on a condition variable when there is none. The queue is
//! bounded by its feeders: a room has at most one hash job and `pulls_in_flight` pulls at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::fault::Faults;
use super::{Pull, PullEnd, PullError, copy};
use crate::code::Code;
use crate::pool::{KvPool, RemotePool};
use crate::protocol::Sealed;

pub enum Job {
    /// Pages of a room, as (index in the prompt, page, generation).
    Hash {
        room: u64,
        pages: Vec<(u32, u32, u64)>,
    },
    Pull {
        pull: Pull,
        from: Arc<RemotePool>,
    },
}

pub enum Done {
    Hashed {
        room: u64,
        sums: Vec<(u32, Sealed)>,
    },
    Pulled(PullEnd),
    /// A job panicked; the thread goes on, but the node is not healthy. A room whose checksums are lost must end.
    Panicked {
        what: String,
        room: Option<u64>,
    },
}

type Report = Arc<dyn Fn(Done) + Send + Sync>;

struct Queue {
    jobs: Mutex<(VecDeque<Job>, bool)>, // (jobs, closed)
    ready: Condvar,
}

/// Joined when closed or dropped.
pub struct Copier {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Copier {
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

    pub fn submit(&self, job: Job) {
        self.queue.jobs.lock().0.push_back(job);
        self.queue.ready.notify_one();
    }

    /// Drop what has not started, wait for what has. After this no thread writes the pool.
    pub fn close(&mut self) {
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

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}

impl Queue {
    fn next(&self) -> Option<Job> {
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
        while let Some(job) = queue.next() {
            let (room, pull) = match &job {
                Job::Hash { room, .. } => (Some(*room), None),
                Job::Pull { pull, .. } => (None, Some(pull.id)),
            };
            match catch_unwind(AssertUnwindSafe(|| self.work(job))) {
                Ok(done) => (self.report)(done),
                Err(panic) => {
                    let what = panic_text(panic.as_ref());
                    if let Some(id) = pull {
                        let result = Err(PullError::Failed(
                            Code::TransportBroken,
                            format!("internal: {what}"),
                        ));
                        (self.report)(Done::Pulled(PullEnd {
                            id,
                            bytes: 0,
                            result,
                        }));
                    }
                    (self.report)(Done::Panicked { what, room });
                }
            }
        }
    }

    fn work(&self, job: Job) -> Done {
        match job {
            Job::Hash { room, pages } => Done::Hashed {
                room,
                sums: pages
                    .iter()
                    .map(|&(index, page, generation)| (index, self.seal(page, generation)))
                    .collect(),
            },
            Job::Pull { pull, from } => {
                let mut bytes = 0;
                let result = self.pull(&pull, &from, &mut bytes);
                Done::Pulled(PullEnd {
                    id: pull.id,
                    bytes,
                    result,
                })
            }
        }
    }

    /// The page's checksum under this generation. If the page was re-owned meanwhile, the checksum is of no use, and neither is the
    /// generation: whoever pulls it finds it stale.
    fn seal(&self, page: u32, generation: u64) -> Sealed {
        let sum = self.pool.sums().get(page, generation).unwrap_or_else(|| {
            // SAFETY: page ids are checked when published; the range is inside our mapping, which `self.pool` keeps alive.
            let sum = unsafe { copy::hash(self.pool.page_ptr(page), self.pool.page_bytes()) };
            if self.pool.generation(page) == generation {
                self.pool.sums().put(page, generation, sum);
            }
            sum
        });
        Sealed {
            page,
            generation,
            sum,
        }
    }

    fn pull(&self, pull: &Pull, from: &RemotePool, bytes: &mut u64) -> Result<(), PullError> {
        let page_bytes = self.pool.page_bytes();
        for page in &pull.pages {
            if pull.cancel.load(Ordering::Relaxed) {
                return Err(PullError::Cancelled);
            }
            if self.faults.transport_broken() {
                return Err(PullError::Broken("fault injection".into()));
            }
            if let Some(ms) = self.faults.page_delay_ms() {
                std::thread::sleep(std::time::Duration::from_millis(ms)); // a test's slow link
            }
            check_generation(page.src, from.generation(page.src.page))?;
            from.prefault(page.src.page);
            // SAFETY: src is inside the peer's read-only mapping (ids are checked when announced), which `from` keeps alive; dst is a page
            // of our pool that the engine granted to this room and that nobody else uses until this pull has ended. The peer may
            // rewrite src meanwhile; the second look at the generation finds out.
            let mut sum = unsafe {
                copy::copy_hash(
                    self.pool.page_ptr(page.dst),
                    from.page_ptr(page.src.page),
                    page_bytes,
                )
            };
            if self.faults.flip_page() {
                // SAFETY: the same page, still ours alone.
                sum = unsafe { flip_and_rehash(self.pool.page_ptr(page.dst), page_bytes) };
            }
            if let Some(ms) = self.faults.copied_delay_ms() {
                std::thread::sleep(std::time::Duration::from_millis(ms)); // time for a test's new owner
            }
            check_generation(page.src, from.generation_after(page.src.page))?;
            check_sum(page.src, sum)?;
            *bytes += page_bytes as u64;
        }
        Ok(())
    }
}

/// Test only: damage a page that was just copied, as a broken link would have.
///
/// # Safety
/// `page` is writable for `len` bytes and nobody else uses it.
pub(super) unsafe fn flip_and_rehash(page: *mut u8, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let at = page.add(len / 2);
        at.write(at.read() ^ 4);
        copy::hash(page, len)
    }
}

pub(super) fn check_generation(src: Sealed, now: u64) -> Result<(), PullError> {
    if now == src.generation {
        return Ok(());
    }
    let why = format!(
        "page {} of the prefill node was generation {}, is {now}: it was given to another request",
        src.page, src.generation
    );
    Err(PullError::Failed(Code::StalePage, why))
}

pub(super) fn check_sum(src: Sealed, sum: u64) -> Result<(), PullError> {
    if sum == src.sum {
        return Ok(());
    }
    let why = format!(
        "page {} of the prefill node arrived with checksum {sum:016x}, announced was {:016x}",
        src.page, src.sum
    );
    Err(PullError::Failed(Code::Checksum, why))
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a thread panicked: {}", text.unwrap_or("no message"))
}
