//! The reasoning of an answer, as it arrives.

use super::start::{BlockText, ReasoningStart, is_blank, is_blank_char};
use crate::stream::markers::{Lexeme, MarkerRole, MarkerTable};
use crate::stream::parts::AnswerParts;

/// Reader of what is behind the reasoning.
pub type ForwardLexeme<'a> = dyn FnMut(Lexeme<'_>, &mut AnswerParts) + 'a;

/// Reads the reasoning of an answer and passes what is behind it on. Deterministic: the joined
/// parts depend on the joined lexemes alone.
///
/// ```text
/// Undecided → Inside → Behind → Content
///     └──────────────────────────┘
/// ```
///
/// * `Undecided`: white space is held back; a begin marker begins the reasoning, anything else is
///   content.
/// * `Inside`: ends with an end marker. Models that forget it begin a call: a begin marker of a
///   call that is a token ends the reasoning, also within a line, because no user types a token. A
///   begin marker behind nothing but white space repeats that of the prompt.
/// * `Behind`: newlines are held back; a begin marker begins a second block.
/// * `Content`: markers of reasoning are text.
///
/// Separated from the content, the reasoning has no markers, no newline in front of it and none
/// behind it; nor does the content have newlines in front of it. Where a grammar begins behind the
/// reasoning, newlines that it has counted are content (`count_lead_newlines`). A begin marker at
/// the end of the answer begins nothing and is left out.
#[derive(Debug)]
pub struct ReasoningReader {
    state: ReasoningState,
    is_separate: bool,
    /// White space that is shown only if text follows.
    held: String,
    /// A begin marker where it is text, and white space behind it. It is shown if more follows.
    late_begin: String,
    /// An end marker was read since [`ReasoningReader::take_block_end`].
    has_block_end: bool,
    lead: LeadNewlines,
}

/// Newlines behind the reasoning that are no content.
#[derive(Debug, Clone, Copy)]
enum LeadNewlines {
    All,
    /// Those in tokens of newlines alone, up to a number: the rank's `ReasoningTracker` (Python)
    /// keeps them from the grammar by the same rule.
    Counted {
        most: usize,
        left: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReasoningState {
    Undecided,
    Inside {
        block: BlockText,
        /// The next newline is the one in front of the reasoning.
        drops_newline: bool,
    },
    Behind,
    Content,
}

const BLOCK_BEGIN: ReasoningState = ReasoningState::Inside {
    block: BlockText::Blank,
    drops_newline: true,
};

impl ReasoningReader {
    /// `is_separate`: false leaves the reasoning and its markers in the content, as generated.
    pub fn new(start: ReasoningStart, is_separate: bool) -> Self {
        let state = match start {
            ReasoningStart::Undecided => ReasoningState::Undecided,
            ReasoningStart::Inside(block) => ReasoningState::Inside {
                block,
                drops_newline: block == BlockText::Blank,
            },
            ReasoningStart::Behind => ReasoningState::Behind,
            ReasoningStart::Content => ReasoningState::Content,
        };
        Self {
            state,
            is_separate,
            held: String::new(),
            late_begin: String::new(),
            has_block_end: false,
            lead: LeadNewlines::All,
        }
    }

    /// A grammar begins behind the reasoning and `most` newlines. Called before the first token.
    pub fn count_lead_newlines(&mut self, most: usize) {
        self.lead = LeadNewlines::Counted { most, left: most };
    }

    /// True if the next token is to be passed to [`Self::count_newlines`], unless it is a marker.
    pub fn counts_newlines(&self) -> bool {
        let is_counted = matches!(self.lead, LeadNewlines::Counted { .. });
        is_counted && self.state == ReasoningState::Behind
    }

    /// Takes the bytes of a token whose lexemes are read next.
    pub fn count_newlines(&mut self, bytes: &[u8]) {
        let LeadNewlines::Counted { left, .. } = &mut self.lead else {
            return;
        };
        let is_newlines = !bytes.is_empty() && bytes.iter().all(|byte| *byte == b'\n');
        if is_newlines && bytes.len() <= *left {
            *left -= bytes.len();
            return;
        }
        // The grammar has counted this token from its first byte on.
        self.held.clear();
        self.state = ReasoningState::Content;
    }

    /// True within a block of reasoning.
    pub fn is_inside(&self) -> bool {
        matches!(self.state, ReasoningState::Inside { .. })
    }

    /// True if an end marker of a block was read since the last call.
    pub fn take_block_end(&mut self) -> bool {
        std::mem::take(&mut self.has_block_end)
    }

    pub fn read(
        &mut self,
        lexeme: Lexeme<'_>,
        table: &MarkerTable,
        out: &mut AnswerParts,
        forward: &mut ForwardLexeme<'_>,
    ) {
        if let Lexeme::Text(text) = lexeme
            && !self.late_begin.is_empty()
            && is_blank(text)
        {
            self.late_begin.push_str(text);
            return;
        }
        self.show_late_begin(out, forward);
        match lexeme {
            Lexeme::Text(text) => self.read_text(text, out, forward),
            Lexeme::Marker(index) => {
                let text = table.text_of(index);
                match table.role_of(index) {
                    MarkerRole::ReasoningBegin => self.read_begin(text, out, forward),
                    MarkerRole::ReasoningEnd => self.read_end(text, out, forward),
                    MarkerRole::CallBegin => {
                        let ends_reasoning = table.is_token(index);
                        self.read_call_marker(lexeme, text, ends_reasoning, out, forward);
                    }
                    MarkerRole::Call => self.read_call_marker(lexeme, text, false, out, forward),
                }
            }
        }
    }

    /// The answer has ended: appends what was held back.
    pub fn finish(&mut self, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        match self.state {
            ReasoningState::Undecided => self.forward_held(out, forward),
            ReasoningState::Inside { .. } => self.push_held_reasoning(out),
            ReasoningState::Behind | ReasoningState::Content => {}
        }
    }

    fn read_text(&mut self, text: &str, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        match self.state {
            ReasoningState::Undecided => {
                let rest = text.trim_start_matches(is_blank_char);
                self.held.push_str(&text[..text.len() - rest.len()]);
                if !rest.is_empty() {
                    self.begin_content(out, forward);
                    forward(Lexeme::Text(rest), out);
                }
            }
            ReasoningState::Inside { .. } => self.read_reasoning(text, out),
            ReasoningState::Behind => {
                let rest = text.trim_start_matches(['\n', '\r']);
                let newlines = &text[..text.len() - rest.len()];
                if self.is_separate {
                    self.held.push_str(newlines);
                } else {
                    out.push_content(newlines);
                }
                if !rest.is_empty() {
                    self.held.clear();
                    self.state = ReasoningState::Content;
                    forward(Lexeme::Text(rest), out);
                }
            }
            ReasoningState::Content => forward(Lexeme::Text(text), out),
        }
    }

    /// Reads text of a block.
    fn read_reasoning(&mut self, text: &str, out: &mut AnswerParts) {
        let ReasoningState::Inside {
            block,
            drops_newline,
        } = &mut self.state
        else {
            return;
        };
        *block = block.followed_by(text);
        if !self.is_separate {
            out.push_content(text);
            return;
        }
        let mut shown = text;
        if *drops_newline {
            *drops_newline = false;
            shown = shown.strip_prefix('\n').unwrap_or(shown);
        }
        // A begin marker may follow that the prompt has already.
        if *block == BlockText::Blank {
            self.held.push_str(shown);
            return;
        }
        let body = shown.trim_end_matches('\n');
        if !body.is_empty() {
            self.push_held_reasoning(out);
            out.push_reasoning(body);
        }
        self.held.push_str(&shown[body.len()..]);
    }

    fn read_begin(&mut self, text: &str, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        match self.state {
            ReasoningState::Undecided => {
                if !self.is_separate {
                    self.forward_held(out, forward);
                }
                self.begin_block(text, out);
            }
            ReasoningState::Behind => {
                self.push_held_reasoning(out);
                self.begin_block(text, out);
            }
            // The prompt has the marker, and the model repeats it.
            ReasoningState::Inside {
                block: BlockText::Blank,
                ..
            } => self.begin_block(text, out),
            ReasoningState::Inside { .. } | ReasoningState::Content => {
                self.late_begin.push_str(text);
                // What a grammar has counted is in the answer, also at its end.
                let is_counted = matches!(self.lead, LeadNewlines::Counted { .. });
                if !self.is_separate || (is_counted && self.state == ReasoningState::Content) {
                    self.show_late_begin(out, forward);
                }
            }
        }
    }

    fn show_late_begin(&mut self, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        if self.late_begin.is_empty() {
            return;
        }
        let text = std::mem::take(&mut self.late_begin);
        if self.is_inside() {
            self.read_reasoning(&text, out);
        } else {
            forward(Lexeme::Text(&text), out);
        }
    }

    fn begin_block(&mut self, marker: &str, out: &mut AnswerParts) {
        self.state = BLOCK_BEGIN;
        self.held.clear();
        if !self.is_separate {
            out.push_content(marker);
        }
    }

    fn read_end(&mut self, text: &str, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        if self.is_inside() {
            self.held.clear();
            self.has_block_end = true;
            self.state = ReasoningState::Behind;
            if let LeadNewlines::Counted { most, left } = &mut self.lead {
                *left = *most;
            }
            if !self.is_separate {
                out.push_content(text);
            }
            return;
        }
        self.begin_content(out, forward);
        forward(Lexeme::Text(text), out);
    }

    fn read_call_marker(
        &mut self,
        marker: Lexeme<'_>,
        text: &str,
        ends_reasoning: bool,
        out: &mut AnswerParts,
        forward: &mut ForwardLexeme<'_>,
    ) {
        if self.is_inside() {
            if !ends_reasoning {
                self.read_reasoning(text, out);
                return;
            }
            self.held.clear();
        }
        self.begin_content(out, forward);
        forward(marker, out);
    }

    /// Ends the reasoning. White space in front of a content without reasoning is its beginning.
    fn begin_content(&mut self, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        if self.state == ReasoningState::Undecided {
            self.forward_held(out, forward);
        }
        self.held.clear();
        self.state = ReasoningState::Content;
    }

    fn forward_held(&mut self, out: &mut AnswerParts, forward: &mut ForwardLexeme<'_>) {
        if !self.held.is_empty() {
            forward(Lexeme::Text(&self.held), out);
            self.held.clear();
        }
    }

    fn push_held_reasoning(&mut self, out: &mut AnswerParts) {
        out.push_reasoning(&self.held);
        self.held.clear();
    }
}
