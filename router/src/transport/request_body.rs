//! Body of a request to a worker, in pieces that other owners share.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body of known length in pieces, sent one after the other; hyper writes them with one vectored
/// write.
#[derive(Debug, Clone, Default)]
pub struct BodySegments {
    pub pieces: VecDeque<Bytes>,
    /// Bytes of all pieces.
    len: u64,
}

impl BodySegments {
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len() as u64;
            self.pieces.push_back(piece);
        }
    }
}

impl From<Bytes> for BodySegments {
    fn from(bytes: Bytes) -> Self {
        let mut parts = BodySegments::default();
        parts.push(bytes);
        parts
    }
}

impl FromIterator<Bytes> for BodySegments {
    fn from_iter<T: IntoIterator<Item = Bytes>>(pieces: T) -> Self {
        let mut parts = BodySegments::default();
        pieces.into_iter().for_each(|piece| parts.push(piece));
        parts
    }
}

impl Body for BodySegments {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let piece = self.pieces.pop_front();
        if let Some(piece) = &piece {
            self.len -= piece.len() as u64;
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.len == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len)
    }
}
