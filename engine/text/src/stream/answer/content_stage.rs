//! Stop strings in the content, and white space around calls.

use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::stop_strings::StopMatcher;

/// Last stage of an answer's parts.
///
/// * The content ends at a stop string. Reasoning, names and arguments are not searched, and a stop
///   string does not extend over a call.
/// * White space in front of a call is left out. White space behind a call is kept if text follows
///   it, and is not searched for stop strings before.
/// * Where calls do not run side by side, the answer ends behind the first one.
#[derive(Debug)]
pub struct ContentStage {
    stop_matcher: Option<StopMatcher>,
    /// Calls are read: white space is held back.
    reads_calls: bool,
    ends_behind_call: bool,
    /// White space behind a call.
    gap: String,
    is_behind_call: bool,
    /// White space at the end of the content.
    tail: String,
    /// Content on its way through the matcher.
    searched: String,
    completed_calls: usize,
}

impl ContentStage {
    pub fn new(
        stops: &[String],
        include_stop: bool,
        reads_calls: bool,
        ends_behind_call: bool,
    ) -> Self {
        Self {
            stop_matcher: StopMatcher::new(stops, include_stop),
            reads_calls,
            ends_behind_call,
            gap: String::new(),
            is_behind_call: false,
            tail: String::new(),
            searched: String::new(),
            completed_calls: 0,
        }
    }

    pub fn completed_calls(&self) -> usize {
        self.completed_calls
    }

    pub fn matched_stop(&self) -> Option<usize> {
        self.stop_matcher.as_ref()?.matched()
    }

    /// True if parts leave the stage as they are, at once: nothing is looked for in them.
    pub fn is_transparent(&self) -> bool {
        self.stop_matcher.is_none() && !self.reads_calls
    }

    /// True if nothing of the answer that follows is shown.
    pub fn has_ended(&self) -> bool {
        self.matched_stop().is_some() || self.is_ended_by_call()
    }

    fn is_ended_by_call(&self) -> bool {
        self.ends_behind_call && self.completed_calls > 0
    }

    /// `may_end`: a stop string that is complete with these parts ends the answer.
    pub fn push_parts(&mut self, parts: &AnswerParts, may_end: bool, out: &mut AnswerParts) {
        for part in parts.iter() {
            if self.has_ended() {
                return;
            }
            match part {
                AnswerPart::Content(text) => self.push_content(text, may_end, out),
                AnswerPart::CallBegin(_) => {
                    self.end_content(true, out);
                    out.push(part);
                }
                AnswerPart::CallEnd => {
                    self.completed_calls += 1;
                    self.is_behind_call = true;
                    out.push(part);
                }
                AnswerPart::Reasoning(_) => {
                    self.end_content(false, out);
                    out.push(part);
                }
                AnswerPart::Arguments(_) => out.push(part),
            }
        }
    }

    /// The answer has ended: appends what was held back.
    pub fn finish(&mut self, out: &mut AnswerParts) {
        if !self.has_ended() {
            self.end_content(false, out);
        }
    }

    fn push_content(&mut self, text: &str, may_end: bool, out: &mut AnswerParts) {
        let mut text = text;
        if self.is_behind_call {
            let rest = text.trim_start();
            self.gap.push_str(&text[..text.len() - rest.len()]);
            if rest.is_empty() {
                return;
            }
            self.is_behind_call = false;
            let gap = std::mem::take(&mut self.gap);
            self.search_content(&gap, may_end, out);
            text = rest;
        }
        self.search_content(text, may_end, out);
    }

    fn search_content(&mut self, text: &str, may_end: bool, out: &mut AnswerParts) {
        let Some(matcher) = &mut self.stop_matcher else {
            self.show_content(text, out);
            return;
        };
        let mut searched = std::mem::take(&mut self.searched);
        let matched_stop = matcher.feed(text, may_end, &mut searched);
        self.show_content(&searched, out);
        searched.clear();
        self.searched = searched;
        if matched_stop.is_some() {
            out.push_content(&self.tail);
            self.tail.clear();
        }
    }

    fn show_content(&mut self, text: &str, out: &mut AnswerParts) {
        if !self.reads_calls {
            out.push_content(text);
            return;
        }
        let body = text.trim_end();
        if !body.is_empty() {
            out.push_content(&self.tail);
            self.tail.clear();
            out.push_content(body);
        }
        self.tail.push_str(&text[body.len()..]);
    }

    /// Another part follows. `drops_tail`: white space at the end is left out.
    fn end_content(&mut self, drops_tail: bool, out: &mut AnswerParts) {
        if let Some(matcher) = &mut self.stop_matcher {
            let mut held = String::new();
            matcher.flush(&mut held);
            matcher.restart();
            self.show_content(&held, out);
        }
        if !drops_tail {
            out.push_content(&self.tail);
        }
        self.tail.clear();
        self.gap.clear();
        self.is_behind_call = false;
    }
}
