//! Client of a bootstrap server. One connection per request: a node sends one per peer, not one per
//! room.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use super::auth::{AUTH_HEADER, is_answer_signed, sign_request, unix_ms};
use super::{RankRegistration, RegisteredTopology};
use crate::protocol::ClusterKeys;

/// Answers are small; more is not a bootstrap server.
const MAX_ANSWER_BYTES: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("{0} did not answer within {1:?}")]
    Timeout(String, Duration),
    #[error("{0}: {1}")]
    Io(String, String),
    #[error("{url} answered {status}: {text}")]
    Status {
        url: String,
        status: StatusCode,
        text: String,
    },
    #[error("{0} answered nonsense: {1}")]
    Nonsense(String, String),
    /// The server did not prove that it belongs to this cluster.
    #[error("{0}")]
    Untrusted(String),
}

impl HttpError {
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            HttpError::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Answer to GET /route for one rank.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RankRoute {
    pub rank_ip: String,
    pub rank_port: u16,
    #[serde(default)]
    pub instance_id: String,
    /// Newest version of the transfer protocol that the rank speaks; 0: unknown.
    #[serde(default)]
    pub proto_ver: u32,
}

#[derive(Debug, Clone)]
pub struct BootstrapClient {
    pub host: String,
    pub port: u16,
    pub cluster_keys: Option<ClusterKeys>,
    /// Use no server of another host: without a cluster key its answers cannot be trusted.
    pub loopback_only: bool,
    /// For each whole request.
    pub timeout: Duration,
}

/// Addresses of a peer. With `loopback_only`, `Err` names the remedy when there are none on this
/// host.
pub async fn resolve(
    host: &str,
    port: u16,
    loopback_only: bool,
) -> Result<Vec<SocketAddr>, HttpError> {
    let addresses = tokio::net::lookup_host((host, port))
        .await
        .map_err(|err| HttpError::Io(format!("{host}:{port}"), err.to_string()))?;
    let usable: Vec<_> = addresses
        .filter(|addr| !loopback_only || addr.ip().to_canonical().is_loopback())
        .collect();
    if loopback_only && usable.is_empty() {
        return Err(HttpError::Untrusted(format!(
            "{host} is another host, and this node has no cluster key: give all engines the same --cluster-key, or \
             --insecure-kv where every host of the network is trusted"
        )));
    }
    Ok(usable)
}

impl BootstrapClient {
    /// (answer body, our address on that connection)
    async fn send_request(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(Bytes, IpAddr), HttpError> {
        let url = format!("http://{}:{}{path}", self.host, self.port);
        let exchange = self.exchange_messages(method, path, body, &url);
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(HttpError::Timeout(url.clone(), self.timeout)))
    }

    async fn exchange_messages(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        url: &str,
    ) -> Result<(Bytes, IpAddr), HttpError> {
        let io = |err: &dyn std::fmt::Display| HttpError::Io(url.to_owned(), err.to_string());
        let addrs = resolve(&self.host, self.port, self.loopback_only).await?;
        let stream = TcpStream::connect(&addrs[..])
            .await
            .map_err(|err| io(&err))?;
        let local = stream.local_addr().map_err(|err| io(&err))?.ip();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|err| io(&err))?;
        let connection = AbortOnDrop(tokio::spawn(connection));
        let mut request = Request::builder()
            .method(&method)
            .uri(path)
            .header("host", format!("{}:{}", self.host, self.port));
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        let key = self.cluster_keys.as_ref().map(ClusterKeys::own_key);
        let signed = key.map(|key| sign_request(key, method.as_str(), path, unix_ms(), &body));
        if let Some(signature) = &signed {
            request = request.header(AUTH_HEADER, signature);
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|err| io(&err))?;
        let response = sender.send_request(request).await.map_err(|err| io(&err))?;
        let status = response.status();
        let proof = response.headers().get(AUTH_HEADER).cloned();
        let answer = Limited::new(response.into_body(), MAX_ANSWER_BYTES)
            .collect()
            .await
            .map_err(|err| io(&err))?
            .to_bytes();
        drop(connection);
        // A refusal of our signature may be unsigned: the server has another key.
        if let (Some(key), Some(request)) = (key, &signed)
            && status != StatusCode::UNAUTHORIZED
        {
            let proof = proof.as_ref().and_then(|value| value.to_str().ok());
            if !is_answer_signed(key, request, status.as_u16(), &answer, proof) {
                return Err(HttpError::Untrusted(format!(
                    "{url} did not sign its answer with this cluster's key: give all engines the \
                     same --cluster-key"
                )));
            }
        }
        if !status.is_success() {
            let text = String::from_utf8_lossy(&answer)
                .trim()
                .chars()
                .take(300)
                .collect();
            return Err(HttpError::Status {
                url: url.to_owned(),
                status,
                text,
            });
        }
        Ok((answer, local))
    }

    async fn get_json<T: for<'de> Deserialize<'de>>(&self, path: &str) -> Result<T, HttpError> {
        let (body, _) = self.send_request(Method::GET, path, vec![]).await?;
        serde_json::from_slice(&body).map_err(|err| {
            HttpError::Nonsense(format!("{}:{}", self.host, self.port), err.to_string())
        })
    }

    pub async fn topology(&self) -> Result<RegisteredTopology, HttpError> {
        self.get_json("/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1")
            .await
    }

    pub async fn rank_route(&self, dp_rank: u32) -> Result<RankRoute, HttpError> {
        self.get_json(&format!(
            "/route?engine_rank=0&target_dp_group={dp_rank}&target_pp_rank=0"
        ))
        .await
    }

    /// Register; an empty `rank_ip` is filled with our address on the way to the server.
    pub async fn register_rank(&self, registration: &RankRegistration) -> Result<(), HttpError> {
        let mut registration = registration.clone();
        if registration.rank_ip.is_empty() {
            let (_, local) = self.send_request(Method::GET, "/health", vec![]).await?;
            registration.rank_ip = local.to_string();
        }
        let body = serde_json::to_vec(&registration).expect("a registration is plain data");
        self.send_request(Method::PUT, "/route", body)
            .await
            .map(|_| ())
    }

    pub async fn unregister_rank(&self, registration: &RankRegistration) -> Result<(), HttpError> {
        let body = serde_json::to_vec(registration).expect("a registration is plain data");
        self.send_request(Method::DELETE, "/route", body)
            .await
            .map(|_| ())
    }
}

struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
