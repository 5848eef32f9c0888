//! Shared mapping of a pool file: the owner's (writable) or a reader's (read-only).

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Unmapped when dropped.
pub struct SharedMapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain shared memory that stays valid until drop; all typed access through
// `atomic_word` is atomic, and raw page access is governed by page ownership (see the crate's
// invariants), not by this type.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    pub fn writable(fd: impl AsFd, len: usize) -> io::Result<Self> {
        Self::new(fd, len, ProtFlags::READ | ProtFlags::WRITE)
    }

    pub fn read_only(fd: impl AsFd, len: usize) -> io::Result<Self> {
        Self::new(fd, len, ProtFlags::READ)
    }

    fn new(fd: impl AsFd, len: usize, prot: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice cannot overlap live Rust
        // objects.
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Self {
            base: base.cast(),
            len,
        })
    }

    pub fn ptr(&self, offset: usize) -> *mut u8 {
        assert!(
            offset < self.len,
            "offsets come from PoolShape, which fits the file"
        );
        self.base.wrapping_add(offset)
    }

    /// The 8-byte word at `offset`, shared with other processes. A reader must only load from it.
    pub fn atomic_word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset + 8 <= self.len,
            "offsets come from PoolShape, which fits the file"
        );
        // SAFETY: in range, aligned, lives as long as `self`, and every access to header and
        // generations is atomic.
        unsafe { &*self.base.wrapping_add(offset).cast::<AtomicU64>() }
    }

    /// Advice for the owner's mapping; both are best effort and change no behavior that we rely
    /// on.
    pub fn advise_owner(&self, data_off: usize) {
        // SAFETY: advice on our own mapping; DONTFORK only affects children, which must not inherit
        // a writable pool.
        unsafe {
            let _ = madvise(self.base.cast::<c_void>(), self.len, Advice::LinuxDontFork);
            if data_off < self.len {
                let _ = madvise(
                    self.ptr(data_off).cast::<c_void>(),
                    self.len - data_off,
                    Advice::LinuxHugepage,
                );
            }
        }
    }

    /// Fill the page tables of a range in one call, so that the copy loop takes no fault per 4 KiB.
    /// Best effort (Linux 5.14 or newer).
    pub fn populate_read(&self, offset: usize, len: usize) {
        const MADV_POPULATE_READ: i32 = 22;
        let start = offset & !4095;
        let end = (offset + len).min(self.len);
        // SAFETY: the range lies inside our mapping; populating reads has no effect on its content.
        unsafe { libc::madvise(self.ptr(start).cast(), end - start, MADV_POPULATE_READ) };
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: base and len are mmap's; no reference into it can exist, since `atomic_word`
        // borrows self.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}
