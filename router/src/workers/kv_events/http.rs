//! Our engines' events: lines of JSON from `GET /v1/kv_events` (docs/scheduling/cache.md).
//!
//! Each connection begins with a snapshot and continues with batches; the engine puts another
//! snapshot in the place of batches that it cannot repeat, so numbers never show a gap here. An
//! empty line every 15 s shows that it lives.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use http::{HeaderMap, Method, Uri};
use memchr::memchr;
use router_core::kv::ApplyResult;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::codec::{self, EventKind};
use super::subscriber::{EventReader, SubscriptionEnd};
use crate::transport::upstream::{ConnectionPool, RequestHead};

const SILENCE: Duration = Duration::from_secs(45);
/// Longest line read [bytes]: a snapshot of four million tokens has about 40 MB.
const MAX_LINE: usize = 256 << 20;
/// Longer lines are parsed off the async threads: above 1 ms.
const LONG_LINE: usize = 64 << 10;
/// Snapshots in memory at the same time, of all workers.
static LONG_LINES: Semaphore = Semaphore::const_new(2);

/// Follow the stream until it ends.
pub async fn follow(
    reader: &mut EventReader,
    pool: &Arc<ConnectionPool>,
    headers: &HeaderMap,
    rank: u32,
) -> Result<Infallible, SubscriptionEnd> {
    let uri = Uri::try_from(format!("/v1/kv_events?dp_rank={rank}"));
    let uri = uri.map_err(|err| SubscriptionEnd::Connect(err.to_string()))?;
    let head = RequestHead::new(Method::GET, uri, headers.clone());
    let silent = || SubscriptionEnd::Silent {
        secs: SILENCE.as_secs(),
    };
    let response = timeout(SILENCE, pool.send_alone(&head))
        .await
        .map_err(|_| silent())?;
    let response = response.map_err(|err| SubscriptionEnd::Connect(err.to_string()))?;
    let status = response.status();
    if !status.is_success() {
        return Err(SubscriptionEnd::Refused(format!(
            "/v1/kv_events: status {status}"
        )));
    }
    let mut answer = response.into_body();
    let mut lines = Lines::default();
    loop {
        while let Some(line) = lines.next() {
            take(reader, line).await?;
        }
        match timeout(SILENCE, answer.piece())
            .await
            .map_err(|_| silent())?
        {
            None => return Err(SubscriptionEnd::Closed),
            Some(Err(err)) => return Err(SubscriptionEnd::Connect(err.to_string())),
            Some(Ok(piece)) => lines.add(&piece)?,
        }
    }
}

/// Bytes that are no whole line yet.
#[derive(Default)]
struct Lines {
    buffer: BytesMut,
    /// So far there is no end of a line.
    searched: usize,
}

impl Lines {
    fn add(&mut self, piece: &[u8]) -> Result<(), SubscriptionEnd> {
        self.buffer.extend_from_slice(piece);
        match self.buffer.len() {
            0..=MAX_LINE => Ok(()),
            _ => Err(SubscriptionEnd::Malformed(format!(
                "a line of more than {MAX_LINE} bytes"
            ))),
        }
    }

    fn next(&mut self) -> Option<BytesMut> {
        let Some(at) = memchr(b'\n', &self.buffer[self.searched..]) else {
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.buffer.split_to(self.searched + at);
        self.buffer.advance(1);
        self.searched = 0;
        Some(line)
    }
}

async fn take(reader: &mut EventReader, line: BytesMut) -> Result<(), SubscriptionEnd> {
    if line.is_empty() {
        return Ok(());
    }
    let (parsed, _place) = match line.len() {
        0..=LONG_LINE => (codec::of_json(&line), None),
        _ => {
            let place = LONG_LINES.acquire().await.ok();
            let parsing = tokio::task::spawn_blocking(move || codec::of_json(&line)).await;
            (parsing.unwrap_or_else(|err| Err(err.to_string())), place)
        }
    };
    let line = parsed.map_err(SubscriptionEnd::Malformed)?;
    match line.r#type {
        EventKind::Snapshot => reader.snapshot(line.seq, &line.events),
        EventKind::Batch => match reader.batch(line.seq, &line.events, Some(line.ts))? {
            ApplyResult::Applied | ApplyResult::Old => Ok(()),
            ApplyResult::Gap { first } => Err(SubscriptionEnd::Malformed(format!(
                "batch {} came where {first} was due",
                line.seq
            ))),
        },
        EventKind::Error => Err(SubscriptionEnd::Connect(
            line.error.map(|error| error.message).unwrap_or_default(),
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_pieces_end() {
        let text = b"{\"a\":1}\n\n{\"b\":2}\nrest";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for piece in text.chunks(size) {
                lines.add(piece).unwrap();
                seen.extend(std::iter::from_fn(|| lines.next()));
            }
            assert_eq!(seen, [&b"{\"a\":1}"[..], b"", b"{\"b\":2}"], "{size}");
            assert_eq!(&lines.buffer[..], b"rest");
        }
    }
}
