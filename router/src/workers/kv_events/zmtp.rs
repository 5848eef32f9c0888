//! ZMTP 3.0 as a client with the NULL mechanism: enough of ZeroMQ to subscribe to a PUB socket and
//! to ask a ROUTER.
//!
//! 1. greeting (64 bytes) and a READY command go out, the peer's come in ([`ZmtpPeer::connect`]);
//! 2. messages of several frames go both ways; the peer's other commands are passed over;
//! 3. any error ends the connection. Nothing reconnects behind the caller's back: that a connection
//!    broke is how a restarted publisher is distinguished from a quiet one.
//!
//! Why not the `zeromq` crate (0.7): it reconnects by itself without a word, and believes any
//! length a frame claims to have, which ends the process when memory for it cannot be had. The
//! protocol is at rfc.zeromq.org/spec/23.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::transport::socket::tune_upstream;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest frame that is read [bytes]: a batch of a million tokens has about 6 MB.
const MAX_FRAME: u64 = 64 << 20;
/// Most frames of a message; the formats here have three.
const MAX_FRAMES: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("it speaks no ZMTP 3: {0}")]
    NotZmtp(&'static str),
    #[error("a frame of {bytes} bytes; at most {MAX_FRAME} are read")]
    FrameTooLong { bytes: u64 },
    #[error("a message of more than {MAX_FRAMES} frames")]
    TooManyFrames,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

pub struct ZmtpPeer {
    stream: BufReader<TcpStream>,
}

impl ZmtpPeer {
    /// `address`: host:port. `kind`: this side's socket type.
    pub async fn connect(address: &str, kind: &str) -> Result<Self, ZmtpError> {
        let shaking = async {
            let stream = TcpStream::connect(address).await;
            let stream = stream.map_err(|err| ZmtpError::Connect(err.to_string()))?;
            tune_upstream(&stream)?;
            let mut peer = Self {
                stream: BufReader::new(stream),
            };
            peer.shake_hands(kind).await?;
            Ok(peer)
        };
        let late = || ZmtpError::Connect(format!("no greeting for {CONNECT_TIMEOUT:?}"));
        timeout(CONNECT_TIMEOUT, shaking)
            .await
            .map_err(|_| late())?
    }

    async fn shake_hands(&mut self, kind: &str) -> Result<(), ZmtpError> {
        let mut greeting = [0; 64];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        self.stream.write_all(&greeting).await?;
        let mut ready = b"\x05READY".to_vec();
        for (name, value) in [("Socket-Type", kind), ("Identity", "")] {
            ready.push(name.len() as u8);
            ready.extend_from_slice(name.as_bytes());
            ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
            ready.extend_from_slice(value.as_bytes());
        }
        self.stream.read_exact(&mut greeting).await?;
        if greeting[0] != 0xff || greeting[9] & 1 == 0 {
            return Err(ZmtpError::NotZmtp("no ZMTP signature"));
        }
        if greeting[10] < 3 {
            return Err(ZmtpError::NotZmtp("an older version"));
        }
        if &greeting[12..17] != b"NULL\0" {
            return Err(ZmtpError::NotZmtp(
                "its socket asks for authentication (CURVE or PLAIN)",
            ));
        }
        self.write_frame(COMMAND, &ready).await?;
        let (flags, body) = self.read_frame().await?;
        match (flags & COMMAND != 0, body.starts_with(b"\x05READY")) {
            (true, true) => Ok(()),
            _ => Err(ZmtpError::NotZmtp("it refused this kind of socket")),
        }
    }

    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        for (at, frame) in frames.iter().enumerate() {
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            self.write_frame(more, frame).await?;
        }
        Ok(())
    }

    /// The next message. Not to be dropped half-way: what was read of it would be lost.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.read_frame().await?;
            if flags & COMMAND != 0 {
                continue;
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(frames);
            }
            if frames.len() == MAX_FRAMES {
                return Err(ZmtpError::TooManyFrames);
            }
        }
    }

    /// Short frames only: what this side says.
    async fn write_frame(&mut self, flags: u8, body: &[u8]) -> Result<(), ZmtpError> {
        let mut frame = vec![flags, body.len() as u8];
        frame.extend_from_slice(body);
        debug_assert!(body.len() < 256, "this side sends no long frames");
        self.stream.write_all(&frame).await?;
        Ok(self.stream.flush().await?)
    }

    async fn read_frame(&mut self) -> Result<(u8, Bytes), ZmtpError> {
        let flags = self.stream.read_u8().await?;
        let bytes = match flags & LONG {
            0 => u64::from(self.stream.read_u8().await?),
            _ => self.stream.read_u64().await?,
        };
        if bytes > MAX_FRAME {
            return Err(ZmtpError::FrameTooLong { bytes });
        }
        let mut body = vec![0; bytes as usize];
        self.stream.read_exact(&mut body).await?;
        Ok((flags, body.into()))
    }
}
