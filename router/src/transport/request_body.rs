//! Body of a request to a worker, in pieces that other owners share.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body in pieces, sent one after the other.
#[derive(Debug, Clone, Default)]
pub struct BodySegments {
    pieces: Vec<Bytes>,
    len: u64,
}

impl BodySegments {
    pub fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.len += piece.len() as u64;
            self.pieces.push(piece);
        }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn into_pieces(self) -> Vec<Bytes> {
        self.pieces
    }
}

impl From<Bytes> for BodySegments {
    fn from(bytes: Bytes) -> Self {
        let mut parts = BodySegments::default();
        parts.push(bytes);
        parts
    }
}

/// Request body of known length in pieces; hyper writes them with one vectored write.
pub struct SegmentBody {
    pieces: std::vec::IntoIter<Bytes>,
    left: u64,
}

impl From<BodySegments> for SegmentBody {
    fn from(parts: BodySegments) -> Self {
        Self { left: parts.len(), pieces: parts.into_pieces().into_iter() }
    }
}

impl Body for SegmentBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let piece = self.pieces.next();
        if let Some(piece) = &piece {
            self.left -= piece.len() as u64;
        }
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
