//! Runs of whole events of a stream that comes in pieces.

use bytes::Bytes;
use memchr::memrchr2_iter;

use super::event::ends_empty_line;

/// An event longer than this passes in parts [bytes].
pub const MAX_EVENT: usize = 8 << 20;

/// Cuts a stream, however it comes, into runs of whole events.
#[derive(Debug, Default)]
pub struct EventSplitter {
    /// The beginning of an event.
    part: Vec<u8>,
}

impl EventSplitter {
    /// Take a piece; returns the events that are whole with it. An event longer than `MAX_EVENT`
    /// comes in parts.
    #[inline]
    pub fn push(&mut self, piece: Bytes) -> Option<Bytes> {
        if self.part.is_empty() {
            let end = run_len(&piece, 0);
            self.part.extend_from_slice(&piece[end..]);
            return (end > 0).then(|| piece.slice(..end));
        }
        let seen = self.part.len();
        self.part.extend_from_slice(&piece);
        let end = run_len(&self.part, seen);
        (end > 0).then(|| {
            let next = self.part.split_off(end);
            Bytes::from(std::mem::replace(&mut self.part, next))
        })
    }

    /// Take the beginning of the next event.
    pub fn take_part(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.part)
    }

    /// The worker ended the stream properly: its last event, if only the empty line behind it is
    /// missing.
    pub fn finish(&mut self) -> Option<Bytes> {
        match self.part.last() {
            Some(b'\n') => self.push(Bytes::from_static(b"\n")),
            // LF would belong to the CR in front of it.
            Some(b'\r') => self.push(Bytes::from_static(b"\r")),
            _ => None,
        }
    }
}

/// Length of the whole events in front, or of all if it is too long to wait. A search that saw the
/// first `seen` bytes found none there. An event may end with CR before the LF that belongs to it
/// has come: that LF is then an empty line in front of the next event, which means nothing.
#[inline]
fn run_len(text: &[u8], seen: usize) -> usize {
    let mut ends = memrchr2_iter(b'\n', b'\r', &text[seen..]).map(|at| seen + at);
    match ends.find(|at| ends_empty_line(text, *at)) {
        Some(at) => at + 1,
        None if text.len() > MAX_EVENT => text.len(),
        None => 0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::sse::event_len;

    fn pushed(events: &mut EventSplitter, piece: &str) -> String {
        let run = events.push(Bytes::copy_from_slice(piece.as_bytes()));
        String::from_utf8(run.unwrap_or_default().to_vec()).unwrap()
    }

    proptest! {
        #[test]
        fn runs_are_the_whole_events_however_the_stream_is_cut(
            events in proptest::collection::vec(
                (
                    "(: x\n){0,2}(data: [ab]{0,3}\n){0,2}\n",
                    proptest::sample::select(vec!["\n", "\r\n", "\r"]),
                ),
                0..5,
            ),
            part in "(data: [ab]{0,3}(\n|\r|\r\n)?)?",
            cuts in proptest::collection::vec(0usize..200, 0..6),
        ) {
            let whole: String = events
                .iter()
                .map(|(event, line_end)| event.replace('\n', line_end))
                .collect();
            let stream = format!("{whole}{part}");
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let mut splitter = EventSplitter::default();
            let mut seen = String::new();
            for cut in cuts.windows(2) {
                seen += &pushed(&mut splitter, &stream[cut[0]..cut[1]]);
                // All events that are whole so far, and nothing else.
                let mut expected = 0;
                while let Some(len) = event_len(&stream.as_bytes()[expected..cut[1]]) {
                    expected += len;
                }
                prop_assert_eq!(seen.len(), expected);
            }
            prop_assert_eq!(&seen, &whole);
            let rest = splitter.finish().map(|run| String::from_utf8(run.to_vec()).unwrap());
            let end = match part.chars().last() {
                Some(end @ ('\n' | '\r')) => Some(format!("{part}{end}")),
                _ => None,
            };
            prop_assert_eq!(rest, end);
        }
    }

    #[test]
    fn event_without_end_is_not_held_for_ever() {
        let mut events = EventSplitter::default();
        let half = "x".repeat(MAX_EVENT / 2);
        assert_eq!(pushed(&mut events, &half), "");
        assert_eq!(pushed(&mut events, &half), "");
        assert_eq!(pushed(&mut events, "y\n").len(), MAX_EVENT + 2);
        assert_eq!(pushed(&mut events, "\ndata: a\n\n"), "\ndata: a\n\n");
    }
}
