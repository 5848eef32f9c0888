//! Content before, between and after calls.

use crate::stream::parts::AnswerParts;

/// Writes content, and knows whether the next character begins a line.
#[derive(Debug, Clone)]
pub struct LineTracker {
    /// The line so far is blank.
    is_at_line_start: bool,
}

impl Default for LineTracker {
    fn default() -> Self {
        Self {
            is_at_line_start: true,
        }
    }
}

impl LineTracker {
    pub fn push_text(&mut self, text: &str, out: &mut AnswerParts) {
        out.push_content(text);
        let last_line = text.rsplit('\n').next().unwrap_or_default();
        let is_new_line = last_line.len() < text.len();
        let is_blank = last_line.trim_ascii().is_empty();
        self.is_at_line_start = (self.is_at_line_start || is_new_line) && is_blank;
    }

    /// A call begins here. Text behind a call begins a line.
    pub fn begin_call(&mut self, name: &str, out: &mut AnswerParts) {
        out.begin_call(name);
        self.is_at_line_start = true;
    }

    /// True if only white space stands before the next character in its line.
    pub fn is_at_line_start(&self) -> bool {
        self.is_at_line_start
    }
}
