//! The drafter against a naive model that compares every place of every text.

use std::collections::VecDeque;

use proptest::prelude::*;

use crate::answer_store::{ANSWER_OVERHEAD, AnswerStore};
use crate::suffix_index::{MATCH_LIMIT, MAX_CANDIDATES, SuffixIndex, SuffixMatch};
use crate::{DraftStart, DrafterError, NgramDrafter};

/// Tokens at the ends of both that are equal; a negative id equals none.
fn naive_common_suffix(a: &[i32], b: &[i32]) -> usize {
    let mut len = 0;
    while len < a.len() && len < b.len() {
        let last = a[a.len() - 1 - len];
        if last < 0 || last != b[b.len() - 1 - len] {
            break;
        }
        len += 1;
    }
    len
}

/// A text that may be proposed from `first` on, and whether it goes on behind its end.
struct NaiveText {
    tokens: Vec<i32>,
    first: usize,
    repeats: bool,
}

impl NaiveText {
    /// (length, place) of all matches, those of equal length oldest first.
    fn matches(&self, context: &[i32], min_match: usize) -> Vec<(usize, usize)> {
        let places = self.first..self.tokens.len();
        let proposable = places.filter(|&place| self.tokens[place] >= 0);
        proposable
            .map(|place| (naive_common_suffix(&self.tokens[..place], context), place))
            .filter(|&(len, _)| len >= min_match)
            .collect()
    }

    fn continuation(&self, place: usize, most: usize) -> Vec<i32> {
        let mut text = self.tokens.clone();
        let mut draft = Vec::new();
        for at in place..place.saturating_add(most) {
            match text.get(at) {
                Some(&id) if id >= 0 => draft.push(id),
                _ => break,
            }
            if self.repeats {
                text.push(draft[draft.len() - 1]);
            }
        }
        draft
    }
}

#[derive(Clone)]
struct NaiveRequest {
    group: Vec<u8>,
    tokens: Vec<i32>,
    prompt_len: usize,
    prediction: Vec<i32>,
}

struct NaiveDrafter {
    min_match: usize,
    store_tokens: usize,
    requests: Vec<Option<NaiveRequest>>,
    /// Oldest first.
    answers: VecDeque<(Vec<u8>, Vec<i32>)>,
}

impl NaiveDrafter {
    fn stored(&self) -> usize {
        let charges = self.answers.iter();
        charges
            .map(|(_, answer)| answer.len() + ANSWER_OVERHEAD)
            .sum()
    }

    fn finish(&mut self, handle: usize) {
        let Some(request) = self.requests[handle].take() else {
            return;
        };
        let mut answer = request.tokens[request.prompt_len..].to_vec();
        while answer.len() + ANSWER_OVERHEAD > self.store_tokens && !answer.is_empty() {
            answer.remove(0);
        }
        if answer.len() > self.min_match {
            self.answers.push_back((request.group, answer));
        }
        while self.stored() > self.store_tokens {
            self.answers.pop_front();
        }
    }

    /// Texts in the order in which equally long matches are taken.
    fn texts(&self, request: &NaiveRequest) -> [Vec<NaiveText>; 3] {
        let own = NaiveText {
            tokens: request.tokens.clone(),
            first: 0,
            repeats: true,
        };
        let prompt = &request.tokens[..request.prompt_len];
        let prediction = NaiveText {
            tokens: [prompt, &request.prediction].concat(),
            first: prompt.len(),
            repeats: false,
        };
        let same_group = self
            .answers
            .iter()
            .filter(|(group, _)| *group == request.group);
        let stored = same_group.map(|(_, answer)| NaiveText {
            tokens: answer.clone(),
            first: 0,
            repeats: false,
        });
        [vec![own], vec![prediction], stored.collect()]
    }

    /// Every draft that is right: several only where more than one place matches in
    /// [`MATCH_LIMIT`] tokens.
    fn right_drafts(&self, handle: usize, most: usize) -> Vec<Vec<i32>> {
        let mut best_len = 0;
        let mut best = vec![vec![]];
        let Some(request) = &self.requests[handle] else {
            return best;
        };
        for texts in self.texts(request) {
            let mut found = Vec::new();
            for text in &texts {
                for (len, place) in text.matches(&request.tokens, self.min_match) {
                    found.push((len.min(MATCH_LIMIT), text, place));
                }
            }
            let longest = found.iter().map(|&(len, ..)| len).max().unwrap_or(0);
            if longest <= best_len {
                continue;
            }
            best_len = longest;
            found.retain(|&(len, ..)| len == longest);
            let newest = found.len() - 1;
            let from = if longest < MATCH_LIMIT { newest } else { 0 };
            let drafts = found[from..].iter();
            best = drafts
                .map(|(_, text, place)| text.continuation(*place, most))
                .collect();
        }
        best
    }
}

#[derive(Clone, Debug)]
enum Call {
    Start {
        handle: usize,
        group: u8,
        prompt: Vec<i32>,
        answer: Vec<i32>,
        prediction: Vec<i32>,
    },
    Append {
        handle: usize,
        tokens: Vec<i32>,
    },
    Propose {
        handle: usize,
        most: usize,
    },
    Finish {
        handle: usize,
    },
}

const HANDLES: usize = 3;

/// Texts of few different ids, in which long matches are frequent, and some ids that are no tokens.
fn text(most: usize) -> impl Strategy<Value = Vec<i32>> {
    let pattern = (prop::collection::vec(0..3, 1..7), 0..most);
    prop_oneof![
        prop::collection::vec(0..4, 0..most / 4),
        prop::collection::vec(0..2, 0..most),
        pattern.prop_map(|(pattern, len)| pattern.into_iter().cycle().take(len).collect()),
        prop::collection::vec(
            prop_oneof![8 => 0..3, 1 => Just(-1), 1 => Just(i32::MIN), 1 => Just(i32::MAX)],
            0..most / 4
        ),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let start = (0..HANDLES, 0..2u8, text(110), text(20), text(110));
    prop_oneof![
        2 => start.prop_map(|(handle, group, prompt, answer, prediction)| Call::Start {
            handle,
            group,
            prompt,
            answer,
            prediction,
        }),
        4 => (0..HANDLES, text(20)).prop_map(|(handle, tokens)| Call::Append { handle, tokens }),
        6 => (0..HANDLES, 0..12usize).prop_map(|(handle, most)| Call::Propose { handle, most }),
        1 => (0..HANDLES).prop_map(|handle| Call::Finish { handle }),
    ]
}

/// Carries out a call on both; a draft must be one of the naive model's.
fn compare(naive: &mut NaiveDrafter, drafter: &mut NgramDrafter, call: Call) {
    match call {
        Call::Start {
            handle,
            group,
            prompt,
            answer,
            prediction,
        } => {
            let tokens = [&prompt[..], &answer].concat();
            let start = DraftStart {
                group: &[group],
                tokens: &tokens,
                prompt_len: prompt.len(),
                prediction: &prediction,
            };
            drafter.start(handle as u64, &start).expect("a start");
            naive.requests[handle] = Some(NaiveRequest {
                group: vec![group],
                tokens,
                prompt_len: prompt.len(),
                prediction,
            });
        }
        Call::Append { handle, tokens } => {
            let Some(request) = &mut naive.requests[handle] else {
                return drafter.append(handle as u64, &tokens);
            };
            // Longer texts have more places than one search looks at.
            if request.tokens.len() + tokens.len() < MAX_CANDIDATES {
                request.tokens.extend(&tokens);
                drafter.append(handle as u64, &tokens);
            }
        }
        Call::Propose { handle, most } => {
            let draft = drafter.propose(handle as u64, most);
            let right = naive.right_drafts(handle, most);
            assert!(right.contains(&draft), "{draft:?} is none of {right:?}");
        }
        Call::Finish { handle } => {
            drafter.finish(handle as u64);
            naive.finish(handle);
        }
    }
    assert_eq!(drafter.stored_tokens(), naive.stored());
    let started = naive.requests.iter().flatten().count();
    assert_eq!(drafter.requests(), started);
}

proptest! {
    #[test]
    fn drafts_equal_those_of_naive_model(
        min_match in 1..5usize,
        store_tokens in 0..240usize,
        calls in prop::collection::vec(call(), 1..60),
    ) {
        let mut drafter = NgramDrafter::new(min_match, store_tokens).expect("valid limits");
        let mut naive = NaiveDrafter {
            min_match,
            store_tokens,
            requests: vec![None; HANDLES],
            answers: VecDeque::new(),
        };
        for call in calls {
            compare(&mut naive, &mut drafter, call);
        }
    }

    #[test]
    fn followed_match_is_what_search_finds(
        min_match in 1..5usize,
        tokens in text(200),
        context in text(200),
    ) {
        let mut index = SuffixIndex::new(min_match);
        index.extend(&tokens);
        for end in 1..context.len() {
            let last = index.longest_match(&context[..end]);
            let followed = last.and_then(|last| index.follow(last, context[end]));
            let Some(followed) = followed else {
                continue;
            };
            let searched = index.longest_match(&context[..=end]);
            if followed.len < MATCH_LIMIT {
                prop_assert_eq!(Some(followed), searched);
            } else {
                prop_assert_eq!(Some(followed.len), searched.map(|searched| searched.len));
            }
        }
    }

    /// Also where texts have more equal places than one search looks at.
    #[test]
    fn match_is_never_longer_than_what_agrees(
        min_match in 1..5usize,
        parts in prop::collection::vec(text(400), 1..8),
        context in text(100),
    ) {
        let mut index = SuffixIndex::new(min_match);
        for part in &parts {
            index.extend(part);
        }
        let tokens = parts.concat();
        prop_assert_eq!(index.tokens(), &tokens[..]);
        for context in [&context, &tokens] {
            if let Some(SuffixMatch { place, len }) = index.longest_match(context) {
                let agreed = naive_common_suffix(&tokens[..place], context);
                prop_assert_eq!(len, agreed.min(MATCH_LIMIT));
                prop_assert!(len >= min_match && tokens[place] >= 0);
            }
        }
    }
}

/// The next tokens of a request with this text, in a drafter without stored answers.
fn draft_of(tokens: &[i32], prompt_len: usize, prediction: &[i32]) -> Vec<i32> {
    let mut drafter = NgramDrafter::new(2, 0).expect("valid limits");
    let start = DraftStart {
        group: b"",
        tokens,
        prompt_len,
        prediction,
    };
    drafter.start(0, &start).expect("a start");
    drafter.propose(0, 4)
}

#[test]
fn longest_match_wins_over_newer_place() {
    assert_eq!(
        draft_of(&[7, 1, 2, 10, 11, 12, 13, 1, 2, 20, 7, 1, 2], 13, &[]),
        [10, 11, 12, 13]
    );
}

#[test]
fn newest_of_equally_long_matches_wins() {
    assert_eq!(
        draft_of(&[1, 2, 10, 5, 1, 2, 20, 21, 6, 1, 2], 11, &[]),
        [20, 21, 6, 1]
    );
}

#[test]
fn own_text_is_repeated_behind_its_end() {
    assert_eq!(draft_of(&[5, 1, 2, 3, 1, 2], 6, &[]), [3, 1, 2, 3]);
    assert_eq!(draft_of(&[9, 9, 9], 3, &[]), [9, 9, 9, 9]);
}

#[test]
fn prediction_is_proposed_from_first_token_and_again_after_difference() {
    let prompt = [1, 2, 3];
    let prediction = [10, 11, 12, 13, 14, 15, 16];
    assert_eq!(draft_of(&prompt, 3, &prediction), [10, 11, 12, 13]);
    assert_eq!(
        draft_of(&[1, 2, 3, 10, 11], 3, &prediction),
        [12, 13, 14, 15]
    );
    assert_eq!(draft_of(&[1, 2, 3, 10, 90], 3, &prediction), [0; 0]);
    assert_eq!(
        draft_of(&[1, 2, 3, 10, 90, 12, 13], 3, &prediction),
        [14, 15, 16]
    );
}

#[test]
fn equally_long_matches_are_taken_from_own_text_then_prediction_then_store() {
    let mut drafter = NgramDrafter::new(2, 1000).expect("valid limits");
    let mut start = |handle, tokens: &[i32], prompt_len, prediction: &[i32]| {
        let start = DraftStart {
            group: b"tenant",
            tokens,
            prompt_len,
            prediction,
        };
        drafter.start(handle, &start).expect("a start");
        let draft = drafter.propose(handle, 1);
        drafter.finish(handle);
        draft
    };
    start(0, &[3, 1, 2, 60], 1, &[]);
    assert_eq!(start(1, &[5, 4, 8, 1, 2], 5, &[]), [60]);
    assert_eq!(start(2, &[5, 4, 8, 1, 2], 4, &[7, 1, 2, 70]), [70]);
    assert_eq!(start(3, &[1, 2, 80, 8, 1, 2], 5, &[7, 1, 2, 70]), [80]);
    assert_eq!(start(4, &[1, 2, 80, 3, 1, 2], 6, &[]), [80]);
    // The store now matches in one token more than the request's own text.
    start(5, &[0, 3, 1, 2, 61], 1, &[]);
    assert_eq!(start(6, &[1, 2, 80, 3, 1, 2], 6, &[]), [61]);
}

#[test]
fn answers_of_other_groups_and_prompts_are_never_proposed() {
    let mut drafter = NgramDrafter::new(2, 1000).expect("valid limits");
    let finished = DraftStart {
        group: b"one",
        tokens: &[50, 51, 52, 1, 2, 3, 4, 5],
        prompt_len: 3,
        prediction: &[],
    };
    drafter.start(0, &finished).expect("a start");
    drafter.finish(0);
    let mut draft = |group, tokens| {
        let start = DraftStart {
            group,
            tokens,
            prompt_len: 0,
            prediction: &[],
        };
        drafter.start(1, &start).expect("a start");
        drafter.propose(1, 8)
    };
    assert_eq!(draft(b"one", &[1, 2]), [3, 4, 5]);
    assert_eq!(draft(b"two", &[1, 2]), [0; 0]);
    assert_eq!(draft(b"one", &[50, 51]), [0; 0], "tokens of a prompt");
}

#[test]
fn answer_that_ends_while_it_is_followed_is_searched_again() {
    let mut drafter = NgramDrafter::new(2, 1000).expect("valid limits");
    finish_answer(&mut drafter, b"", &[1, 2, 3, 4, 5, 6]);
    finish_answer(&mut drafter, b"", &[9, 2, 3, 4]);
    start_text(&mut drafter, 0, b"", &[9, 2]);
    assert_eq!(drafter.propose(0, 8), [3, 4]);
    drafter.append(0, &[3, 4]);
    assert_eq!(drafter.propose(0, 8), [5, 6]);
}

/// A drafter whose request 1 follows an answer in the store.
fn drafter_with_store(store_tokens: usize) -> NgramDrafter {
    let mut drafter = NgramDrafter::new(2, store_tokens).expect("valid limits");
    finish_answer(&mut drafter, b"", &[1, 2, 3, 4, 5, 6]);
    start_text(&mut drafter, 1, b"", &[5, 1, 2]);
    assert_eq!(drafter.propose(1, 2), [3, 4]);
    drafter
}

fn start_text(drafter: &mut NgramDrafter, handle: u64, group: &[u8], tokens: &[i32]) {
    let start = DraftStart {
        group,
        tokens,
        prompt_len: 0,
        prediction: &[],
    };
    drafter.start(handle, &start).expect("a start");
}

fn finish_answer(drafter: &mut NgramDrafter, group: &[u8], answer: &[i32]) {
    start_text(drafter, 0, group, answer);
    drafter.finish(0);
}

#[test]
fn answer_that_joins_store_is_found_while_another_is_followed() {
    let mut drafter = drafter_with_store(1000);
    finish_answer(&mut drafter, b"", &[1, 2, 7, 8]);
    assert_eq!(drafter.propose(1, 2), [7, 8]);
    drafter.append(1, &[3]);
    assert_eq!(drafter.propose(1, 2), [4, 5]);
    finish_answer(&mut drafter, b"", &[5, 1, 2, 3, 9, 9]);
    assert_eq!(drafter.propose(1, 2), [9, 9]);
}

#[test]
fn answer_that_left_store_is_not_proposed_while_it_is_followed() {
    let mut drafter = drafter_with_store(3 * (6 + ANSWER_OVERHEAD));
    finish_answer(&mut drafter, b"", &[11, 12, 13, 14, 15, 16]);
    finish_answer(&mut drafter, b"other", &[21, 22, 23, 24, 25, 26]);
    assert_eq!(drafter.propose(1, 2), [3, 4]);
    finish_answer(&mut drafter, b"other", &[31, 32, 33, 34, 35, 36]);
    assert_eq!(drafter.propose(1, 2), [0; 0]);
}

#[test]
fn place_behind_too_many_newer_ones_is_not_seen() {
    let with_newer = |newer: usize| {
        let old = [7, 8, 1, 2, 99];
        let others = [3, 1, 2, 50].repeat(newer);
        draft_of(&[&old[..], &others, &[7, 8, 1, 2]].concat(), 0, &[])[0]
    };
    assert_eq!(with_newer(MAX_CANDIDATES - 1), 99);
    assert_eq!(with_newer(MAX_CANDIDATES), 50);
}

#[test]
fn full_store_drops_oldest_answers_of_any_group() {
    let one = b"one".as_slice().into();
    let two = b"two".as_slice().into();
    let mut store = AnswerStore::new(1, 3 * (10 + ANSWER_OVERHEAD));
    store.insert(&one, &[1; 10]);
    store.insert(&two, &[2; 10]);
    store.insert(&one, &[3; 10]);
    let found = |store: &AnswerStore, group, id: i32| {
        let answers: &crate::answer_store::GroupAnswers = store.group(group)?;
        answers.index().longest_match(&[id])
    };
    assert!(found(&store, b"one", 1).is_some());
    store.insert(&two, &[4; 10]);
    assert!(found(&store, b"one", 1).is_none());
    assert!(found(&store, b"two", 2).is_some());
    store.insert(&one, &[5; 200]);
    assert!(
        store.group(b"two").is_none(),
        "a group without answers is forgotten"
    );
    assert!(found(&store, b"one", 3).is_none());
    assert_eq!(store.used(), 3 * (10 + ANSWER_OVERHEAD));
}

#[test]
fn text_of_stored_answers_stays_within_twice_the_capacity() {
    let group = b"".as_slice().into();
    let mut store = AnswerStore::new(2, 1000);
    for answer in 0..500 {
        store.insert(&group, &vec![answer; 1 + answer as usize % 90]);
        let text = store
            .group(b"")
            .map_or(0, |answers| answers.index().tokens().len());
        assert!(text <= 2 * 1000, "{text}");
    }
}

#[test]
fn unknown_handles_have_no_drafts_and_no_effect() {
    let mut drafter = NgramDrafter::new(1, 1000).expect("valid limits");
    drafter.append(1, &[1, 1, 1]);
    assert_eq!(drafter.propose(1, 4), [0; 0]);
    drafter.finish(1);
    assert_eq!((drafter.requests(), drafter.stored_tokens()), (0, 0));
}

#[test]
fn limits_and_prompts_that_cannot_be_are_refused() {
    for min_match in [0, MATCH_LIMIT + 1] {
        let refused = NgramDrafter::new(min_match, 0).err();
        assert_eq!(refused, Some(DrafterError::MinMatch(min_match)));
    }
    let mut drafter = NgramDrafter::new(MATCH_LIMIT, 0).expect("valid limits");
    let start = DraftStart {
        group: b"",
        tokens: &[1],
        prompt_len: 2,
        prediction: &[],
    };
    let refused = DrafterError::PromptLen {
        prompt_len: 2,
        tokens: 1,
    };
    assert_eq!(drafter.start(0, &start), Err(refused));
}
