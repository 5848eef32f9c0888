use super::*;

const P: ConnectionId = 3;
const GROUP: GroupId = 4;
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
    let start = GroupStart {
        group: GROUP,
        start_page,
    };
    let mut room = DecodeRoom::new(1, start, 0, 1000, LIMITS);
    assert_eq!(
        room.apply_event(DecodeEvent::Connected { peer: P }, 0),
        Ok(vec![DecodeAction::Open { peer: P }])
    );
    room
}

fn progress(first_page: u32, n: u32) -> DecodeEvent {
    DecodeEvent::Progress {
        peer: P,
        attempt: 1,
        group: GROUP,
        first_page,
        pages: (first_page..first_page + n).map(digest).collect(),
    }
}

fn fin(start: u32, total_pages: u32) -> DecodeEvent {
    let root = root_of((start..total_pages).map(|p| digest(p).sum));
    DecodeEvent::Final {
        peer: P,
        attempt: 1,
        fin: FinalMessage {
            groups: vec![GroupTotal {
                group: GROUP,
                total_pages,
                last_page_tokens: 5,
                root,
            }],
            payload: vec![1],
        },
    }
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
    DecodeEvent::Grant {
        group: GROUP,
        start_page: 0,
        pages: (0..pages).collect(),
    }
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
        room.apply_event(
            DecodeEvent::Grant {
                group: GROUP,
                start_page: 0,
                pages: vec![50, 51, 52]
            },
            0
        ),
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
    let grant = |pages: &[u32]| DecodeEvent::Grant {
        group: GROUP,
        start_page: 0,
        pages: pages.to_vec(),
    };
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
    room.apply_event(
        DecodeEvent::Grant {
            group: GROUP,
            start_page: 4,
            pages: vec![],
        },
        0,
    )
    .expect("legal");
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
    room.apply_event(
        DecodeEvent::Grant {
            group: GROUP,
            start_page: 0,
            pages: (50..57).collect(),
        },
        0,
    )
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
    room.apply_event(
        DecodeEvent::Grant {
            group: GROUP,
            start_page: 0,
            pages: vec![50, 51, 52, 53],
        },
        0,
    )
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
    room.apply_event(
        DecodeEvent::Grant {
            group: GROUP,
            start_page: 0,
            pages: vec![50],
        },
        0,
    )
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
            &shm.apply_event(
                DecodeEvent::Grant {
                    group: GROUP,
                    start_page: 0,
                    pages: vec![50, 51]
                },
                0
            )
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
        room.apply_event(
            DecodeEvent::Grant {
                group: GROUP,
                start_page: 0,
                pages: (0..granted as u32).collect(),
            },
            0,
        )
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
    room.apply_event(
        DecodeEvent::Grant {
            group: GROUP,
            start_page: 0,
            pages: vec![50],
        },
        0,
    )
    .expect("legal");
    room.apply_event(progress(0, 1), 0).expect("legal");
    let lie = DecodeEvent::Final {
        peer: P,
        attempt: 1,
        fin: FinalMessage {
            groups: vec![GroupTotal {
                group: GROUP,
                total_pages: 1,
                last_page_tokens: 1,
                root: 1,
            }],
            payload: vec![],
        },
    };
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
        .apply_event(
            DecodeEvent::Grant {
                group: GROUP,
                start_page: 0,
                pages: vec![1],
            },
            0,
        )
        .expect("legal");
    let cases = [
        (
            over.clone(),
            DecodeEvent::Grant {
                group: GROUP,
                start_page: 0,
                pages: vec![1],
            },
            "over",
        ),
        (
            over.clone(),
            DecodeEvent::Abort(ReasonCode::ClientGone),
            "over",
        ),
        (over, DecodeEvent::Connected { peer: P }, "over"),
        (
            granted,
            DecodeEvent::Grant {
                group: GROUP,
                start_page: 0,
                pages: vec![2],
            },
            "granted before",
        ),
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
    let actions = room.apply_event(progress(90, 20), 0).expect("legal");
    assert!(
        actions.iter().any(|a| matches!(
            a,
            DecodeAction::Fail {
                code: ReasonCode::TransportBroken,
                ..
            }
        )),
        "{actions:?}"
    );
}

#[test]
fn pages_of_another_group_end_the_room_and_a_grant_of_them_changes_nothing() {
    let other = GROUP + 1;
    let total = |group| GroupTotal {
        group,
        total_pages: 1,
        last_page_tokens: 1,
        root: 0,
    };
    let finals = [vec![], vec![total(other)], vec![total(GROUP), total(other)]];
    let finals = finals.map(|groups| DecodeEvent::Final {
        peer: P,
        attempt: 1,
        fin: FinalMessage {
            groups,
            payload: vec![],
        },
    });
    let announced = DecodeEvent::Progress {
        peer: P,
        attempt: 1,
        group: other,
        first_page: 0,
        pages: vec![digest(0)],
    };
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
    let grant = DecodeEvent::Grant {
        group: other,
        start_page: 0,
        pages: vec![50],
    };
    let err = room.apply_event(grant, 0).expect_err("illegal");
    assert!(err.reason.contains("page group"), "{err}");
    assert_eq!(room, before);
}
