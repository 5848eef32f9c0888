//! Memory of request bodies (--max-total-body-bytes): a body takes its bytes as they arrive and
//! gives them back when the last slice of it is dropped. Answers of workers that are read whole
//! before they are passed on count likewise.
//!
//! A body is refused before it is read if its Content-Length exceeds the free memory. Bytes are
//! taken as they arrive and not as announced: a client that announces a long body and sends nothing
//! takes no memory from others. Bodies that grow past the limit together are refused one by one,
//! and each refusal frees memory for the others, so some of them always complete.
//!
//! Resume buffers (`response::failover`) take their bytes from a budget of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use prometheus::Gauge;

use crate::error::RouteError;

/// Memory of one kind, shared by all requests.
#[derive(Debug)]
pub struct MemoryBudget {
    held: AtomicUsize,
    limit: usize,
    /// Shows what is held.
    gauge: Option<Gauge>,
}

impl MemoryBudget {
    pub fn new(limit: usize, gauge: Option<Gauge>) -> Arc<Self> {
        Arc::new(Self {
            held: AtomicUsize::new(0),
            limit,
            gauge,
        })
    }

    /// True if a body of this length could be held now.
    pub fn check(&self, bytes: usize) -> Result<(), RouteError> {
        let held_bytes = self.held.load(Ordering::Relaxed);
        if bytes > self.limit.saturating_sub(held_bytes) {
            return Err(RouteError::BodyMemoryFull {
                held_bytes,
                limit_bytes: self.limit,
            });
        }
        Ok(())
    }

    /// A share without bytes yet.
    pub fn share(self: &Arc<Self>) -> MemoryShare {
        MemoryShare {
            memory: self.clone(),
            bytes: 0,
        }
    }
}

/// Memory of one request; given back when dropped.
#[derive(Debug)]
pub struct MemoryShare {
    memory: Arc<MemoryBudget>,
    bytes: usize,
}

impl MemoryShare {
    pub fn grow(&mut self, bytes: usize) -> Result<(), RouteError> {
        let memory = &self.memory;
        let limit_bytes = self.memory.limit;
        let with_bytes = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= limit_bytes);
        let order = Ordering::Relaxed;
        let taken = memory.held.fetch_update(order, order, with_bytes);
        taken.map_err(|held_bytes| RouteError::BodyMemoryFull {
            held_bytes,
            limit_bytes,
        })?;
        memory
            .gauge
            .iter()
            .for_each(|gauge| gauge.add(bytes as f64));
        self.bytes += bytes;
        Ok(())
    }

    pub fn free(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.memory.held.fetch_sub(bytes, Ordering::Relaxed);
        self.memory
            .gauge
            .iter()
            .for_each(|gauge| gauge.sub(bytes as f64));
    }

    /// The body, which keeps this share as long as any slice of it lives.
    pub fn keep_with(self, body: Bytes) -> Bytes {
        Bytes::from_owner(HeldBody { body, _share: self })
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.free();
    }
}

struct HeldBody {
    body: Bytes,
    _share: MemoryShare,
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn share_is_given_back_with_the_last_slice_of_its_body() {
        let gauge = Gauge::new("g", "g").unwrap();
        let memory = MemoryBudget::new(10, Some(gauge.clone()));
        let mut share = memory.share();
        share.grow(6).unwrap();
        assert_eq!((memory.check(4), gauge.get()), (Ok(()), 6.0));
        let refused = memory.share().grow(5).unwrap_err();
        assert_eq!(
            (refused.code(), refused.status().as_u16()),
            ("body_memory_full", 503)
        );
        assert_eq!(memory.check(5), Err(refused));
        let body = share.keep_with(Bytes::from_static(b"abcdef"));
        let slice = body.slice(2..4);
        drop(body);
        assert_eq!((&slice[..], gauge.get()), (&b"cd"[..], 6.0));
        drop(slice);
        assert_eq!((memory.check(10), gauge.get()), (Ok(()), 0.0));
    }
}
