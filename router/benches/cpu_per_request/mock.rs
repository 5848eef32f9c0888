//! Workers that answer at once, in the forms that routers of this family ask for.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::time::{Interval, interval};

/// Events of a stream.
pub const EVENTS: usize = 100;
/// A prompt that has this word is answered by a stream as an engine writes it: an event per step.
pub const PACED: &str = "paced";
const STEP: Duration = Duration::from_millis(20);

const ANSWER: &str = r#"{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}"#;
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"sglang","root":"m","max_model_len":1000000}]}"#;
const FACTS: &str = r#"{"model_path":"m","served_model_name":"m","tokenizer_path":"m","is_generation":true,"version":"0.5.7","tp_size":1,"dp_size":1,"max_total_num_tokens":1000000,"page_size":16,"loads":[]}"#;

pub async fn start() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let serve = service_fn(answer);
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), serve),
            );
        }
    });
    addr
}

type MockBody = http_body_util::combinators::BoxBody<Bytes, Infallible>;

async fn answer(request: Request<Incoming>) -> Result<Response<MockBody>, hyper::Error> {
    let text = match request.uri().path() {
        "/v1/chat/completions" => ANSWER,
        "/v1/models" => MODELS,
        _ => FACTS,
    };
    let body = request.into_body().collect().await?.to_bytes();
    let is_stream = |part: &[u8]| {
        part.windows(13).any(|w| w == b"\"stream\":true")
            || part.windows(14).any(|w| w == b"\"stream\": true")
    };
    // Some routers write the fields in another order: the end, too, is looked at.
    let ends = (
        &body[..body.len().min(60)],
        &body[body.len().saturating_sub(2000)..],
    );
    if text == ANSWER && (is_stream(ends.0) || is_stream(ends.1)) {
        let is_paced = body.windows(PACED.len()).any(|w| w == PACED.as_bytes());
        let events = Events {
            left: EVENTS,
            turn: false,
            steps: is_paced.then(|| interval(STEP)),
        };
        let mut response = Response::new(events.boxed());
        let kind = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", kind);
        return Ok(response);
    }
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())).boxed());
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert("content-type", kind);
    Ok(response)
}

/// `EVENTS` events, each written to the socket on its own.
struct Events {
    left: usize,
    turn: bool,
    steps: Option<Interval>,
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(steps) = &mut self.steps {
            ready!(steps.poll_tick(cx));
        } else {
            self.turn = !self.turn;
            if self.turn {
                cx.waker().wake_by_ref(); // hyper flushes when it has to wait
                return Poll::Pending;
            }
        }
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        let event = match self.left {
            0 => "data: [DONE]\n\n",
            1 => {
                "data: \
                 {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
            }
            _ => {
                "data: \
                 {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n"
            }
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(event.as_bytes())))))
    }
}
