use super::*;

const D: ConnectionId = 7;
const GROUP: GroupId = 4;

fn starts(start_page: u32) -> Vec<GroupStart> {
    vec![GroupStart {
        group: GROUP,
        start_page,
    }]
}

fn room() -> PrefillRoom {
    PrefillRoom::new(1, vec![1, 2], 1000, 100, GROUP)
}

fn digest(page: u32) -> PageDigest {
    PageDigest {
        page,
        generation: 2,
        sum: u64::from(page) * 11,
    }
}

fn open(start_page: u32) -> PrefillEvent {
    PrefillEvent::Open {
        peer: D,
        attempt: 1,
        prompt_hash: vec![1, 2],
        groups: starts(start_page),
    }
}

fn finish(total_pages: u32) -> PrefillEvent {
    PrefillEvent::Finish(PrefillOutput {
        groups: vec![GroupPages {
            group: GROUP,
            total_pages,
            last_page_tokens: 3,
        }],
        payload: vec![9],
    })
}

/// `room` with pages 10.. published and hashed.
fn with_pages(mut room: PrefillRoom, n: u32) -> PrefillRoom {
    room.apply_event(
        PrefillEvent::Publish {
            group: GROUP,
            first: 0,
            pages: (0..n).map(|i| (10 + i, 2)).collect(),
        },
        0,
    )
    .expect("publish is legal");
    room.apply_event(
        PrefillEvent::Hashed((0..n).map(|i| (i, digest(10 + i))).collect()),
        0,
    )
    .expect("always legal");
    room
}

#[test]
fn room_without_a_reader_sends_nothing_until_open() {
    let mut room = with_pages(room(), 2);
    assert_eq!(room.apply_event(finish(2), 10), Ok(vec![]));
    assert_eq!(room.phase, PrefillPhase::Leased { until: 110 });
    let actions = room.apply_event(open(1), 20).expect("legal");
    assert_eq!(actions[0], PrefillAction::Accept { peer: D });
    assert_eq!(
        actions[1],
        PrefillAction::Progress {
            peer: D,
            group: GROUP,
            first_page: 1,
            pages: vec![digest(11)]
        }
    );
    assert!(
        matches!(&actions[2], PrefillAction::Final { groups, .. } if groups[0].root == root_of([digest(11).sum].into_iter()))
    );
    assert_eq!(
        room.apply_event(
            PrefillEvent::Done {
                peer: D,
                attempt: 1
            },
            30
        ),
        Ok(vec![PrefillAction::Released(None)])
    );
    assert_eq!(room.phase, PrefillPhase::Released);
}

#[test]
fn final_waits_for_the_last_checksum() {
    let mut room = room();
    room.apply_event(open(0), 0).expect("legal");
    room.apply_event(
        PrefillEvent::Publish {
            group: GROUP,
            first: 0,
            pages: vec![(10, 2)],
        },
        0,
    )
    .expect("legal");
    assert_eq!(room.apply_event(finish(1), 0), Ok(vec![]));
    assert_eq!(
        room.apply_event(
            PrefillEvent::Done {
                peer: D,
                attempt: 1
            },
            0
        ),
        Ok(vec![]),
        "DONE before FINAL means nothing"
    );
    let actions = room
        .apply_event(PrefillEvent::Hashed(vec![(0, digest(10))]), 0)
        .expect("legal");
    assert!(matches!(
        actions[..],
        [PrefillAction::Progress { .. }, PrefillAction::Final { .. }]
    ));
}

#[test]
fn checksums_of_another_room_of_the_same_number_are_not_taken() {
    let mut room = room();
    room.apply_event(open(0), 0).expect("legal");
    room.apply_event(
        PrefillEvent::Publish {
            group: GROUP,
            first: 0,
            pages: vec![(10, 2)],
        },
        0,
    )
    .expect("legal");
    for foreign in [
        digest(11),
        PageDigest {
            generation: 4,
            ..digest(10)
        },
    ] {
        assert_eq!(
            room.apply_event(PrefillEvent::Hashed(vec![(0, foreign)]), 0),
            Ok(vec![])
        );
    }
    assert_eq!(
        room.apply_event(PrefillEvent::Hashed(vec![(0, digest(10))]), 0)
            .map(|a| a.len()),
        Ok(1)
    );
}

#[test]
fn wrong_prompt_and_a_wrong_attempt_are_rejected_and_another_reader_takes_over() {
    let mut room = with_pages(room(), 1);
    let code = |actions: Vec<PrefillAction>| match &actions[..] {
        [PrefillAction::Reject { code, .. }] => *code,
        other => panic!("expected one rejection, got {other:?}"),
    };
    let wrong_prompt = PrefillEvent::Open {
        peer: D,
        attempt: 1,
        prompt_hash: vec![3],
        groups: starts(0),
    };
    assert_eq!(
        code(room.apply_event(wrong_prompt, 0).expect("legal")),
        ReasonCode::PromptMismatch
    );
    let wrong_attempt = PrefillEvent::Open {
        peer: D,
        attempt: 2,
        prompt_hash: vec![1, 2],
        groups: starts(0),
    };
    assert_eq!(
        code(room.apply_event(wrong_attempt, 0).expect("legal")),
        ReasonCode::DupRoom
    );
    for groups in [vec![], [starts(0), starts(0)].concat()] {
        let other_groups = PrefillEvent::Open {
            peer: D,
            attempt: 1,
            prompt_hash: vec![1, 2],
            groups,
        };
        assert_eq!(
            code(room.apply_event(other_groups, 0).expect("legal")),
            ReasonCode::LayoutMismatch
        );
    }
    room.apply_event(open(0), 0).expect("legal");
    assert_eq!(
        room.apply_event(open(0), 0).expect("legal")[0],
        PrefillAction::Accept { peer: D },
        "the same OPEN twice is answered twice"
    );
    let second = |prompt_hash| PrefillEvent::Open {
        peer: 8,
        attempt: 1,
        prompt_hash,
        groups: starts(0),
    };
    assert_eq!(
        code(room.apply_event(second(vec![9]), 0).expect("legal")),
        ReasonCode::PromptMismatch
    );
    assert_eq!(room.reader(), Some(D));
    assert_eq!(
        room.apply_event(second(vec![1, 2]), 0).expect("legal")[..3],
        [
            PrefillAction::SendAbort {
                peer: D,
                code: ReasonCode::DupRoom
            },
            PrefillAction::ReaderLeft { peer: D },
            PrefillAction::Accept { peer: 8 }
        ]
    );
    assert_eq!(room.reader(), Some(8));
}

#[test]
fn lease_is_renewed_by_its_reader_only_and_for_a_limited_time() {
    let mut room = with_pages(room(), 1);
    room.apply_event(finish(1), 0).expect("legal");
    room.apply_event(open(0), 0).expect("legal");
    room.apply_event(PrefillEvent::Renew { peer: 99 }, 50)
        .expect("legal");
    assert_eq!(room.next_due(), Some(100));
    room.apply_event(PrefillEvent::Renew { peer: D }, 50)
        .expect("legal");
    assert_eq!(room.next_due(), Some(150));
    room.apply_event(PrefillEvent::Renew { peer: D }, 100_000)
        .expect("legal");
    assert_eq!(room.next_due(), Some(1100), "deadline plus one lease");
    assert_eq!(room.apply_event(PrefillEvent::Tick, 1099), Ok(vec![]));
    let end = room.apply_event(PrefillEvent::Tick, 1100).expect("legal");
    assert_eq!(
        end,
        vec![
            PrefillAction::SendAbort {
                peer: D,
                code: ReasonCode::LeaseExpired
            },
            PrefillAction::Released(Some(ReasonCode::LeaseExpired))
        ]
    );
    assert_eq!(room.phase, PrefillPhase::Expired);
}

#[test]
fn only_the_reader_of_this_attempt_can_end_the_room_from_outside() {
    let mut room = with_pages(room(), 1);
    room.apply_event(open(0), 0).expect("legal");
    room.apply_event(finish(1), 0).expect("legal");
    let before = room.clone();
    for event in [
        PrefillEvent::Done {
            peer: 99,
            attempt: 1,
        },
        PrefillEvent::Done {
            peer: D,
            attempt: 0,
        },
        PrefillEvent::PeerAbort {
            peer: 99,
            attempt: 1,
            code: ReasonCode::ClientGone,
        },
        PrefillEvent::PeerAbort {
            peer: D,
            attempt: 2,
            code: ReasonCode::ClientGone,
        },
        PrefillEvent::PeerGone {
            peer: 99,
            code: ReasonCode::PeerDead,
        },
    ] {
        assert_eq!(room.apply_event(event, 0), Ok(vec![]));
    }
    assert_eq!(room, before);
    assert_eq!(
        room.apply_event(
            PrefillEvent::Done {
                peer: D,
                attempt: 1
            },
            0
        ),
        Ok(vec![PrefillAction::Released(None)])
    );
}

#[test]
fn another_reader_gets_the_pages_of_one_that_died_during_prefill() {
    const D2: ConnectionId = 8;
    let mut room = with_pages(room(), 1);
    room.apply_event(open(0), 0).expect("legal");
    let gone = PrefillEvent::PeerGone {
        peer: D,
        code: ReasonCode::PeerDead,
    };
    assert_eq!(
        room.apply_event(gone, 1),
        Ok(vec![PrefillAction::ReaderLeft { peer: D }])
    );
    let again = |peer| PrefillEvent::Open {
        peer,
        attempt: 1,
        prompt_hash: vec![1, 2],
        groups: starts(0),
    };
    let actions = room.apply_event(again(D2), 2).expect("legal");
    assert_eq!(actions[0], PrefillAction::Accept { peer: D2 });
    assert!(matches!(
        actions[1],
        PrefillAction::Progress { peer: D2, .. }
    ));
    // Late messages of the first one are ignored.
    let late = PrefillEvent::Done {
        peer: D,
        attempt: 1,
    };
    assert_eq!(room.apply_event(late, 3), Ok(vec![]));
    let actions = room.apply_event(finish(1), 4).expect("legal");
    assert!(matches!(
        actions[..],
        [PrefillAction::Final { peer: D2, .. }]
    ));
}

#[test]
fn lease_whose_reader_left_is_short_until_another_opens() {
    let mut room = PrefillRoom::new(1, vec![1, 2], 1_000_000, 60_000, GROUP);
    room = with_pages(room, 1);
    room.apply_event(open(0), 0).expect("legal");
    room.apply_event(finish(1), 0).expect("legal");
    let refused = PrefillEvent::PeerAbort {
        peer: D,
        attempt: 1,
        code: ReasonCode::NoCapacity,
    };
    assert_eq!(
        room.apply_event(refused, 100),
        Ok(vec![
            PrefillAction::AckAbort { peer: D },
            PrefillAction::ReaderLeft { peer: D }
        ])
    );
    let mut expires = room.clone();
    let until = 100 + REOPEN_MS;
    assert_eq!(room.next_due(), Some(until));
    assert_eq!(
        expires.apply_event(PrefillEvent::Tick, until),
        Ok(vec![PrefillAction::Released(Some(
            ReasonCode::LeaseExpired
        ))])
    );
    room.apply_event(open(0), 200).expect("legal");
    assert_eq!(room.next_due(), Some(60_200));
}

#[test]
fn every_way_to_end_releases_once() {
    let ends = [
        (
            PrefillEvent::Abort(ReasonCode::ClientGone),
            ReasonCode::ClientGone,
        ),
        (
            PrefillEvent::PeerAbort {
                peer: D,
                attempt: 1,
                code: ReasonCode::Checksum,
            },
            ReasonCode::Checksum,
        ),
        (
            PrefillEvent::PeerGone {
                peer: D,
                code: ReasonCode::TransportBroken,
            },
            ReasonCode::TransportBroken,
        ),
    ];
    for (event, code) in ends {
        let mut room = room();
        room.apply_event(open(0), 0).expect("legal");
        let actions = room.apply_event(event, 1).expect("legal");
        assert_eq!(
            actions
                .iter()
                .filter(|a| **a == PrefillAction::Released(Some(code)))
                .count(),
            1
        );
        assert_eq!(room.phase, PrefillPhase::Aborted(code));
        for late in [
            PrefillEvent::Tick,
            PrefillEvent::PeerGone {
                peer: D,
                code: ReasonCode::PeerDead,
            },
            PrefillEvent::Done {
                peer: D,
                attempt: 1,
            },
        ] {
            assert_eq!(room.apply_event(late, 5000), Ok(vec![]));
        }
    }
}

#[test]
fn illegal_pairs_are_typed_errors_and_change_nothing() {
    let publish = |page| PrefillEvent::Publish {
        group: GROUP,
        first: 0,
        pages: vec![(page, 2)],
    };
    let mut over = room();
    over.apply_event(PrefillEvent::Abort(ReasonCode::ClientGone), 0)
        .expect("legal");
    let mut leased = with_pages(room(), 1);
    leased.apply_event(finish(1), 0).expect("legal");
    let cases = [
        (over.clone(), publish(10), "the room is over"),
        (over.clone(), finish(0), "the room is over"),
        (
            over,
            PrefillEvent::Abort(ReasonCode::ClientGone),
            "the room is over",
        ),
        (leased.clone(), publish(10), "finish() came before"),
        (leased, finish(1), "called before"),
        (
            with_pages(room(), 1),
            publish(11),
            "was published as page 10",
        ),
        (with_pages(room(), 1), finish(2), "2 pages in all"),
        (
            room(),
            PrefillEvent::Publish {
                group: GROUP + 1,
                first: 0,
                pages: vec![(10, 2)],
            },
            "pages of group 5 in a room of group 4",
        ),
        (
            with_pages(room(), 1),
            PrefillEvent::Finish(PrefillOutput {
                groups: vec![],
                payload: vec![],
            }),
            "pages of groups [] in a room of group 4",
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
fn publishing_the_same_pages_again_is_harmless() {
    let mut room = with_pages(room(), 2);
    assert_eq!(
        room.apply_event(
            PrefillEvent::Publish {
                group: GROUP,
                first: 1,
                pages: vec![(11, 2)]
            },
            0
        ),
        Ok(vec![])
    );
}
