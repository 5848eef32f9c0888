//! Every kind of decoder against the naive model.

use proptest::collection::vec;
use proptest::prelude::*;

use super::decoders::*;
use super::model::{ReadAnswer, ends_within_character, read_answer, stream_answer};
use crate::stream::{TextRules, TextStream};
use crate::tokenizer::TokenDecoder;

/// Rules with stop strings that begin alike, contain each other, and have several bytes.
fn text_rules() -> impl Strategy<Value = TextRules> {
    let any_stop = prop_oneof![
        3 => "[ab<]{0,3}",
        1 => Just("é<".to_owned()),
        1 => Just("界".to_owned()),
        1 => Just(" the".to_owned()),
        1 => Just("\n\n".to_owned()),
        1 => Just("\u{fffd}\u{fffd}".to_owned()),
    ];
    let stops = vec(any_stop, 0..4);
    (stops, any::<bool>(), any::<bool>(), 0..12u32).prop_map(
        |(stops, include_stop, skip_special_tokens, min_tokens)| TextRules {
            stops,
            include_stop,
            skip_special_tokens,
            min_tokens,
            ..TextRules::default()
        },
    )
}

fn group_sizes() -> impl Strategy<Value = Vec<usize>> {
    vec(1..5usize, 1..6)
}

/// Texts that are final with the first n tokens, and at last that of the end, for tokens whose
/// bytes are the text: all but an incomplete character.
fn bytewise_final_texts(decoder: &ByteTokens, rules: &TextRules, ids: &[u32]) -> Vec<String> {
    let lossy_text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut texts: Vec<String> = (0..=ids.len())
        .map(|len| {
            let bytes = decoder.join_bytes(&ids[..len], rules.skip_special_tokens);
            let mut text = lossy_text(&bytes);
            if ends_within_character(&bytes) {
                text.pop();
            }
            text
        })
        .collect();
    texts.push(lossy_text(
        &decoder.join_bytes(ids, rules.skip_special_tokens),
    ));
    texts
}

/// The same for decoders that need context, of answers in which U+FFFD is no more than the
/// beginning of a character: the answer behind the prompt, without U+FFFD at its end. Where a
/// decoder gives up a run of bytes that lacks its last ones, the text stays as it was.
fn window_final_texts(
    decoder: &dyn TokenDecoder,
    rules: &TextRules,
    prompt: &[u32],
    ids: &[u32],
) -> Vec<String> {
    let before = decoder.decode(prompt, rules.skip_special_tokens);
    let mut texts = vec![String::new()];
    for len in 1..=ids.len() {
        let both = [prompt, &ids[..len]].concat();
        let whole = decoder.decode(&both, rules.skip_special_tokens);
        let answer = whole.strip_prefix(&before);
        let final_text = answer.map(|text| text.trim_end_matches('\u{fffd}').to_owned());
        let last = &texts[len - 1];
        texts.push(
            final_text
                .filter(|text| text.starts_with(last))
                .unwrap_or_else(|| last.clone()),
        );
    }
    let both = [prompt, ids].concat();
    let whole = decoder.decode(&both, rules.skip_special_tokens);
    texts.push(whole.strip_prefix(&before).unwrap().to_owned());
    texts
}

/// Words and characters of [`spaced_token`], those without a token as bytes.
fn spaced_ids(max_words: usize) -> impl Strategy<Value = Vec<u32>> {
    let character_ids =
        "[é世界😀ß]".prop_map(|text: String| -> Vec<u32> { text.bytes().map(byte_id).collect() });
    let word_ids = prop_oneof![
        4 => (0..12u32).prop_map(|id| vec![id]),
        2 => character_ids,
        1 => Just(vec![SPACED_IDS + 7]),
    ];
    vec(word_ids, 0..max_words).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn bytewise_stream_equals_one_decode_cut_at_first_stop(
        decoder in byte_tokens(true),
        rules in text_rules(),
        ids in vec(0..26u32, 0..60),
        sizes in group_sizes(),
    ) {
        let expected = read_answer(&rules, &bytewise_final_texts(&decoder, &rules, &ids));
        let (answer, _) = stream_answer(&decoder, &rules, &[], &ids, &sizes);
        prop_assert_eq!(answer, expected);
    }

    #[test]
    fn bytewise_stream_shows_every_complete_character_at_once(
        decoder in byte_tokens(true),
        ids in vec(0..26u32, 0..60),
        sizes in group_sizes(),
    ) {
        let rules = TextRules::default();
        let final_texts = bytewise_final_texts(&decoder, &rules, &ids);
        let (_, pieces) = stream_answer(&decoder, &rules, &[], &ids, &sizes);
        let mut fed = 0;
        let mut shown = String::new();
        for (piece, size) in pieces.iter().zip(sizes.iter().cycle()) {
            fed = (fed + size).min(ids.len());
            shown += piece;
            if shown.len() < final_texts[ids.len() + 1].len() {
                prop_assert_eq!(&shown, &final_texts[fed]);
            }
        }
    }

    #[test]
    fn window_stream_of_any_bytes_equals_one_decode(
        decoder in byte_tokens(false),
        prompt in vec(0..26u32, 0..20),
        ids in vec(0..26u32, 0..60),
        sizes in group_sizes(),
        skip_special_tokens in any::<bool>(),
    ) {
        let rules = TextRules { skip_special_tokens, ..TextRules::default() };
        let bytes = decoder.join_bytes(&ids, skip_special_tokens);
        let (answer, _) = stream_answer(&decoder, &rules, &prompt, &ids, &sizes);
        prop_assert_eq!(answer.text, String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn spaced_stream_equals_one_decode_cut_at_first_stop(
        rules in text_rules(),
        prompt in spaced_ids(20),
        ids in spaced_ids(40),
        sizes in group_sizes(),
    ) {
        let decoder = SpacedTokens;
        let expected =
            read_answer(&rules, &window_final_texts(&decoder, &rules, &prompt, &ids));
        let (answer, _) = stream_answer(&decoder, &rules, &prompt, &ids, &sizes);
        prop_assert_eq!(answer, expected);
    }

    /// Text that a grammar has counted: the bytes of the tokens, with the space that `decode`
    /// drops.
    #[test]
    fn text_of_counted_tokens_is_their_bytes(
        prompt in prop_oneof![Just(Vec::new()), Just(vec![1]), spaced_ids(20)],
        ids in spaced_ids(40),
        sizes in group_sizes(),
        skip_special_tokens in any::<bool>(),
    ) {
        let rules = TextRules {
            skip_special_tokens,
            follows_grammar: true,
            ..TextRules::default()
        };
        let shown = ids.iter().filter(|id| !(skip_special_tokens && SpacedTokens.is_special(**id)));
        let bytes: Vec<u8> = shown.flat_map(|id| SpacedTokens.token_bytes(*id).into_owned()).collect();
        let (answer, _) = stream_answer(&SpacedTokens, &rules, &prompt, &ids, &sizes);
        prop_assert_eq!(answer.text, String::from_utf8(bytes).unwrap());
    }

    #[test]
    fn ids_without_text_within_character_change_nothing(
        ids in interrupted_characters(),
        sizes in group_sizes(),
    ) {
        let rules = TextRules { skip_special_tokens: true, ..TextRules::default() };
        let (answer, pieces) = stream_answer(&SpacedTokens, &rules, &[], &ids, &sizes);
        prop_assert_eq!(answer.text, SpacedTokens.decode(&ids, true));
        let is_garbage_shown = pieces.concat().contains(char::REPLACEMENT_CHARACTER);
        prop_assert!(!is_garbage_shown);
    }

    #[test]
    fn wrong_bytes_leave_characters_before_them(
        ids in vec(prop_oneof![spaced_ids(3), vec(visible_byte_id(), 1..6)], 0..12),
        sizes in group_sizes(),
    ) {
        let rules = TextRules { skip_special_tokens: true, ..TextRules::default() };
        let ids = ids.concat();
        let (answer, _) = stream_answer(&SpacedTokens, &rules, &[], &ids, &sizes);
        prop_assert_eq!(answer.text, spaced_text_by_character(&ids));
    }
}

/// Characters as byte tokens, each followed by ids that have no text.
fn interrupted_characters() -> impl Strategy<Value = Vec<u32>> {
    let silent_ids = vec(
        prop_oneof![0..2u32, Just(SPACED_IDS), Just(SPACED_IDS + 7)],
        0..8,
    );
    let characters = vec("[é世界😀ß]", 0..8);
    (characters, vec(silent_ids, 32)).prop_map(|(characters, silent)| {
        let text = characters.concat();
        let parts = text.bytes().zip(silent);
        parts
            .flat_map(|(byte, ids)| std::iter::once(byte_id(byte)).chain(ids))
            .collect()
    })
}

/// Byte tokens but the space: the first of an answer is not shown, so it may be given up with the
/// run.
fn visible_byte_id() -> impl Strategy<Value = u32> {
    any::<u8>()
        .prop_filter("a space", |&byte| byte != b' ')
        .prop_map(byte_id)
}

/// Text of an answer in which a run of byte tokens ends with every complete character: the
/// exemption that the module names.
fn spaced_text_by_character(ids: &[u32]) -> String {
    let mut text = String::new();
    let mut run: Vec<u8> = Vec::new();
    for &id in ids {
        match spaced_token(id) {
            None | Some(SpacedToken::Special(_)) => {}
            Some(SpacedToken::Byte(byte)) => {
                run.push(byte);
                if let Ok(complete) = std::str::from_utf8(&run) {
                    text += complete;
                    run.clear();
                }
            }
            Some(SpacedToken::Word(word)) => {
                text += &decode_byte_run(&run);
                run.clear();
                text += &word.replace('▁', " ");
            }
        }
    }
    text += &decode_byte_run(&run);
    text.strip_prefix(' ').unwrap_or(&text).to_owned()
}

/// Streams any answers with a tokenizer of `tokenizers`, against its decode of the whole.
fn check_loaded_tokenizer(
    decoder: &LoadedTokenizer,
    ids: impl Fn(usize) -> BoxedStrategy<Vec<u32>>,
) {
    let config = ProptestConfig::with_cases(500);
    let cases = (text_rules(), ids(20), ids(40), group_sizes());
    proptest!(config, |((rules, prompt, ids, sizes) in cases)| {
        let expected = read_answer(&rules, &window_final_texts(decoder, &rules, &prompt, &ids));
        let (answer, _) = stream_answer(decoder, &rules, &prompt, &ids, &sizes);
        prop_assert_eq!(answer, expected);
    });
}

/// Ids of byte-level BPE that make whole characters.
fn byte_level_ids(decoder: &LoadedTokenizer, max_words: usize) -> BoxedStrategy<Vec<u32>> {
    let vocabulary = decoder.tokenizer.get_vocab(true);
    let ids_of: Vec<Vec<u32>> = ["<s>", "a", "b", "<", "ab", "<<a", "Ġthe", "ĊĊ"]
        .iter()
        .map(|token| vec![vocabulary[*token]])
        .chain(["é", "世", "😀", "界", "ß"].iter().map(|text| {
            let ids = decoder.tokenizer.encode(*text, false).unwrap();
            ids.get_ids().to_vec()
        }))
        .collect();
    vec(proptest::sample::select(ids_of), 0..max_words)
        .prop_map(|words| words.concat())
        .boxed()
}

#[test]
fn byte_level_bpe_streams_what_it_decodes_to() {
    let decoder = byte_level_tokenizer(true);
    check_loaded_tokenizer(&decoder, |len| byte_level_ids(&decoder, len));
}

#[test]
fn byte_level_bpe_with_context_streams_what_it_decodes_to() {
    let decoder = byte_level_tokenizer(false);
    check_loaded_tokenizer(&decoder, |len| byte_level_ids(&decoder, len));
}

#[test]
fn byte_level_bpe_streams_any_bytes_as_it_decodes_them() {
    let bytewise = byte_level_tokenizer(true);
    let window = byte_level_tokenizer(false);
    let any_ids = vec(0..300u32, 0..60);
    proptest!(ProptestConfig::with_cases(500), |(ids in any_ids, sizes in group_sizes(), skip_special_tokens: bool)| {
        let rules = TextRules { skip_special_tokens, ..TextRules::default() };
        let whole = window.tokenizer.decode(&ids, skip_special_tokens).unwrap();
        for decoder in [&bytewise, &window] {
            let (answer, _) = stream_answer(decoder, &rules, &[], &ids, &sizes);
            prop_assert_eq!(&answer.text, &whole);
        }
    });
}

#[test]
fn byte_fallback_streams_what_it_decodes_to() {
    check_loaded_tokenizer(&llama_tokenizer(), |len| spaced_ids(len).boxed());
}

#[test]
fn metaspace_streams_what_it_decodes_to() {
    check_loaded_tokenizer(&metaspace_tokenizer(), |len| spaced_ids(len).boxed());
}

#[test]
fn word_piece_streams_what_it_decodes_to() {
    check_loaded_tokenizer(&word_piece_tokenizer(), |len| vec(0..15u32, 0..len).boxed());
}

#[test]
fn written_out_decoder_equals_that_of_tokenizers() {
    let llama = llama_tokenizer();
    let any_ids = vec(0..SPACED_IDS + 2, 0..30);
    proptest!(|(ids in any_ids, skip_special_tokens: bool)| {
        prop_assert_eq!(
            SpacedTokens.decode(&ids, skip_special_tokens),
            llama.decode(&ids, skip_special_tokens)
        );
    });
}

#[test]
fn resumed_stream_continues_at_every_token() {
    let decoder = SpacedTokens;
    let rules = TextRules {
        stops: vec!["</a".to_owned(), "é<".to_owned()],
        skip_special_tokens: true,
        ..TextRules::default()
    };
    proptest!(|(prompt in spaced_ids(10), ids in spaced_ids(20), cut in any::<prop::sample::Index>())| {
        let cut = cut.index(ids.len() + 1);
        let (whole, _) = stream_answer(&decoder, &rules, &prompt, &ids, &[1]);
        let rules = std::sync::Arc::new(rules.clone());
        let mut first = TextStream::new(rules.clone(), &decoder, &prompt);
        let mut text = String::new();
        if first.feed(&decoder, &ids[..cut], &mut text).matched_stop.is_some() {
            return Ok(());
        }
        let mut second = TextStream::new(rules, &decoder, &prompt);
        let mut repeated = String::new();
        second.feed(&decoder, &ids[..cut], &mut repeated);
        prop_assert_eq!(&repeated, &text);
        let fed = second.feed(&decoder, &ids[cut..], &mut text);
        let matched_stop = fed
            .matched_stop
            .or_else(|| second.finish(&decoder, &mut text));
        let counted = cut + fed.counted;
        prop_assert_eq!(ReadAnswer { text, counted, matched_stop }, whole);
    });
}

#[test]
fn tokens_after_stop_count_for_nothing() {
    let decoder = ByteTokens {
        tokens: vec![b"a".to_vec(), b"b".to_vec()],
        special: 0,
        is_bytewise: true,
    };
    let rules = TextRules {
        stops: vec!["b".to_owned()],
        ..TextRules::default()
    };
    let mut stream = TextStream::new(rules.into(), &decoder, &[]);
    let mut text = String::new();
    let fed = stream.feed(&decoder, &[0, 1, 0, 0], &mut text);
    assert_eq!((fed.counted, fed.matched_stop), (2, Some(0)));
    let fed = stream.feed(&decoder, &[0], &mut text);
    assert_eq!((fed.counted, fed.matched_stop), (0, Some(0)));
    assert_eq!(stream.finish(&decoder, &mut text), None);
    assert_eq!(text, "a");
}

#[test]
fn tail_that_could_begin_stop_string_is_held_back() {
    let decoder = ByteTokens {
        tokens: vec![b"a</e".to_vec(), b"x</".to_vec(), b"end>b".to_vec()],
        special: 0,
        is_bytewise: true,
    };
    let rules = TextRules {
        stops: vec!["</end>".to_owned()],
        ..TextRules::default()
    };
    let mut stream = TextStream::new(rules.into(), &decoder, &[]);
    let mut texts = Vec::new();
    for id in 0..3 {
        let mut text = String::new();
        stream.feed(&decoder, &[id], &mut text);
        texts.push(text);
    }
    assert_eq!(texts, ["a", "</ex", ""]);
}

#[test]
fn decoded_window_of_long_streams_stays_short() {
    struct CountingDecoder(std::sync::atomic::AtomicUsize);
    impl TokenDecoder for CountingDecoder {
        fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
            self.0
                .fetch_max(ids.len(), std::sync::atomic::Ordering::Relaxed);
            SpacedTokens.decode(ids, skip_special_tokens)
        }
        fn token_bytes(&self, id: u32) -> std::borrow::Cow<'_, [u8]> {
            SpacedTokens.token_bytes(id).into_owned().into()
        }
        fn is_special(&self, id: u32) -> bool {
            SpacedTokens.is_special(id)
        }
        fn is_bytewise(&self) -> bool {
            false
        }
    }
    let longest_of = |ids: &[u32]| {
        let decoder = CountingDecoder(Default::default());
        let rules = TextRules::default();
        let (answer, _) = stream_answer(&decoder, &rules, &[], ids, &[1]);
        assert_eq!(answer.text, SpacedTokens.decode(ids, false));
        // `decode` of the whole text is not the stream's.
        decoder.0.into_inner()
    };
    assert!(longest_of(&[4, 7].repeat(2000)) <= 3);
    assert!(
        longest_of(&[2].repeat(2000)) <= 66,
        "spaces alone have no text"
    );
    assert!(
        longest_of(&[byte_id(0xFF)].repeat(2000)) <= 132,
        "bytes that are no text"
    );
}
