//! The body of an answer to a client: a worker's pieces pass through, and everything the request holds hangs on it.
//!
//! 1. `Relay::new` with what the leg already read, the rest of the answer, and the request's guards;
//! 2. hyper polls it as fast as the client reads: a slow client slows the worker down, nothing piles up here;
//! 3. the end: a clean one settles the record as ok; a break or silence ends a stream with one error event and [DONE];
//! 4. dropped before that (the client left): the guards close both legs' connections and free the load.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use router_core::Outcome;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

use crate::error::RouteError;
use crate::leg::{Opened, silent_error};
use crate::pair::PrefillLeg;
use crate::record::Record;
use crate::registry::LoadGuard;
use crate::sse::{Ending, Tail, epilogue};
use crate::upstream::{Answer, with_source};
use crate::usage::usage_in;

const DONE: &[u8] = b"\ndata: [DONE]\n\n";

/// The answer broke and cannot be mended by an event: the connection to the client is cut, so that it sees the break.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Cut(RouteError);

pub struct Relay {
    out: VecDeque<Bytes>,
    rest: Option<Answer>,
    /// `Some` for streams.
    tail: Option<Tail>,
    status: StatusCode,
    limit: Duration,
    last_piece: Instant,
    /// Armed while the worker is silent; re-armed lazily, so that a piece costs no timer operation.
    silence: Option<Pin<Box<Sleep>>>,
    guard: LoadGuard,
    /// Whether the policy wants to know what the worker counted.
    counts: bool,
    /// Of a JSON answer: its last piece.
    last: Option<Bytes>,
    prefill: Option<PrefillLeg>,
    record: Record,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Relay {
    pub fn new(
        opened: Opened,
        many: bool,
        limit: Duration,
        prefill: Option<PrefillLeg>,
        record: Record,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let mut relay = Self {
            out: VecDeque::with_capacity(opened.pieces.len().max(2)),
            rest: opened.rest,
            tail: opened.is_sse.then(|| Tail::new(many)),
            status: opened.status,
            limit,
            last_piece: Instant::now(),
            silence: None,
            guard: opened.guard,
            counts: opened.counts,
            last: None,
            prefill,
            record,
            _permit: permit,
        };
        for piece in opened.pieces {
            relay.take(piece);
        }
        if relay.rest.is_none() {
            relay.ended();
        }
        relay
    }

    fn take(&mut self, piece: Bytes) {
        match &mut self.tail {
            Some(tail) => tail.pass(piece, &mut self.out),
            None => {
                if self.counts {
                    self.last = Some(piece.clone());
                }
                self.out.push_back(piece);
            }
        }
    }

    /// The worker ended its answer properly; a stream must also have been finished.
    fn ended(&mut self) {
        self.rest = None;
        let ending = self.tail.as_ref().map(Tail::ending);
        match ending {
            Some(Ending::Open) => self.broke("ended the stream without finishing it".into()),
            _ => {
                if ending == Some(Ending::Finished) {
                    self.out.push_back(Bytes::from_static(DONE)); // a client may wait for it
                }
                let has_error = self.tail.as_ref().is_some_and(Tail::has_error);
                self.finish(if has_error { "error_event" } else { "ok" });
            }
        }
    }

    /// Once, when the answer is complete.
    fn count(&mut self) {
        if std::mem::take(&mut self.counts) {
            let told = match &self.tail {
                Some(tail) => tail.usage(),
                None => usage_in(self.last.iter()),
            };
            if let Some(usage) = told {
                self.guard.usage(usage);
            }
        }
    }

    fn finish(&mut self, outcome: &'static str) {
        self.count();
        self.record.end(self.status, outcome);
        if let Some(prefill) = self.prefill.take() {
            prefill.linger();
        }
    }

    /// The worker broke off. Returns the error if only a cut connection can tell the client.
    fn broke(&mut self, cause: String) {
        let err = RouteError::Upstream {
            role: self.guard.candidate.worker.role(),
            worker: self.guard.candidate.name.clone(),
            cause,
        };
        self.fail(err, "reset");
    }

    fn fail(&mut self, err: RouteError, reason: &'static str) {
        self.rest = None;
        let ending = self.tail.as_ref().map_or(Ending::Open, Tail::ending);
        if ending == Ending::Open {
            self.guard.settle(Outcome::Failure);
            let worker = &self.guard.candidate.worker;
            worker.suspect.notify_one();
            self.record.upstream_error(worker.role(), reason);
            self.record.end(self.status, err.code());
            tracing::warn!(rid = %self.record.rid, %err, "answer broke off");
            self.prefill = None;
        } else {
            self.finish("ok");
        }
        if self.tail.is_some()
            && let Some(epilogue) = epilogue(ending, &err)
        {
            self.out.push_back(epilogue);
        }
    }

    fn is_silent(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = self.last_piece + self.limit;
        let timer = self
            .silence
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        while timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return true;
            }
            timer.as_mut().reset(deadline);
        }
        false
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = this.out.pop_front() {
                let status = this.status;
                this.record.first_byte(status);
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            let Some(rest) = &mut this.rest else {
                return Poll::Ready(None);
            };
            match rest.poll_piece(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    this.last_piece = Instant::now();
                    this.take(piece);
                }
                Poll::Ready(None) => this.ended(),
                Poll::Ready(Some(Err(err))) => {
                    let cause = format!("answer broke off: {}", with_source(&err));
                    this.broke(cause.clone());
                    if this.tail.is_none() {
                        return Poll::Ready(Some(Err(Cut(RouteError::Upstream {
                            role: this.guard.candidate.worker.role(),
                            worker: this.guard.candidate.name.clone(),
                            cause,
                        }))));
                    }
                }
                Poll::Pending => {
                    if !this.is_silent(cx) {
                        return Poll::Pending;
                    }
                    let err = silent_error(&this.guard, this.limit);
                    this.fail(err.clone(), "silent");
                    if this.tail.is_none() {
                        return Poll::Ready(Some(Err(Cut(err))));
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_none() && self.out.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_some() || self.tail.is_some() {
            return SizeHint::default();
        }
        SizeHint::with_exact(self.out.iter().map(|piece| piece.len() as u64).sum())
    }
}
