//! The KV pool: page-major memory that only its owner can write, with a generation per page.
//!
//! Life of a pool
//! 1. `KvPool::create` makes a memfd, maps it writable, then seals it: F_SEAL_FUTURE_WRITE | SHRINK
//!    | GROW | SEAL. From then on the kernel refuses every further writable mapping or write(2), in
//!    this process and in others.
//! 2. The owner's scheduler gives pages to requests: `begin_write` makes the page's generation odd.
//! 3. When the content is final, `seal_pages` makes it even. A generation never repeats, so (page,
//!    generation) names one content permanently.
//! 4. A peer on the same host receives the fd, maps it read-only (`RemotePool`) and copies pages
//!    between two reads of the generation (a seqlock across processes).
//!
//! File layout: header (4 KiB) | generation table (8 bytes per page) | data, aligned to 2 MiB. The
//! pages of a pool on a device are elsewhere (`device`): its file ends with the generation table.
//!
//! Invariants: the mapping is writable only in the process that created it (not in its forks:
//! MADV_DONTFORK); the file never shrinks, so a reader cannot be hit by SIGBUS; generations only
//! grow.

mod announced;
mod checksum;
pub mod device;
mod remote;
mod shared_memory;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};

pub use announced::AnnouncedPages;
pub use checksum::{SumCache, SumKind, weighted_sum};
use device::DevicePages;
pub use remote::{RemoteData, RemotePool};
pub use shared_memory::SharedMapping;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"BATONKV1");
pub(crate) const HEADER_BYTES: usize = 4096;
/// Data starts on a huge page boundary, so that MADV_HUGEPAGE can take effect where the kernel
/// allows it for shmem.
const DATA_ALIGN: usize = 2 << 20;
/// Seals that a reader requires before it maps a foreign pool.
pub(crate) const REQUIRED_SEALS: SealFlags = SealFlags::FUTURE_WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW);

#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error(
        "a KV pool needs at least one page of at least 64 bytes (a multiple of 8); got {num_pages} \
         pages of {page_bytes} bytes"
    )]
    Shape { num_pages: usize, page_bytes: usize },
    #[error("a KV pool of {num_pages} pages of {page_bytes} bytes does not fit the address space")]
    TooLarge { num_pages: usize, page_bytes: usize },
    #[error("cannot create the KV pool's memory ({what}, {bytes} bytes): {source}")]
    Create {
        what: &'static str,
        bytes: usize,
        source: io::Error,
    },
    #[error(
        "this kernel does not seal memfds against later writers (F_SEAL_FUTURE_WRITE, Linux 5.1 or \
         newer is needed): {source}; KV pages cannot be shared safely"
    )]
    Sealing { source: io::Error },
    #[error("page {page} is outside this pool of {num_pages} pages")]
    PageRange { page: i64, num_pages: usize },
    #[error("page ids come as little endian int32, but {0} bytes are no multiple of 4")]
    PageBytes(usize),
    #[error("the peer's KV pool cannot be mapped: {0}")]
    Foreign(String),
}

/// Offsets of the three parts of a pool file; both sides compute them from the same two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolShape {
    pub num_pages: usize,
    pub page_bytes: usize,
    pub data_off: usize,
    pub file_bytes: usize,
    /// The data part is not in the file.
    pub on_device: bool,
}

impl PoolShape {
    pub fn new(num_pages: usize, page_bytes: usize, on_device: bool) -> Result<Self, PoolError> {
        if num_pages == 0
            || num_pages > i32::MAX as usize
            || page_bytes < 64
            || !page_bytes.is_multiple_of(8)
        {
            return Err(PoolError::Shape {
                num_pages,
                page_bytes,
            });
        }
        let too_large = PoolError::TooLarge {
            num_pages,
            page_bytes,
        };
        let data_off = (HEADER_BYTES + num_pages * 8).next_multiple_of(DATA_ALIGN);
        let whole_bytes = num_pages
            .checked_mul(page_bytes)
            .and_then(|data| data.checked_add(data_off))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or(too_large)?;
        Ok(Self {
            num_pages,
            page_bytes,
            data_off,
            file_bytes: if on_device { data_off } else { whole_bytes },
            on_device,
        })
    }

    fn header_words(&self) -> [u64; 5] {
        [
            MAGIC,
            self.num_pages as u64,
            self.page_bytes as u64,
            self.data_off as u64,
            self.on_device.into(),
        ]
    }
}

/// Memory of one rank's KV pages. Page `p` is the bytes `[p * page_bytes, (p + 1) * page_bytes)` of
/// the data part.
pub struct KvPool {
    shape: PoolShape,
    map: SharedMapping,
    fd: OwnedFd,
    sums: SumCache,
    device: Option<Arc<dyn DevicePages>>,
}

impl KvPool {
    /// Create, map and seal. The memory is zero and is taken from the system page by page when
    /// first touched.
    pub fn create(num_pages: usize, page_bytes: usize) -> Result<Self, PoolError> {
        Self::new(num_pages, page_bytes, None)
    }

    /// Create a pool whose pages are on `device`.
    pub fn create_on(
        num_pages: usize,
        page_bytes: usize,
        device: Arc<dyn DevicePages>,
    ) -> Result<Self, PoolError> {
        Self::new(num_pages, page_bytes, Some(device))
    }

    fn new(
        num_pages: usize,
        page_bytes: usize,
        device: Option<Arc<dyn DevicePages>>,
    ) -> Result<Self, PoolError> {
        let shape = PoolShape::new(num_pages, page_bytes, device.is_some())?;
        let bytes = shape.file_bytes;
        let failed = |what, source| PoolError::Create {
            what,
            bytes,
            source,
        };
        let fd = new_memfd().map_err(|err| failed("memfd_create", err))?;
        ftruncate(&fd, bytes as u64).map_err(|err| failed("ftruncate", err.into()))?;
        let map = SharedMapping::writable(&fd, bytes).map_err(|err| failed("mmap", err))?;
        map.advise_owner(shape.data_off);
        for (i, word) in shape.header_words().into_iter().enumerate() {
            map.atomic_word(i * 8).store(word, Ordering::Relaxed);
        }
        seal_file(&fd)?;
        Ok(Self {
            shape,
            map,
            fd,
            sums: SumCache::new(num_pages),
            device,
        })
    }

    pub fn num_pages(&self) -> usize {
        self.shape.num_pages
    }

    pub fn page_bytes(&self) -> usize {
        self.shape.page_bytes
    }

    /// Bytes of the data part.
    pub fn nbytes(&self) -> usize {
        self.shape.num_pages * self.shape.page_bytes
    }

    /// Device that holds the pages' content, if it is not in host memory.
    pub fn device(&self) -> Option<&Arc<dyn DevicePages>> {
        self.device.as_ref()
    }

    /// Kind of this pool's checksums.
    pub fn sum_kind(&self) -> SumKind {
        match self.device {
            Some(_) => SumKind::Weighted,
            None => SumKind::Xxh3,
        }
    }

    /// Start of the data part of a pool in host memory; valid as long as the pool lives.
    pub fn data_ptr(&self) -> *mut u8 {
        assert!(!self.shape.on_device, "callers look for a device first");
        self.map.ptr(self.shape.data_off)
    }

    /// Start of one page of a pool in host memory. The id is checked; access to the bytes is
    /// governed by page ownership.
    pub(crate) fn page_ptr(&self, page: u32) -> *mut u8 {
        assert!(!self.shape.on_device, "callers look for a device first");
        let page = page as usize;
        assert!(
            page < self.shape.num_pages,
            "page ids are checked by `check_pages` when they enter"
        );
        self.map
            .ptr(self.shape.data_off + page * self.shape.page_bytes)
    }

    fn gen_word(&self, page: u32) -> &AtomicU64 {
        self.map.atomic_word(HEADER_BYTES + page as usize * 8)
    }

    /// The page's generation: even = content is final, odd = being written.
    pub fn generation(&self, page: u32) -> u64 {
        self.gen_word(page).load(Ordering::Acquire)
    }

    /// The first of these (page, generation) that this pool does not have, or no longer has.
    pub fn first_stale(&self, pages: &[(u32, u64)]) -> Option<u32> {
        let mut pages = pages.iter().copied();
        let stale = pages.find(|&(page, generation)| {
            page as usize >= self.num_pages() || self.generation(page) != generation
        });
        stale.map(|(page, _)| page)
    }

    /// The pages get a new owner: every (page, generation) announced before is void from now on.
    pub fn begin_write(&self, pages: &[u32]) {
        for &page in pages {
            let word = self.gen_word(page);
            let now = word.load(Ordering::Relaxed);
            word.store((now + 1) | 1, Ordering::Relaxed); // even -> +1, odd -> +2
        }
        fence(Ordering::SeqCst); // the odd numbers are visible before any byte of the new content
    }

    /// The pages' content is final. Idempotent. Returns the (even) generations.
    pub fn seal_pages(&self, pages: &[u32]) -> Vec<u64> {
        fence(Ordering::SeqCst); // the content is visible before the even numbers
        pages
            .iter()
            .map(|&page| {
                let word = self.gen_word(page);
                let sealed = (word.load(Ordering::Relaxed) + 1) & !1;
                word.store(sealed, Ordering::Release);
                sealed
            })
            .collect()
    }

    /// Parse little-endian int32 ids from Python and check them against this pool.
    pub fn check_pages(&self, bytes: &[u8]) -> Result<Vec<u32>, PoolError> {
        let (words, remainder) = bytes.as_chunks::<4>();
        if !remainder.is_empty() {
            return Err(PoolError::PageBytes(bytes.len()));
        }
        words
            .iter()
            .map(|&word| {
                let page = i32::from_le_bytes(word);
                u32::try_from(page)
                    .ok()
                    .filter(|&p| (p as usize) < self.shape.num_pages)
                    .ok_or(PoolError::PageRange {
                        page: page.into(),
                        num_pages: self.shape.num_pages,
                    })
            })
            .collect()
    }

    /// Page checksums computed so far, per (page, generation).
    pub fn sums(&self) -> &SumCache {
        &self.sums
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl std::fmt::Debug for KvPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "KvPool({} pages of {} bytes)",
            self.shape.num_pages, self.shape.page_bytes
        )?;
        f.write_str(if self.shape.on_device {
            " on a device"
        } else {
            ""
        })
    }
}

fn new_memfd() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // NOEXEC_SEAL is refused by kernels before 6.3 and asked for by later ones.
    memfd_create("baton-kv", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| memfd_create("baton-kv", flags))
        .map_err(Into::into)
}

fn seal_file(fd: &OwnedFd) -> Result<(), PoolError> {
    let seals = fcntl_add_seals(fd, REQUIRED_SEALS | SealFlags::SEAL)
        .and_then(|()| fcntl_get_seals(fd))
        .map_err(|err| PoolError::Sealing { source: err.into() })?;
    if !seals.contains(REQUIRED_SEALS) {
        let source = io::Error::other(format!("the kernel kept only {seals:?}"));
        return Err(PoolError::Sealing { source });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn generations_are_odd_while_written_and_never_repeat() {
        let pool = KvPool::create(4, 4096).unwrap();
        assert_eq!(pool.generation(2), 0);
        pool.begin_write(&[2]);
        assert_eq!(pool.generation(2), 1);
        pool.begin_write(&[2]); // a new owner before the first one sealed
        assert_eq!(pool.generation(2), 3);
        assert_eq!(pool.seal_pages(&[2]), vec![4]);
        assert_eq!(
            pool.seal_pages(&[2]),
            vec![4],
            "sealing a sealed page changes nothing"
        );
        assert_eq!(pool.generation(1), 0, "neighbors are untouched");
    }

    #[test]
    fn page_ids_are_checked_on_entry() {
        let pool = KvPool::create(4, 4096).unwrap();
        let ids = |v: &[i32]| v.iter().flat_map(|i| i.to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(pool.check_pages(&ids(&[0, 3])).unwrap(), vec![0, 3]);
        assert!(matches!(
            pool.check_pages(&ids(&[4])),
            Err(PoolError::PageRange { page: 4, .. })
        ));
        assert!(matches!(
            pool.check_pages(&ids(&[-1])),
            Err(PoolError::PageRange { page: -1, .. })
        ));
        assert!(matches!(
            pool.check_pages(&[1, 2, 3]),
            Err(PoolError::PageBytes(3))
        ));
        assert!(matches!(
            KvPool::create(0, 4096),
            Err(PoolError::Shape { .. })
        ));
        assert!(matches!(
            KvPool::create(1 << 30, 1 << 62),
            Err(PoolError::TooLarge { .. })
        ));
    }

    #[test]
    fn pool_file_cannot_be_written_by_other_means() {
        let pool = KvPool::create(4, 4096).unwrap();
        assert!(
            SharedMapping::writable(pool.fd(), pool.shape.file_bytes).is_err(),
            "a later writable mapping is refused by the kernel"
        );
        assert!(
            rustix::io::pwrite(pool.fd(), &[1], pool.shape.data_off as u64).is_err(),
            "so is write(2)"
        );
        assert!(
            ftruncate(pool.fd(), 4096).is_err(),
            "and the file cannot shrink under a reader"
        );
    }

    #[test]
    fn reader_sees_the_owners_bytes_and_generations() {
        let pool = KvPool::create(4, 4096).unwrap();
        pool.begin_write(&[3]);
        // SAFETY: page 3 is inside the pool and no other thread uses it in this test.
        unsafe { std::ptr::write_bytes(pool.page_ptr(3), 7, 4096) };
        pool.seal_pages(&[3]);
        let remote = RemotePool::map_pool(
            pool.fd().try_clone_to_owned().unwrap(),
            4,
            4096,
            RemoteData::Mapped,
        )
        .unwrap();
        assert_eq!(remote.generation(3), 2);
        // SAFETY: as above.
        assert_eq!(unsafe { remote.page_ptr(3).add(4095).read() }, 7);
        assert!(
            RemotePool::map_pool(
                pool.fd().try_clone_to_owned().unwrap(),
                5,
                4096,
                RemoteData::Mapped
            )
            .is_err(),
            "another shape is refused"
        );
    }

    #[test]
    fn reader_refuses_a_file_that_could_shrink() {
        let fd = memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 64 << 20).unwrap();
        let err = RemotePool::map_pool(fd, 4, 4096, RemoteData::Mapped).unwrap_err();
        assert!(err.to_string().contains("seal"), "{err}");
    }
}
