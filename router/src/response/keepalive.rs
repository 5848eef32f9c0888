//! An answer to a stream request that takes its time: the head and comments now, the answer when it opens.
//!
//! A prompt may wait in a queue longer than a proxy keeps a silent connection. After --sse-keepalive-secs the client gets
//! its 200 and a comment, again every so often, while dispatch still works on the request and may still retry: comments
//! are no answer. What then comes as an error with a status becomes an error event.

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

pub const COMMENT: &[u8] = b": keep-alive\n\n";

type Answering = Pin<Box<dyn Future<Output = Response> + Send>>;

/// Wait for the answer; when it takes longer than `every`, answer with comments until it comes.
pub async fn with_keepalive(mut answering: Answering, every: Duration) -> Response {
    if let Ok(answer) = timeout(every, &mut answering).await {
        return answer;
    }
    let late = KeepAliveBody {
        state: State::Waiting(answering),
        first: true,
        every,
        timer: Box::pin(sleep(every)),
    };
    let mut response = Response::new(AxumBody::new(late));
    sse_headers(response.headers_mut());
    response
}

/// Headers of every stream: proxies must not keep or hold it back.
pub fn sse_headers(headers: &mut http::HeaderMap) {
    let kind = HeaderValue::from_static("text/event-stream");
    headers.entry(header::CONTENT_TYPE).or_insert(kind);
    let no = HeaderValue::from_static("no");
    headers.insert("x-accel-buffering", no);
    let cache = headers.entry(header::CACHE_CONTROL);
    cache.or_insert(HeaderValue::from_static("no-cache"));
}

struct KeepAliveBody {
    state: State,
    /// The first comment goes with the head.
    first: bool,
    every: Duration,
    timer: Pin<Box<Sleep>>,
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
        let comment = || Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
        if std::mem::take(&mut self.first) {
            return comment();
        }
        loop {
            match &mut self.state {
                State::Waiting(answering) => match answering.as_mut().poll(cx) {
                    Poll::Ready(answer) => {
                        let is_stream =
                            answer.status() == StatusCode::OK && is_sse(answer.headers());
                        let body = answer.into_body();
                        self.state = match is_stream {
                            true => State::Streaming(body),
                            false => State::Collecting(body, Vec::new()),
                        };
                    }
                    Poll::Pending => {
                        ready!(self.timer.as_mut().poll(cx));
                        let next = Instant::now() + self.every;
                        self.timer.as_mut().reset(next);
                        return comment();
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
                            self.state = State::Ended;
                            return Poll::Ready(Some(Ok(Frame::data(event))));
                        }
                    }
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }
}

/// A JSON body as one event; its line ends, which JSON allows between values only, would end the event's line.
fn event_of(json: &[u8]) -> Bytes {
    let line = json.iter().map(|b| match b {
        b'\n' | b'\r' => b' ',
        other => *other,
    });
    let end = b"\n\ndata: [DONE]\n\n".iter().copied();
    b"data: ".iter().copied().chain(line).chain(end).collect()
}
