use super::*;

const D: ConnectionId = 7;
const GROUP: GroupId = 4;
/// A second group, which keeps the last pages only.
const WINDOW: GroupId = 9;

fn starts(start_page: u32) -> Vec<GroupStart> {
    vec![GroupStart {
        group: GROUP,
        start_page,
    }]
}

fn room() -> PrefillRoom {
    PrefillRoom::new(1, vec![1, 2], 1000, 100, &[GROUP])
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

fn pages_of(group: GroupId, first_page: u32, total_pages: u32) -> GroupPages {
    GroupPages {
        group,
        first_page,
        total_pages,
        last_page_tokens: 3,
        tokens_at: None,
    }
}

fn finish(total_pages: u32) -> PrefillEvent {
    finish_with(vec![pages_of(GROUP, 0, total_pages)])
}

fn finish_with(groups: Vec<GroupPages>) -> PrefillEvent {
    PrefillEvent::Finish(PrefillOutput {
        groups,
        payload: vec![9],
    })
}

/// Page `page` of the pool is the one with this number.
fn publish_one(group: GroupId, index: u32, page: u32) -> PrefillEvent {
    PrefillEvent::Publish {
        group,
        first: index,
        pages: vec![(page, 2)],
    }
}

fn place(index: u32) -> PromptPage {
    PromptPage {
        group: GROUP,
        index,
    }
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
        PrefillEvent::Hashed((0..n).map(|i| (place(i), digest(10 + i))).collect()),
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
        .apply_event(PrefillEvent::Hashed(vec![(place(0), digest(10))]), 0)
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
            room.apply_event(PrefillEvent::Hashed(vec![(place(0), foreign)]), 0),
            Ok(vec![])
        );
    }
    assert_eq!(
        room.apply_event(PrefillEvent::Hashed(vec![(place(0), digest(10))]), 0)
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
    let mut room = PrefillRoom::new(1, vec![1, 2], 1_000_000, 60_000, &[GROUP]);
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
        (
            with_pages(room(), 1),
            finish(2),
            "prefill has pages [0, 2) of group 4, but [0, 1) are published",
        ),
        (
            room(),
            publish_one(GROUP + 1, 0, 10),
            "page group 5, but there are [4]",
        ),
        (
            with_pages(room(), 2),
            publish_one(GROUP, 3, 13),
            "pages [0, 2) of group 4 are published, page 3 does not continue them",
        ),
        (
            with_pages(room(), 1),
            publish_one(GROUP, i32::MAX as u32, 11),
            "exceed the numbers of messages",
        ),
        (
            with_pages(room(), 1),
            finish_with(vec![]),
            "page group 4 of [4] is missing",
        ),
        (
            with_pages(room(), 1),
            finish_with(vec![pages_of(GROUP, 0, 1), pages_of(GROUP, 0, 1)]),
            "page group 4 is named twice",
        ),
        (
            room(),
            finish_with(vec![pages_of(GROUP, 1, 2)]),
            "prefill has pages [1, 2) of group 4, but [0, 0) are published",
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

/// A room of two groups: pages 0 and 1 of the first are published, and 40 and 41 of the second.
fn two_groups() -> PrefillRoom {
    let mut room = PrefillRoom::new(1, vec![1, 2], 1000, 100, &[GROUP, WINDOW]);
    for (group, index) in [(WINDOW, 40), (GROUP, 0), (WINDOW, 41), (GROUP, 1)] {
        let page = 100 + index;
        let place = PromptPage { group, index };
        assert_eq!(
            room.apply_event(publish_one(group, index, page), 0),
            Ok(vec![PrefillAction::Hash(vec![(place, page, 2)])])
        );
    }
    room
}

fn open_two(groups: &[(GroupId, u32)]) -> PrefillEvent {
    let starts = groups
        .iter()
        .map(|&(group, start_page)| GroupStart { group, start_page });
    PrefillEvent::Open {
        peer: D,
        attempt: 1,
        prompt_hash: vec![1, 2],
        groups: starts.collect(),
    }
}

fn both_finished() -> PrefillEvent {
    finish_with(vec![pages_of(WINDOW, 40, 42), pages_of(GROUP, 0, 2)])
}

#[test]
fn groups_are_announced_from_what_exists_and_what_is_asked_for() {
    let progress = |group, first_page, pages: &[u32]| PrefillAction::Progress {
        peer: D,
        group,
        first_page,
        pages: pages.iter().copied().map(digest).collect(),
    };
    let sum = |page| digest(page).sum;
    for (asked, announced, roots) in [
        (
            [(WINDOW, 0), (GROUP, 0)],
            [
                progress(GROUP, 0, &[100, 101]),
                progress(WINDOW, 40, &[140, 141]),
            ],
            [
                root_of([sum(100), sum(101)].into_iter()),
                root_of([sum(140), sum(141)].into_iter()),
            ],
        ),
        (
            [(GROUP, 1), (WINDOW, 41)],
            [progress(GROUP, 1, &[101]), progress(WINDOW, 41, &[141])],
            [
                root_of([sum(101)].into_iter()),
                root_of([sum(141)].into_iter()),
            ],
        ),
    ] {
        let mut room = two_groups();
        assert_eq!(room.apply_event(both_finished(), 0), Ok(vec![]));
        let sums = [(WINDOW, 41), (GROUP, 0), (GROUP, 1), (WINDOW, 40)];
        let sums = sums.map(|(group, index)| (PromptPage { group, index }, digest(100 + index)));
        assert_eq!(
            room.apply_event(PrefillEvent::Hashed(sums.to_vec()), 0),
            Ok(vec![]),
            "there is no reader"
        );
        let actions = room.apply_event(open_two(&asked), 0).expect("legal");
        let total = |group, first_page, total_pages, root| GroupTotal {
            group,
            first_page,
            total_pages,
            last_page_tokens: 3,
            tokens_at: None,
            root,
        };
        let fin = PrefillAction::Final {
            peer: D,
            groups: vec![
                total(GROUP, 0, 2, roots[0]),
                total(WINDOW, 40, 42, roots[1]),
            ],
            payload: vec![9],
        };
        let [first, second] = announced;
        let accept = PrefillAction::Accept { peer: D };
        assert_eq!(actions, vec![accept, first, second, fin]);
    }
}

#[test]
fn final_waits_for_the_checksums_of_every_group() {
    let mut room = two_groups();
    room.apply_event(open_two(&[(GROUP, 0), (WINDOW, 0)]), 0)
        .expect("legal");
    room.apply_event(both_finished(), 0).expect("legal");
    let hashed = |group, first, n: u32| {
        let pages =
            (first..first + n).map(|index| (PromptPage { group, index }, digest(100 + index)));
        PrefillEvent::Hashed(pages.collect())
    };
    let actions = room.apply_event(hashed(GROUP, 0, 2), 0).expect("legal");
    assert!(matches!(actions[..], [PrefillAction::Progress { .. }]));
    let actions = room.apply_event(hashed(WINDOW, 40, 2), 0).expect("legal");
    assert!(matches!(
        actions[..],
        [PrefillAction::Progress { .. }, PrefillAction::Final { .. }]
    ));
}

#[test]
fn open_that_does_not_ask_for_each_group_once_is_refused_with_the_group() {
    for (asked, difference) in [
        (&[(GROUP, 0)][..], "page group 9 of [4, 9] is missing"),
        (
            &[(GROUP, 0), (WINDOW, 0), (WINDOW, 0)],
            "page group 9 is named twice",
        ),
        (
            &[(GROUP, 0), (WINDOW, 0), (5, 0)],
            "page group 5, but there are [4, 9]",
        ),
    ] {
        let mut room = two_groups();
        let before = room.clone();
        let reason =
            format!("the decode node does not ask for the page groups of the room: {difference}");
        assert_eq!(
            room.apply_event(open_two(asked), 0),
            Ok(vec![PrefillAction::Reject {
                peer: D,
                code: ReasonCode::LayoutMismatch,
                reason
            }])
        );
        assert_eq!(room, before);
    }
}

#[test]
fn group_of_which_nothing_exists_is_finished_empty() {
    let mut room = PrefillRoom::new(1, vec![1, 2], 1000, 100, &[GROUP, WINDOW]);
    room.apply_event(publish_one(GROUP, 0, 10), 0)
        .expect("legal");
    let groups = vec![pages_of(GROUP, 0, 1), pages_of(WINDOW, 7, 7)];
    assert_eq!(room.apply_event(finish_with(groups), 0), Ok(vec![]));
    assert!(matches!(room.phase, PrefillPhase::Leased { .. }));
}
