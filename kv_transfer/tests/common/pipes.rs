//! Communicators within one process, with NCCL's manners: two sides, one order, no notice of the
//! other side's death or abort, and nothing but an abort or the timeout ends a call. `stuck` is
//! worse than NCCL at its worst: not even those do.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kv_transfer::transport::communicator::{
    CommBackend, CommError, CommRank, CommTimeouts, Communicator, SlabRing, Slabs,
};
use parking_lot::{Condvar, Mutex};

use super::device;
use kv_transfer::pool::device::DeviceSlabs;

static PIPES: Mutex<Option<HashMap<Vec<u8>, Arc<Pipe>>>> = Mutex::new(None);

#[derive(Default)]
struct Pipe {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    joined: usize,
    posted: Option<Vec<u8>>,
    aborted: [bool; 2],
}

impl Pipe {
    fn wait<T>(
        &self,
        limit: Duration,
        mut ready: impl FnMut(&mut State) -> Option<Result<T, CommError>>,
    ) -> Result<T, CommError> {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        loop {
            if let Some(done) = ready(&mut state) {
                self.changed.notify_all();
                return done;
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(CommError(format!("no peer joined within {limit:?}")));
            }
        }
    }
}

/// One side's maker of communicators.
pub struct Pipes {
    name: &'static str,
    stuck: Arc<(Mutex<bool>, Condvar)>,
    pub opened: Arc<AtomicUsize>,
}

impl Default for Pipes {
    fn default() -> Self {
        Self::named("gloo")
    }
}

impl Pipes {
    /// "nccl" works on the device.
    pub fn named(name: &'static str) -> Self {
        Self {
            name,
            stuck: Arc::default(),
            opened: Arc::default(),
        }
    }

    /// From now on receives and aborts of this side do not return, until `resume`.
    pub fn stick(&self, stuck: bool) {
        *self.stuck.0.lock() = stuck;
        self.stuck.1.notify_all();
    }
}

impl CommBackend for Pipes {
    fn name(&self) -> &'static str {
        self.name
    }

    fn works_on_device(&self) -> bool {
        self.name == "nccl"
    }

    fn unique_id(&self) -> Result<Vec<u8>, CommError> {
        let id = rand::random::<[u8; 16]>().to_vec();
        let pipe = Arc::<Pipe>::default();
        PIPES
            .lock()
            .get_or_insert_default()
            .insert(id.clone(), pipe);
        Ok(id)
    }

    fn open(
        &self,
        id: &[u8],
        rank: CommRank,
        slabs: &Slabs,
        timeouts: CommTimeouts,
    ) -> Result<Arc<dyn Communicator>, CommError> {
        let known = PIPES.lock().get_or_insert_default().get(id).cloned();
        let pipe = known.ok_or_else(|| CommError("an unknown id".into()))?;
        pipe.state.lock().joined += 1;
        pipe.wait(timeouts.open, |state| (state.joined == 2).then_some(Ok(())))?;
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(End {
            pipe,
            me: rank.number() as usize,
            slabs: match slabs {
                Slabs::Host(ring) => Staging::Host(ring.clone()),
                Slabs::Device(slabs) => Staging::Device(slabs.clone()),
            },
            limit: timeouts.op,
            stuck: self.stuck.clone(),
        }))
    }
}

enum Staging {
    Host(Arc<SlabRing>),
    Device(Arc<dyn DeviceSlabs>),
}

impl Staging {
    fn read(&self, slab: usize, bytes: usize) -> Vec<u8> {
        match self {
            Staging::Host(ring) => {
                // SAFETY: the slab has at least `bytes` and is this thread's.
                unsafe { std::slice::from_raw_parts(ring.ptr(slab), bytes) }.to_vec()
            }
            Staging::Device(slabs) => device::Slabs::of(slabs).bytes(slab).lock()[..bytes].to_vec(),
        }
    }

    fn write(&self, slab: usize, got: &[u8]) {
        match self {
            // SAFETY: as above.
            Staging::Host(ring) => unsafe {
                std::ptr::copy_nonoverlapping(got.as_ptr(), ring.ptr(slab), got.len());
            },
            Staging::Device(slabs) => {
                device::Slabs::of(slabs).bytes(slab).lock()[..got.len()].copy_from_slice(got);
            }
        }
    }
}

struct End {
    pipe: Arc<Pipe>,
    me: usize,
    slabs: Staging,
    limit: Duration,
    stuck: Arc<(Mutex<bool>, Condvar)>,
}

impl End {
    fn wait_while_stuck(&self) {
        let mut stuck = self.stuck.0.lock();
        while *stuck {
            self.stuck.1.wait(&mut stuck);
        }
    }

    fn wait(&self, mut ready: impl FnMut(&mut State) -> bool) -> Result<(), CommError> {
        let aborted = || Some(Err(CommError("aborted".into())));
        self.pipe.wait(self.limit, |state| {
            if state.aborted[self.me] {
                aborted()
            } else {
                ready(state).then_some(Ok(()))
            }
        })
    }
}

impl Communicator for End {
    fn send(&self, slab: usize, bytes: usize) -> Result<(), CommError> {
        let sent = self.slabs.read(slab, bytes);
        self.pipe.state.lock().posted = Some(sent);
        self.pipe.changed.notify_all();
        self.wait(|state| state.posted.is_none())
    }

    fn recv(&self, slab: usize, bytes: usize) -> Result<(), CommError> {
        self.wait_while_stuck();
        let mut got = None;
        self.wait(|state| {
            got = state.posted.take();
            got.is_some()
        })?;
        let got = got.unwrap_or_default();
        assert_eq!(got.len(), bytes, "a send met a receive of another size");
        self.slabs.write(slab, &got);
        Ok(())
    }

    fn abort(&self) -> Result<(), CommError> {
        self.wait_while_stuck();
        self.pipe.state.lock().aborted[self.me] = true;
        self.pipe.changed.notify_all();
        Ok(())
    }
}
