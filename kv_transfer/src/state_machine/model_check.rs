//! Exhaustive, breadth-first exploration of all interleavings of a small model.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

use xxhash_rust::xxh3::Xxh3;

use super::decode::PullLimits;
use super::model::{Budget, Model, ModelGroup};

/// 128 bits stand for a visited state.
fn fingerprint(model: &Model) -> u128 {
    let mut hasher = Xxh3::new();
    model.hash(&mut hasher);
    hasher.digest128()
}

struct Explored {
    states: usize,
    ends: HashSet<(Option<&'static str>, String)>,
}

/// Visit all reachable states; the model asserts the invariants, and from every state time alone
/// ends both rooms.
fn explore(start: Model) -> Explored {
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut queue = VecDeque::from([start]);
    let mut ends = HashSet::new();
    while let Some(model) = queue.pop_front() {
        let mut later = model.clone();
        later.run_out();
        if model.is_over() {
            ends.insert((
                model.d_end,
                model
                    .p_end
                    .map(|code| code.map_or("DONE".into(), |code| code.to_string()))
                    .unwrap_or_default(),
            ));
        }
        for m in model.transitions() {
            let mut next = model.clone();
            next.apply(&m);
            if seen.insert(fingerprint(&next)) {
                queue.push_back(next);
            }
        }
    }
    Explored {
        states: seen.len(),
        ends,
    }
}

const NOTHING: Budget = Budget {
    losses: 0,
    doubles: 0,
    stale: 0,
    p_aborts: 0,
    d_aborts: 0,
    revokes: 0,
    cuts: 0,
    ticks: 0,
};
const ONE_PAGE: PullLimits = PullLimits {
    pages_per_pull: 1,
    pulls_in_flight: 2,
    max_pages: 8,
    wait_ms: 300,
};

/// A prompt of one group: `total` pages of which D holds `start`.
fn one_group(total: u32, start: u32) -> [ModelGroup; 1] {
    [ModelGroup::new(0, total, start)]
}

/// A prompt of two groups with one page each: of the second, the pages in front do not exist.
const TWO_GROUPS: [ModelGroup; 2] = [ModelGroup::new(0, 1, 0), ModelGroup::new(2, 3, 2)];

/// D needs a page that P has left behind.
const LEFT_BEHIND: [ModelGroup; 2] = [ModelGroup::new(0, 1, 0), ModelGroup::new(2, 3, 1)];

/// A prompt with a state of one page, all of whose other pages D holds. Args: `tokens_at`: tokens
/// that P's state has seen, and those that D's must have.
fn with_state(tokens_at: [u32; 2]) -> [ModelGroup; 2] {
    let state = ModelGroup {
        tokens_at: tokens_at.map(Some),
        ..ModelGroup::new(0, 1, 0)
    };
    [ModelGroup::new(0, 1, 1), state]
}

fn reaches(explored: &Explored, d: &'static str, p: &str) -> bool {
    explored.ends.contains(&(Some(d), p.into()))
}

#[test]
fn without_faults_every_order_of_events_ends_in_commit_and_done() {
    for (total, start) in [(2, 0), (3, 1), (2, 2)] {
        let explored = explore(Model::new(&one_group(total, start), ONE_PAGE, NOTHING));
        assert_eq!(
            explored.ends,
            HashSet::from([(Some("committed"), "DONE".to_owned())]),
            "{total} pages from {start}"
        );
        assert!(explored.states > 50, "{}", explored.states);
    }
}

#[test]
fn revoked_grants_and_repeated_ones_change_no_outcome() {
    let budget = Budget {
        revokes: 2,
        ..NOTHING
    };
    for (total, start) in [(2, 0), (2, 1), (2, 2)] {
        let explored = explore(Model::new(
            &one_group(total, start),
            ONE_PAGE,
            budget.clone(),
        ));
        assert_eq!(
            explored.ends,
            HashSet::from([(Some("committed"), "DONE".to_owned())]),
            "{total} pages from {start}"
        );
    }
    let faulty = Budget {
        revokes: 1,
        d_aborts: 1,
        losses: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&one_group(2, 0), ONE_PAGE, faulty));
    assert!(
        reaches(&explored, "aborted", "CLIENT_GONE") && reaches(&explored, "committed", "DONE"),
        "{:?}",
        explored.ends
    );
}

#[test]
fn lost_doubled_and_reordered_messages_never_break_a_promise() {
    let budget = Budget {
        losses: 1,
        doubles: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&one_group(2, 0), ONE_PAGE, budget));
    assert!(
        reaches(&explored, "committed", "DONE")
            && reaches(&explored, "committed", "LEASE_EXPIRED")
            && reaches(&explored, "failed", "DEADLINE"),
        "{:?}",
        explored.ends
    );
    assert!(explored.states > 1000, "{}", explored.states);
}

#[test]
fn aborts_on_either_side_at_any_moment_end_both_rooms() {
    let budget = Budget {
        p_aborts: 1,
        d_aborts: 1,
        losses: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&one_group(2, 0), ONE_PAGE, budget));
    assert!(
        reaches(&explored, "aborted", "CLIENT_GONE") && reaches(&explored, "failed", "CLIENT_GONE"),
        "{:?}",
        explored.ends
    );
}

#[test]
fn pages_given_away_under_the_lease_are_never_committed_unverified() {
    let budget = Budget {
        stale: 2,
        doubles: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&one_group(2, 0), ONE_PAGE, budget));
    assert!(
        reaches(&explored, "failed", "STALE_PAGE") && reaches(&explored, "committed", "DONE"),
        "{:?}",
        explored.ends
    );
}

#[test]
fn cut_connection_is_survived_only_by_rooms_that_need_nothing_more() {
    let budget = Budget {
        cuts: 1,
        losses: 1,
        d_aborts: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&one_group(2, 0), ONE_PAGE, budget));
    assert!(
        reaches(&explored, "committed", "LEASE_EXPIRED")
            && reaches(&explored, "failed", "LEASE_EXPIRED"),
        "{:?}",
        explored.ends
    );
}

#[test]
fn two_groups_without_faults_end_in_commit_and_done() {
    let [full, window] = TWO_GROUPS;
    let longer = ModelGroup { total: 2, ..full };
    let held = ModelGroup { start: 3, ..window };
    for groups in [
        TWO_GROUPS,
        [window, longer],
        [longer, window],
        [longer, held],
    ] {
        let budget = Budget {
            revokes: 1,
            ..NOTHING
        };
        let explored = explore(Model::new(&groups, ONE_PAGE, budget));
        assert_eq!(
            explored.ends,
            HashSet::from([(Some("committed"), "DONE".to_owned())]),
            "{groups:?}"
        );
    }
}

#[test]
fn two_groups_keep_their_promises_under_loss_aborts_and_reassigned_pages() {
    let faults = [
        Budget {
            losses: 1,
            doubles: 1,
            ticks: 1,
            ..NOTHING
        },
        Budget {
            losses: 1,
            p_aborts: 1,
            d_aborts: 1,
            revokes: 1,
            ..NOTHING
        },
        Budget {
            stale: 1,
            cuts: 1,
            ticks: 1,
            ..NOTHING
        },
    ];
    let expected = [
        ("failed", "DEADLINE"),
        ("aborted", "CLIENT_GONE"),
        ("failed", "STALE_PAGE"),
    ];
    for (budget, (d, p)) in faults.into_iter().zip(expected) {
        let explored = explore(Model::new(&TWO_GROUPS, ONE_PAGE, budget.clone()));
        assert!(
            reaches(&explored, d, p) && reaches(&explored, "committed", "DONE"),
            "{budget:?}: {:?}",
            explored.ends
        );
        assert!(explored.states > 1000, "{}", explored.states);
    }
}

#[test]
fn prompt_whose_needed_page_was_left_behind_never_commits() {
    let budget = Budget {
        losses: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&LEFT_BEHIND, ONE_PAGE, budget));
    assert!(
        reaches(&explored, "failed", "PROMPT_MISMATCH"),
        "{:?}",
        explored.ends
    );
    let committed = explored.ends.iter().any(|(d, _)| *d == Some("committed"));
    assert!(!committed, "{:?}", explored.ends);
}

#[test]
fn state_is_sent_whatever_the_decode_node_holds_of_the_prompt() {
    let faults = Budget {
        losses: 1,
        stale: 1,
        revokes: 1,
        ticks: 1,
        ..NOTHING
    };
    let explored = explore(Model::new(&with_state([9, 9]), ONE_PAGE, faults));
    assert!(
        reaches(&explored, "committed", "DONE") && reaches(&explored, "failed", "STALE_PAGE"),
        "{:?}",
        explored.ends
    );
}

#[test]
fn state_that_has_seen_other_tokens_than_the_prompt_never_commits() {
    for tokens_at in [[8, 9], [10, 9]] {
        let budget = Budget {
            losses: 1,
            revokes: 1,
            ticks: 1,
            ..NOTHING
        };
        let explored = explore(Model::new(&with_state(tokens_at), ONE_PAGE, budget));
        assert!(
            reaches(&explored, "failed", "PROMPT_MISMATCH"),
            "{:?}",
            explored.ends
        );
        let committed = explored.ends.iter().any(|(d, _)| *d == Some("committed"));
        assert!(!committed, "{tokens_at:?}: {:?}", explored.ends);
    }
}
