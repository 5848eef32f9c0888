//! Queue loads reported by workers reach the policy, and not the client.

use serde_json::{Value, json};

use crate::support::*;

const BUSY: &str = "rank=0;reqs=9;tokens=9;age_ms=0;queued_tokens=900000;started_tokens=100000;bands=default:900000";
const IDLE: &str = "rank=0;reqs=1;tokens=9;age_ms=0;queued_tokens=0;started_tokens=0";
/// As much work, but reported ten minutes ago.
const LONG_AGO: &str =
    "rank=0;reqs=9;tokens=9;age_ms=600000;queued_tokens=900000;started_tokens=100000";

fn turn(stream: bool) -> Value {
    let text = "and so on ".repeat(100);
    json!({"messages": [{"role": "user", "content": text}], "stream": stream})
}

async fn ask(router: &Router, stream: bool) -> Reply {
    let reply = router.post("/v1/chat/completions", &turn(stream)).await;
    assert_eq!(reply.status, 200);
    reply
}

fn reports(role: &str, source: &str, result: &str) -> String {
    let labels = format!("result=\"{result}\",role=\"{role}\",source=\"{source}\"");
    format!("baton_router_load_reports_total{{{labels}}}")
}

async fn mocks<const N: usize>(load: &'static str) -> [Mock; N] {
    let mut mocks = Vec::new();
    for _ in 0..N {
        mocks.push(Mock::start(&[]).await.with_load(load));
    }
    mocks.try_into().ok().expect("N of them")
}

/// How three requests with one prompt are spread over two workers that answer with this header,
/// most first.
async fn spread(load: &'static str, result: &str) -> [usize; 2] {
    let [a, b] = mocks(load).await;
    let router = Router::regular(&[&a, &b], &["--policy", "cost"]).await;
    for _ in 0..2 {
        ask(&router, false).await;
    }
    assert_eq!(
        router.metric(&reports("regular", "answer", result)).await,
        2.0
    );
    let (a, b) = (a.count(), b.count());
    [a.max(b), a.min(b)]
}

#[tokio::test]
async fn reported_backlog_diverts_the_next_request() {
    timed(async {
        // The second goes where the first did, for its prefix, unless others' work waits there.
        assert_eq!(spread(IDLE, "taken").await, [2, 0]);
        assert_eq!(spread(BUSY, "taken").await, [1, 1]);
    })
    .await;
}

#[tokio::test]
async fn old_report_has_run_off_and_calls_for_a_draw() {
    timed(async {
        assert_eq!(spread(LONG_AGO, "taken").await, [2, 0]);
        let [a, b, c] = mocks(LONG_AGO).await;
        let router = Router::regular(&[&a, &b, &c], &["--policy", "cost"]).await;
        for _ in 0..2 {
            ask(&router, false).await;
        }
        let why = |why: &str| {
            format!("baton_router_policy_decisions_total{{policy=\"cost\",role=\"regular\",why=\"{why}\"}}")
        };
        assert_eq!(router.metric(&why("no_prefix")).await, 1.0, "nothing was reported yet");
        assert_eq!(router.metric(&why("sampled")).await, 1.0);
    })
    .await;
}

#[tokio::test]
async fn unusable_load_reports_are_counted_and_change_nothing() {
    timed(async {
        for malformed in [
            "busy",
            "rank=0;queued_tokens=many;started_tokens=0;age_ms=0",
        ] {
            assert_eq!(spread(malformed, "malformed").await, [2, 0]);
        }
        assert_eq!(spread("rank=0;reqs=1;tokens=7", "unused").await, [2, 0]);
        // One rank's queue says little of a worker with several, unless each is a candidate.
        for (flags, unused) in [(&[][..], 2.0), (&["--dp-aware"][..], 1.0)] {
            let [mock] = mocks(BUSY).await; // always rank 0
            let mock = mock.with_info(json!({"dp_size": 2}));
            let router = Router::regular(&[&mock], flags).await; // in turn
            ask(&router, false).await;
            ask(&router, false).await;
            for (result, count) in [("unused", unused), ("taken", 2.0 - unused)] {
                let counter = reports("regular", "answer", result);
                assert_eq!(router.metric(&counter).await, count, "{flags:?} {result}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn clients_do_not_see_the_header_and_see_all_others() {
    timed(async {
        let [mock] = mocks(BUSY).await;
        let router = Router::regular(&[&mock], &["--policy", "cost"]).await;
        let whole = ask(&router, false).await;
        assert!(!whole.headers.contains_key("x-baton-load"));
        assert_eq!(whole.headers["x-mock"], "yes");
        let streamed = ask(&router, true).await;
        assert!(!streamed.headers.contains_key("x-baton-load"));
        assert_eq!(streamed.events().len(), 4);

        let [refusing] = mocks(BUSY).await;
        let mut refusing = refusing;
        refusing.acts(&[Act::Status(400, "invalid_value")]);
        let router = Router::regular(&[&refusing], &["--policy", "round_robin"]).await;
        let refused = router.chat().await;
        assert_eq!(
            (refused.status, refused.code().as_str()),
            (400, "invalid_value")
        );
        assert!(!refused.headers.contains_key("x-baton-load"));
        assert_eq!(refused.headers["x-mock"], "yes");
    })
    .await;
}

#[tokio::test]
async fn both_legs_of_a_pair_report() {
    timed(async {
        let [p1, p2, d] = mocks(BUSY).await;
        let router = Router::pd(&[&p1, &p2], &[&d], &["--policy", "cost"]).await;
        for stream in [false, true] {
            let reply = ask(&router, stream).await;
            assert!(!reply.headers.contains_key("x-baton-load"));
            router.no_load().await;
        }
        assert_eq!((p1.count(), p2.count()), (1, 1));
        for role in ["prefill", "decode"] {
            assert_eq!(router.metric(&reports(role, "answer", "taken")).await, 2.0);
        }
        let backlog = "baton_router_backlog_seconds{role=\"prefill\"";
        assert!(router.metric(backlog).await > 1.0);
    })
    .await;
}

#[tokio::test]
async fn idle_engines_of_ours_are_asked_and_others_left_alone() {
    timed(async {
        let loads = |queued: u64| {
            json!({"dp_rank_count": 2, "loads": [
                {"dp_rank": 0, "age_ms": 3, "load": {"queued_tokens": queued, "started_tokens": 0}},
                {"dp_rank": 1, "age_ms": null, "load": null},
            ]})
        };
        let ours = json!({"engine": "baton"});
        let busy = Mock::start(&[])
            .await
            .with_info(ours.clone())
            .with_loads(loads(1_000_000));
        let idle = Mock::start(&[])
            .await
            .with_info(ours.clone())
            .with_loads(loads(0));
        let odd = Mock::start(&[]).await.with_info(ours).with_loads(json!([]));
        let other = Mock::start(&[]).await.with_loads(loads(1_000_000));
        let router = Router::regular(&[&busy, &idle], &["--policy", "cost"]).await;
        let taken = reports("regular", "poll", "taken");
        eventually("both have reported", || async {
            router.metric(&taken).await >= 2.0
        })
        .await;
        for _ in 0..4 {
            let body = json!({"messages": [{"role": "user", "content": "hi"}]});
            assert_eq!(router.post("/v1/chat/completions", &body).await.status, 200);
        }
        assert_eq!((busy.count(), idle.count()), (0, 4));

        let router = Router::regular(&[&odd, &other], &["--policy", "cost"]).await;
        let malformed = reports("regular", "poll", "malformed");
        eventually("it was asked", || async {
            router.metric(&malformed).await >= 1.0
        })
        .await;
        assert_eq!(other.polls(), 0);
        assert_eq!(router.metric(&taken).await, 0.0);
    })
    .await;
}
