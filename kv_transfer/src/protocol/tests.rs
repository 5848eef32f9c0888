#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use proptest::prelude::*;

pub(crate) use super::page_groups::tests::layout;
use super::*;

pub(crate) fn hello(nonce: &[u8]) -> Msg {
    Msg::Hello(Hello {
        ver: VERSION,
        min_ver: MIN_VERSION,
        channel: Channel::Control,
        nonce: nonce.to_vec(),
        inc: "inc".into(),
        expected_inc: None,
        addr: "127.0.0.1:1".into(),
        boot_id: "boot".into(),
        network_namespace: "net:[1]".into(),
        transports: vec!["shm".into(), "tcp".into()],
        layout_hash: "l".into(),
        layout: layout(4096),
        num_pages: 4,
        page_bytes: 4096,
        sums: "xxh3".into(),
        shm_socket: "s".into(),
        shm_token: vec![1; 16],
    })
}

fn body(frame: &[u8]) -> &[u8] {
    &frame[HEADER_BYTES..]
}

/// Both sides of an established connection: (asker's sealer, opener), (answerer's …).
fn pair(
    key_a: Option<&[u8]>,
    key_b: Option<&[u8]>,
) -> ((FrameSealer, FrameOpener), (FrameSealer, FrameOpener)) {
    (
        Handshake::new(key_a).derive_session(true, b"a", b"b"),
        Handshake::new(key_b).derive_session(false, b"a", b"b"),
    )
}

fn any_msg() -> impl Strategy<Value = Msg> {
    let room = any::<u64>;
    let attempt = any::<u32>;
    let code = || proptest::sample::select(ReasonCode::ALL);
    prop_oneof![
        (
            room(),
            attempt(),
            proptest::collection::vec(any::<(u32, u32, u64)>(), 0..40)
        )
            .prop_map(|(room, attempt, pages)| Msg::Progress {
                room,
                attempt,
                group: 1,
                first_page: 3,
                ids: pages.iter().map(|p| p.0).collect(),
                gens: pages.iter().map(|p| u64::from(p.1) * 2).collect(),
                sums: pages.iter().map(|p| p.2).collect(),
            }),
        (
            room(),
            attempt(),
            (any::<u16>(), any::<u16>()),
            proptest::collection::vec(any::<u8>(), 0..200)
        )
            .prop_map(|(room, attempt, (first, n), payload)| Msg::Final {
                room,
                attempt,
                groups: vec![GroupTotal {
                    group: 1,
                    first_page: first.min(n).into(),
                    total_pages: n.into(),
                    last_page_tokens: 7,
                    tokens_at: None,
                    root: 9,
                }],
                payload,
            }),
        (room(), attempt(), code()).prop_map(|(room, attempt, code)| Msg::Abort {
            room,
            attempt,
            code
        }),
        (room(), attempt(), code(), ".{0,20}").prop_map(|(room, attempt, code, message)| {
            Msg::Reject {
                room,
                attempt,
                code,
                message,
                retry_after_ms: 5,
                connection: false,
            }
        }),
        (any::<u64>(), proptest::option::of(any::<u32>()))
            .prop_map(|(ticket, stale)| Msg::DataEnd { ticket, stale }),
        proptest::collection::vec(any::<u8>(), 0..64).prop_map(|n| hello(&n)),
        (room(), attempt(), any::<u64>()).prop_map(|(room, attempt, root)| Msg::Done {
            room,
            attempt,
            bytes: 1,
            root
        }),
    ]
}

proptest! {
    #[test]
    fn messages_round_trip_with_and_without_a_key(msgs in proptest::collection::vec(any_msg(), 1..6), keyed: bool) {
        let key: Option<&[u8]> = keyed.then_some(b"secret");
        let ((mut seal, _), (_, mut open)) = pair(key, key);
        for msg in msgs {
            prop_assert!(msg.encode()[2..].starts_with(msg.name().as_bytes()), "one map entry, named");
            let frame = seal.seal(&msg);
            prop_assert_eq!(frame_len(frame[..4].try_into().unwrap()).unwrap(), frame.len() - 4);
            prop_assert_eq!(open.open(body(&frame)).unwrap(), msg);
        }
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), keyed: bool) {
        let key: Option<&[u8]> = keyed.then_some(b"secret");
        let (_, (_, mut open)) = pair(key, key);
        let _ = open.open(&bytes);
        let _ = Msg::decode(&bytes);
        let _ = Handshake::new(key).open_hello(&bytes, b"n");
    }

    #[test]
    fn damaged_messages_never_panic(msg in any_msg(), at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>()) {
        let mut bytes = msg.encode();
        let i = at.index(bytes.len());
        bytes[i] = byte;
        let _ = Msg::decode(&bytes);
        let _ = Msg::decode(&bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn flipped_bit_is_refused_with_and_without_a_key(msg in any_msg(), bit in any::<prop::sample::Index>(), keyed: bool) {
        let key: Option<&[u8]> = keyed.then_some(b"secret");
        let ((mut seal, _), (_, mut open)) = pair(key, key);
        let mut frame = body(&seal.seal(&msg)).to_vec();
        let bit = bit.index(frame.len() * 8);
        frame[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(open.open(&frame).is_err());
    }
}

#[test]
fn replayed_reflected_or_reordered_frame_is_refused() {
    // without a key, only the move to another connection would pass
    let key: Option<&[u8]> = Some(b"secret");
    let msg = |room| Msg::AbortAck { room, attempt: 0 };
    let ((mut seal, mut initiator_open), (_, mut open)) = pair(key, key);
    let first = seal.seal(&msg(1));
    let second = seal.seal(&msg(2));
    assert!(
        initiator_open.open(body(&first)).is_err(),
        "reflected to its sender"
    );
    open.open(body(&first)).unwrap();
    assert!(open.open(body(&first)).is_err(), "replayed");
    let (_, (_, mut other)) = pair(key, key);
    assert!(other.open(body(&second)).is_err(), "reordered");
    let (_, mut elsewhere) = Handshake::new(key).derive_session(false, b"a", b"another nonce");
    assert!(
        elsewhere.open(body(&first)).is_err(),
        "moved to another connection"
    );
}

#[test]
fn keys_must_agree_and_the_refusal_says_which_side_has_none() {
    let frame = Handshake::new(Some(b"one")).seal_hello(&hello(b"n"), b"");
    assert!(
        Handshake::new(Some(b"one"))
            .open_hello(body(&frame), b"")
            .is_ok()
    );
    assert!(matches!(
        Handshake::new(Some(b"two")).open_hello(body(&frame), b""),
        Err(FrameError::Auth(_))
    ));
    let err = Handshake::new(None)
        .open_hello(body(&frame), b"")
        .unwrap_err();
    assert!(err.to_string().contains("this node has none"), "{err}");
    let plain = Handshake::new(None).seal_hello(&hello(b"n"), b"");
    let err = Handshake::new(Some(b"one"))
        .open_hello(body(&plain), b"")
        .unwrap_err();
    assert!(err.to_string().contains("unauthenticated"), "{err}");
    assert!(
        Handshake::new(Some(b"one"))
            .open_hello(body(&frame), b"my nonce")
            .is_err(),
        "an old answer to another nonce"
    );
}

#[test]
fn oversized_and_inconsistent_messages_are_refused() {
    assert_eq!(
        frame_len((5_000_000u32).to_le_bytes()),
        Err(FrameError::TooLarge(5_000_000))
    );
    assert_eq!(frame_len(0u32.to_le_bytes()), Err(FrameError::Short));
    let refused = |msg: Msg| matches!(Msg::decode(&msg.encode()), Err(DecodeError::Invalid { .. }));
    let progress = |ids: usize, gen_: u64, gens: usize| Msg::Progress {
        room: 1,
        attempt: 0,
        group: 0,
        first_page: 0,
        ids: vec![0; ids],
        gens: vec![gen_; gens],
        sums: vec![0; ids],
    };
    assert!(refused(progress(2, 2, 1)));
    assert!(refused(progress(1, 3, 1)), "an odd generation");
    assert!(refused(progress(
        MAX_PROGRESS_PAGES + 1,
        2,
        MAX_PROGRESS_PAGES + 1
    )));
    assert!(!refused(progress(
        MAX_PROGRESS_PAGES,
        2,
        MAX_PROGRESS_PAGES
    )));
    assert!(refused(Msg::Read {
        ticket: 0,
        group: 0,
        ids: vec![1],
        gens: vec![]
    }));
    let total = GroupTotal {
        group: 0,
        first_page: 0,
        total_pages: 1,
        last_page_tokens: 1,
        tokens_at: None,
        root: 0,
    };
    let fin = |groups: usize, payload: usize| Msg::Final {
        room: 1,
        attempt: 0,
        groups: vec![total; groups],
        payload: vec![0; payload],
    };
    assert!(!refused(fin(MAX_GROUPS, MAX_PAYLOAD_BYTES)));
    assert!(refused(fin(MAX_GROUPS + 1, 0)));
    assert!(refused(fin(1, MAX_PAYLOAD_BYTES + 1)));
    let ends_before_it_begins = Msg::Final {
        room: 1,
        attempt: 0,
        groups: vec![GroupTotal {
            first_page: 2,
            ..total
        }],
        payload: vec![],
    };
    assert!(refused(ends_before_it_begins));
}

#[test]
fn names_and_explanations_are_bounded() {
    let refused =
        |msg: &Msg| matches!(Msg::decode(&msg.encode()), Err(DecodeError::Invalid { .. }));
    let Msg::Hello(fine) = hello(b"n") else {
        unreachable!("it makes a HELLO")
    };
    let long = || "x".repeat(MAX_NAME_BYTES + 1);
    assert!(!refused(&Msg::Hello(fine.clone())));
    for change in [
        (|hello, long| hello.inc = long) as fn(&mut Hello, String),
        |hello, long| hello.addr = long,
        |hello, long| hello.boot_id = long,
        |hello, long| hello.network_namespace = long,
        |hello, long| hello.layout_hash = long,
        |hello, long| hello.sums = long,
        |hello, long| hello.expected_inc = Some(long),
        |hello, long| hello.transports = vec![long],
    ] {
        let mut hello = fine.clone();
        change(&mut hello, long());
        assert!(refused(&Msg::Hello(hello.clone())), "{hello:?}");
    }
    let reject = |message| Msg::Reject {
        room: 0,
        attempt: 0,
        code: ReasonCode::Auth,
        message,
        retry_after_ms: 0,
        connection: true,
    };
    let text = "é".repeat(MAX_TEXT_BYTES);
    assert!(refused(&reject(text.clone())));
    assert!(!refused(&reject(clip_text(&text))));
}

#[test]
fn unknown_fields_of_a_later_version_are_ignored() {
    #[derive(Serialize)]
    enum Later {
        #[serde(rename = "ABORT_ACK")]
        AbortAck {
            room: u64,
            attempt: u32,
            novelty: &'static str,
        },
    }
    let bytes = rmp_serde::to_vec_named(&Later::AbortAck {
        room: 5,
        attempt: 1,
        novelty: "x",
    })
    .unwrap();
    assert_eq!(
        Msg::decode(&bytes).unwrap(),
        Msg::AbortAck {
            room: 5,
            attempt: 1
        }
    );
}

#[test]
fn largest_messages_of_a_decode_rank_fit_into_its_frames() {
    let beat = Msg::Heartbeat {
        inc: "x".repeat(MAX_NAME_BYTES),
        seq: u64::MAX,
        rooms: vec![u64::MAX; MAX_HEARTBEAT_ROOMS],
        pull_backlog_bytes: u64::MAX,
        progress: u64::MAX,
        busy: true,
    };
    let read = Msg::SlabRead {
        comm: u64::MAX,
        ticket: u64::MAX,
        group: u32::MAX,
        ids: vec![u32::MAX; MAX_READ_PAGES],
        gens: vec![u64::MAX; MAX_READ_PAGES],
    };
    let ((mut sealer, _), _) = pair(Some(b"k"), Some(b"k"));
    for msg in [beat, read] {
        assert!(body(&sealer.seal(&msg)).len() <= MAX_DECODE_FRAME_BYTES);
    }
}

/// Bytes that peers of other builds send and expect, made with Python's msgspec.
#[test]
fn open_is_a_map_of_named_fields() {
    let open = Msg::Open(OpenMessage {
        room: 7,
        attempt: 2,
        d_inc: "d".into(),
        p_inc_expected: "p".into(),
        layout_hash: "l".into(),
        prompt_hash: vec![1, 2],
        groups: vec![GroupStart {
            group: 5,
            start_page: 3,
        }],
        deadline_ms: 1000,
        prio: -1,
    });
    let wire = b"\x81\xa4OPEN\x89\xa4room\x07\xa7attempt\x02\xa5d_inc\xa1d\xaep_inc_expected\xa1p\xablayout_hash\xa1l\xabprompt_hash\xc4\x02\x01\x02\xa6groups\x91\x82\xa5group\x05\xaastart_page\x03\xabdeadline_ms\xcd\x03\xe8\xa4prio\xff";
    assert_eq!(open.encode(), wire);
    assert_eq!(Msg::decode(wire).unwrap(), open);
}

/// Made with Python's msgspec.
#[test]
fn final_counts_the_pages_of_each_group() {
    let fin = Msg::Final {
        room: 7,
        attempt: 2,
        groups: vec![
            GroupTotal {
                group: 0,
                first_page: 0,
                total_pages: 300,
                last_page_tokens: 5,
                tokens_at: None,
                root: 1 << 40,
            },
            GroupTotal {
                group: 1,
                first_page: 268,
                total_pages: 300,
                last_page_tokens: 5,
                tokens_at: None,
                root: 9,
            },
        ],
        payload: vec![8, 9],
    };
    let wire = b"\x81\xa5FINAL\x84\xa4room\x07\xa7attempt\x02\xa6groups\x92\x85\xa5group\x00\xaafirst_page\x00\xabtotal_pages\xcd\x01\x2c\xb0last_page_tokens\x05\xa4root\xcf\x00\x00\x01\x00\x00\x00\x00\x00\x85\xa5group\x01\xaafirst_page\xcd\x01\x0c\xabtotal_pages\xcd\x01\x2c\xb0last_page_tokens\x05\xa4root\x09\xa7payload\xc4\x02\x08\x09";
    assert_eq!(fin.encode(), wire);
    assert_eq!(Msg::decode(wire).unwrap(), fin);
}

/// Made with Python's msgspec.
#[test]
fn final_says_how_many_tokens_a_state_has_seen() {
    let fin = Msg::Final {
        room: 7,
        attempt: 2,
        groups: vec![GroupTotal {
            group: 1,
            first_page: 0,
            total_pages: 3,
            last_page_tokens: 0,
            root: 9,
            tokens_at: Some(4790),
        }],
        payload: vec![8, 9],
    };
    let wire = b"\x81\xa5FINAL\x84\xa4room\x07\xa7attempt\x02\xa6groups\x91\x86\xa5group\x01\xaafirst_page\x00\xabtotal_pages\x03\xb0last_page_tokens\x00\xa4root\x09\xa9tokens_at\xcd\x12\xb6\xa7payload\xc4\x02\x08\x09";
    assert_eq!(fin.encode(), wire);
    assert_eq!(Msg::decode(wire).unwrap(), fin);
}

/// Made with Python's msgspec: without the layout, which version 3 added.
#[test]
fn hello_of_version_2_is_read_so_that_its_version_can_be_refused() {
    let wire = b"\x81\xa5HELLO\xde\x00\x10\xa3ver\x02\xa7min_ver\x02\xa7channel\xa7Control\xa5nonce\xc4\x01n\xa3inc\xa1i\xacexpected_inc\xc0\xa4addr\xa3a:1\xa7boot_id\xa1b\xb1network_namespace\xa0\xaatransports\x91\xa3tcp\xablayout_hash\xa1l\xa9num_pages\x04\xaapage_bytes\xcd\x10\x00\xa4sums\xa4xxh3\xaashm_socket\xa1s\xa9shm_token\xc4\x01t";
    let Msg::Hello(old) = Msg::decode(wire).unwrap() else {
        unreachable!("it is a HELLO")
    };
    assert_eq!((old.ver, old.layout), (2, PageLayout::default()));
}
