//! JSON for the errors that hyper answers itself: requests that are no HTTP, and heads beyond a
//! limit.
//!
//! hyper has no hook for these answers. Each is one write of a head with the status 400, 414 or
//! 431, without a body and, unlike every answer of the routes, without `x-request-id`. Here such a
//! write gets both. An answer that hyper appends to one that is not yet written (pipelined
//! requests) stays as it is.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::RouteError;
use crate::observability::metrics::RouterMetrics;
use crate::server::header_timeout::HeaderReadTimeout;
use crate::server::http_util::{REQUEST_ID, new_request_id};

/// Most headers of a request, `host` included.
pub const MAX_HEADERS: usize = 100;
/// hyper's limit of a request's target [bytes].
const MAX_TARGET_BYTES: usize = 65_534;
const NO_BODY: &str = "content-length: 0\r\n";

/// A client's HTTP/1 connection: bare errors get bodies, and the timer of heads learns of what is
/// read.
pub struct HeadErrors<S> {
    stream: S,
    /// Rest of an answer that is written in the place of a bare one.
    answer: Bytes,
    max_header_bytes: usize,
    metrics: Arc<RouterMetrics>,
    /// Timer of heads, which begins with the first byte read.
    header_timeout: HeaderReadTimeout,
}

impl<S: AsyncWrite + Unpin> HeadErrors<S> {
    pub fn new(
        stream: S,
        max_header_bytes: usize,
        metrics: Arc<RouterMetrics>,
        header_timeout: HeaderReadTimeout,
    ) -> Self {
        Self {
            stream,
            answer: Bytes::new(),
            max_header_bytes,
            metrics,
            header_timeout,
        }
    }

    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.answer.is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(cx, &self.answer))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                len => self.answer.advance(len),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// JSON error in the place of `written`, if that is a bare error.
    fn answer_for(&self, written: &[u8]) -> Option<Bytes> {
        let status = written.strip_prefix(b"HTTP/1.")?.get(2..5)?;
        let err = match status {
            b"400" => RouteError::MalformedHead {
                problem: "the request line or a header is not valid HTTP/1.1",
            },
            b"414" => RouteError::TargetTooLong {
                limit_bytes: MAX_TARGET_BYTES,
            },
            b"431" => RouteError::HeadTooLarge {
                limit_bytes: self.max_header_bytes,
                limit_headers: MAX_HEADERS,
            },
            _ => return None,
        };
        let head = std::str::from_utf8(written).ok()?;
        let is_whole = head.find("\r\n\r\n") == Some(head.len() - 4);
        if !is_whole || !head.contains(NO_BODY) || head.contains(REQUEST_ID.as_str()) {
            return None;
        }
        self.metrics
            .requests
            .with_label_values(&["unmatched", "other", "4xx", err.code()])
            .inc();
        let (body, id) = (err.body(), new_request_id("req-"));
        let id = id.to_str().unwrap_or_default();
        let headers = format!(
            "content-type: application/json\r\ncontent-length: {}\r\n{REQUEST_ID}: {id}\r\n",
            body.len()
        );
        let head = head.replacen(NO_BODY, &headers, 1);
        Some(Bytes::from([head.as_bytes(), &body].concat()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeadErrors<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.header_timeout.note_read();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HeadErrors<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_answer(cx))?;
        let Some(answer) = self.answer_for(buf) else {
            return Pin::new(&mut self.stream).poll_write(cx, buf);
        };
        self.answer = answer; // goes out with the flush that follows each answer
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_answer(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_answer(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [buf] = bufs {
            return self.poll_write(cx, buf);
        }
        ready!(self.poll_answer(cx))?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
