//! Frames on a byte stream, and the HELLO exchange that opens a connection.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    Channel, ClusterKeys, FrameError, HEADER_BYTES, Handshake, Hello, MAX_HELLO_BYTES, MIN_VERSION,
    Msg, Opener, Sealer, VERSION, clipped, frame_len,
};
use crate::reason_code::Code;

/// Longest wait for a peer's half of the HELLO exchange.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(1);
pub const NONCE_BYTES: usize = 16;
/// A frame that has begun ends within this time, where heartbeats do not watch over the connection.
const FRAME_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a connection did not come about or ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct LinkError {
    pub code: Code,
    pub why: String,
}

impl LinkError {
    pub fn new(code: Code, why: impl Into<String>) -> Self {
        Self {
            code,
            why: why.into(),
        }
    }

    fn io(err: &io::Error) -> Self {
        Self::new(Code::PeerDead, err.to_string())
    }
}

impl From<FrameError> for LinkError {
    fn from(err: FrameError) -> Self {
        let code = if matches!(err, FrameError::Auth(_)) {
            Code::Auth
        } else {
            Code::TransportBroken
        };
        Self::new(code, err.to_string())
    }
}

/// Bytes after one length field, at most `limit` bytes. An error leaves the stream unusable.
pub async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> Result<Vec<u8>, LinkError> {
    let len = read_len(stream, limit).await?;
    read_body(stream, len).await
}

/// The same on a stream without heartbeats of the control thread: a frame begins within `idle`.
pub async fn read_small_frame(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
    idle: Duration,
) -> Result<Vec<u8>, LinkError> {
    let silent = |what: &str, time| LinkError::new(Code::PeerDead, format!("{what} for {time:?}"));
    let len = tokio::time::timeout(idle, read_len(stream, limit))
        .await
        .unwrap_or_else(|_| Err(silent("no frame", idle)))?;
    tokio::time::timeout(FRAME_TIMEOUT, read_body(stream, len))
        .await
        .unwrap_or_else(|_| Err(silent("half a frame", FRAME_TIMEOUT)))
}

async fn read_len(stream: &mut (impl AsyncRead + Unpin), limit: usize) -> Result<usize, LinkError> {
    let mut header = [0; HEADER_BYTES];
    stream
        .read_exact(&mut header)
        .await
        .map_err(|err| LinkError::io(&err))?;
    match frame_len(header)? {
        len if len > limit => Err(LinkError::new(
            Code::TransportBroken,
            format!("a frame of {len} bytes, the limit is {limit} here"),
        )),
        len => Ok(len),
    }
}

async fn read_body(
    stream: &mut (impl AsyncRead + Unpin),
    len: usize,
) -> Result<Vec<u8>, LinkError> {
    let mut frame = vec![0; len];
    stream
        .read_exact(&mut frame)
        .await
        .map_err(|err| LinkError::io(&err))?;
    Ok(frame)
}

async fn read_hello_frame(stream: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, LinkError> {
    read_small_frame(stream, MAX_HELLO_BYTES, HELLO_TIMEOUT).await
}

/// An open connection's peer and keys.
pub struct Opened {
    pub peer: Hello,
    pub sealer: Sealer,
    pub opener: Opener,
}

/// What a node says of itself in every HELLO.
#[derive(Debug, Clone)]
pub struct Identity {
    pub cluster_keys: Option<ClusterKeys>,
    /// `channel`, `nonce` and `expected_inc` are filled in per connection.
    pub hello: Hello,
}

impl Identity {
    /// The handshake of the side that asks.
    fn handshake(&self) -> Handshake<'_> {
        Handshake::new(self.cluster_keys.as_ref().map(|keys| keys.own().as_bytes()))
    }

    /// Opens a HELLO with one of the accepted keys. Returns the handshake of that key, which the answer needs.
    fn open_hello(&self, frame: &[u8], nonce: &[u8]) -> Result<(Handshake<'_>, Msg), FrameError> {
        let own = self.handshake();
        let first = match own.open_hello(frame, nonce) {
            Ok(msg) => return Ok((own, msg)),
            Err(err) => err,
        };
        let others = self
            .cluster_keys
            .iter()
            .flat_map(|keys| keys.accepted().skip(1));
        let opened = others
            .map(|key| Handshake::new(Some(key.as_bytes())))
            .find_map(|handshake| {
                let msg = handshake.open_hello(frame, nonce).ok()?;
                Some((handshake, msg))
            });
        opened.ok_or(first)
    }

    fn hello(&self, channel: Channel, nonce: &[u8], expected_inc: Option<&str>) -> Msg {
        Msg::Hello(Hello {
            channel,
            nonce: nonce.to_vec(),
            expected_inc: expected_inc.map(Into::into),
            ..self.hello.clone()
        })
    }

    /// The asking side (D). `expected_inc`: refuse any other incarnation.
    pub async fn ask(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        channel: Channel,
        expected_inc: Option<&str>,
    ) -> Result<Opened, LinkError> {
        let exchange = async {
            let challenge = match Handshake::open_plain(&read_hello_frame(stream).await?)? {
                Msg::Challenge { nonce } => nonce,
                Msg::Reject { code, message, .. } => return Err(LinkError::new(code, message)),
                other => {
                    return Err(LinkError::new(
                        Code::TransportBroken,
                        format!("the peer opened with {}", other.name()),
                    ));
                }
            };
            let nonce: [u8; NONCE_BYTES] = rand::random();
            let hello = self.hello(channel, &nonce, expected_inc);
            let frame = self.handshake().seal_hello(&hello, &challenge);
            stream
                .write_all(&frame)
                .await
                .map_err(|err| LinkError::io(&err))?;
            let answer = read_hello_frame(stream).await?;
            let peer = match self.handshake().open_hello(&answer, &nonce)? {
                Msg::Hello(peer) => peer,
                Msg::Reject { code, message, .. } => return Err(LinkError::new(code, message)),
                other => {
                    return Err(LinkError::new(
                        Code::TransportBroken,
                        format!("the peer opened with {}", other.name()),
                    ));
                }
            };
            check_version(&peer)?;
            if let Some(expected) = expected_inc
                && expected != peer.inc
            {
                return Err(LinkError::new(
                    Code::PeerRestarted,
                    format!("incarnation {} answered, {expected} was expected", peer.inc),
                ));
            }
            let (sealer, opener) = self.handshake().establish(true, &nonce, &peer.nonce);
            Ok(Opened {
                peer,
                sealer,
                opener,
            })
        };
        bounded(exchange).await
    }

    /// The answering side (P). Refusals are told to the peer.
    pub async fn answer(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<Opened, LinkError> {
        bounded(async {
            match self.answer_inner(stream).await {
                Err(err)
                    if matches!(
                        err.code,
                        Code::Auth | Code::LayoutMismatch | Code::PeerRestarted
                    ) =>
                {
                    let refusal = Msg::Reject {
                        room: 0,
                        attempt: 0,
                        code: err.code,
                        message: clipped(&err.why),
                        retry_after_ms: 0,
                        connection: true,
                    };
                    // The connection ends either way; a peer that is gone needs no explanation.
                    let _ = stream.write_all(&Handshake::seal_plain(&refusal)).await;
                    let _ = stream.shutdown().await;
                    Err(err)
                }
                other => other,
            }
        })
        .await
    }

    async fn answer_inner(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<Opened, LinkError> {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let challenge = Msg::Challenge {
            nonce: nonce.to_vec(),
        };
        stream
            .write_all(&Handshake::seal_plain(&challenge))
            .await
            .map_err(|err| LinkError::io(&err))?;
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
            Ok((_, other)) => {
                return Err(LinkError::new(
                    Code::TransportBroken,
                    format!("the peer opened with {}", other.name()),
                ));
            }
        };
        check_version(&peer)?;
        if peer
            .expected_inc
            .as_ref()
            .is_some_and(|expected| *expected != self.hello.inc)
        {
            return Err(LinkError::new(
                Code::PeerRestarted,
                format!("this is incarnation {}", self.hello.inc),
            ));
        }
        let hello = self.hello(peer.channel, &nonce, None);
        stream
            .write_all(&handshake.seal_hello(&hello, &peer.nonce))
            .await
            .map_err(|err| LinkError::io(&err))?;
        let (sealer, opener) = handshake.establish(false, &peer.nonce, &nonce);
        Ok(Opened {
            peer,
            sealer,
            opener,
        })
    }
}

fn check_version(peer: &Hello) -> Result<(), LinkError> {
    let oldest = if peer.min_ver == 0 {
        peer.ver
    } else {
        peer.min_ver
    };
    if peer.ver >= MIN_VERSION && oldest <= VERSION {
        return Ok(());
    }
    Err(LinkError::new(
        Code::LayoutMismatch,
        format!(
            "the peer speaks protocol versions {oldest} to {}, this node {MIN_VERSION} to {VERSION}",
            peer.ver
        ),
    ))
}

async fn bounded<T>(exchange: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
    let silent = LinkError::new(
        Code::PeerDead,
        format!("the peer did not finish its HELLO within {HELLO_TIMEOUT:?}"),
    );
    tokio::time::timeout(HELLO_TIMEOUT, exchange)
        .await
        .unwrap_or(Err(silent))
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
        (hello.ver, hello.min_ver) = (VERSION + ver - 1, VERSION + ver - 1);
        Identity {
            cluster_keys: key.map(Into::into),
            hello,
        }
    }

    async fn meet(
        asker: Identity,
        answerer: Identity,
        expected: Option<&str>,
    ) -> (Result<Opened, LinkError>, Result<Opened, LinkError>) {
        let (mut a, mut b) = tokio::io::duplex(4096);
        tokio::join!(
            asker.ask(&mut a, Channel::Control, expected),
            answerer.answer(&mut b)
        )
    }

    #[tokio::test]
    async fn two_nodes_meet_and_their_frames_open() {
        for key in [None, Some("k")] {
            let (asked, answered) =
                meet(identity(key, "d", 1), identity(key, "p", 1), Some("p")).await;
            let (mut asked, mut answered) = (asked.expect("met"), answered.expect("met"));
            assert_eq!(
                (asked.peer.inc.as_str(), answered.peer.inc.as_str()),
                ("p", "d")
            );
            let msg = Msg::AbortAck {
                room: 1,
                attempt: 2,
            };
            let frame = asked.sealer.seal(&msg);
            assert_eq!(
                answered.opener.open(&frame[HEADER_BYTES..]),
                Ok(msg.clone())
            );
            let frame = answered.sealer.seal(&msg);
            assert_eq!(asked.opener.open(&frame[HEADER_BYTES..]), Ok(msg));
        }
    }

    #[tokio::test]
    async fn both_sides_learn_why_they_do_not_match() {
        let cases = [
            (
                identity(Some("a"), "d", 1),
                identity(Some("b"), "p", 1),
                None,
                Code::Auth,
            ),
            (
                identity(None, "d", 1),
                identity(Some("b"), "p", 1),
                None,
                Code::Auth,
            ),
            (
                identity(Some("a"), "d", 1),
                identity(None, "p", 1),
                None,
                Code::Auth,
            ),
            (
                identity(Some("a"), "d", 2),
                identity(Some("a"), "p", 1),
                None,
                Code::LayoutMismatch,
            ),
            (
                identity(Some("a"), "d", 1),
                identity(Some("a"), "p", 1),
                Some("former p"),
                Code::PeerRestarted,
            ),
        ];
        for (asker, answerer, expected, code) in cases {
            let (asked, answered) = meet(asker, answerer, expected).await;
            assert_eq!(
                (asked.err().map(|e| e.code), answered.err().map(|e| e.code)),
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
            (peer.hello.min_ver, peer.hello.ver) = (oldest, newest);
            let (_, answered) = meet(peer, identity(None, "p", 1), None).await;
            assert_eq!(answered.is_ok(), fits, "{oldest} to {newest}");
        }
    }

    #[tokio::test]
    async fn silent_peer_is_reported_dead() {
        let (mut a, _b) = tokio::io::duplex(4096);
        let err = identity(None, "d", 1)
            .ask(&mut a, Channel::Control, None)
            .await
            .err()
            .expect("nobody answers");
        assert_eq!(err.code, Code::PeerDead);
    }
}
