//! vLLM's and SGLang's events: a PUB socket with numbered batches, and a ROUTER socket that repeats
//! the last of them.
//!
//! 1. subscribe first, so that batches published meanwhile wait in the connection;
//! 2. ask for a replay from the last batch that is known, that one included. It returns with the
//!    same time: the publisher is still the same process, and everything behind it is taken in.
//!    Another time, or no batch, means another process with numbers that restart;
//! 3. read on. A number that is too large is a gap: back to 2. A batch that no replay brings back
//!    makes the entry a guess until the cache is cleared.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use router_core::kv::ApplyResult;
use tokio::time::timeout;

use super::codec;
use super::subscriber::{EventReader, SubscriptionEnd};
use super::zmtp::ZmtpPeer;

/// A replay pauses no longer than this: publishers look for requests ten times a second.
const REPLAY_SILENCE: Duration = Duration::from_secs(10);
const SUBSCRIBE_TO_ALL: &[u8] = b"\x01";
const END_OF_REPLAY: u64 = u64::MAX;

/// The last batch taken in. Its time tells processes apart: numbers alone do not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LastBatch {
    number: u64,
    ts: f64,
}

/// Follow the publisher until the connection ends. `last` is kept from one connection to the next.
pub async fn follow(
    reader: &mut EventReader,
    events: &str,
    replay: Option<&str>,
    last: &mut Option<LastBatch>,
) -> Result<Infallible, SubscriptionEnd> {
    let mut publisher = ZmtpPeer::connect(events, "SUB").await?;
    publisher.send(&[SUBSCRIBE_TO_ALL]).await?;
    match replay {
        Some(replay) => catch_up(reader, replay, last).await?,
        None => {
            // It may be another process by now.
            reader.restart();
            *last = None;
        }
    }
    loop {
        let (number, payload) = numbered(&publisher.receive().await?)?;
        let batch = codec::of_msgpack(&payload).map_err(SubscriptionEnd::Malformed)?;
        let mut took = reader.batch(number, &batch.events, Some(batch.ts))?;
        if matches!(took, ApplyResult::Gap { .. })
            && let Some(replay) = replay
        {
            catch_up(reader, replay, last).await?;
            took = reader.batch(number, &batch.events, None)?;
        }
        if matches!(took, ApplyResult::Gap { .. }) {
            reader.skip_to(number)?;
            took = reader.batch(number, &batch.events, None)?;
        }
        if took == ApplyResult::Applied {
            *last = Some(LastBatch {
                number,
                ts: batch.ts,
            });
        }
    }
}

/// Take in what the publisher still has of what was missed.
async fn catch_up(
    reader: &mut EventReader,
    replay: &str,
    last: &mut Option<LastBatch>,
) -> Result<(), SubscriptionEnd> {
    while !replayed(reader, replay, last).await? {
        reader.restart();
        *last = None;
    }
    Ok(())
}

/// False: the publisher is not the process whose batch `last` is.
async fn replayed(
    reader: &mut EventReader,
    replay: &str,
    last: &mut Option<LastBatch>,
) -> Result<bool, SubscriptionEnd> {
    let mut known = *last;
    let mut peer = ZmtpPeer::connect(replay, "DEALER").await?;
    let first = known.map_or(0, |last| last.number);
    peer.send(&[b"", &first.to_be_bytes()]).await?;
    loop {
        let silent = |_| SubscriptionEnd::Silent {
            secs: REPLAY_SILENCE.as_secs(),
        };
        let message = timeout(REPLAY_SILENCE, peer.receive()).await;
        let (number, payload) = numbered(&message.map_err(silent)??)?;
        if number == END_OF_REPLAY {
            break;
        }
        let batch = codec::of_msgpack(&payload).map_err(SubscriptionEnd::Malformed)?;
        let this = LastBatch {
            number,
            ts: batch.ts,
        };
        if known.take().is_some_and(|known| known != this) {
            return Ok(false);
        }
        if let ApplyResult::Gap { .. } = reader.batch(number, &batch.events, None)? {
            reader.skip_to(number)?;
            reader.batch(number, &batch.events, None)?;
        }
        *last = Some(this);
    }
    if known.is_some() {
        return Ok(false); // it does not even have the batch that was the last one
    }
    reader.resume()?;
    Ok(true)
}

/// A message is [topic, or nothing; number, 8 bytes, big-endian; payload].
fn numbered(frames: &[Bytes]) -> Result<(u64, Bytes), SubscriptionEnd> {
    let bad = || {
        let lengths: Vec<usize> = frames.iter().map(Bytes::len).collect();
        SubscriptionEnd::Malformed(format!(
            "frames of {lengths:?} bytes, where a topic, 8 bytes and a payload are expected"
        ))
    };
    let [_, number, payload] = frames else {
        return Err(bad());
    };
    let number: [u8; 8] = number[..].try_into().map_err(|_| bad())?;
    Ok((u64::from_be_bytes(number), payload.clone()))
}
