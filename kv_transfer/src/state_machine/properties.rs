//! Random walks through models too large for the exhaustive check.

use proptest::prelude::*;

use super::decode::PullLimits;
use super::model::{Budget, Model, ModelGroup};

fn limits() -> impl Strategy<Value = PullLimits> {
    (1usize..4, 1usize..4).prop_map(|(pages_per_pull, pulls_in_flight)| PullLimits {
        pages_per_pull,
        pulls_in_flight,
        max_pages: 32,
        wait_ms: 300,
    })
}

fn budget() -> impl Strategy<Value = Budget> {
    (
        0u8..4,
        0u8..4,
        0u8..3,
        0u8..2,
        0u8..2,
        0u8..3,
        0u8..2,
        0u8..2,
    )
        .prop_map(
            |(losses, doubles, stale, p_aborts, d_aborts, revokes, cuts, ticks)| Budget {
                losses,
                doubles,
                stale,
                p_aborts,
                d_aborts,
                revokes,
                cuts,
                ticks,
            },
        )
}

/// One to three groups of which D holds or does not need a part of those that exist; some of them
/// have states.
fn groups() -> impl Strategy<Value = Vec<ModelGroup>> {
    let sizes = (0u32..4, 0u32..6, 0u32..6, proptest::option::of(1u32..9));
    let group = sizes.prop_map(|(first, pages, held, tokens_at)| {
        let total = first + pages;
        ModelGroup {
            tokens_at: [tokens_at; 2],
            ..ModelGroup::new(first, total, (first + held).min(total))
        }
    });
    proptest::collection::vec(group, 1..4)
}

/// Apply transitions until none is left (or the walk is long enough).
fn walk(model: &mut Model, choices: &[prop::sample::Index]) {
    for choice in choices {
        let transitions = model.transitions();
        if transitions.is_empty() {
            return;
        }
        model.apply(&transitions[choice.index(transitions.len())]);
    }
}

fn choices() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    proptest::collection::vec(any::<prop::sample::Index>(), 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_happens_both_rooms_end_once_and_truthfully(groups in groups(), limits in limits(), budget in budget(), choices in choices()) {
        let mut model = Model::new(&groups, limits, budget);
        walk(&mut model, &choices);
        model.run_out(); // asserts that both rooms end
    }

    #[test]
    fn without_faults_the_prompt_always_arrives(groups in groups(), limits in limits(), choices in proptest::collection::vec(any::<prop::sample::Index>(), 200)) {
        let none = Budget { losses: 0, doubles: 0, stale: 0, p_aborts: 0, d_aborts: 0, revokes: 3, cuts: 0, ticks: 0 };
        let mut model = Model::new(&groups, limits, none);
        walk(&mut model, &choices);
        prop_assert_eq!((model.d_end, model.p_end), (Some("committed"), Some(None)));
    }
}
