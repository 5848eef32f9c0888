//! The web page: its files and their headers, the feed of the fleet and its bounds.

use std::collections::BTreeSet;

use http::Method;
use serde_json::{Value, json};

use crate::support::{Act, Answering, Client, End, Mock, Router, TOKEN, eventually, timed};

const FILES: [(&str, &str); 13] = [
    ("/ui/", "text/html; charset=utf-8"),
    ("/ui/index.html", "text/html; charset=utf-8"),
    ("/ui/chat.html", "text/html; charset=utf-8"),
    ("/ui/theme.js", "text/javascript; charset=utf-8"),
    ("/ui/app.js", "text/javascript; charset=utf-8"),
    ("/ui/cluster.js", "text/javascript; charset=utf-8"),
    ("/ui/charts.js", "text/javascript; charset=utf-8"),
    ("/ui/nodes.js", "text/javascript; charset=utf-8"),
    ("/ui/chat.js", "text/javascript; charset=utf-8"),
    ("/ui/timeline.js", "text/javascript; charset=utf-8"),
    ("/ui/explanation.js", "text/javascript; charset=utf-8"),
    ("/ui/style.css", "text/css; charset=utf-8"),
    ("/ui/icon.svg", "image/svg+xml"),
];
/// Pages that may listen at once.
const MOST_PAGES: usize = 64;
const LISTENING: &str = "baton_router_feed_clients";

/// A page that listens, with the part of the stream that was not taken yet.
struct Page {
    answering: Answering,
    text: String,
    _client: Client,
}

impl Page {
    async fn open(router: &Router) -> Page {
        let mut client = Client::connect(router.running.addr).await;
        let answering = client.send(Method::GET, "/ui/feed", &[], "").await;
        assert_eq!(answering.response.status(), 200);
        Page {
            answering,
            text: String::new(),
            _client: client,
        }
    }

    /// `None` when the stream has ended.
    async fn snapshot(&mut self) -> Option<Value> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let data = event.strip_prefix("event: snapshot\ndata: ").unwrap();
                let snapshot = serde_json::from_str(data).unwrap();
                self.text = rest.to_owned();
                return Some(snapshot);
            }
            let piece = self.answering.piece().await?;
            self.text += std::str::from_utf8(&piece).unwrap();
        }
    }

    /// The first snapshot of which `is_wanted` is true.
    async fn until(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let snapshot = self.snapshot().await.expect("the feed goes on");
            if is_wanted(&snapshot) {
                return snapshot;
            }
        }
    }
}

fn names(object: &Value) -> BTreeSet<&str> {
    let object = object.as_object().unwrap();
    object.keys().map(String::as_str).collect()
}

fn node<'a>(snapshot: &'a Value, url: &str) -> &'a Value {
    let nodes = snapshot["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["url"] == url).unwrap()
}

#[tokio::test]
async fn files_have_their_type_and_a_policy_without_other_origins() {
    timed(async {
        let router = Router::start(&["--api-key", "k"]).await;
        for (path, media_type) in FILES {
            let reply = router.get(path).await;
            assert_eq!(reply.status, 200, "{path}");
            let header = |name: &str| reply.headers[name].to_str().unwrap().to_owned();
            assert_eq!(header("content-type"), media_type, "{path}");
            assert_eq!(header("x-content-type-options"), "nosniff");
            assert_eq!(header("x-frame-options"), "DENY");
            assert_eq!(header("referrer-policy"), "no-referrer");
            assert_eq!(header("cache-control"), "no-cache");
            let policy = header("content-security-policy");
            assert!(policy.starts_with("default-src 'self';"), "{policy}");
            assert!(!policy.contains("unsafe"), "{policy}");
            let etag = header("etag");
            let asked = [("if-none-match", etag.as_str())];
            let known = router.send(Method::GET, path, &asked, "").await;
            assert_eq!((known.status, known.body.len()), (304, 0), "{path}");
            let head = router.send(Method::HEAD, path, &[], "").await;
            assert_eq!((head.status, head.body.len()), (200, 0), "{path}");
        }
        let labels = "method=\"GET\",outcome=\"ok\",route=\"/ui/{file}\",status=\"3xx\"";
        let not_modified = format!("baton_router_requests_total{{{labels}}}");
        assert!(router.metric(&not_modified).await >= 1.0);
        let moved = router.get("/ui").await;
        assert_eq!(
            (moved.status, moved.headers["location"].to_str().unwrap()),
            (308, "ui/")
        );
        for path in ["/ui/nothing.js", "/ui/..", "/ui/..%2fCargo.toml"] {
            let reply = router.send(Method::GET, path, &[], "").await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (404, "not_found"),
                "{path}"
            );
        }
        let posted = router.send(Method::POST, "/ui/", &[], "").await;
        assert_eq!(
            (posted.status, posted.code().as_str()),
            (405, "method_not_allowed")
        );
    })
    .await;
}

#[tokio::test]
async fn snapshot_shows_nodes_their_reports_and_the_traffic_of_pairs() {
    timed(async {
        let info = json!({"engine": "baton", "disaggregation_bootstrap_port": 8998, "served_model_name": "m"});
        let p = Mock::start(&[]).await.with_info(info.clone());
        let loads = |generated| {
            json!({"dp_rank_count": 1, "loads": [{
                "dp_rank": 0, "age_ms": 5, "prefilled_tokens": 10, "generated_tokens": generated,
                "load": {"queued_tokens": 30, "started_tokens": 4, "running_requests": 2, "queued_requests": 3,
                    "transfer_requests": 0, "pages_free": 20, "pages_evictable": 5, "pages": 100}}]})
        };
        let d = Mock::start(&[]).await.with_info(info).with_loads(loads(7));
        d.stages("queue_us=100;transport=tcp;pages=4;bytes=8000000;pull_us=4000");
        p.stages("queue_us=2500");
        let router = Router::pd(&[&p], &[&d], &["--policy", "cost"]).await;
        let reply = router.chat_stream().await;
        assert_eq!(reply.status, 200);
        assert!(!reply.headers.contains_key("x-baton-stages"), "it is for routers");
        let mut page = Page::open(&router).await;
        let snapshot = page
            .until(|snapshot| node(snapshot, &d.url())["ranks"][0]["report"].is_object())
            .await;
        let keys = [
            "at_unix_ms", "events", "failed_requests", "history", "incarnation", "is_disaggregated", "is_draining",
            "nodes", "nodes_left_out", "pairs", "queued_requests", "requests", "slow_requests", "version",
        ];
        assert_eq!(names(&snapshot), BTreeSet::from(keys));
        assert_eq!(snapshot["is_disaggregated"], true);
        let decode = node(&snapshot, &d.url());
        assert_eq!((&decode["role"], &decode["state"]), (&json!("decode"), &json!("ready")));
        assert_eq!((&decode["model"], &decode["load"]), (&json!("m"), &json!(0)));
        let report = &decode["ranks"][0]["report"];
        assert_eq!((&report["kv_pages_used"], &report["kv_pages"]), (&json!(75), &json!(100)));
        assert_eq!((&report["queued_tokens"], &report["queued_requests"]), (&json!(34), &json!(3)));
        let prefill = node(&snapshot, &p.url());
        let pair = &snapshot["pairs"][0];
        assert_eq!((&pair["prefill"], &pair["decode"]), (&prefill["id"], &decode["id"]));
        assert_eq!((&pair["requests"], &pair["transport"]), (&json!(1), &json!("tcp")));
        assert_eq!((&pair["bytes"], &pair["bytes_per_s"]), (&json!(8_000_000), &json!(2e9)));
        let kinds: Vec<_> = snapshot["events"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
        assert_eq!(kinds.iter().filter(|kind| **kind == "registered").count(), 2);
        assert_eq!(kinds.iter().filter(|kind| **kind == "ready").count(), 2);
        let request = &snapshot["requests"][0];
        assert_eq!((&request["outcome"], &request["worker"]), (&json!("ok"), &json!(d.url())));
        let id = reply.headers["x-request-id"].to_str().unwrap();
        assert_eq!(request["id"], id);
        // The timeline has what each engine reported.
        let request = router.get(&format!("/v1/requests/{id}")).await.json();
        let legs = request["legs"].as_array().unwrap();
        let stages = |role: &str| &legs.iter().find(|leg| leg["role"] == role).unwrap()["stages"];
        assert_eq!(stages("prefill"), &json!({"queue_ms": 2.5}));
        assert_eq!(stages("decode")["pull"]["pull_ms"], 4.0);
    })
    .await;
}

#[tokio::test]
async fn rates_follow_what_ranks_report_with_their_answers() {
    timed(async {
        let d = Mock::start(&[]).await;
        let router = Router::regular(&[&d], &["--policy", "cost"]).await;
        let base = "rank=0;reqs=1;tokens=9;queued_tokens=0;started_tokens=0;running=1;queued=0;pages_free=1;pages=2";
        let mut generated = 0;
        let mut page = Page::open(&router).await;
        let snapshot = loop {
            generated += 1000;
            d.set_load(&format!(
                "{base};age_ms=0;prefilled=40;generated={generated}"
            ));
            assert_eq!(router.chat().await.status, 200);
            let snapshot = page.snapshot().await.unwrap();
            if snapshot["nodes"][0]["ranks"][0]["decode_tokens_per_s"].is_number() {
                break snapshot;
            }
        };
        let rank = &snapshot["nodes"][0]["ranks"][0];
        assert!(rank["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(rank["prefill_tokens_per_s"], 0.0);
    })
    .await;
}

#[tokio::test]
async fn events_report_failovers_lost_workers_and_drains() {
    timed(async {
        let resumes = json!({"engine": "baton", "disaggregation_bootstrap_port": 8998, "baton_features": ["resume"]});
        let ours = async |acts: &[Act]| Mock::start(acts).await.with_info(resumes.clone());
        let p = ours(&[]).await;
        let dying = ours(&[Act::CountTo(2, 0, End::Break)]).await;
        let good = ours(&[Act::Count]).await;
        let router = Router::pd(&[&p], &[&dying, &good], &["--disable-circuit-breaker"]).await;
        while dying.count() == 0 {
            assert_eq!(router.chat_stream().await.status, 200);
        }
        let url = dying.url();
        dying.stop().await;
        let mut page = Page::open(&router).await;
        let is_lost = |snapshot: &Value| node(snapshot, &url)["state"] == "unhealthy";
        // meets the closed port, or the other worker
        assert_eq!(router.chat_stream().await.status, 200);
        let snapshot = page.until(is_lost).await;
        let events = snapshot["events"].as_array().unwrap();
        let of = |kind: &str| events.iter().find(|event| event["kind"] == kind && event["worker"] == url.as_str());
        let failover = of("failover").expect("an event of the failover");
        assert_eq!(failover["detail"], "reset after 2 tokens");
        let id = failover["request"].as_str().unwrap();
        assert_eq!(router.get(&format!("/v1/requests/{id}")).await.json()["id"], id);
        assert!(of("unhealthy").unwrap()["detail"].is_string());
        let id = node(&snapshot, &good.url())["id"].as_str().unwrap().to_owned();
        let drained = router.post(&format!("/workers/{id}/drain"), &json!({})).await;
        assert_eq!(drained.status, 202);
        page.until(|snapshot| {
            let events = snapshot["events"].as_array().unwrap();
            ["draining", "removed"].iter().all(|kind| {
                events.iter().any(|event| event["kind"] == *kind && event["worker"] == good.url())
            })
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn draining_node_keeps_its_numbers_and_a_lost_one_loses_them() {
    timed(async {
        let info = json!({"engine": "baton"});
        let mock = Mock::start(&[]).await.with_info(info).with_drain();
        let report = |queued| {
            json!({"dp_rank_count": 1, "loads": [{"dp_rank": 0, "age_ms": 5,
                "load": {"queued_tokens": queued, "started_tokens": 0, "running_requests": 2, "queued_requests": 3,
                    "transfer_requests": 0, "pages_free": 20, "pages_evictable": 5, "pages": 100}}]})
        };
        let mock = mock.with_loads(report(30));
        let router = Router::regular(&[&mock], &["--policy", "cost"]).await;
        let url = mock.url();
        let queued = |snapshot: &Value| node(snapshot, &url)["ranks"][0]["report"]["queued_tokens"].clone();
        let mut page = Page::open(&router).await;
        let snapshot = page.until(|snapshot| queued(snapshot) == 30).await;
        let id = node(&snapshot, &url)["id"].as_str().unwrap().to_owned();
        let drained = router.post(&format!("/workers/{id}/drain"), &json!({})).await;
        assert_eq!(drained.status, 202);
        mock.set_loads(report(12));
        // The new number shows that a draining worker is still asked.
        let snapshot = page.until(|snapshot| queued(snapshot) == 12).await;
        assert_eq!(node(&snapshot, &url)["state"], "draining");
        assert_eq!(node(&snapshot, &url)["ranks"][0]["report"]["kv_pages_used"], 75);
        mock.stop().await;
        let snapshot = page.until(|snapshot| node(snapshot, &url)["state"] == "unhealthy").await;
        assert_eq!(node(&snapshot, &url)["ranks"], json!([]));
    })
    .await;
}

#[tokio::test]
async fn history_and_lists_of_requests_follow_what_was_answered() {
    timed(async {
        let acts = [Act::Answer, Act::Status(400, "bad"), Act::Answer];
        let mock = Mock::start(&acts).await;
        let router = Router::regular(&[&mock], &[]).await;
        // The page's own files, which answer 304 when they are known, are not requests of clients.
        let etag = router.get("/ui/").await.headers["etag"]
            .to_str()
            .unwrap()
            .to_owned();
        let known = router
            .send(Method::GET, "/ui/", &[("if-none-match", etag.as_str())], "")
            .await;
        assert_eq!(known.status, 304);
        let mut page = Page::open(&router).await;
        let is_sampled = |snapshot: &Value| snapshot["history"]["requests_per_s"][0].is_number();
        let history = &page.until(is_sampled).await["history"];
        assert_eq!(
            (&history["requests_per_s"], &history["errors_per_s"]),
            (&json!([0.0]), &json!([0.0]))
        );
        for _ in 0..3 {
            router.chat().await;
        }
        let mut page = Page::open(&router).await;
        let has_all = |snapshot: &Value| {
            let listed = snapshot["requests"].as_array().unwrap();
            listed
                .iter()
                .filter(|row| !row["outcome"].is_null())
                .count()
                == 3
        };
        let snapshot = page.until(has_all).await;
        assert_eq!(snapshot["slow_requests"].as_array().unwrap().len(), 3);
        let failed = snapshot["failed_requests"].as_array().unwrap();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0]["id"], snapshot["requests"][1]["id"]);
        // The first sample comes after one period; values are tested beside the code.
        let column =
            |snapshot: &Value, name: &str| snapshot["history"][name].as_array().unwrap().clone();
        let rises = |snapshot: &Value, name: &str| {
            column(snapshot, name)
                .iter()
                .any(|value| value.as_f64() > Some(0.0))
        };
        let snapshot = page.until(|snapshot| rises(snapshot, "errors_per_s")).await;
        assert!(rises(&snapshot, "requests_per_s"));
        assert!(rises(&snapshot, "ttft_p50_ms") && rises(&snapshot, "ttft_p95_ms"));
        assert!(
            column(&snapshot, "decode_kv_usage")
                .iter()
                .all(Value::is_null),
            "this worker reports none"
        );
        assert_eq!(
            (
                &snapshot["history"]["period_ms"],
                &snapshot["history"]["max_samples"]
            ),
            (&json!(5000), &json!(120))
        );
    })
    .await;
}

#[tokio::test]
async fn failed_transfers_are_counted_for_their_pair() {
    timed(async {
        let info = json!({"engine": "baton", "disaggregation_bootstrap_port": 8998});
        let p = Mock::start(&[]).await.with_info(info.clone());
        let failing = [Act::Status(502, "kv_transfer_failed"), Act::Answer];
        let d = Mock::start(&failing).await.with_info(info);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        assert_eq!(router.chat().await.status, 200, "the second attempt");
        let snapshot = Page::open(&router).await.snapshot().await.unwrap();
        let pair = &snapshot["pairs"][0];
        assert_eq!(
            (&pair["requests"], &pair["failures"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(pair["last_failure"], "kv_transfer_failed");
    })
    .await;
}

#[tokio::test]
async fn pages_beyond_the_limit_are_refused_and_places_are_free_when_pages_leave() {
    timed(async {
        let router = Router::start(&[]).await;
        let mut pages = Vec::new();
        for _ in 0..MOST_PAGES {
            pages.push(Page::open(&router).await);
        }
        assert_eq!(router.metric(LISTENING).await, MOST_PAGES as f64);
        let refused = router.get("/ui/feed").await;
        assert_eq!(
            (refused.status, refused.code().as_str()),
            (503, "feed_full")
        );
        assert!(refused.headers.contains_key("retry-after"));
        // Each page gets the shared snapshots.
        let first = pages[0].snapshot().await.unwrap()["at_unix_ms"]
            .as_u64()
            .unwrap();
        for page in &mut pages {
            page.until(|snapshot| snapshot["at_unix_ms"].as_u64().unwrap() >= first)
                .await;
        }
        drop(pages);
        eventually("all places are free", || async {
            router.metric(LISTENING).await == 0.0
        })
        .await;
        assert!(Page::open(&router).await.snapshot().await.is_some());
    })
    .await;
}

#[tokio::test]
async fn feed_ends_when_the_router_drains_though_requests_still_run() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let router = Router::regular(&[&mock], &["--shutdown-delay-ms", "60000"]).await;
        let addr = router.running.addr;
        let mut page = Page::open(&router).await;
        assert_eq!(page.snapshot().await.unwrap()["is_draining"], false);
        let stopping = tokio::spawn(router.running.stop());
        let mut last = Value::Null;
        while let Some(snapshot) = page.snapshot().await {
            last = snapshot;
        }
        assert_eq!(last["is_draining"], true);
        let mut client = Client::connect(addr).await;
        let refused = client.send(Method::GET, "/ui/feed", &[], "").await;
        let refused = refused.read().await;
        assert_eq!((refused.status, refused.code().as_str()), (503, "draining"));
        stopping.abort();
    })
    .await;
}
