//! Device memory of one process, for two nodes in one: ordinary memory that is reached as a GPU's
//! is. A closed peer's pages refuse, memory that is pinned must be unpinned, and copies can be made
//! to fail.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use kv_transfer::pool::device::{DeviceError, DevicePages, DeviceSlabs, PeerPages};
use kv_transfer::pool::weighted_sum;
use parking_lot::Mutex;

type Done = Result<(), DeviceError>;

static HANDLES: Mutex<Option<HashMap<u64, Weak<Memory>>>> = Mutex::new(None);

pub struct Memory {
    bytes: Mutex<Vec<u8>>,
    page_bytes: usize,
    handle: u64,
    this: Weak<Memory>,
    /// Operations that fail: "sums", "copy", "gather", "scatter".
    pub fails: Mutex<Vec<&'static str>>,
    pub pinned: AtomicUsize,
    /// Peers' pages opened and not closed.
    pub open: Arc<AtomicUsize>,
    pub opened: AtomicUsize,
    pub copies: AtomicUsize,
}

impl Memory {
    pub fn new(num_pages: usize, page_bytes: usize) -> Arc<Self> {
        let handle = rand::random();
        let memory = Arc::new_cyclic(|this| Self {
            bytes: Mutex::new(vec![0; num_pages * page_bytes]),
            page_bytes,
            handle,
            this: this.clone(),
            fails: Mutex::default(),
            pinned: AtomicUsize::new(0),
            open: Arc::default(),
            opened: AtomicUsize::new(0),
            copies: AtomicUsize::new(0),
        });
        HANDLES
            .lock()
            .get_or_insert_default()
            .insert(handle, Arc::downgrade(&memory));
        memory
    }

    pub fn write(&self, page: u32, content: &[u8]) {
        let at = page as usize * self.page_bytes;
        self.bytes.lock()[at..at + self.page_bytes].copy_from_slice(content);
    }

    pub fn read(&self, page: u32) -> Vec<u8> {
        let at = page as usize * self.page_bytes;
        self.bytes.lock()[at..at + self.page_bytes].to_vec()
    }

    fn may(&self, what: &'static str) -> Done {
        if self.fails.lock().contains(&what) {
            return Err(DeviceError(format!("injected failure: {what}")));
        }
        Ok(())
    }
}

impl DevicePages for Memory {
    fn gather(&self, pages: &[u32], to: &mut [u8]) -> Done {
        self.may("gather")?;
        for (part, &page) in to.chunks_mut(self.page_bytes).zip(pages) {
            part.copy_from_slice(&self.read(page));
        }
        Ok(())
    }

    fn scatter(&self, from: &mut [u8], pages: &[u32]) -> Done {
        self.may("scatter")?;
        for (part, &page) in from.chunks(self.page_bytes).zip(pages) {
            self.write(page, part);
        }
        Ok(())
    }

    fn sums(&self, pages: &[u32]) -> Result<Vec<u64>, DeviceError> {
        self.may("sums")?;
        Ok(pages
            .iter()
            .map(|&page| weighted_sum(&self.read(page)))
            .collect())
    }

    fn pin(&self, _memory: &mut [u8]) -> Done {
        self.pinned.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unpin(&self, _memory: &mut [u8]) -> Done {
        self.pinned.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn slabs(&self, slabs: usize, slab_bytes: usize) -> Result<Arc<dyn DeviceSlabs>, DeviceError> {
        let memory = self.this.upgrade().expect("it is being used");
        let slabs = (0..slabs)
            .map(|_| Mutex::new(vec![0; slab_bytes]))
            .collect();
        Ok(Arc::new(Slabs { memory, slabs }))
    }

    fn handle(&self) -> Result<Vec<u8>, DeviceError> {
        self.may("handle")?;
        Ok(self.handle.to_le_bytes().to_vec())
    }

    fn open(&self, handle: &[u8], num_pages: usize) -> Result<Arc<dyn PeerPages>, DeviceError> {
        self.may("open")?;
        let number = u64::from_le_bytes(handle.try_into().expect("a handle of ours"));
        let theirs = HANDLES.lock().get_or_insert_default().get(&number).cloned();
        let theirs = theirs.and_then(|theirs| theirs.upgrade());
        let theirs = theirs.ok_or_else(|| DeviceError("no device has that memory".into()))?;
        assert_eq!(
            theirs.bytes.lock().len(),
            num_pages * self.page_bytes,
            "another size"
        );
        self.open.fetch_add(1, Ordering::Relaxed);
        self.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(OpenedConnection {
            ours: self.this.upgrade().expect("it is being used"),
            theirs: Mutex::new(Some(theirs)),
        }))
    }
}

pub struct Slabs {
    memory: Arc<Memory>,
    slabs: Vec<Mutex<Vec<u8>>>,
}

impl Slabs {
    /// The slabs that a communicator sends and receives.
    pub fn of(slabs: &Arc<dyn DeviceSlabs>) -> &Slabs {
        let any: &dyn Any = slabs.as_ref();
        any.downcast_ref().expect("made by this file")
    }

    pub fn bytes(&self, slab: usize) -> &Mutex<Vec<u8>> {
        &self.slabs[slab]
    }
}

impl DeviceSlabs for Slabs {
    fn gather(&self, pages: &[u32], slab: usize) -> Done {
        self.memory.gather(pages, &mut self.slabs[slab].lock())
    }

    fn scatter(&self, slab: usize, pages: &[u32]) -> Done {
        self.memory.scatter(&mut self.slabs[slab].lock(), pages)
    }
}

struct OpenedConnection {
    ours: Arc<Memory>,
    theirs: Mutex<Option<Arc<Memory>>>,
}

impl PeerPages for OpenedConnection {
    fn copy(&self, src: &[u32], dst: &[u32]) -> Result<Vec<u64>, DeviceError> {
        let theirs = self.theirs.lock();
        let theirs = theirs
            .as_ref()
            .ok_or_else(|| DeviceError("the peer's pages are closed".into()))?;
        self.ours.may("copy")?;
        self.ours.copies.fetch_add(1, Ordering::Relaxed);
        for (&src, &dst) in src.iter().zip(dst) {
            self.ours.write(dst, &theirs.read(src));
        }
        self.ours.sums(dst)
    }

    fn close(&self) -> Done {
        if self.theirs.lock().take().is_some() {
            self.ours.open.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }
}
