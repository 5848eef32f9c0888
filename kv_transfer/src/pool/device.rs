//! Interface to pages on a device, implemented by the engine.
//!
//! A pool "on a device" keeps its header and generations in the sealed memfd; the content of its
//! pages is reached through a `DevicePages` only. Every call blocks until the device has finished,
//! and none returns while the device still uses the memory it was given: a reported end would
//! otherwise free memory that is still to be written. A device that does not finish is handled by
//! the implementation (the engine's ends the process).

use std::any::Any;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

type Done = Result<(), DeviceError>;

/// The content of one pool's pages. Called from several threads at a time, each with pages of its
/// own.
pub trait DevicePages: Send + Sync {
    /// Copy pages, one after the other, into host memory.
    fn gather(&self, pages: &[u32], to: &mut [u8]) -> Done;
    /// Copy host memory into pages, one after the other.
    fn scatter(&self, from: &mut [u8], pages: &[u32]) -> Done;
    /// The `Weighted` checksum of each page.
    fn sums(&self, pages: &[u32]) -> Result<Vec<u64>, DeviceError>;
    /// Pin host memory that many copies will use.
    fn pin(&self, memory: &mut [u8]) -> Done;
    fn unpin(&self, memory: &mut [u8]) -> Done;
    /// Staging memory on the device, for a communicator that works there.
    fn slabs(&self, slabs: usize, slab_bytes: usize) -> Result<Arc<dyn DeviceSlabs>, DeviceError>;
    /// Handle by which another process of this host opens these pages.
    fn handle(&self) -> Result<Vec<u8>, DeviceError>;
    /// Open a peer's pages, of the same size as ours, by its handle.
    fn open(&self, handle: &[u8], num_pages: usize) -> Result<Arc<dyn PeerPages>, DeviceError>;
}

/// Slabs on the device; a slab is used by one thread at a time.
pub trait DeviceSlabs: Any + Send + Sync {
    fn gather(&self, pages: &[u32], slab: usize) -> Done;
    fn scatter(&self, slab: usize, pages: &[u32]) -> Done;
}

/// A peer's pages, opened in this process.
pub trait PeerPages: Send + Sync {
    /// Copy the peer's pages `src` into our pages `dst`; returns the `Weighted` checksum of each
    /// page as it arrived.
    fn copy(&self, src: &[u32], dst: &[u32]) -> Result<Vec<u64>, DeviceError>;
    /// Release the peer's pages; any later copy fails. Waits for a running copy. Idempotent.
    fn close(&self) -> Done;
}
