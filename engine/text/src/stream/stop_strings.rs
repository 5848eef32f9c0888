//! Stop strings in a growing text.

/// Finds the first stop string in a growing text: of several, the one that is complete first, and
/// of those that are complete together the longest. A reader of one character after the other finds
/// the same.
///
/// Cost: per byte of text one step of each stop string's automaton (Knuth, Morris, Pratt 1977), so
/// linear in the text for every choice of stop strings.
#[derive(Debug)]
pub(super) struct StopMatcher {
    automata: Vec<StopAutomaton>,
    include_stop: bool,
    /// Text that may be the beginning of a stop string.
    held: String,
    matched: Option<usize>,
}

impl StopMatcher {
    /// Empty stop strings match nothing. `None` if no other is there.
    pub(super) fn new(stops: &[String], include_stop: bool) -> Option<Self> {
        let automata: Vec<StopAutomaton> = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty())
            .map(|(index, stop)| StopAutomaton::new(index, stop))
            .collect();
        if automata.is_empty() {
            return None;
        }
        Some(Self {
            automata,
            include_stop,
            held: String::new(),
            matched: None,
        })
    }

    /// Index of the stop string that is complete; no more text comes out then.
    pub(super) fn matched(&self) -> Option<usize> {
        self.matched
    }

    /// Appends to `out` what may be shown with `text`. Returns the index of the stop string that
    /// is complete.
    ///
    /// `may_end`: false for text in which no stop string ends the text. One may begin there, and
    /// ends the text if its last character comes later.
    pub(super) fn feed(&mut self, text: &str, may_end: bool, out: &mut String) -> Option<usize> {
        if self.matched.is_some() {
            return self.matched;
        }
        let text_start = self.held.len();
        self.held.push_str(text);
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            let Some((stop_index, stop_len)) = self.read_byte(byte, may_end) else {
                continue;
            };
            let end = text_start + index + 1;
            let shown = if self.include_stop {
                end
            } else {
                end - stop_len
            };
            out.push_str(&self.held[..shown]);
            self.held.clear();
            self.matched = Some(stop_index);
            return self.matched;
        }
        let begun_len = self
            .automata
            .iter()
            .map(|automaton| automaton.matched_len)
            .max()
            .unwrap_or_default();
        let shown = self.held.len() - begun_len;
        out.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        None
    }

    /// The text has ended: appends what was held back.
    pub(super) fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Forgets the text so far: the next text begins a new one.
    pub(super) fn restart(&mut self) {
        self.held.clear();
        self.matched = None;
        for automaton in &mut self.automata {
            automaton.matched_len = 0;
        }
    }

    /// True if text is held back.
    pub(super) fn holds_text(&self) -> bool {
        !self.held.is_empty()
    }

    /// Index and length of the longest stop string that ends with this byte, where one may end.
    fn read_byte(&mut self, byte: u8, may_end: bool) -> Option<(usize, usize)> {
        let mut longest: Option<(usize, usize)> = None;
        for automaton in &mut self.automata {
            let stop_len = automaton.stop.len();
            if !automaton.read_byte(byte) {
                continue;
            }
            if !may_end {
                automaton.restart_after_match();
                continue;
            }
            if longest.is_none_or(|(_, len)| len < stop_len) {
                longest = Some((automaton.stop_index, stop_len));
            }
        }
        longest
    }
}

/// Automaton that reads a text and knows how much of one stop string its end is.
#[derive(Debug)]
struct StopAutomaton {
    stop_index: usize,
    stop: Box<[u8]>,
    /// For every length of a beginning of `stop`: length of the longest shorter beginning that it
    /// ends with.
    shorter_len: Box<[usize]>,
    /// Bytes of `stop` that the text ends with.
    matched_len: usize,
}

impl StopAutomaton {
    fn new(stop_index: usize, stop: &str) -> Self {
        let mut automaton = Self {
            stop_index,
            stop: stop.as_bytes().into(),
            shorter_len: vec![0; stop.len() + 1].into(),
            matched_len: 0,
        };
        // The automaton of the beginnings so far reads the stop string from its second byte on.
        for index in 1..stop.len() {
            automaton.read_byte(stop.as_bytes()[index]);
            automaton.shorter_len[index + 1] = automaton.matched_len;
        }
        automaton.matched_len = 0;
        automaton
    }

    /// Returns true if the stop string ends with this byte; the text ends there, too.
    fn read_byte(&mut self, byte: u8) -> bool {
        while self.stop[self.matched_len] != byte {
            if self.matched_len == 0 {
                return false;
            }
            self.matched_len = self.shorter_len[self.matched_len];
        }
        self.matched_len += 1;
        self.matched_len == self.stop.len()
    }

    /// The complete stop string counts for nothing. Its end may begin the next one.
    fn restart_after_match(&mut self) {
        self.matched_len = self.shorter_len[self.matched_len];
    }
}
