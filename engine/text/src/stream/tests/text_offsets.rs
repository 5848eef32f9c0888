//! Places of tokens against the characters of the bytes before them.

use proptest::collection::vec;
use proptest::prelude::*;

use super::decoders::token_bytes;
use super::model::ends_within_character;
use crate::stream::TextOffsets;

/// Characters that the bytes before make. The last one is not counted if `raw` may be a part of it.
fn expected_place(start_chars: usize, before: &[u8], raw: &[u8]) -> usize {
    let chars = String::from_utf8_lossy(before).chars().count();
    let begins_character = raw.first().is_some_and(|&byte| byte & 0xC0 != 0x80);
    let is_within = ends_within_character(before) && !begins_character;
    start_chars + chars - usize::from(is_within)
}

proptest! {
    #[test]
    fn places_count_characters_of_bytes_before(
        tokens in vec(token_bytes(), 0..40),
        start_chars in 0..100usize,
    ) {
        let mut offsets = TextOffsets::new(start_chars);
        let mut before = Vec::new();
        for raw in tokens {
            prop_assert_eq!(offsets.place(&raw), expected_place(start_chars, &before, &raw));
            before.extend_from_slice(&raw);
        }
    }
}

#[test]
fn parts_of_one_character_have_its_place() {
    let mut offsets = TextOffsets::new(5);
    let places: Vec<usize> = [&b"a"[..], b"\xF0\x9F", b"\x98", b"\x80b", b"", b"c"]
        .into_iter()
        .map(|raw| offsets.place(raw))
        .collect();
    assert_eq!(places, [5, 6, 6, 6, 8, 8]);
}
