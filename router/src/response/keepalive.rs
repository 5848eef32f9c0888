//! An answer to a stream request that takes its time: the head and comments now, the answer when it
//! opens.
//!
//! A prompt may wait in a queue longer than a proxy keeps a silent connection. After
//! --sse-keepalive-secs the client gets its 200 and a comment, again every so often, while dispatch
//! still works on the request and may still retry: comments are no answer. What then comes as an
//! error with a status becomes an error event.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body as AxumBody;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::response::sse::is_sse;

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
        Self { every, timer: Box::pin(sleep(every)) }
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
pub async fn with_keepalive(mut answering: Answering, every: Duration) -> Response {
    if let Ok(answer) = timeout(every, &mut answering).await {
        return answer;
    }
    let late = KeepAliveBody {
        state: State::Waiting(answering),
        first: Some(Bytes::from_static(COMMENT)),
        keepalive: KeepAlive::new(every),
    };
    let mut response = Response::new(AxumBody::new(late));
    sse_headers(response.headers_mut());
    response
}

/// Headers of every stream: proxies must not keep or hold it back.
pub fn sse_headers(headers: &mut http::HeaderMap) {
    headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("text/event-stream"));
    let no = HeaderValue::from_static("no");
    headers.insert("x-accel-buffering", no);
    let cache = headers.entry(header::CACHE_CONTROL);
    cache.or_insert(HeaderValue::from_static("no-cache"));
}

struct KeepAliveBody {
    state: State,
    /// The first comment goes with the head.
    first: Option<Bytes>,
    keepalive: KeepAlive,
}

enum State {
    Waiting(Answering),
    /// The answer is a stream.
    Streaming(AxumBody),
    /// The answer is a JSON body, most likely an error: it becomes one event.
    Collecting(AxumBody, Vec<u8>),
    Ended,
}

impl Body for KeepAliveBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(comment) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(comment))));
        }
        let this = &mut *self;
        loop {
            match &mut this.state {
                State::Waiting(answering) => match answering.as_mut().poll(cx) {
                    Poll::Ready(answer) => {
                        let is_stream =
                            answer.status() == StatusCode::OK && is_sse(answer.headers());
                        let body = answer.into_body();
                        this.state = match is_stream {
                            true => State::Streaming(body),
                            false => State::Collecting(body, Vec::new()),
                        };
                    }
                    Poll::Pending => {
                        let comment = ready!(this.keepalive.poll(cx));
                        return Poll::Ready(Some(Ok(Frame::data(comment))));
                    }
                },
                State::Streaming(body) => return Pin::new(body).poll_frame(cx),
                State::Collecting(body, text) => {
                    match ready!(Pin::new(body).poll_frame(cx)).transpose()? {
                        Some(frame) => {
                            if let Ok(data) = frame.into_data() {
                                text.extend_from_slice(&data);
                            }
                        }
                        None => {
                            let event = event_of(text);
                            this.state = State::Ended;
                            return Poll::Ready(Some(Ok(Frame::data(event))));
                        }
                    }
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }
}

/// A JSON body as one event; its line ends, which JSON allows between values only, would end the
/// event's line.
fn event_of(json: &[u8]) -> Bytes {
    let line = json.iter().map(|b| match b {
        b'\n' | b'\r' => b' ',
        other => *other,
    });
    let end = b"\n\ndata: [DONE]\n\n".iter().copied();
    b"data: ".iter().copied().chain(line).chain(end).collect()
}
