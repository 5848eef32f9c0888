//! Vocabularies of other files than tokenizer.json, whose ids and texts their own libraries gave
//! (tests/support/goldens/vocabulary_goldens.py).

use super::model::stream_answer;
use crate::stream::TextRules;
use crate::tokenizer::golden::{VOCABULARIES, load, vocabulary_cases};
use crate::tokenizer::{CacheLimits, CacheLookups, PromptEncoder, TextTokenizer, TokenDecoder};

#[test]
fn ids_and_texts_are_those_of_the_own_libraries() {
    for name in VOCABULARIES {
        let tokenizer = load(name);
        let limits = CacheLimits {
            whole: None,
            segment_bytes: Some(1 << 20),
        };
        let router = PromptEncoder::new(load(name), limits).unwrap();
        for case in vocabulary_cases(name) {
            let text = tokenizer.guard().escape(&case.text);
            let ids = tokenizer.encode(&text, false).unwrap();
            assert_eq!(*ids, *case.ids, "{name} {:?}", case.text);
            assert_eq!(tokenizer.decode(&ids, true), case.decoded, "{name} {ids:?}");
            let in_router = router.encode(&text, false, &mut CacheLookups::default());
            assert_eq!(in_router.unwrap(), ids, "{name} {:?}", case.text);
        }
    }
}

#[test]
fn streams_cut_anywhere_give_the_text_of_the_whole() {
    let rules = TextRules {
        skip_special_tokens: true,
        ..TextRules::default()
    };
    for name in VOCABULARIES {
        let tokenizer = load(name);
        for case in vocabulary_cases(name) {
            for place in 0..=case.ids.len().min(40) {
                let (prompt, answer) = case.ids.split_at(place);
                let before = tokenizer.decode(prompt, true);
                // A prompt that ends within a character is no text to continue.
                let Some(rest) = case.decoded.strip_prefix(&before) else {
                    continue;
                };
                if before.ends_with('\u{fffd}') {
                    continue;
                }
                let (streamed, _) = stream_answer(&tokenizer, &rules, prompt, answer, &[1, 3]);
                assert_eq!(streamed.text, rest, "{name} {:?} at {place}", case.text);
            }
        }
    }
}
