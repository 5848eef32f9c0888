use super::*;

const P: ConnectionId = 3;
const GROUP: GroupId = 4;
/// A second group, which keeps the last pages only.
const WINDOW: GroupId = 9;
const LIMITS: PullLimits = PullLimits {
    pages_per_pull: 2,
    pulls_in_flight: 2,
    max_pages: 100,
    wait_ms: 300,
};

fn digest(page: u32) -> PageDigest {
    PageDigest {
        page,
        generation: 2,
        sum: u64::from(page) * 11,
    }
}

fn connected(start_page: u32) -> DecodeRoom {
    connected_in(&[GROUP], start_page)
}

fn connected_in(groups: &[GroupId], start_page: u32) -> DecodeRoom {
    let starts = groups.iter().map(|&group| GroupStart { group, start_page });
    let mut room = DecodeRoom::new(1, starts.collect(), 0, 1000, LIMITS);
    assert_eq!(
        room.apply_event(DecodeEvent::Connected { peer: P }, 0),
        Ok(vec![DecodeAction::Open { peer: P }])
    );
    room
}

fn progress(first_page: u32, n: u32) -> DecodeEvent {
    progress_of(GROUP, first_page, n)
}

fn progress_of(group: GroupId, first_page: u32, n: u32) -> DecodeEvent {
    DecodeEvent::Progress {
        peer: P,
        attempt: 1,
        group,
        first_page,
        pages: (first_page..first_page + n).map(digest).collect(),
    }
}

/// What FINAL says of a group whose pages from `first_page` on exist.
fn total(group: GroupId, first_page: u32, total_pages: u32) -> GroupTotal {
    GroupTotal {
        group,
        first_page,
        total_pages,
        last_page_tokens: 5,
        tokens_at: None,
        root: root_of((first_page..total_pages).map(|p| digest(p).sum)),
    }
}

fn final_of(groups: Vec<GroupTotal>) -> DecodeEvent {
    DecodeEvent::Final {
        peer: P,
        attempt: 1,
        fin: FinalMessage {
            groups,
            payload: vec![1],
        },
    }
}

fn fin(first_page: u32, total_pages: u32) -> DecodeEvent {
    final_of(vec![total(GROUP, first_page, total_pages)])
}

fn grant(group: GroupId, start_page: u32, pages: Vec<u32>) -> DecodeEvent {
    DecodeEvent::Grant(vec![group_grant(group, start_page, pages)])
}

fn group_grant(group: GroupId, start_page: u32, pages: Vec<u32>) -> GroupGrant {
    GroupGrant {
        group,
        start_page,
        pages,
        tokens_at: None,
    }
}

/// The failure among these actions.
fn failure(actions: &[DecodeAction]) -> (ReasonCode, &str) {
    let mut failures = actions.iter().filter_map(|action| match action {
        DecodeAction::Fail { code, reason } => Some((*code, reason.as_str())),
        _ => None,
    });
    failures
        .next()
        .unwrap_or_else(|| panic!("no failure in {actions:?}"))
}

fn pulls(actions: &[DecodeAction]) -> Vec<(u64, usize)> {
    actions
        .iter()
        .filter_map(|a| {
            if let DecodeAction::Pull { ticket, pages, .. } = a {
                Some((*ticket, pages.len()))
            } else {
                None
            }
        })
        .collect()
}

fn grant_first(pages: u32) -> DecodeEvent {
    grant(GROUP, 0, (0..pages).collect())
}

#[test]
fn waiting_for_an_engine_is_not_a_transfer_that_hangs() {
    let mut room = connected(0);
    assert_eq!(room.next_due(), Some(300), "P owes an answer to OPEN");
    room.apply_event(progress(0, 2), 200)
        .expect("a legal event");
    assert_eq!(room.next_due(), Some(1000), "this side owes pages");
    assert_eq!(room.apply_event(DecodeEvent::Tick, 999), Ok(vec![]));
    room.apply_event(grant_first(2), 600)
        .expect("a legal event");
    assert_eq!(room.next_due(), Some(900), "a pull is in flight");
    room.apply_event(DecodeEvent::Pulled { ticket: 0 }, 700)
        .expect("a legal event");
    assert_eq!(
        room.next_due(),
        Some(1000),
        "P's engine owes the rest of the prompt"
    );
    assert!(matches!(
        room.apply_event(DecodeEvent::Tick, 1000).as_deref(),
        Ok([
            DecodeAction::SendAbort { .. },
            DecodeAction::Fail {
                code: ReasonCode::Deadline,
                ..
            }
        ])
    ));
}

#[test]
fn pull_that_hangs_ends_the_room_before_its_deadline() {
    let mut room = connected(0);
    room.apply_event(progress(0, 2), 200)
        .expect("a legal event");
    room.apply_event(grant_first(2), 210)
        .expect("a legal event");
    assert_eq!(room.apply_event(DecodeEvent::Tick, 509), Ok(vec![]));
    let actions = room
        .apply_event(DecodeEvent::Tick, 510)
        .expect("a legal event");
    assert!(
        matches!(
            actions[..],
            [DecodeAction::SendAbort { .. }, DecodeAction::CancelPulls]
        ),
        "{actions:?}"
    );
}

#[test]
fn pages_are_pulled_as_they_are_announced_and_committed_at_the_end() {
    let mut room = connected(0);
    assert_eq!(
        room.apply_event(grant(GROUP, 0, vec![50, 51, 52]), 0),
        Ok(vec![]),
        "a grant before OPEN_OK"
    );
    let actions = room.apply_event(progress(0, 1), 0).expect("legal");
    assert_eq!(
        actions,
        vec![DecodeAction::Pull {
            ticket: 0,
            group: GROUP,
            pages: vec![PullPage {
                src: digest(0),
                dst: 50
            }]
        }],
        "PROGRESS overtook OPEN_OK"
    );
    room.apply_event(
        DecodeEvent::Accepted {
            peer: P,
            attempt: 1,
        },
        0,
    )
    .expect("legal");
    assert_eq!(
        pulls(&room.apply_event(progress(1, 2), 0).expect("legal")),
        vec![(1, 2)]
    );
    assert_eq!(room.apply_event(fin(0, 3), 0), Ok(vec![]));
    assert_eq!(
        room.apply_event(DecodeEvent::Pulled { ticket: 1 }, 0),
        Ok(vec![])
    );
    let end = room
        .apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
        .expect("legal");
    assert!(
        matches!(
            end[..],
            [DecodeAction::Done { peer: P, .. }, DecodeAction::Commit(_)]
        ),
        "{end:?}"
    );
    assert_eq!(room.phase, DecodePhase::Committed);
}

#[test]
fn grant_can_be_revoked_until_the_peer_holds_pages_for_the_room() {
    let grant = |pages: &[u32]| grant(GROUP, 0, pages.to_vec());
    let mut room = connected(0);
    room.apply_event(grant(&[50, 51]), 0).expect("legal");
    assert_eq!(
        room.apply_event(DecodeEvent::Revoke, 0),
        Ok(vec![DecodeAction::Revoked])
    );
    assert!(
        room.apply_event(DecodeEvent::Revoke, 0).is_err(),
        "nothing is granted"
    );
    assert_eq!(
        room.apply_event(progress(0, 1), 0),
        Ok(vec![DecodeAction::Announced]),
        "the engine gets one event that P holds pages"
    );
    assert_eq!(room.apply_event(progress(1, 1), 0), Ok(vec![]));
    assert_eq!(
        pulls(&room.apply_event(grant(&[60, 61]), 0).expect("legal")),
        vec![(0, 2)]
    );
    assert_eq!(
        room.apply_event(DecodeEvent::Revoke, 0),
        Ok(vec![DecodeAction::Announced]),
        "too late: the pages are being filled"
    );
    assert_eq!(room.pulls_in_flight(), 1);
}

#[test]
fn full_hit_commits_on_final_alone() {
    let mut room = connected(0);
    room.apply_event(grant(GROUP, 4, vec![]), 0).expect("legal");
    assert_eq!(
        room.apply_event(progress(0, 4), 0),
        Ok(vec![]),
        "nothing to pull"
    );
    let end = room.apply_event(fin(0, 4), 0).expect("legal");
    assert!(
        matches!(
            end[..],
            [DecodeAction::Done { .. }, DecodeAction::Commit(_)]
        ),
        "{end:?}"
    );
}

#[test]
fn pages_before_start_page_are_not_pulled_and_pulls_are_windowed() {
    let mut room = connected(2);
    room.apply_event(grant(GROUP, 2, (50..57).collect()), 0)
        .expect("legal");
    let actions = room.apply_event(progress(0, 9), 0).expect("legal");
    assert_eq!(
        pulls(&actions),
        vec![(0, 2), (1, 2)],
        "two pulls of two pages, the rest waits"
    );
    assert!(
        matches!(&actions[0], DecodeAction::Pull { pages, .. } if pages[0] == PullPage { src: digest(2), dst: 50 })
    );
    assert_eq!(
        pulls(
            &room
                .apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
                .expect("legal")
        ),
        vec![(2, 2)]
    );
}

#[test]
fn end_is_reported_only_after_the_last_pull_stopped() {
    let mut room = connected(0);
    room.apply_event(grant(GROUP, 0, vec![50, 51, 52, 53]), 0)
        .expect("legal");
    room.apply_event(progress(0, 4), 0).expect("legal");
    let actions = room
        .apply_event(
            DecodeEvent::PullFailed {
                ticket: 0,
                code: ReasonCode::Checksum,
                reason: "x".into(),
            },
            0,
        )
        .expect("legal");
    assert_eq!(
        actions,
        vec![
            DecodeAction::SendAbort {
                peer: P,
                code: ReasonCode::Checksum
            },
            DecodeAction::CancelPulls
        ]
    );
    assert_eq!(
        room.apply_event(DecodeEvent::Tick, 5000),
        Ok(vec![]),
        "no second end"
    );
    assert_eq!(
        room.apply_event(progress(4, 1), 0),
        Ok(vec![]),
        "nothing new is started"
    );
    let end = room
        .apply_event(DecodeEvent::Pulled { ticket: 1 }, 0)
        .expect("legal");
    assert_eq!(
        end,
        vec![DecodeAction::Fail {
            code: ReasonCode::Checksum,
            reason: "x".into()
        }]
    );
}

#[test]
fn abort_replaces_a_failure_that_was_not_reported_yet() {
    let mut room = connected(0);
    room.apply_event(grant(GROUP, 0, vec![50]), 0)
        .expect("legal");
    room.apply_event(progress(0, 1), 0).expect("legal");
    room.apply_event(
        DecodeEvent::PeerAbort {
            peer: P,
            attempt: 1,
            code: ReasonCode::ClientGone,
        },
        0,
    )
    .expect("legal");
    assert_eq!(
        room.apply_event(DecodeEvent::Abort(ReasonCode::ClientGone), 0),
        Ok(vec![])
    );
    assert_eq!(
        room.apply_event(DecodeEvent::PullStopped { ticket: 0 }, 0),
        Ok(vec![DecodeAction::Aborted])
    );
}

#[test]
fn dead_peer_is_survived_only_if_nothing_more_is_needed_from_it() {
    let gone = |readable| DecodeEvent::PeerGone {
        peer: P,
        code: ReasonCode::PeerDead,
        readable,
    };
    let ready = || {
        let mut room = connected(0);
        room.apply_event(progress(0, 2), 0).expect("legal");
        room
    };
    let mut early = ready();
    assert!(
        matches!(
            early.apply_event(gone(true), 0).expect("legal")[..],
            [DecodeAction::Fail {
                code: ReasonCode::PeerDead,
                ..
            }]
        ),
        "FINAL is missing"
    );
    let mut tcp = ready();
    tcp.apply_event(fin(0, 2), 0).expect("legal");
    assert!(matches!(
        tcp.apply_event(gone(false), 0).expect("legal")[..],
        [DecodeAction::Fail { .. }]
    ));
    let mut shm = ready();
    shm.apply_event(fin(0, 2), 0).expect("legal");
    assert_eq!(shm.apply_event(gone(true), 0), Ok(vec![]));
    assert_eq!(
        pulls(
            &shm.apply_event(grant(GROUP, 0, vec![50, 51]), 0)
                .expect("legal")
        ),
        vec![(0, 2)]
    );
    assert!(
        matches!(
            shm.apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
                .expect("legal")[..],
            [DecodeAction::Commit(_)]
        ),
        "and no DONE is sent"
    );
}

#[test]
fn grant_of_the_wrong_size_never_commits() {
    for granted in [0usize, 1, 3] {
        let mut room = connected(0);
        room.apply_event(grant(GROUP, 0, (0..granted as u32).collect()), 0)
            .expect("legal");
        let actions = room.apply_event(fin(0, 2), 0).expect("legal");
        assert!(
            actions.iter().any(|a| matches!(
                a,
                DecodeAction::Fail {
                    code: ReasonCode::PromptMismatch,
                    ..
                }
            )),
            "{actions:?}"
        );
    }
}

#[test]
fn wrong_root_is_a_checksum_failure() {
    let mut room = connected(0);
    room.apply_event(grant(GROUP, 0, vec![50]), 0)
        .expect("legal");
    room.apply_event(progress(0, 1), 0).expect("legal");
    let lie = final_of(vec![GroupTotal {
        root: 1,
        ..total(GROUP, 0, 1)
    }]);
    room.apply_event(lie, 0).expect("legal");
    let end = room
        .apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
        .expect("legal");
    assert!(
        end.iter().any(|a| matches!(
            a,
            DecodeAction::Fail {
                code: ReasonCode::Checksum,
                ..
            }
        )),
        "{end:?}"
    );
}

#[test]
fn messages_of_other_peers_and_attempts_are_ignored() {
    let mut room = connected(0);
    let before = room.clone();
    for event in [
        DecodeEvent::Accepted {
            peer: 99,
            attempt: 1,
        },
        DecodeEvent::Rejected {
            peer: P,
            attempt: 0,
            code: ReasonCode::DupRoom,
            reason: String::new(),
        },
        DecodeEvent::PeerGone {
            peer: 99,
            code: ReasonCode::PeerDead,
            readable: false,
        },
        DecodeEvent::PeerAbort {
            peer: P,
            attempt: 2,
            code: ReasonCode::ClientGone,
        },
    ] {
        assert_eq!(room.apply_event(event, 0), Ok(vec![]));
    }
    assert_eq!(room, before);
}

#[test]
fn illegal_pairs_are_typed_errors_and_change_nothing() {
    let mut over = connected(0);
    over.apply_event(DecodeEvent::Abort(ReasonCode::ClientGone), 0)
        .expect("legal");
    let mut granted = connected(0);
    granted
        .apply_event(grant(GROUP, 0, vec![1]), 0)
        .expect("legal");
    let cases = [
        (over.clone(), grant(GROUP, 0, vec![1]), "over"),
        (
            over.clone(),
            DecodeEvent::Abort(ReasonCode::ClientGone),
            "over",
        ),
        (over, DecodeEvent::Connected { peer: P }, "over"),
        (granted, grant(GROUP, 0, vec![2]), "granted before"),
        (
            connected(0),
            DecodeEvent::Connected { peer: 4 },
            "has a peer",
        ),
    ];
    for (mut room, event, reason) in cases {
        let before = room.clone();
        let err = room.apply_event(event, 0).expect_err("illegal");
        assert!(err.reason.contains(reason), "{err}");
        assert_eq!(room, before);
    }
}

#[test]
fn peer_that_announces_without_end_is_cut_off() {
    let mut room = connected(0);
    room.apply_event(progress(0, 1), 0).expect("legal");
    let actions = room.apply_event(progress(100, 1), 0).expect("legal");
    let reason = "the peer announces 101 prompt pages, up to page 101 of group 4; at most 100 fit";
    assert_eq!(failure(&actions), (ReasonCode::TransportBroken, reason));
}

#[test]
fn announced_pages_of_all_groups_are_limited_together() {
    let mut room = connected_in(&[GROUP, WINDOW], 0);
    room.apply_event(progress(0, 60), 0).expect("legal");
    let announced = room.apply_event(progress_of(WINDOW, 1000, 40), 0);
    assert_eq!(announced, Ok(vec![]), "as many pages as the pool has");
    let actions = room
        .apply_event(progress_of(WINDOW, 1040, 1), 0)
        .expect("legal");
    assert_eq!(failure(&actions).0, ReasonCode::TransportBroken);
}

#[test]
fn pages_of_another_group_end_the_room_and_a_grant_of_them_changes_nothing() {
    let other = GROUP + 1;
    let finals = [
        vec![],
        vec![total(other, 0, 1)],
        vec![total(GROUP, 0, 1), total(other, 0, 1)],
        vec![total(GROUP, 0, 1), total(GROUP, 0, 1)],
    ];
    let finals = finals.map(final_of);
    let announced = progress_of(other, 0, 1);
    for message in finals.into_iter().chain([announced]) {
        let mut room = connected(0);
        let actions = room.apply_event(message.clone(), 0).expect("legal");
        assert!(
            actions.iter().any(|action| matches!(
                action,
                DecodeAction::Fail {
                    code: ReasonCode::TransportBroken,
                    ..
                }
            )),
            "{message:?}: {actions:?}"
        );
    }
    let mut room = connected(0);
    let before = room.clone();
    let grant = grant(other, 0, vec![50]);
    let err = room.apply_event(grant, 0).expect_err("illegal");
    assert!(err.reason.contains("page group"), "{err}");
    assert_eq!(room, before);
}

#[test]
fn grant_that_does_not_have_every_group_once_changes_nothing() {
    let full = group_grant(GROUP, 0, vec![50]);
    let window = group_grant(WINDOW, 0, vec![60]);
    for (grants, reason) in [
        (vec![full.clone()], "page group 9 of [4, 9] is missing"),
        (
            vec![full.clone(), window.clone(), full.clone()],
            "page group 4 is named twice",
        ),
        (
            vec![full.clone(), window.clone(), group_grant(5, 0, vec![])],
            "page group 5, but there are [4, 9]",
        ),
        (
            vec![window, group_grant(GROUP, 1, vec![50])],
            "pages of group 4 are granted from 1 on, but OPEN asks for those from 2 on",
        ),
    ] {
        let mut room = connected_in(&[GROUP, WINDOW], 0);
        if reason.contains("OPEN") {
            let starts = [(GROUP, 2), (WINDOW, 0)];
            let starts = starts.map(|(group, start_page)| GroupStart { group, start_page });
            room = DecodeRoom::new(1, starts.to_vec(), 0, 1000, LIMITS);
        }
        let before = room.clone();
        let err = room
            .apply_event(DecodeEvent::Grant(grants), 0)
            .expect_err("illegal");
        assert_eq!(err.reason, reason);
        assert_eq!(room, before);
    }
}

/// A room of two groups: three pages of the first, of which D has one, and the pages 40 and 41 of
/// the second.
fn granted_in_two_groups() -> DecodeRoom {
    let mut room = connected_in(&[GROUP, WINDOW], 0);
    let grants = vec![
        group_grant(WINDOW, 40, vec![60, 61]),
        group_grant(GROUP, 1, vec![50, 51]),
    ];
    assert_eq!(room.apply_event(DecodeEvent::Grant(grants), 0), Ok(vec![]));
    room
}

#[test]
fn state_of_other_tokens_than_those_of_the_prompt_is_refused_before_it_is_pulled() {
    for (sent, reason) in [
        (
            Some(12),
            "the state in group 9 has seen 12 tokens, one that has seen 13 tokens is needed here",
        ),
        (
            None,
            "the state in group 9 has seen no stated tokens, one that has seen 13 tokens is needed here",
        ),
        (Some(13), ""),
    ] {
        let mut room = connected_in(&[GROUP, WINDOW], 0);
        let state = GroupTotal {
            tokens_at: sent,
            ..total(WINDOW, 0, 2)
        };
        let fin = final_of(vec![total(GROUP, 0, 2), state]);
        assert_eq!(room.apply_event(fin, 0).map(|actions| actions.len()), Ok(1));
        let grants = vec![
            group_grant(GROUP, 2, vec![]),
            GroupGrant {
                tokens_at: Some(13),
                ..group_grant(WINDOW, 0, vec![60, 61])
            },
        ];
        let actions = room
            .apply_event(DecodeEvent::Grant(grants), 0)
            .expect("legal");
        if reason.is_empty() {
            assert_eq!(actions, vec![], "P announces the pages of the state next");
        } else {
            assert_eq!(failure(&actions), (ReasonCode::PromptMismatch, reason));
        }
    }
}

#[test]
fn prompt_of_two_groups_commits_when_both_are_verified() {
    let mut room = granted_in_two_groups();
    let pull = |ticket, group, src, dst| DecodeAction::Pull {
        ticket,
        group,
        pages: vec![PullPage {
            src: digest(src),
            dst,
        }],
    };
    let actions = room.apply_event(progress_of(WINDOW, 41, 1), 0);
    assert_eq!(actions, Ok(vec![pull(0, WINDOW, 41, 61)]));
    let actions = room.apply_event(progress(0, 2), 0);
    assert_eq!(actions, Ok(vec![pull(1, GROUP, 1, 50)]));
    let actions = room.apply_event(progress_of(WINDOW, 40, 1), 0);
    assert_eq!(actions, Ok(vec![]), "two pulls of the room are in flight");
    let totals = vec![total(WINDOW, 40, 42), total(GROUP, 0, 3)];
    let actions = room.apply_event(final_of(totals), 0);
    assert_eq!(actions, Ok(vec![]));
    let actions = room.apply_event(DecodeEvent::Pulled { ticket: 0 }, 0);
    assert_eq!(actions, Ok(vec![pull(2, WINDOW, 40, 60)]));
    for ticket in [1, 2] {
        let actions = room.apply_event(DecodeEvent::Pulled { ticket }, 0);
        assert_eq!(actions, Ok(vec![]), "page 2 of the first group is missing");
    }
    let actions = room.apply_event(progress(2, 1), 0);
    assert_eq!(actions, Ok(vec![pull(3, GROUP, 2, 51)]));
    let ordered = [total(GROUP, 0, 3), total(WINDOW, 40, 42)];
    let root = root_of(ordered.iter().map(|total| total.root));
    let fin = FinalMessage {
        groups: ordered.to_vec(),
        payload: vec![1],
    };
    assert_eq!(
        room.apply_event(DecodeEvent::Pulled { ticket: 3 }, 0),
        Ok(vec![
            DecodeAction::Done { peer: P, root },
            DecodeAction::Commit(fin)
        ])
    );
}

#[test]
fn wrong_root_of_one_group_is_a_checksum_failure() {
    let mut room = granted_in_two_groups();
    room.apply_event(progress(0, 3), 0).expect("legal");
    room.apply_event(progress_of(WINDOW, 40, 2), 0)
        .expect("legal");
    let lie = GroupTotal {
        root: 1,
        ..total(WINDOW, 40, 42)
    };
    let totals = vec![total(GROUP, 0, 3), lie];
    room.apply_event(final_of(totals), 0).expect("legal");
    room.apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
        .expect("legal");
    let end = room
        .apply_event(DecodeEvent::Pulled { ticket: 1 }, 0)
        .expect("legal");
    let reason = "the root over the page checksums of group 9 differs from the prefill side's";
    assert_eq!(failure(&end), (ReasonCode::Checksum, reason));
}

#[test]
fn final_that_contradicts_the_grant_or_the_announced_pages_of_a_group_ends_the_room() {
    for (window, code, reason) in [
        (
            total(WINDOW, 41, 42),
            ReasonCode::PromptMismatch,
            "prefill has the pages of group 9 from 41 on, but those from 40 on are needed here",
        ),
        (
            total(WINDOW, 40, 43),
            ReasonCode::PromptMismatch,
            "pages [40, 42) of group 9 were granted, but prefill has [40, 43)",
        ),
        (
            total(WINDOW, 40, 42),
            ReasonCode::TransportBroken,
            "pages [39, 41) of group 9 were announced, but FINAL counts [40, 42)",
        ),
    ] {
        let mut room = granted_in_two_groups();
        let announced = if code == ReasonCode::TransportBroken {
            39
        } else {
            40
        };
        room.apply_event(progress_of(WINDOW, announced, 2), 0)
            .expect("legal");
        let totals = vec![total(GROUP, 0, 3), window];
        room.apply_event(final_of(totals), 0).expect("legal");
        let end = room
            .apply_event(DecodeEvent::Pulled { ticket: 0 }, 0)
            .expect("legal");
        assert_eq!(failure(&end), (code, reason));
    }
}

#[test]
fn pages_of_all_groups_are_revoked_together() {
    let mut room = granted_in_two_groups();
    assert_eq!(
        room.apply_event(DecodeEvent::Revoke, 0),
        Ok(vec![DecodeAction::Revoked])
    );
    assert_eq!(
        room.apply_event(progress_of(WINDOW, 40, 1), 0),
        Ok(vec![DecodeAction::Announced])
    );
    assert_eq!(
        room.apply_event(progress(0, 3), 0),
        Ok(vec![]),
        "nothing is pulled without a grant"
    );
    let mut late = granted_in_two_groups();
    late.apply_event(progress_of(WINDOW, 40, 1), 0)
        .expect("legal");
    assert_eq!(
        late.apply_event(DecodeEvent::Revoke, 0),
        Ok(vec![DecodeAction::Announced]),
        "too late for one group is too late for all"
    );
}
