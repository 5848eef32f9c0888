//! Frames on a byte stream, and the HELLO exchange that opens a connection.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    Channel, ClusterKeys, FrameError, FrameOpener, FrameSealer, GroupId, HEADER_BYTES, Handshake,
    Hello, MAX_HELLO_BYTES, MIN_VERSION, Msg, VERSION, frame_len, unknown_group,
};
use crate::reason_code::ReasonCode;

/// Timeout of a peer's half of the HELLO exchange.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(1);
pub const NONCE_BYTES: usize = 16;
/// Timeout of the rest of a frame that has begun, on connections without heartbeats.
const FRAME_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why a connection was not established or ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ConnectionError {
    pub code: ReasonCode,
    pub reason: String,
}

impl ConnectionError {
    pub fn new(code: ReasonCode, reason: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.into(),
        }
    }

    /// The peer does not answer, or has closed the connection.
    pub fn peer_dead(reason: impl Into<String>) -> Self {
        Self::new(ReasonCode::PeerDead, reason)
    }

    /// The peer broke the protocol, or the transport does not work.
    pub fn transport_broken(reason: impl Into<String>) -> Self {
        Self::new(ReasonCode::TransportBroken, reason)
    }
}

impl From<io::Error> for ConnectionError {
    fn from(err: io::Error) -> Self {
        Self::peer_dead(err.to_string())
    }
}

impl From<FrameError> for ConnectionError {
    fn from(err: FrameError) -> Self {
        let code = if matches!(err, FrameError::Auth(_)) {
            ReasonCode::Auth
        } else {
            ReasonCode::TransportBroken
        };
        Self::new(code, err.to_string())
    }
}

/// Read one frame of at most `limit` bytes. An error leaves the stream unusable.
pub async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<Vec<u8>, ConnectionError> {
    let len = read_len(stream, limit).await?;
    read_body(stream, len).await
}

/// Read one frame on a stream without heartbeats: it must begin within `idle`.
pub async fn read_small_frame(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
    idle: Duration,
) -> Result<Vec<u8>, ConnectionError> {
    let silent = |what: &str, time| ConnectionError::peer_dead(format!("{what} for {time:?}"));
    let len = tokio::time::timeout(idle, read_len(stream, limit))
        .await
        .unwrap_or_else(|_| Err(silent("no frame", idle)))?;
    tokio::time::timeout(FRAME_TIMEOUT, read_body(stream, len))
        .await
        .unwrap_or_else(|_| Err(silent("half a frame", FRAME_TIMEOUT)))
}

async fn read_len(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<usize, ConnectionError> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await?;
    match frame_len(header)? {
        len if len > limit => Err(ConnectionError::transport_broken(format!(
            "a frame of {len} bytes, the limit is {limit} here"
        ))),
        len => Ok(len),
    }
}

async fn read_body(
    stream: &mut (impl AsyncRead + Unpin),
    len: usize,
) -> Result<Vec<u8>, ConnectionError> {
    let mut frame = vec![0; len];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn read_hello_frame(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<Vec<u8>, ConnectionError> {
    read_small_frame(stream, MAX_HELLO_BYTES, HELLO_TIMEOUT).await
}

/// An open connection's peer and keys.
pub struct OpenedConnection {
    pub peer: Hello,
    pub sealer: FrameSealer,
    pub opener: FrameOpener,
}

/// Identity that a node sends in every HELLO.
#[derive(Debug, Clone)]
pub struct Identity {
    pub cluster_keys: Option<ClusterKeys>,
    /// Template: `channel`, `nonce` and `expected_inc` are filled in per connection.
    pub hello: Hello,
}

impl Identity {
    /// Refuse a request for pages of a group that this node does not have.
    pub fn check_group(&self, message: &str, group: GroupId) -> Result<(), ConnectionError> {
        let layout = &self.hello.layout;
        if layout.groups.iter().any(|own| own.id == group) {
            return Ok(());
        }
        let reason = unknown_group(group, &layout.group_ids());
        let reason = format!("{message} names {reason}");
        Err(ConnectionError::transport_broken(reason))
    }

    /// Handshake with the signing key.
    fn handshake(&self) -> Handshake<'_> {
        Handshake::new(
            self.cluster_keys
                .as_ref()
                .map(|keys| keys.own_key().as_bytes()),
        )
    }

    /// Opens a HELLO with one of the accepted keys. Returns the handshake of that key, which signs
    /// the answer.
    fn open_hello(&self, frame: &[u8], nonce: &[u8]) -> Result<(Handshake<'_>, Msg), FrameError> {
        let own = self.handshake();
        let first = match own.open_hello(frame, nonce) {
            Ok(msg) => return Ok((own, msg)),
            Err(err) => err,
        };
        let others = self
            .cluster_keys
            .iter()
            .flat_map(|keys| keys.accepted_keys().skip(1));
        let opened = others
            .map(|key| Handshake::new(Some(key.as_bytes())))
            .find_map(|handshake| {
                let msg = handshake.open_hello(frame, nonce).ok()?;
                Some((handshake, msg))
            });
        opened.ok_or(first)
    }

    fn hello_message(&self, channel: Channel, nonce: &[u8], expected_inc: Option<&str>) -> Msg {
        Msg::Hello(Hello {
            channel,
            nonce: nonce.to_vec(),
            expected_inc: expected_inc.map(Into::into),
            ..self.hello.clone()
        })
    }

    /// Run the initiator's side (D). `expected_inc`: refuse any other incarnation.
    pub async fn initiate_connection(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        channel: Channel,
        expected_inc: Option<&str>,
    ) -> Result<OpenedConnection, ConnectionError> {
        let exchange = async {
            let challenge = match Handshake::open_plain(&read_hello_frame(stream).await?)? {
                Msg::Challenge { nonce } => nonce,
                Msg::Reject { code, message, .. } => {
                    return Err(ConnectionError::new(code, message));
                }
                other => return Err(unexpected_message(&other)),
            };
            let nonce: [u8; NONCE_BYTES] = rand::random();
            let hello = self.hello_message(channel, &nonce, expected_inc);
            let frame = self.handshake().seal_hello(&hello, &challenge);
            stream.write_all(&frame).await?;
            let respond = read_hello_frame(stream).await?;
            let peer = match self.handshake().open_hello(&respond, &nonce)? {
                Msg::Hello(peer) => peer,
                Msg::Reject { code, message, .. } => {
                    return Err(ConnectionError::new(code, message));
                }
                other => return Err(unexpected_message(&other)),
            };
            check_version(&peer)?;
            if let Some(expected) = expected_inc
                && expected != peer.inc
            {
                let reason = format!("incarnation {} answered, {expected} was expected", peer.inc);
                return Err(ConnectionError::new(ReasonCode::PeerRestarted, reason));
            }
            let (sealer, opener) = self.handshake().derive_session(true, &nonce, &peer.nonce);
            Ok(OpenedConnection {
                peer,
                sealer,
                opener,
            })
        };
        within_hello_timeout(exchange).await
    }

    /// Run the responder's side (P). Refusals are sent to the peer.
    pub async fn accept_connection(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<OpenedConnection, ConnectionError> {
        use ReasonCode::{Auth, LayoutMismatch, PeerRestarted};
        within_hello_timeout(async {
            let opened = self.respond_unbounded(stream).await;
            if let Err(err) = &opened
                && matches!(err.code, Auth | LayoutMismatch | PeerRestarted)
            {
                let refusal = Msg::connection_refusal(err.code, &err.reason);
                // The connection ends either way, and the peer may have closed it.
                let _ = stream.write_all(&Handshake::seal_plain(&refusal)).await;
                let _ = stream.shutdown().await;
            }
            opened
        })
        .await
    }

    async fn respond_unbounded(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<OpenedConnection, ConnectionError> {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let challenge = Msg::Challenge {
            nonce: nonce.to_vec(),
        };
        stream.write_all(&Handshake::seal_plain(&challenge)).await?;
        let frame = read_hello_frame(stream).await?;
        let (handshake, peer) = match self.open_hello(&frame, &nonce) {
            Ok((handshake, Msg::Hello(peer))) => (handshake, peer),
            Err(err) => {
                // Version 1 sent HELLO without waiting for a challenge.
                if let Ok((_, Msg::Hello(peer))) = self.open_hello(&frame, b"") {
                    check_version(&peer)?;
                }
                return Err(err.into());
            }
            Ok((_, other)) => return Err(unexpected_message(&other)),
        };
        check_version(&peer)?;
        if peer
            .expected_inc
            .as_ref()
            .is_some_and(|expected| *expected != self.hello.inc)
        {
            let reason = format!("this is incarnation {}", self.hello.inc);
            return Err(ConnectionError::new(ReasonCode::PeerRestarted, reason));
        }
        let hello = self.hello_message(peer.channel, &nonce, None);
        stream
            .write_all(&handshake.seal_hello(&hello, &peer.nonce))
            .await?;
        let (sealer, opener) = handshake.derive_session(false, &peer.nonce, &nonce);
        Ok(OpenedConnection {
            peer,
            sealer,
            opener,
        })
    }
}

fn unexpected_message(msg: &Msg) -> ConnectionError {
    ConnectionError::transport_broken(format!("the peer opened with {}", msg.name()))
}

/// Versions of the transfer protocol, for messages.
pub fn name_versions(oldest: u32, newest: u32) -> String {
    if oldest == newest {
        return format!("protocol version {newest}");
    }
    format!("protocol versions {oldest} to {newest}")
}

fn check_version(peer: &Hello) -> Result<(), ConnectionError> {
    let oldest = if peer.min_ver == 0 {
        peer.ver
    } else {
        peer.min_ver
    };
    if peer.ver >= MIN_VERSION && oldest <= VERSION {
        return Ok(());
    }
    let reason = format!(
        "the peer speaks {}, this node {}: update the older one",
        name_versions(oldest, peer.ver),
        name_versions(MIN_VERSION, VERSION)
    );
    Err(ConnectionError::new(ReasonCode::LayoutMismatch, reason))
}

async fn within_hello_timeout<T>(
    exchange: impl Future<Output = Result<T, ConnectionError>>,
) -> Result<T, ConnectionError> {
    let reason = format!("the peer did not finish its HELLO within {HELLO_TIMEOUT:?}");
    let silent = Err(ConnectionError::peer_dead(reason));
    tokio::time::timeout(HELLO_TIMEOUT, exchange)
        .await
        .unwrap_or(silent)
}

#[cfg(test)]
mod tests {
    use super::super::tests::hello;
    use super::*;

    fn identity(key: Option<&str>, inc: &str, ver: u32) -> Identity {
        let Msg::Hello(mut hello) = hello(b"") else {
            unreachable!("it makes a HELLO")
        };
        hello.inc = inc.into();
        hello.ver = VERSION + ver - 1;
        hello.min_ver = VERSION + ver - 1;
        Identity {
            cluster_keys: key.map(Into::into),
            hello,
        }
    }

    async fn handshake_of(
        initiator: Identity,
        responder: Identity,
        expected: Option<&str>,
    ) -> (
        Result<OpenedConnection, ConnectionError>,
        Result<OpenedConnection, ConnectionError>,
    ) {
        let (mut a, mut b) = tokio::io::duplex(4096);
        tokio::join!(
            initiator.initiate_connection(&mut a, Channel::Control, expected),
            responder.accept_connection(&mut b)
        )
    }

    #[tokio::test]
    async fn two_nodes_meet_and_their_frames_open() {
        for key in [None, Some("k")] {
            let (initiated, responded) =
                handshake_of(identity(key, "d", 1), identity(key, "p", 1), Some("p")).await;
            let mut initiated = initiated.expect("met");
            let mut responded = responded.expect("met");
            assert_eq!(
                (initiated.peer.inc.as_str(), responded.peer.inc.as_str()),
                ("p", "d")
            );
            let msg = Msg::AbortAck {
                room: 1,
                attempt: 2,
            };
            let frame = initiated.sealer.seal(&msg);
            assert_eq!(
                responded.opener.open(&frame[HEADER_BYTES..]),
                Ok(msg.clone())
            );
            let frame = responded.sealer.seal(&msg);
            assert_eq!(initiated.opener.open(&frame[HEADER_BYTES..]), Ok(msg));
        }
    }

    #[tokio::test]
    async fn both_sides_learn_why_they_do_not_match() {
        let cases = [
            (
                identity(Some("a"), "d", 1),
                identity(Some("b"), "p", 1),
                None,
                ReasonCode::Auth,
            ),
            (
                identity(None, "d", 1),
                identity(Some("b"), "p", 1),
                None,
                ReasonCode::Auth,
            ),
            (
                identity(Some("a"), "d", 1),
                identity(None, "p", 1),
                None,
                ReasonCode::Auth,
            ),
            (
                identity(Some("a"), "d", 2),
                identity(Some("a"), "p", 1),
                None,
                ReasonCode::LayoutMismatch,
            ),
            (
                identity(Some("a"), "d", 1),
                identity(Some("a"), "p", 1),
                Some("former p"),
                ReasonCode::PeerRestarted,
            ),
        ];
        for (initiator, responder, expected, code) in cases {
            let (initiated, responded) = handshake_of(initiator, responder, expected).await;
            assert_eq!(
                (
                    initiated.err().map(|e| e.code),
                    responded.err().map(|e| e.code)
                ),
                (Some(code), Some(code))
            );
        }
    }

    #[tokio::test]
    async fn version_ranges_that_overlap_are_accepted() {
        for (oldest, newest, fits) in [
            (MIN_VERSION, VERSION + 3, true),
            (VERSION + 1, VERSION + 3, false),
            (0, VERSION, true),
            (0, MIN_VERSION - 1, false),
        ] {
            let mut peer = identity(None, "d", 1);
            peer.hello.min_ver = oldest;
            peer.hello.ver = newest;
            let (_, responded) = handshake_of(peer, identity(None, "p", 1), None).await;
            assert_eq!(responded.is_ok(), fits, "{oldest} to {newest}");
        }
    }

    #[tokio::test]
    async fn peer_of_version_2_is_refused_with_both_versions() {
        let mut old = identity(None, "d", 1);
        old.hello.min_ver = 2;
        old.hello.ver = 2;
        let (initiated, responded) = handshake_of(old, identity(None, "p", 1), None).await;
        let expected = "the peer speaks protocol version 2, this node protocol version 3: update \
                        the older one";
        for result in [initiated, responded] {
            let err = result.err().expect("refused");
            assert_eq!(
                (err.code, err.reason.as_str()),
                (ReasonCode::LayoutMismatch, expected)
            );
        }
    }

    #[tokio::test]
    async fn silent_peer_is_reported_dead() {
        let (mut a, _b) = tokio::io::duplex(4096);
        let err = identity(None, "d", 1)
            .initiate_connection(&mut a, Channel::Control, None)
            .await
            .err()
            .expect("the peer never answers");
        assert_eq!(err.code, ReasonCode::PeerDead);
    }
}
