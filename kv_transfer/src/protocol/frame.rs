//! Frames: `u32 length | u8 kind | tag | body`, all little endian; `length` counts everything after
//! itself. The tag is an XXH3-64 over the bytes that the MAC would cover (kind 0, 8 bytes), or with
//! a cluster key an HMAC-SHA256 (kind 1, 32 bytes). TCP's own checksum lets one damaged frame in
//! some ten million through, and a FINAL carries a token.
//!
//! With a cluster key, HELLO is authenticated by the key itself together with the other side's
//! nonce, and every later frame by a key derived from both nonces, over direction, sequence number
//! and body: a frame cannot be replayed, reordered, reflected or moved to another connection.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{DecodeError, Msg};

type HmacSha256 = Hmac<Sha256>;

const HELLO_LABEL: &[u8] = b"baton hello 1";

/// Bytes of the length field in front of every frame.
pub const HEADER_BYTES: usize = 4;
/// Largest frame after the length field. The biggest message, FINAL, is bounded to half of it.
pub const MAX_FRAME_BYTES: usize = 4 << 20;
const SUM_BYTES: usize = 8;
const MAC_BYTES: usize = 32;
const KIND_SUM: u8 = 0;
const KIND_MAC: u8 = 1;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("a frame of {0} bytes is refused, the limit is {MAX_FRAME_BYTES}")]
    TooLarge(usize),
    #[error("the frame ends early")]
    Short,
    #[error("the frame is damaged: its checksum is wrong")]
    Damaged,
    #[error("the frame is of unknown kind {0}")]
    Kind(u8),
    #[error("{0}")]
    Auth(&'static str),
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// Size of the frame after the length field, checked against the limit.
pub fn frame_len(header: [u8; HEADER_BYTES]) -> Result<usize, FrameError> {
    match u32::from_le_bytes(header) as usize {
        0 => Err(FrameError::Short),
        n if n > MAX_FRAME_BYTES => Err(FrameError::TooLarge(n)),
        n => Ok(n),
    }
}

fn frame_mac(key: &[u8], parts: &[&[u8]]) -> HmacSha256 {
    let mut mac = HmacSha256::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

fn frame_sum(parts: &[&[u8]]) -> [u8; SUM_BYTES] {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for part in parts {
        hash.update(part);
    }
    hash.digest().to_le_bytes()
}

/// The frame of `parts`' last element, tagged over all of them.
fn build_frame(key: Option<&[u8]>, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.last().copied().unwrap_or_default();
    let (kind, tag) = match key {
        Some(key) => (
            KIND_MAC,
            frame_mac(key, parts).finalize().into_bytes().to_vec(),
        ),
        None => (KIND_SUM, frame_sum(parts).to_vec()),
    };
    let len = 1 + tag.len() + body.len();
    debug_assert!(
        len <= MAX_FRAME_BYTES,
        "messages are bounded where they are made"
    );
    let mut frame = Vec::with_capacity(HEADER_BYTES + len);
    frame.extend_from_slice(&(len as u32).to_le_bytes());
    frame.push(kind);
    frame.extend_from_slice(&tag);
    frame.extend_from_slice(body);
    frame
}

#[derive(Clone, Copy)]
enum Tag<'a> {
    Sum(&'a [u8]),
    Mac(&'a [u8]),
}

/// Split the frame after its length field into (tag, body).
fn split_tag(frame: &[u8]) -> Result<(Tag<'_>, &[u8]), FrameError> {
    let (&kind, rest) = frame.split_first().ok_or(FrameError::Short)?;
    let bytes = match kind {
        KIND_SUM => SUM_BYTES,
        KIND_MAC => MAC_BYTES,
        other => return Err(FrameError::Kind(other)),
    };
    let (tag, body) = rest.split_at_checked(bytes).ok_or(FrameError::Short)?;
    Ok((
        if kind == KIND_MAC {
            Tag::Mac(tag)
        } else {
            Tag::Sum(tag)
        },
        body,
    ))
}

fn verify_tag(key: Option<&[u8]>, parts: &[&[u8]], tag: Tag<'_>) -> Result<(), FrameError> {
    match (key, tag) {
        (None, Tag::Sum(tag)) if frame_sum(parts) == tag => Ok(()),
        (None, Tag::Sum(_)) => Err(FrameError::Damaged),
        (Some(key), Tag::Mac(tag)) => frame_mac(key, parts)
            .verify_slice(tag)
            .map_err(|_| FrameError::Auth("the frame's HMAC is wrong: the cluster keys differ")),
        (Some(_), Tag::Sum(_)) => Err(FrameError::Auth(
            "the peer sends unauthenticated frames, but this node has a cluster key",
        )),
        (None, Tag::Mac(_)) => Err(FrameError::Auth(
            "the peer has a cluster key, this node has none",
        )),
    }
}

/// Keys and nonces of one connection before it is established.
pub struct Handshake<'a> {
    key: Option<&'a [u8]>,
}

impl<'a> Handshake<'a> {
    pub fn new(cluster_key: Option<&'a [u8]>) -> Self {
        Self { key: cluster_key }
    }

    /// A HELLO frame. It covers the nonce that the other side sent, so that it cannot be replayed.
    pub fn seal_hello(&self, hello: &Msg, peer_nonce: &[u8]) -> Vec<u8> {
        build_frame(
            self.key,
            &[
                HELLO_LABEL,
                &[peer_nonce.len() as u8],
                peer_nonce,
                &hello.encode(),
            ],
        )
    }

    /// An unauthenticated frame: CHALLENGE, or a refusal, for a peer whose HELLO did not verify and
    /// which could not check a MAC of ours either.
    pub fn seal_plain(msg: &Msg) -> Vec<u8> {
        build_frame(None, &[HELLO_LABEL, &[0], &msg.encode()])
    }

    pub fn open_plain(frame: &[u8]) -> Result<Msg, FrameError> {
        let (tag, body) = split_tag(frame)?;
        verify_tag(None, &[HELLO_LABEL, &[0], body], tag)?;
        Ok(Msg::decode(body)?)
    }

    /// `own_nonce`: the nonce we sent, which the frame must cover.
    pub fn open_hello(&self, frame: &[u8], own_nonce: &[u8]) -> Result<Msg, FrameError> {
        let (tag, body) = split_tag(frame)?;
        let err = match verify_tag(
            self.key,
            &[HELLO_LABEL, &[own_nonce.len() as u8], own_nonce, body],
            tag,
        ) {
            Ok(()) => return Ok(Msg::decode(body)?),
            Err(err) => err,
        };
        // A refusal is accepted without a MAC: it can only end this connection.
        match Self::open_plain(frame) {
            Ok(
                refusal @ Msg::Reject {
                    connection: true, ..
                },
            ) => Ok(refusal),
            _ => Err(err),
        }
    }

    /// Sealer and opener of the established connection, for the initiator or the responder.
    pub fn derive_session(
        &self,
        initiator: bool,
        initiator_nonce: &[u8],
        responder_nonce: &[u8],
    ) -> (FrameSealer, FrameOpener) {
        let key = self.key.map(|key| {
            let parts: [&[u8]; 4] = [
                b"baton session 1",
                &[initiator_nonce.len() as u8],
                initiator_nonce,
                responder_nonce,
            ];
            frame_mac(key, &parts).finalize().into_bytes().to_vec()
        });
        let half = |direction| FrameStream {
            key: key.clone(),
            direction,
            seq: 0,
        };
        let ours = u8::from(initiator);
        (FrameSealer(half(ours)), FrameOpener(half(1 - ours)))
    }
}

/// Key and position of one direction of one connection.
struct FrameStream {
    key: Option<Vec<u8>>,
    direction: u8,
    seq: u64,
}

impl FrameStream {
    /// Call `act` with the key and to the parts that the next frame's tag covers.
    fn with_next_counter<T>(
        &mut self,
        body: &[u8],
        act: impl FnOnce(Option<&[u8]>, &[&[u8]]) -> T,
    ) -> T {
        let parts: [&[u8]; 3] = [&[self.direction], &self.seq.to_le_bytes(), body];
        self.seq += 1;
        act(self.key.as_deref(), &parts)
    }
}

/// Writes the frames of one direction of one connection, in order.
pub struct FrameSealer(FrameStream);

impl FrameSealer {
    pub fn seal(&mut self, msg: &Msg) -> Vec<u8> {
        self.0.with_next_counter(&msg.encode(), build_frame)
    }
}

/// Reads the frames of one direction of one connection, in order.
pub struct FrameOpener(FrameStream);

impl FrameOpener {
    /// `frame` is without its length field. After an error the connection must be closed.
    pub fn open(&mut self, frame: &[u8]) -> Result<Msg, FrameError> {
        let (tag, body) = split_tag(frame)?;
        self.0
            .with_next_counter(body, |key, parts| verify_tag(key, parts, tag))?;
        Ok(Msg::decode(body)?)
    }
}
