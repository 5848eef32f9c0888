//! An answer to a stream request that takes its time: the head and comments now, the answer when it
//! opens.
//!
//! A prompt may wait in a queue longer than a proxy keeps a silent connection. After
//! --sse-keepalive-secs the client gets its 200 and a comment, again every so often, while dispatch
//! still works on the request and may still retry: comments are no answer. A later error with a
//! status becomes an error event.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body as AxumBody, to_bytes};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{StreamExt, TryFutureExt, stream};
use http::StatusCode;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::response::stream_error::StreamErrorForm;
use crate::response::stream_headers::{is_sse, sse_headers};

const COMMENT: &[u8] = b": keep-alive\n\n";

/// Comments for a client whose stream pauses.
#[derive(Debug)]
pub struct KeepAlive {
    every: Duration,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    /// `every`: the time between two comments; zero: none.
    pub fn new(every: Duration) -> Self {
        Self {
            every,
            timer: Box::pin(sleep(every)),
        }
    }

    /// The next comment, when it is due.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        if self.every.is_zero() {
            return Poll::Pending;
        }
        ready!(self.timer.as_mut().poll(cx));
        self.timer.as_mut().reset(Instant::now() + self.every);
        Poll::Ready(Bytes::from_static(COMMENT))
    }
}

type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// Wait for the answer; when it takes longer than `every`, answer with comments until it comes.
/// `error_form`: of an error that comes then.
pub async fn with_keepalive(
    mut answering: Answering,
    every: Duration,
    error_form: StreamErrorForm,
) -> Response {
    if let Ok(answer) = timeout(every, &mut answering).await {
        return answer;
    }
    // The first comment goes with the head.
    let first = stream::iter([AxumBody::from(COMMENT)]);
    let waiting = Some((answering, KeepAlive::new(every), error_form));
    let rest = stream::unfold(waiting, |waiting| async move {
        let (mut answering, mut keepalive, error_form) = waiting?;
        tokio::select! {
            biased;
            answer = &mut answering => Some((stream_of(answer, error_form), None)),
            comment = poll_fn(|cx| keepalive.poll(cx)) => {
                Some((comment.into(), Some((answering, keepalive, error_form))))
            }
        }
    });
    let bodies = first.chain(rest).flat_map(AxumBody::into_data_stream);
    let mut response = Response::new(AxumBody::from_stream(bodies));
    sse_headers(response.headers_mut());
    response
}

/// Stream of an answer: a JSON body, most likely an error, becomes one event.
fn stream_of(answer: Response, error_form: StreamErrorForm) -> AxumBody {
    let status = answer.status();
    if status == StatusCode::OK && is_sse(answer.headers()) {
        return answer.into_body();
    }
    let json = to_bytes(answer.into_body(), usize::MAX);
    AxumBody::from_stream(stream::once(
        json.map_ok(move |json| error_form.stream_of_body(status, &json)),
    ))
}
