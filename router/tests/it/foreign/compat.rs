//! In front of workers of other makes the router is not there: the same words come back, the same
//! words arrive.

use http::Method;
use serde_json::{Value, json};

use crate::support::peers::{Peer, Rooms};
use crate::support::{Client, Mock, Reply, Router, eventually, timed};

async fn regular(peers: &[&Peer], flags: &[&str]) -> Router {
    let urls: Vec<String> = peers.iter().map(|peer| peer.url()).collect();
    let mut all = vec!["--worker-urls"];
    all.extend(urls.iter().map(String::as_str));
    all.extend(flags);
    let router = Router::start(&all).await;
    router.all_ready(peers.len()).await;
    router
}

fn requests() -> Vec<(&'static str, Value)> {
    let mut all = Vec::new();
    for stream in [false, true] {
        let options = json!({"include_usage": true});
        all.push(("/v1/chat/completions", json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream})));
        all.push((
            "/v1/chat/completions",
            json!({"model": "m", "messages": [], "stream": stream, "stream_options": options}),
        ));
        all.push((
            "/v1/completions",
            json!({"model": "m", "prompt": "hi", "stream": stream, "priority": 3}),
        ));
        all.push((
            "/generate",
            json!({"text": "hi", "sampling_params": {"max_new_tokens": 2}, "stream": stream}),
        ));
    }
    all
}

const HEADERS: [(&str, &str); 4] = [
    ("authorization", "Bearer client"),
    ("x-custom", "kept"),
    (
        "traceparent",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    ("x-request-id", "r-1"),
];

async fn direct(peer: &Peer, path: &str, body: &Value) -> Reply {
    let mut client = Client::connect(peer.addr).await;
    let body = body.to_string();
    let answering = client.send(Method::POST, path, &HEADERS, &body).await;
    answering.read().await
}

/// Status, type and bytes are the worker's, whatever was asked.
async fn is_transparent(router: &Router, peer: &Peer) {
    for (path, body) in requests() {
        let through = router
            .send(Method::POST, path, &HEADERS, &body.to_string())
            .await;
        let direct = direct(peer, path, &body).await;
        let what = format!("{path} {body}");
        assert_eq!(through.status, direct.status, "{what}");
        assert_eq!(
            through.headers["content-type"], direct.headers["content-type"],
            "{what}"
        );
        assert_eq!(through.text(), direct.text(), "{what}");
        assert_eq!(through.headers["x-request-id"], "r-1", "{what}");
    }
    let seen = peer.seen();
    for pair in seen.chunks(2) {
        let [through, direct] = pair else {
            panic!("{seen:?}")
        };
        assert_eq!(through.2, direct.2, "no field added, none lost");
        for (name, value) in HEADERS {
            assert_eq!(through.1[name], value);
        }
    }
    router.no_load().await;
}

#[tokio::test]
async fn sglang_regular() {
    timed(async {
        for policy in ["cost", "cache_aware", "power_of_two"] {
            let peer = Peer::sglang("null", &Rooms::new()).await;
            let router = regular(&[&peer], &["--policy", policy]).await;
            is_transparent(&router, &peer).await;
            let bad = json!({"model": "m", "messages": [], "temperature": -1});
            let reply = router.post("/v1/chat/completions", &bad).await;
            assert_eq!(
                (reply.status, reply.json()["code"].clone()),
                (400, json!(400))
            );
            assert_eq!(
                router.get("/v1/models").await.json()["data"][0]["owned_by"],
                "sglang"
            );
            assert_eq!(router.post("/flush_cache", &json!({})).await.status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn vllm_regular() {
    timed(async {
        let peer = Peer::vllm().await;
        let router = regular(&[&peer], &["--policy", "cost"]).await;
        is_transparent(&router, &peer).await;
        let before = peer.seen().len();
        let ask = async || {
            let body = json!({"model": "other", "prompt": "x"});
            router.post("/v1/completions", &body).await
        };
        let reply = ask().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (404, "model_not_found")
        );
        assert_eq!(peer.seen().len(), before, "no worker serves it");
        assert_eq!(
            router.get("/v1/models").await.json()["data"][0]["owned_by"],
            "vllm"
        );
    })
    .await;
}

#[tokio::test]
async fn vllm_workers_get_requests_for_the_models_they_list() {
    timed(async {
        let models = |ids: &[&str]| {
            let cards = ids.iter().map(|id| json!({"id": id, "object": "model"}));
            json!({"object": "list", "data": cards.collect::<Vec<_>>()})
        };
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let (a, b) = (a.with_version("0.14.0"), b.with_version("0.14.0"));
        a.answers("/v1/models", 200, models(&["a"]));
        b.answers("/v1/models", 200, models(&["b", "adapter-of-b"]));
        let flags = ["--health-check-interval-secs", "1"];
        let router = Router::regular(&[&a, &b], &flags).await;
        let ask = async |model: &str| {
            let body = json!({"model": model, "prompt": "x"});
            router.post("/v1/completions", &body).await.status
        };
        for (model, counts) in [("a", (2, 0)), ("b", (2, 2)), ("adapter-of-b", (2, 4))] {
            assert_eq!((ask(model).await, ask(model).await), (200, 200));
            assert_eq!((a.count(), b.count()), counts, "{model}");
        }
        assert_eq!(ask("adapter-of-a").await, 404);
        // An adapter is loaded while it runs.
        a.answers("/v1/models", 200, models(&["a", "adapter-of-a"]));
        eventually("the router reads the names again", || async {
            ask("adapter-of-a").await == 200
        })
        .await;
        assert_eq!(b.count(), 4);
    })
    .await;
}

fn rank_headers(peer: &Peer) -> Vec<String> {
    let seen = peer.seen();
    let mut ranks: Vec<String> = seen
        .iter()
        .map(|(_, headers, _)| headers["x-data-parallel-rank"].to_str().unwrap().to_owned())
        .collect();
    ranks.sort_unstable();
    ranks
}

/// vLLM's workers do not tell how many ranks they have, and take the rank from a header.
#[tokio::test]
async fn vllm_ranks_are_given_by_flag() {
    timed(async {
        let peer = Peer::vllm().await;
        let ranks = ["--intra-node-data-parallel-size", "3"];
        let router = regular(&[&peer], &ranks).await;
        let body = json!({"model": "m", "prompt": "hi"});
        for _ in 0..3 {
            assert_eq!(router.post("/v1/completions", &body).await.status, 200);
        }
        assert_eq!(rank_headers(&peer), ["0", "1", "2"]);
        assert!(peer.seen().iter().all(|(_, _, sent)| *sent == body));

        let (p, d) = (Peer::vllm().await, Peer::vllm().await);
        let (p_url, d_url) = (p.url(), d.url());
        let flags = format!(
            "--vllm-pd-disaggregation --prefill {p_url} none --decode {d_url} --prefill-data-parallel-size 4 \
             --decode-data-parallel-size 2"
        );
        let router = Router::start(&flags.split_whitespace().collect::<Vec<_>>()).await;
        router.all_ready(2).await;
        for _ in 0..4 {
            assert_eq!(router.post("/v1/completions", &body).await.status, 200);
        }
        assert_eq!(rank_headers(&p), ["0", "1", "2", "3"]);
        assert_eq!(rank_headers(&d), ["0", "0", "1", "1"]);
    })
    .await;
}

#[tokio::test]
async fn cookies_stay_here() {
    timed(async {
        let peer = Peer::vllm().await;
        let router = regular(&[&peer], &[]).await;
        let headers = [("cookie", "session=secret"), ("x-custom", "kept")];
        let body = json!({"model": "m", "prompt": "hi"}).to_string();
        for path in ["/v1/completions", "/v1/chat/completions"] {
            router.send(Method::POST, path, &headers, &body).await;
        }
        let seen = peer.seen();
        assert_eq!(seen.len(), 2);
        for (_, headers, _) in seen {
            assert_eq!(headers["x-custom"], "kept");
            assert!(!headers.contains_key("cookie"));
        }
    })
    .await;
}

#[tokio::test]
async fn sglang_prefill_and_decode() {
    timed(async {
        let rooms = Rooms::new();
        let (p, d) = (
            Peer::sglang("prefill", &rooms).await,
            Peer::sglang("decode", &rooms).await,
        );
        // No port: the worker tells it.
        let (p_url, d_url) = (p.url(), d.url());
        let flags = [
            "--pd-disaggregation",
            "--prefill",
            &p_url,
            "--decode",
            &d_url,
        ];
        let router = Router::start(&flags).await;
        router.all_ready(2).await;
        let plain = Peer::sglang("null", &Rooms::new()).await;
        for (path, body) in requests() {
            let reply = router
                .send(Method::POST, path, &HEADERS, &body.to_string())
                .await;
            let wanted = direct(&plain, path, &body).await;
            assert_eq!(
                (reply.status, reply.text()),
                (200, wanted.text()),
                "{path} {body}"
            );
        }
        let (p, d) = (p.seen(), d.seen());
        assert_eq!(p.len(), requests().len());
        for (p, d) in p.iter().zip(&d) {
            assert_eq!(p.2, d.2, "both get the same body");
            assert_eq!(p.2["bootstrap_port"], 8998);
            for headers in [&p.1, &d.1] {
                assert_eq!(headers["x-custom"], "kept");
            }
        }
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn worker_registered_for_the_wrong_role_is_rejected_by_its_mode() {
    timed(async {
        let peer = Peer::sglang("decode", &Rooms::new()).await;
        let router = Router::start(&["--worker-urls", &peer.url()]).await;
        eventually("it is rejected", || async {
            let list = router.get("/workers").await.json();
            list["workers"][0]["state"] == "rejected"
        })
        .await;
    })
    .await;
}
