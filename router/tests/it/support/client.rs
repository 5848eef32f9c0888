//! The client: one connection, an answer as it comes, an answer whole.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::chat;

/// One connection; dropping it closes the socket.
pub struct Client {
    sender: hyper::client::conn::http1::SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
}

impl Client {
    pub async fn connect(addr: SocketAddr) -> Client {
        Client::over(TcpStream::connect(addr).await.expect("the router accepts")).await
    }

    pub async fn over<S>(stream: S) -> Client
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .expect("a connection");
        let task = tokio::spawn(async move {
            let _ = driver.await;
        });
        Client { sender, task }
    }

    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answering {
        let mut request = Request::builder().method(method).uri(path);
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Full::new(Bytes::copy_from_slice(body.as_bytes()));
        let request = request.body(body).expect("a request");
        let response = self.sender.send_request(request).await.expect("an answer");
        Answering { response }
    }

    pub async fn chat(&mut self, stream: bool) -> Answering {
        let body = chat(stream).to_string();
        self.send(Method::POST, "/v1/chat/completions", &[], &body)
            .await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The head is there, the body may still come.
pub struct Answering {
    pub response: Response<Incoming>,
}

impl Answering {
    pub async fn piece(&mut self) -> Option<Bytes> {
        let frame = self.response.frame().await?;
        frame.expect("no break").into_data().ok()
    }

    pub async fn read(self) -> Reply {
        let (head, body) = self.response.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        Reply {
            status: head.status.as_u16(),
            headers: head.headers,
            body,
        }
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).expect("text")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or("no code")
            .to_owned()
    }

    /// Payloads of the SSE events.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        let lines = text.lines();
        lines
            .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
            .collect()
    }

    /// Code of the one error event; panics unless it is the last before [DONE].
    pub fn error_event(&self) -> String {
        let events = self.events();
        let [.., error, done] = events.as_slice() else {
            panic!("too few events: {events:?}");
        };
        assert_eq!(done, "[DONE]");
        assert_eq!(
            events
                .iter()
                .filter(|e| e.starts_with("{\"error\""))
                .count(),
            1,
            "{events:?}"
        );
        assert_eq!(
            events.iter().filter(|e| *e == "[DONE]").count(),
            1,
            "{events:?}"
        );
        let error: Value = serde_json::from_str(error).expect("JSON");
        error["error"]["code"].as_str().expect("a code").to_owned()
    }
}
