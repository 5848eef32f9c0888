//! A peer's pool, mapped read-only from the fd it sent us.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{fcntl_get_seals, fstat};

use super::device::PeerPages;
use super::{HEADER_BYTES, PoolError, PoolShape, REQUIRED_SEALS, SharedMapping};

/// Location of a peer's page content.
pub enum RemoteData {
    /// In the mapping. It outlives the peer: after the owner's death the bytes stay as they are.
    Mapped,
    /// On a device. It is not read any more after the owner's death: the driver may have freed it.
    Device(Arc<dyn PeerPages>),
}

/// Read-only view of another process's pool: its generations, and its pages.
pub struct RemotePool {
    shape: PoolShape,
    map: SharedMapping,
    data: RemoteData,
    populated: Vec<AtomicU64>, // one bit per page whose page-table entries were requested
}

impl RemotePool {
    /// Map `fd` as a pool of exactly this shape.
    ///
    /// Refuses a file whose seals would let its owner shrink it (we would die of SIGBUS) or let us
    /// write it.
    pub fn map_pool(
        fd: OwnedFd,
        num_pages: usize,
        page_bytes: usize,
        data: RemoteData,
    ) -> Result<Self, PoolError> {
        let foreign = |what: String| PoolError::Foreign(what);
        let on_device = matches!(data, RemoteData::Device(_));
        let shape = PoolShape::new(num_pages, page_bytes, on_device)?;
        let seals = fcntl_get_seals(&fd)
            .map_err(|err| foreign(format!("it is no sealable memfd: {err}")))?;
        if !seals.contains(REQUIRED_SEALS) {
            return Err(foreign(format!(
                "its seals are {seals:?}, {REQUIRED_SEALS:?} are needed"
            )));
        }
        let size = fstat(&fd).map_err(|err| foreign(err.to_string()))?.st_size;
        if size != shape.file_bytes as i64 {
            return Err(foreign(format!(
                "the file has {size} bytes, {num_pages} pages of {page_bytes} bytes need {}",
                shape.file_bytes
            )));
        }
        let map = SharedMapping::read_only(&fd, shape.file_bytes)
            .map_err(|err| foreign(err.to_string()))?;
        let header: Vec<u64> = (0..5)
            .map(|i| map.atomic_word(i * 8).load(Ordering::Relaxed))
            .collect();
        if header != shape.header_words() {
            return Err(foreign(format!(
                "its header says {header:?}, expected {:?}",
                shape.header_words()
            )));
        }
        let populated = (0..num_pages.div_ceil(64))
            .map(|_| AtomicU64::new(0))
            .collect();
        Ok(Self {
            shape,
            map,
            data,
            populated,
        })
    }

    pub fn num_pages(&self) -> usize {
        self.shape.num_pages
    }

    pub fn page_bytes(&self) -> usize {
        self.shape.page_bytes
    }

    /// The peer's pages, if they are on a device.
    pub fn device(&self) -> Option<&Arc<dyn PeerPages>> {
        match &self.data {
            RemoteData::Mapped => None,
            RemoteData::Device(pages) => Some(pages),
        }
    }

    /// Generation before the copy. Pairs with the owner's release in `seal_pages`.
    pub fn generation(&self, page: u32) -> u64 {
        self.generation_word(page).load(Ordering::Acquire)
    }

    /// Generation after the copy: all our reads of the page happen before this load.
    pub fn generation_after(&self, page: u32) -> u64 {
        fence(Ordering::SeqCst);
        self.generation_word(page).load(Ordering::Relaxed)
    }

    fn generation_word(&self, page: u32) -> &AtomicU64 {
        self.map.atomic_word(HEADER_BYTES + page as usize * 8)
    }

    pub(crate) fn page_ptr(&self, page: u32) -> *const u8 {
        assert!(!self.shape.on_device, "callers look for a device first");
        assert!(
            (page as usize) < self.shape.num_pages,
            "announced page ids are checked when PROGRESS arrives"
        );
        self.map.ptr(self.page_offset(page))
    }

    fn page_offset(&self, page: u32) -> usize {
        self.shape.data_off + page as usize * self.shape.page_bytes
    }

    /// Ask the kernel once per page to fill our page tables for it.
    pub(crate) fn prefault_page(&self, page: u32) {
        let word = &self.populated[page as usize / 64];
        let bit = 1u64 << (page % 64);
        if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.map
                .populate_read(self.page_offset(page), self.shape.page_bytes);
        }
    }
}

impl std::fmt::Debug for RemotePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "RemotePool({} pages of {} bytes)",
            self.shape.num_pages, self.shape.page_bytes
        )
    }
}

impl Drop for RemotePool {
    fn drop(&mut self) {
        if let RemoteData::Device(pages) = &self.data
            && let Err(err) = pages.close()
        {
            tracing::error!(%err, "a peer's pages on the device cannot be closed");
        }
    }
}
