//! Interrupted streams wait for their turn, and all requests for a worker while none is ready.

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::counting::whole;
use crate::support::{Act, Client, DONE, End, FINISH, Mock, Reply, Router, eventually, timed};

const WAIT: [&str; 2] = ["--worker-wait-timeout-secs", "60"];
const QUEUED: &str = "baton_router_queued_requests";
const WAITING: &str = "baton_router_resumes_waiting";

fn resumes() -> Value {
    json!({"engine": "baton", "disaggregation_bootstrap_port": 8998, "baton_features": ["resume"]})
}

/// A request of its own connection, with the first piece of its answer read if it is a stream.
async fn begin(router: &Router, stream: bool) -> JoinHandle<String> {
    let mut client = Client::connect(router.running.addr).await;
    let mut text = String::new();
    if !stream {
        return tokio::spawn(async move { client.chat(false).await.read().await.text() });
    }
    let mut answering = client.chat(true).await;
    let piece = answering.piece().await.unwrap();
    text += std::str::from_utf8(&piece).unwrap();
    tokio::spawn(async move {
        let _open = client;
        let rest: Reply = answering.read().await;
        let text = text + &rest.text();
        text.replace(": keep-alive\n\n", "")
    })
}

async fn is_out(router: &Router, mock: &str) {
    eventually("the worker is out", || async {
        let list = router.get("/workers").await.json();
        let workers = list["workers"].as_array().cloned().unwrap();
        workers
            .iter()
            .any(|w| w["url"] == mock && w["state"] == "unhealthy")
    })
    .await;
}

#[tokio::test]
async fn wait_for_a_first_worker_has_a_name_of_its_own() {
    timed(async {
        let mock = Mock::start(&[]).await;
        mock.set_unhealthy(true);
        let url = mock.url();
        let mut flags = vec!["--worker-urls", url.as_str()];
        flags.extend(WAIT);
        let router = Router::start(&flags).await;
        let waiting = begin(&router, false).await;
        eventually("it waits", || async { router.metric(QUEUED).await == 1.0 }).await;
        mock.set_unhealthy(false);
        waiting.await.unwrap();
        let count = async |stage: &str| {
            let line = format!("baton_router_stage_seconds_count{{stage=\"{stage}\"}}");
            router.metric(&line).await
        };
        eventually("it has ended", || async { count("decide").await == 1.0 }).await;
        assert_eq!(count("worker_wait").await, 1.0);
        router.chat().await;
        eventually("the second has ended", || async {
            count("decide").await == 2.0
        })
        .await;
        assert_eq!(count("worker_wait").await, 1.0, "it did not wait");
    })
    .await;
}

#[tokio::test]
async fn interrupted_streams_are_resumed_in_turns_whatever_the_budget() {
    timed(async {
        let p = Mock::start(&[]).await.with_info(resumes());
        let dying = Mock::start(&[Act::CountTo(2, 0, End::Hang)])
            .await
            .with_info(resumes());
        let mut flags = WAIT.to_vec();
        flags.extend(["--failover-concurrency", "1", "--retry-budget-floor", "0"]);
        flags.extend(["--retry-budget-ratio", "0", "--retry-max-retries", "2"]);
        flags.extend(["--queue-size", "0"]);
        let router = Router::pd(&[&p], &[&dying], &flags).await;
        let mut streams = Vec::new();
        for _ in 0..4 {
            streams.push(begin(&router, true).await);
        }
        let url = dying.url();
        dying.stop().await;
        is_out(&router, &url).await;
        // It answers one request after the other, when released.
        let good = Mock::start(&[Act::GatedCount]).await.with_info(resumes());
        let worker = json!({"url": good.url(), "worker_type": "decode"});
        let added = router.post("/workers", &worker).await;
        assert!((200..300).contains(&added.status), "{}", added.text());
        for turn in 1..=4 {
            eventually("one has its turn, the others wait", || async {
                good.count() == turn && router.metric(WAITING).await == (4 - turn) as f64
            })
            .await;
            good.release();
        }
        for stream in streams {
            assert_eq!(stream.await.unwrap(), whole());
        }
        assert_eq!(good.count(), 4);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn killed_decode_worker_that_returns_resumes_its_own_stream() {
    timed(async {
        let p = Mock::start(&[]).await.with_info(resumes());
        let d = Mock::start(&[Act::CountTo(3, 9, End::Hang)])
            .await
            .with_info(resumes());
        let router = Router::pd(&[&p], &[&d], &WAIT).await;
        let stream = begin(&router, true).await;
        let (url, addr) = (d.url(), d.stop().await);
        is_out(&router, &url).await;
        // A new request waits with it, in the queue.
        let new = begin(&router, false).await;
        let left = begin(&router, false).await;
        eventually("both wait", || async { router.metric(QUEUED).await == 2.0 }).await;
        left.abort();
        eventually("one has left", || async {
            router.metric(QUEUED).await == 1.0
        })
        .await;
        let back = Mock::at(addr, &[Act::Count]).await.with_info(resumes());
        assert_eq!(stream.await.unwrap(), whole());
        assert!(new.await.unwrap().contains("w5"));
        assert_eq!(back.count(), 2);
        assert_eq!(router.metric(QUEUED).await, 0.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn request_is_refused_without_a_place_in_the_queue_or_a_known_worker() {
    timed(async {
        let d = Mock::start(&[]).await;
        let flags = [&WAIT[..], &["--queue-size", "0"]].concat();
        let router = Router::regular(&[&d], &flags).await;
        let url = d.url();
        d.stop().await;
        is_out(&router, &url).await;
        for router in [router, Router::start(&WAIT).await] {
            let reply = router.chat().await;
            assert_eq!((reply.status, reply.code().as_str()), (503, "no_worker"));
            assert_eq!(reply.headers["retry-after"], "1");
        }
    })
    .await;
}

#[tokio::test]
async fn prefill_worker_that_dies_while_its_stream_decodes_changes_nothing() {
    timed(async {
        let p = Mock::start(&[Act::Hang]).await.with_info(resumes());
        let d = Mock::start(&[Act::CountTo(2, 0, End::Gate)])
            .await
            .with_info(resumes());
        let router = Router::pd(&[&p], &[&d], &WAIT).await;
        let stream = begin(&router, true).await;
        let url = p.url();
        p.stop().await;
        is_out(&router, &url).await;
        d.release();
        let text = stream.await.unwrap();
        assert!(text.contains("w1 ") && text.ends_with(&[FINISH, DONE].concat()));
        assert_eq!(d.count(), 1);
        router.no_load().await;
    })
    .await;
}
