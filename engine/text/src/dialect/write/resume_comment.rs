//! Comments with which a router can resume a stream on another engine (docs/protocol.md §2).
//!
//! In front of the last event of each write stands `: baton {"ids":[…]}`, the tokens that are out
//! with the event; the first comment also reports the seed and the time of the answer. Where events
//! are numbered, each comment reports their number.

use super::json::{push_ids, push_number};
use crate::dialect::resume::COMMENT;

/// Writes the comments of one stream.
#[derive(Debug)]
pub struct ResumeComments {
    /// Seed and Unix seconds, until a comment reports them.
    unreported: Option<(u64, u64)>,
    /// Tokens that no comment has reported.
    ids: Vec<u32>,
}

impl ResumeComments {
    pub fn new(seed: u64, created: u64) -> Self {
        Self {
            unreported: Some((seed, created)),
            ids: Vec::new(),
        }
    }

    /// These tokens belong to the next events.
    pub fn add(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Puts a comment into `out` at `last_event`, where the last event begins.
    /// `events`: number of events so far, where they are numbered.
    pub fn write_before(&mut self, last_event: usize, events: Option<u64>, out: &mut Vec<u8>) {
        let event = out.split_off(last_event);
        out.extend_from_slice(COMMENT);
        out.extend_from_slice(b"{\"ids\":");
        push_ids(out, &self.ids);
        self.ids.clear();
        if let Some((seed, created)) = self.unreported.take() {
            out.extend_from_slice(b",\"seed\":");
            push_number(out, seed);
            out.extend_from_slice(b",\"created\":");
            push_number(out, created);
        }
        if let Some(events) = events {
            out.extend_from_slice(b",\"events\":");
            push_number(out, events);
        }
        out.extend_from_slice(b"}\n");
        out.extend_from_slice(&event);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stand_before_the_last_event_and_seed_is_reported_once() {
        let mut comments = ResumeComments::new(7, 9);
        let mut out = b"data: {\"a\":1}\n\ndata: {\"b\":1}\n\n".to_vec();
        comments.add(&[5, 6]);
        comments.write_before(15, None, &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "data: {\"a\":1}\n\n: baton {\"ids\":[5,6],\"seed\":7,\"created\":9}\ndata: \
             {\"b\":1}\n\n"
        );
        let mut out = b"data: {}\n\n".to_vec();
        comments.write_before(0, Some(4), &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            ": baton {\"ids\":[],\"events\":4}\ndata: {}\n\n"
        );
    }
}
