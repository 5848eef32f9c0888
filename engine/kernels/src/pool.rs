//! A few threads that run the items of one job together with the caller.
//!
//! 1. [`set_threads`] starts n - 1 workers, which park.
//! 2. [`for_each`] opens a job, wakes them and works on it itself.
//! 3. Each takes items from a shared counter until none is left.
//! 4. The caller closes the job and waits only for workers that had joined it.
//!
//! A worker that wakes late finds the job closed and parks again: on a busy machine a job is never
//! held up by a thread that has not started, which costs fork-join runtimes whole scheduler ticks.
//!
//! After a job a worker looks for the next for at most `SPIN` before it parks, so that the many
//! short kernels of one step do not pay a wake-up each. Idle processes use no CPU.
//!
//! Items must be independent of each other: which thread runs an item is open, what it computes is
//! not.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// About four wake-ups of a sleeping thread on a virtual machine (5 us each).
const SPIN: Duration = Duration::from_micros(20);

const OPEN: u64 = 1 << 31;
const ACTIVE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;

type Work = *const (dyn Fn(usize) + Sync);

#[derive(Clone, Copy)]
struct Job {
    work: Work,
    items: usize,
}

/// `state` = epoch << 32 | open << 31 | number of workers inside the job.
struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    caller: UnsafeCell<Option<Thread>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Vec<AtomicBool>,
}

// SAFETY: `job` and `caller` are written by the one caller (it holds POOL's lock) while the job is
// closed and no worker is inside, and read by workers only between joining and leaving; `state`
// orders the two. `work` is Sync by its type.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is bound to a thread.
unsafe impl Send for Shared {}

struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

static POOL: Mutex<Option<Pool>> = Mutex::new(None);
static THREADS: AtomicUsize = AtomicUsize::new(1);

/// Threads that take part in a job, the caller included.
pub fn threads() -> usize {
    THREADS.load(Relaxed)
}

/// Use `n` threads from now on (0 counts as 1). Waits for a running job; joins the former workers.
///
/// Errors: the system refuses another thread. The pool then keeps to the calling thread.
pub fn set_threads(n: usize) -> std::io::Result<()> {
    let mut pool = POOL
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    *pool = None;
    THREADS.store(1, Relaxed);
    if n > 1 {
        *pool = Some(Pool::start(n - 1)?);
        THREADS.store(n, Relaxed);
    }
    Ok(())
}

/// Call `work` once for every item below `items`, on this thread and the workers; returns when all
/// are done.
///
/// Panics when an item did. A second caller at the same time, or an item that calls back, works
/// alone.
pub fn for_each(items: usize, work: &(dyn Fn(usize) + Sync)) {
    if items > 1
        && threads() > 1
        && let Ok(guard) = POOL.try_lock()
        && let Some(pool) = guard.as_ref()
    {
        return pool.run(items, work);
    }
    (0..items).for_each(work);
}

impl Pool {
    fn start(workers: usize) -> std::io::Result<Pool> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            caller: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: (0..workers).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(workers),
        };
        for index in 0..workers {
            let shared = Arc::clone(&pool.shared);
            let name = format!("kernels-{}", index + 1);
            pool.workers.push(
                thread::Builder::new()
                    .name(name)
                    .spawn(move || shared.serve(index))?,
            );
        }
        Ok(pool)
    }

    fn run(&self, items: usize, work: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: the job is closed and no worker is inside (the former run waited for that), so no
        // other thread reads the cells. The lifetime of `work` is cut short only for the compiler:
        // this function does not return, nor unwind (items run inside catch_unwind), before every
        // worker has left.
        let job = unsafe {
            let work: Work = std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Work>(work);
            *shared.job.get() = Some(Job { work, items });
            *shared.caller.get() = Some(thread::current());
            Job { work, items }
        };
        shared.next.store(0, Relaxed);
        let epoch = (shared.state.load(Relaxed) & !(EPOCH - 1)).wrapping_add(EPOCH);
        shared.state.store(epoch | OPEN, SeqCst);
        for (worker, sleeping) in self.workers.iter().zip(&shared.sleeping).take(items - 1) {
            if sleeping.load(SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.take_items(job);
        let mut inside = shared.state.fetch_and(!OPEN, AcqRel) & ACTIVE;
        let since = Instant::now();
        while inside != 0 {
            if since.elapsed() > SPIN {
                // The last worker to leave unparks us; a stale token only makes us look once more.
                thread::park();
            } else {
                std::hint::spin_loop();
            }
            inside = shared.state.load(Acquire) & ACTIVE;
        }
        assert!(
            !shared.panicked.swap(false, Relaxed),
            "a kernel item panicked; its message is above"
        );
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its items' panics, so joining cannot fail.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn serve(&self, index: usize) {
        let mut done = 0;
        while let Some(epoch) = self.await_job(index, done) {
            done = epoch;
            // SAFETY: we joined the job, so the caller keeps the cells as they are until we leave.
            let (job, caller) = unsafe { (*self.job.get(), (*self.caller.get()).clone()) };
            if let Some(job) = job {
                self.take_items(job);
            }
            let before = self.state.fetch_sub(1, AcqRel);
            if before & OPEN == 0
                && before & ACTIVE == 1
                && let Some(caller) = caller
            {
                caller.unpark();
            }
        }
    }

    /// Join the next job after epoch `done`; None when the pool stops.
    fn await_job(&self, index: usize, done: u64) -> Option<u64> {
        let mut since = Instant::now();
        loop {
            let state = self.state.load(SeqCst);
            let epoch = state / EPOCH;
            if self.stop.load(SeqCst) {
                return None;
            }
            if state & OPEN != 0 && epoch != done {
                if self
                    .state
                    .compare_exchange(state, state + 1, AcqRel, Relaxed)
                    .is_ok()
                {
                    return Some(epoch);
                }
                continue;
            }
            if since.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            // Announce first, then look again: either this worker sees the new job, or its caller
            // sees it sleeping.
            self.sleeping[index].store(true, SeqCst);
            if self.state.load(SeqCst) == state && !self.stop.load(SeqCst) {
                thread::park();
            }
            self.sleeping[index].store(false, SeqCst);
            since = Instant::now();
        }
    }

    fn take_items(&self, job: Job) {
        // SAFETY: `run` keeps the closure alive until all threads that took this job have left.
        let work = unsafe { &*job.work };
        let items = std::panic::AssertUnwindSafe(|| {
            loop {
                let item = self.next.fetch_add(1, Relaxed);
                if item >= job.items {
                    return;
                }
                work(item);
            }
        });
        if std::panic::catch_unwind(items).is_err() {
            self.panicked.store(true, Relaxed);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The pool is one per process, so its tests take turns.
    static TURN: Mutex<()> = Mutex::new(());

    pub(crate) fn with_threads(n: usize, f: impl FnOnce()) {
        let turn = TURN
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        set_threads(n).expect("threads start");
        f();
        set_threads(1).expect("back to one");
        drop(turn);
    }

    #[test]
    fn every_item_runs_exactly_once_for_any_number_of_threads() {
        for n in [1, 2, 3, 8] {
            with_threads(n, || {
                for items in [0, 1, 2, 7, 300] {
                    let counts: Vec<AtomicUsize> =
                        (0..items).map(|_| AtomicUsize::new(0)).collect();
                    for_each(items, &|i| {
                        counts[i].fetch_add(1, Relaxed);
                    });
                    assert!(
                        counts.iter().all(|c| c.load(Relaxed) == 1),
                        "{n} threads, {items} items"
                    );
                }
            });
        }
    }

    #[test]
    fn many_short_jobs_in_a_row_lose_nothing() {
        with_threads(3, || {
            let total = AtomicUsize::new(0);
            for _ in 0..20_000 {
                for_each(3, &|i| {
                    total.fetch_add(i + 1, Relaxed);
                });
            }
            assert_eq!(total.load(Relaxed), 20_000 * 6);
        });
    }

    #[test]
    fn panicking_item_reaches_the_caller_and_the_pool_lives_on() {
        with_threads(2, || {
            let broken = std::panic::catch_unwind(|| {
                for_each(8, &|i| assert_ne!(i, 5, "expected by this test"))
            });
            assert!(broken.is_err());
            let count = AtomicUsize::new(0);
            for_each(8, &|_| {
                count.fetch_add(1, Relaxed);
            });
            assert_eq!(count.load(Relaxed), 8);
        });
    }

    #[test]
    fn job_inside_a_job_runs_on_its_own_thread() {
        with_threads(2, || {
            let count = AtomicUsize::new(0);
            for_each(4, &|_| {
                for_each(4, &|_| {
                    count.fetch_add(1, Relaxed);
                });
            });
            assert_eq!(count.load(Relaxed), 16);
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn idle_workers_use_no_cpu() {
        /// User and system time of the workers: the tests' own threads have other names.
        fn cpu_ticks() -> u64 {
            let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
            let stats = tasks
                .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
            let workers = stats.filter(|stat| stat.contains("(kernels-"));
            let ticks = |stat: String| -> u64 {
                let fields: Vec<&str> = stat
                    .rsplit(')')
                    .next()
                    .unwrap_or("")
                    .split_whitespace()
                    .collect();
                fields[11..13]
                    .iter()
                    .map(|f| f.parse::<u64>().expect("ticks"))
                    .sum()
            };
            workers.map(ticks).sum()
        }
        with_threads(4, || {
            for_each(8, &|_| {});
            thread::park_timeout(Duration::from_millis(50));
            // Waking costs a tick now and then, above all on a busy machine; spinning costs them in
            // every window.
            let is_idle = (0..20).any(|_| {
                let before = cpu_ticks();
                thread::park_timeout(Duration::from_millis(500));
                cpu_ticks() - before <= 1
            });
            assert!(
                is_idle,
                "three spinning workers would have used up to 150 ticks"
            );
        });
    }
}
