//! Markers in an answer: the tokens and texts between which reasoning and tool calls stand.
//!
//! A marker that the vocabulary has as an added token is recognized by its id alone, so that the
//! same characters typed as text are text, and whether special tokens are shown does not matter.
//! Other markers are recognized by their characters.

use std::ops::Range;
use std::sync::Arc;

use super::detokenizer::Detokenizer;
use super::stop_strings::StopMatcher;
use crate::tokenizer::{TextTokenizer, TokenDecoder};

/// Piece of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lexeme<'a> {
    Text(&'a str),
    /// Index of a marker in its table.
    Marker(usize),
}

/// Meaning of a marker for the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum MarkerRole {
    ReasoningBegin,
    ReasoningEnd,
    /// Begins a call, also in a reasoning whose end marker is missing.
    CallBegin,
    /// Part of a call.
    Call,
}

/// A marker of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerMarker {
    pub text: &'static str,
    pub role: MarkerRole,
    /// Id of the added token. `None`: the marker is text.
    pub id: Option<u32>,
}

/// Markers of a model.
#[derive(Debug, Default)]
pub struct MarkerTable {
    markers: Box<[AnswerMarker]>,
    /// Id and index of each marker that is a token.
    tokens: Box<[(u32, usize)]>,
}

impl MarkerTable {
    pub fn new(markers: &[(&'static str, MarkerRole)], tokenizer: &dyn TextTokenizer) -> Self {
        let markers: Box<[AnswerMarker]> = markers
            .iter()
            .map(|&(text, role)| AnswerMarker {
                text,
                role,
                id: tokenizer.added_id_of(text),
            })
            .collect();
        let indices = markers.iter().enumerate();
        let tokens = indices.filter_map(|(index, marker)| Some((marker.id?, index)));
        Self {
            tokens: tokens.collect(),
            markers,
        }
    }

    pub fn markers(&self) -> &[AnswerMarker] {
        &self.markers
    }

    pub fn text_of(&self, index: usize) -> &'static str {
        self.markers[index].text
    }

    pub fn role_of(&self, index: usize) -> MarkerRole {
        self.markers[index].role
    }

    pub fn is_token(&self, index: usize) -> bool {
        self.markers[index].id.is_some()
    }

    /// Index of the marker that is this token.
    pub fn index_of(&self, id: u32) -> Option<usize> {
        let found = self.tokens.iter().find(|(token, _)| *token == id);
        found.map(|(_, index)| *index)
    }
}

/// Divides an answer into text and markers as its tokens arrive. How the ids are grouped into calls
/// does not matter.
///
/// Cost: a token that is no marker costs a comparison with each marker's id more than its text.
#[derive(Debug)]
pub struct MarkerLexer {
    table: Arc<MarkerTable>,
    /// Markers that are looked for.
    active: Range<usize>,
    detokenizer: Detokenizer,
    text_markers: Option<TextMarkers>,
    /// Text of one token.
    piece: String,
}

impl MarkerLexer {
    /// `active`: the markers of the table that are looked for. `prompt`: ids that the text
    /// continues.
    pub fn new(
        table: Arc<MarkerTable>,
        active: Range<usize>,
        decoder: &dyn TokenDecoder,
        skip_special_tokens: bool,
        prompt: &[u32],
    ) -> Self {
        Self {
            text_markers: TextMarkers::new(&table, active.clone()),
            table,
            active,
            detokenizer: Detokenizer::new(decoder, skip_special_tokens, prompt),
            piece: String::new(),
        }
    }

    /// Calls `read` with the lexemes that are final with `id`. `is_counted`: a grammar has counted
    /// its bytes, and they are its text.
    pub fn feed(
        &mut self,
        decoder: &dyn TokenDecoder,
        id: u32,
        is_counted: bool,
        read: &mut dyn FnMut(Lexeme<'_>),
    ) {
        self.piece.clear();
        let marker = self.table.index_of(id);
        let Some(marker) = marker.filter(|index| self.active.contains(index)) else {
            self.detokenizer
                .feed(decoder, id, is_counted, &mut self.piece);
            self.read_piece(read);
            return;
        };
        self.finish(decoder, read);
        // The marker is left context of the tokens behind it.
        self.detokenizer
            .feed(decoder, id, is_counted, &mut self.piece);
        read(Lexeme::Marker(marker));
    }

    /// The answer has ended: calls `read` with the text that was held back.
    pub fn finish(&mut self, decoder: &dyn TokenDecoder, read: &mut dyn FnMut(Lexeme<'_>)) {
        self.piece.clear();
        self.detokenizer.flush(decoder, &mut self.piece);
        self.read_piece(read);
        if let Some(text_markers) = &mut self.text_markers {
            text_markers.flush(read);
        }
    }

    fn read_piece(&mut self, read: &mut dyn FnMut(Lexeme<'_>)) {
        match &mut self.text_markers {
            Some(text_markers) => text_markers.feed(&self.piece, read),
            None => read_text(&self.piece, read),
        }
    }
}

fn read_text(text: &str, read: &mut dyn FnMut(Lexeme<'_>)) {
    if !text.is_empty() {
        read(Lexeme::Text(text));
    }
}

/// Finds markers that are text.
#[derive(Debug)]
struct TextMarkers {
    matcher: StopMatcher,
    /// Index in the table of each text of the matcher.
    indices: Box<[usize]>,
    first_bytes: Box<[u8]>,
    /// Text in front of the next marker.
    text: String,
}

impl TextMarkers {
    fn new(table: &MarkerTable, active: Range<usize>) -> Option<Self> {
        let indices: Box<[usize]> = active.filter(|index| !table.is_token(*index)).collect();
        let texts: Vec<String> = indices
            .iter()
            .map(|&index| table.text_of(index).to_owned())
            .collect();
        let first_bytes = texts.iter().filter_map(|text| text.bytes().next());
        Some(Self {
            matcher: StopMatcher::new(&texts, false)?,
            indices,
            first_bytes: first_bytes.collect(),
            text: String::new(),
        })
    }

    fn feed(&mut self, text: &str, read: &mut dyn FnMut(Lexeme<'_>)) {
        let begins_marker = |byte: u8| self.first_bytes.contains(&byte);
        if !self.matcher.holds_text() && !text.bytes().any(begins_marker) {
            read_text(text, read);
            return;
        }
        let mut buffer = [0; 4];
        for character in text.chars() {
            let character = character.encode_utf8(&mut buffer);
            let Some(found) = self.matcher.feed(character, true, &mut self.text) else {
                continue;
            };
            self.matcher.restart();
            self.read_held(read);
            read(Lexeme::Marker(self.indices[found]));
        }
        self.read_held(read);
    }

    fn flush(&mut self, read: &mut dyn FnMut(Lexeme<'_>)) {
        self.matcher.flush(&mut self.text);
        self.matcher.restart();
        self.read_held(read);
    }

    fn read_held(&mut self, read: &mut dyn FnMut(Lexeme<'_>)) {
        read_text(&self.text, read);
        self.text.clear();
    }
}
