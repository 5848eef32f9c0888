//! Per-thread working memory that is allocated once and reused: kernels allocate nothing in steady
//! state.

use std::cell::RefCell;

const LINE: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; LINE / 4]);

type Buffer = RefCell<Vec<Line>>;

thread_local! {
    /// For an item, on whichever thread it runs.
    static ITEM: Buffer = const { RefCell::new(Vec::new()) };
    /// For a call, on the thread that makes it; its items read it.
    static CALL: Buffer = const { RefCell::new(Vec::new()) };
}

/// Hands out cache-line-aligned pieces of one buffer.
pub struct ScratchAllocator {
    next: *mut u32,
    left: usize,
}

impl ScratchAllocator {
    /// The next `words` 32-bit words, aligned to 64 bytes. Contents are whatever was left there.
    pub fn take(&mut self, words: usize) -> *mut u32 {
        let rounded = padded(words);
        assert!(
            rounded <= self.left,
            "scratch asked for {rounded} words, {} are left",
            self.left
        );
        let piece = self.next;
        // SAFETY: `left` words follow `next` in the buffer, checked above.
        self.next = unsafe { self.next.add(rounded) };
        self.left -= rounded;
        piece
    }
}

/// `words` rounded up to whole cache lines: what one `take` uses.
pub const fn padded(words: usize) -> usize {
    words.next_multiple_of(LINE / 4)
}

/// Call `f` with at least `words` words of this thread's buffer for items (the sum of `padded`
/// sizes).
pub fn with_scratch<R>(words: usize, f: impl FnOnce(ScratchAllocator) -> R) -> R {
    ITEM.with(|buffer| with_buffer(buffer, words, f))
}

/// The same from the buffer for calls: items may use `with_scratch` meanwhile.
pub fn with_call_scratch<R>(words: usize, f: impl FnOnce(ScratchAllocator) -> R) -> R {
    CALL.with(|buffer| with_buffer(buffer, words, f))
}

fn with_buffer<R>(buffer: &Buffer, words: usize, f: impl FnOnce(ScratchAllocator) -> R) -> R {
    let mut buffer = buffer.borrow_mut();
    let lines = words.div_ceil(LINE / 4);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0; LINE / 4]));
    }
    f(ScratchAllocator {
        next: buffer.as_mut_ptr().cast(),
        left: buffer.len() * (LINE / 4),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_apart() {
        with_scratch(padded(5) + padded(40), |mut carver| {
            let a = carver.take(5) as usize;
            let b = carver.take(40) as usize;
            assert_eq!((a % 64, b % 64), (0, 0));
            assert_eq!(b - a, 64);
        });
    }
}
