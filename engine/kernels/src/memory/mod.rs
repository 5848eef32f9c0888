//! Memory for weights: aligned, and on large pages where the system gives them.
//!
//! Streaming weights from 2 MiB pages reads 36 GB/s where 4 KiB pages gave 28 (two cores of a Zen
//! 4): fewer page walks, and the hardware's prefetchers do not stop at page ends.

/// Buffers of a thread or a call that are used again.
pub(crate) mod scratch;

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

const LARGE_PAGE: usize = 2 << 20;
const LINE: usize = 64;
/// Blocks below this have ordinary memory: a large page costs more to clear than they to read.
const SMALL: usize = 64 << 10;
/// Blocks below half of this share a chunk, so that the matrices of a hundred experts do not end in
/// a hundred half-used large pages.
const CHUNK: usize = 32 << 20;

/// Memory on large pages for blocks that are allocated one after the other.
#[derive(Debug)]
struct Chunk {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain owned memory, of which each block is its owner's.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(bytes: usize, align: usize) -> Chunk {
        let size = bytes.next_multiple_of(align);
        let layout =
            Layout::from_size_align(size, align).expect("sizes come from tensors that exist");
        // SAFETY: the layout's size is above 0.
        let Some(at) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        if align == LARGE_PAGE {
            prefer_large_pages(at.as_ptr(), size);
        }
        Chunk { at, layout }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

/// The chunk that is being filled, and how many of its bytes are taken.
struct OpenChunk(Option<(Arc<Chunk>, usize)>);

static OPEN_CHUNK: Mutex<OpenChunk> = Mutex::new(OpenChunk(None));

impl OpenChunk {
    /// A chunk and the offset of a block in it that no other block overlaps.
    fn take_block(&mut self, bytes: usize) -> (Arc<Chunk>, usize) {
        let (chunk, taken) = match self.0.take() {
            Some((chunk, taken)) if taken + bytes <= CHUNK => (chunk, taken),
            _ => (Arc::new(Chunk::new(CHUNK, LARGE_PAGE)), 0),
        };
        self.0 = Some((Arc::clone(&chunk), taken + bytes));
        (chunk, taken)
    }
}

/// Owned 32-bit words, uninitialized until written.
#[derive(Debug)]
pub struct AlignedWords {
    at: NonNull<u32>,
    /// Freed with the last of its blocks.
    _chunk: Arc<Chunk>,
}

// SAFETY: plain owned memory.
unsafe impl Send for AlignedWords {}
// SAFETY: shared only for reading; writers state their own contract.
unsafe impl Sync for AlignedWords {}

impl AlignedWords {
    pub fn new(words: usize) -> AlignedWords {
        let bytes = (words.max(1) * 4).next_multiple_of(LINE);
        let (chunk, offset) = if bytes < SMALL {
            (Arc::new(Chunk::new(bytes, LINE)), 0)
        } else if bytes < CHUNK / 2 {
            let mut open = OPEN_CHUNK
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            open.take_block(bytes)
        } else {
            (Arc::new(Chunk::new(bytes, LARGE_PAGE)), 0)
        };
        // SAFETY: the chunk has `bytes` bytes from `offset` on, a multiple of a line.
        let at = unsafe { chunk.at.add(offset) }.cast();
        AlignedWords { at, _chunk: chunk }
    }

    pub fn as_ptr(&self) -> *mut u32 {
        self.at.as_ptr()
    }
}

#[cfg(target_os = "linux")]
fn prefer_large_pages(at: *mut u8, size: usize) {
    // SAFETY: whole pages of ours; the advice changes no content. Kernels without large pages
    // refuse it, which only costs speed.
    unsafe { libc::madvise(at.cast(), size, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn prefer_large_pages(_at: *mut u8, _size: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_every_size_are_aligned_and_apart() {
        let sizes = [
            1,
            100,
            SMALL / 4,
            SMALL / 4 + 1,
            1 << 20,
            CHUNK / 8,
            CHUNK / 4,
        ];
        let blocks: Vec<_> = sizes
            .iter()
            .cycle()
            .take(40)
            .map(|&words| {
                let block = AlignedWords::new(words);
                assert_eq!(block.as_ptr() as usize % LINE, 0);
                // SAFETY: the block has as many words.
                let contents = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), words) };
                let mark = block.as_ptr() as usize as u32;
                contents[0] = mark;
                contents[words - 1] = mark;
                (block, words, mark)
            })
            .collect();
        for (block, words, mark) in &blocks {
            // SAFETY: as above.
            let contents = unsafe { std::slice::from_raw_parts(block.as_ptr(), *words) };
            assert_eq!((contents[0], contents[words - 1]), (*mark, *mark));
        }
    }

    #[test]
    fn blocks_share_a_chunk_that_is_freed_with_the_last_of_them() {
        let mut open = OpenChunk(None);
        let (first, first_offset) = open.take_block(CHUNK / 4);
        let (second, second_offset) = open.take_block(CHUNK / 4);
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!((first_offset, second_offset), (0, CHUNK / 4));
        let (third, third_offset) = open.take_block(CHUNK / 2 + LINE);
        assert_eq!(third_offset, 0);
        let chunk = Arc::downgrade(&first);
        drop((first, third));
        assert!(chunk.upgrade().is_some());
        drop(second);
        assert!(chunk.upgrade().is_none());
    }
}
