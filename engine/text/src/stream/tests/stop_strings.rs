//! Stop strings of few letters, so that they overlap themselves and each other, in texts of the
//! same letters.

use proptest::collection::vec;
use proptest::prelude::*;

use super::decoders::ByteTokens;
use super::model::{read_answer, stream_answer};
use crate::stream::TextRules;

/// Tokens "a", "b" and "<".
fn letter_tokens() -> ByteTokens {
    ByteTokens {
        tokens: vec![b"a".to_vec(), b"b".to_vec(), b"<".to_vec()],
        special: 0,
        is_bytewise: true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn first_complete_stop_string_ends_the_text(
        ids in vec(0..3u32, 0..30),
        stops in vec("[ab]{1,6}|[ab<]{1,4}", 1..4),
        include_stop: bool,
        min_tokens in prop_oneof![2 => Just(0), 1 => 0..12u32],
        size in 1..5usize,
    ) {
        let decoder = letter_tokens();
        let rules = TextRules { stops, include_stop, min_tokens, ..TextRules::default() };
        let mut final_texts: Vec<String> = (0..=ids.len())
            .map(|len| String::from_utf8_lossy(&decoder.join_bytes(&ids[..len], false)).into_owned())
            .collect();
        final_texts.extend(final_texts.last().cloned());
        let (answer, _) = stream_answer(&decoder, &rules, &[], &ids, &[size]);
        prop_assert_eq!(answer, read_answer(&rules, &final_texts));
    }
}
