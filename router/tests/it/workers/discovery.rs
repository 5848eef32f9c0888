//! Workers found in a file and among pods, the latter through a Kubernetes API server made of a
//! list and an event log.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::clients::tls::{Authority, encrypted};
use crate::support::{
    Act, Client, End, Mock, Router, TOKEN, TempFile, eventually, refused_start, timed,
};

async fn urls(router: &Router) -> Vec<String> {
    let listed = router.get("/workers").await.json();
    let workers = listed["workers"].as_array().unwrap().iter();
    let mut urls: Vec<String> = workers
        .filter(|w| w["state"] == "ready")
        .map(|w| w["url"].as_str().unwrap().to_owned())
        .collect();
    urls.sort();
    urls
}

async fn serve_exactly(router: &Router, mocks: &[&Mock]) {
    let mut wanted: Vec<String> = mocks.iter().map(|mock| mock.url()).collect();
    wanted.sort();
    eventually("exactly these serve", || async {
        urls(router).await == wanted
    })
    .await;
}

async fn stale(router: &Router, source: &str, is: bool) {
    let line = format!("baton_router_discovery_is_stale{{source=\"{source}\"}}");
    eventually("the staleness is shown", || async {
        router.metric(&line).await == f64::from(u8::from(is))
    })
    .await;
}

const ANSWERED: &str = "baton_router_discovery_last_answer_timestamp_seconds";

/// Waits until the source gave data after `since` [Unix seconds]; returns when.
async fn answers_after(router: &Router, source: &str, since: f64) -> f64 {
    let line = format!("{ANSWERED}{{source=\"{source}\"}}");
    eventually("the source answers", || async {
        router.metric(&line).await > since
    })
    .await;
    router.metric(&line).await
}

// ---- file ----

#[tokio::test]
async fn unchanged_file_is_an_answer_each_time_it_is_read() {
    timed(async {
        let file = TempFile::new(&json!([{"url": "http://127.0.0.1:1"}]).to_string());
        let router = Router::start(&["--discovery-file", file.path()]).await;
        let first = answers_after(&router, "file", 0.0).await;
        answers_after(&router, "file", first).await;
    })
    .await;
}

#[tokio::test]
async fn changed_file_changes_the_workers_and_a_broken_one_nothing() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let file = TempFile::new(&json!([{"url": a.url()}]).to_string());
        let router = Router::start(&["--discovery-file", file.path()]).await;
        serve_exactly(&router, &[&a]).await;
        stale(&router, "file", false).await;

        file.write(&format!(
            "workers:\n- url: {}\n- url: {}\n",
            a.url(),
            b.url()
        ));
        serve_exactly(&router, &[&a, &b]).await;

        for broken in ["[{\"url\":", "[]", "- {url: 'http://x:1', role: decode}"] {
            file.write(broken);
            stale(&router, "file", true).await;
            assert_eq!(urls(&router).await.len(), 2, "after {broken}");
            file.write(&json!([{"url": a.url()}, {"url": b.url()}]).to_string());
            stale(&router, "file", false).await;
        }
        std::fs::remove_file(file.path()).unwrap();
        stale(&router, "file", true).await;
        assert_eq!(urls(&router).await.len(), 2);

        // Written beside and renamed over, as editors and config tools do.
        let next = TempFile::new(&json!([{"url": b.url()}]).to_string());
        std::fs::rename(next.path(), file.path()).unwrap();
        serve_exactly(&router, &[&b]).await;
        assert_eq!(router.chat().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn fleet_is_replaced_only_by_one_that_answers() {
    timed(async {
        let (old, new) = (Mock::start(&[]).await, Mock::start(&[]).await);
        new.set_unhealthy(true);
        let file = TempFile::new(&json!([{"url": old.url()}]).to_string());
        let router = Router::start(&["--discovery-file", file.path()]).await;
        serve_exactly(&router, &[&old]).await;
        file.write(&json!([{"url": new.url()}]).to_string());
        eventually("the old one is kept", || async {
            let kept = "baton_router_discovered_workers{source=\"file\",state=\"kept\"}";
            router.metric(kept).await == 1.0
        })
        .await;
        assert_eq!(router.chat().await.status, 200);
        new.set_unhealthy(false);
        serve_exactly(&router, &[&new]).await;
    })
    .await;
}

#[tokio::test]
async fn file_wrong_from_the_start_ends_the_start() {
    timed(async {
        let file = TempFile::new("- {url: a:1, prot: 3}");
        let text = refused_start(&["--discovery-file", file.path()]).await;
        assert!(
            text.contains("--discovery-file") && text.contains("worker 1: unknown field `prot`"),
            "{text}"
        );
        let text = refused_start(&["--discovery-file", "/nowhere/at/all"]).await;
        assert!(
            text.contains("--discovery-file /nowhere/at/all: cannot be read"),
            "{text}"
        );
    })
    .await;
}

// ---- pods ----

#[derive(Default)]
struct Cluster {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// Events a watch sends, by version.
    log: Vec<(u64, Value)>,
    /// Watches that begin before this version get 410.
    oldest: u64,
    is_forbidden: bool,
    /// The bearer token wanted.
    token: Option<String>,
    /// Queries of lists and watches, in order.
    asked: Vec<BTreeMap<String, String>>,
}

#[derive(Clone)]
struct Api {
    addr: SocketAddr,
    cluster: Arc<Mutex<Cluster>>,
    /// (changes so far, connections cut so far), sent at each.
    feed: watch::Sender<(u64, u64)>,
}

fn pod(ip: &str, app: &str, is_ready: bool) -> Value {
    let status = if is_ready { "True" } else { "False" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "serving", "labels": {"app": app}, "annotations": {"sglang.ai/bootstrap-port": "8998"}},
        "spec": {"containers": []},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": status}]},
    })
}

impl Api {
    async fn start() -> Api {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = Api {
            addr: listener.local_addr().unwrap(),
            cluster: Arc::default(),
            feed: watch::channel((0, 0)).0,
        };
        let routes = axum::Router::new()
            .route(
                "/api/v1/namespaces/{namespace}/pods",
                axum::routing::get(pods),
            )
            .with_state(api.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        api
    }

    fn kubeconfig(&self) -> TempFile {
        let cluster = json!({"server": format!("http://{}", self.addr)});
        self.kubeconfig_of(cluster, json!({}))
    }

    fn kubeconfig_of(&self, cluster: Value, user: Value) -> TempFile {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}],
        });
        TempFile::new(&config.to_string())
    }

    fn change(&self, change: impl FnOnce(&mut Cluster)) {
        change(&mut self.cluster.lock());
        self.feed.send_modify(|(changes, _)| *changes += 1);
    }

    fn put(&self, name: &str, mut pod: Value) {
        self.change(|cluster| {
            cluster.version += 1;
            pod["metadata"]["name"] = name.into();
            pod["metadata"]["uid"] = format!("uid-{name}").into();
            pod["metadata"]["resourceVersion"] = cluster.version.to_string().into();
            let is_new = cluster.pods.insert(name.into(), pod.clone()).is_none();
            let kind = if is_new { "ADDED" } else { "MODIFIED" };
            cluster
                .log
                .push((cluster.version, json!({"type": kind, "object": pod})));
        });
    }

    fn delete(&self, name: &str) {
        self.change(|cluster| {
            cluster.version += 1;
            let mut pod = cluster.pods.remove(name).unwrap();
            pod["metadata"]["resourceVersion"] = cluster.version.to_string().into();
            cluster
                .log
                .push((cluster.version, json!({"type": "DELETED", "object": pod})));
        });
    }

    /// Much happened elsewhere: only a bookmark tells.
    fn bookmark(&self, version: u64) {
        self.change(|cluster| {
            cluster.version = version;
            let version = version.to_string();
            let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": version, "name": ""}});
            cluster.log.push((cluster.version, json!({"type": "BOOKMARK", "object": object})));
        });
    }

    /// All pods vanish, and no event tells.
    fn lose_all(&self) {
        self.change(|cluster| {
            cluster.pods.clear();
            cluster.version += 1;
            cluster.oldest = cluster.version;
        });
    }

    fn cut(&self) {
        self.feed.send_modify(|(_, cuts)| *cuts += 1);
    }

    fn asked(&self) -> Vec<BTreeMap<String, String>> {
        self.cluster.lock().asked.clone()
    }

    fn lists(&self) -> usize {
        let is_list = |query: &&BTreeMap<String, String>| !query.contains_key("watch");
        self.asked().iter().filter(is_list).count()
    }

    async fn router(&self, kubeconfig: &TempFile, port: u16, flags: &[&str]) -> Router {
        let port = port.to_string();
        let mut all = vec!["--service-discovery", "--kubeconfig", kubeconfig.path()];
        all.extend(["--service-discovery-port", &port]);
        all.extend(flags);
        Router::start(&all).await
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason, "message": reason})
}

fn matches(pod: &Value, selector: &str) -> bool {
    let labels = &pod["metadata"]["labels"];
    let mut wanted = selector
        .split(',')
        .filter_map(|label| label.split_once('='));
    wanted.all(|(key, value)| labels[key] == value)
}

async fn pods(
    State(api): State<Api>,
    Path(namespace): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    assert_eq!(namespace, "serving");
    let mut cluster = api.cluster.lock();
    cluster.asked.push(query.clone());
    if cluster.is_forbidden {
        let body = status(403, "Forbidden").to_string();
        return (StatusCode::FORBIDDEN, body).into_response();
    }
    if let Some(token) = &cluster.token {
        assert_eq!(headers["authorization"], format!("Bearer {token}"));
    }
    let selector = query.get("labelSelector").cloned().unwrap_or_default();
    if !query.contains_key("watch") {
        let pods = cluster.pods.values().filter(|pod| matches(pod, &selector));
        let body = json!({
            "kind": "PodList", "apiVersion": "v1",
            "metadata": {"resourceVersion": cluster.version.to_string()},
            "items": pods.collect::<Vec<_>>(),
        });
        return body.to_string().into_response();
    }
    let since: u64 = query["resourceVersion"].parse().unwrap();
    if since < cluster.oldest {
        let gone = json!({"type": "ERROR", "object": status(410, "Expired")});
        return format!("{gone}\n").into_response();
    }
    drop(cluster);
    let feed = api.feed.subscribe();
    let cuts = feed.borrow().1;
    let events = futures_util::stream::unfold((api, feed, since), move |(api, mut feed, since)| {
        let selector = selector.clone();
        async move {
            loop {
                let seen = *feed.borrow_and_update();
                if seen.1 != cuts {
                    return None;
                }
                let next = api
                    .cluster
                    .lock()
                    .log
                    .iter()
                    .find(|(v, _)| *v > since)
                    .cloned();
                match next {
                    Some((version, event))
                        if event["type"] == "BOOKMARK" || matches(&event["object"], &selector) =>
                    {
                        let line = Ok::<_, std::io::Error>(format!("{event}\n"));
                        return Some((line, (api, feed, version)));
                    }
                    // An event of other pods: an empty piece, to go on behind it.
                    Some((version, _)) => return Some((Ok(String::new()), (api, feed, version))),
                    None => feed.changed().await.ok()?,
                }
            }
        }
    });
    Body::from_stream(events).into_response()
}

/// Mocks on one port of several loopback addresses, as pods are.
async fn on_one_port(acts: [&[Act]; 3]) -> (Vec<Mock>, u16) {
    let first = Mock::at("127.0.0.1:0".parse().unwrap(), acts[0]).await;
    let port = first.addr.port();
    let mut mocks = vec![first];
    for (at, acts) in acts.iter().enumerate().skip(1) {
        let addr = format!("127.0.0.{}:{port}", at + 1).parse().unwrap();
        mocks.push(Mock::at(addr, acts).await);
    }
    (mocks, port)
}

#[tokio::test]
async fn pods_behind_tls_show_the_name_of_their_service() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let fleet = Authority::new();
        let url = encrypted(mock.addr, &fleet.issue("engine.serving.svc"), None).await;
        let port = url.rsplit_once(':').unwrap().1.parse().unwrap();
        let api = Api::start().await;
        api.put("x-0", pod("127.0.0.1", "x", true));
        let kubeconfig = api.kubeconfig();
        let ca = ["--ca-cert-paths", fleet.cert.path()];
        let flags = ["--selector", "app=x", "--service-discovery-scheme", "https"];
        let flags = [&flags[..], &ca[..]].concat();
        let named = [&flags[..], &["--worker-tls-name", "engine.serving.svc"]].concat();
        let router = api.router(&kubeconfig, port, &named).await;
        eventually("the pod serves", || async {
            urls(&router).await == [url.as_str()]
        })
        .await;
        assert_eq!(router.chat().await.status, 200);
        let unnamed = api.router(&kubeconfig, port, &flags).await;
        eventually("a probe of the address fails", || async {
            let probes = "baton_router_health_probes_total{result=\"bad\"";
            unnamed.metric(probes).await > 0.0
        })
        .await;
        assert_eq!(mock.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn ready_pods_serve_and_deleted_ones_drain() {
    timed(async {
        let gated: &[Act] = &[Act::Stream(vec![TOKEN], End::Gate), Act::Answer];
        let (mocks, port) = on_one_port([&[Act::Json(json!({"meta_info": {}}))], gated, &[]]).await;
        let api = Api::start().await;
        api.put("p-0", pod("127.0.0.1", "prefill", true));
        api.put("d-0", pod("127.0.0.2", "decode", true));
        api.put("d-1", pod("127.0.0.3", "decode", false));
        api.put("other", pod("127.0.0.4", "database", true));
        let kubeconfig = api.kubeconfig();
        let flags =
            "--pd-disaggregation --prefill-selector app=prefill --decode-selector app=decode";
        let flags: Vec<&str> = flags.split(' ').collect();
        let router = api.router(&kubeconfig, port, &flags).await;
        serve_exactly(&router, &[&mocks[0], &mocks[1]]).await;
        let listed = router.get("/workers").await.json();
        let workers = listed["workers"].as_array().unwrap();
        let prefill = workers
            .iter()
            .find(|w| w["worker_type"] == "prefill")
            .unwrap();
        assert_eq!(prefill["bootstrap_port"], 8998);

        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.is_some());
        assert_eq!(mocks[0].seen()[0].body["bootstrap_port"], 8998);
        api.put("d-1", pod("127.0.0.3", "decode", true));
        serve_exactly(&router, &[&mocks[0], &mocks[1], &mocks[2]]).await;
        api.delete("d-0");
        serve_exactly(&router, &[&mocks[0], &mocks[2]]).await;
        assert_eq!(
            router
                .metric("baton_router_workers{role=\"decode\",state=\"draining\"}")
                .await,
            1.0
        );
        mocks[1].release();
        assert!(answering.read().await.text().ends_with("data: [DONE]\n\n"));
        eventually("the deleted one is gone", || async {
            router.get("/workers").await.json()["total"] == 2
        })
        .await;

        // No replacement is needed to believe in a deletion.
        api.delete("d-1");
        serve_exactly(&router, &[&mocks[0]]).await;
        let asked = api.asked();
        assert!(
            asked.iter().all(|q| q["labelSelector"].starts_with("app=")),
            "{asked:?}"
        );
        let watches = asked.iter().filter(|q| q.contains_key("watch"));
        assert!(
            watches.clone().all(|q| q["allowWatchBookmarks"] == "true") && watches.count() >= 2
        );
    })
    .await;
}

#[tokio::test]
async fn cut_watch_goes_on_at_the_last_bookmark() {
    timed(async {
        let (mocks, port) = on_one_port([&[], &[], &[]]).await;
        let api = Api::start().await;
        api.put("a", pod("127.0.0.1", "x", true));
        let kubeconfig = api.kubeconfig();
        let router = api
            .router(&kubeconfig, port, &["--selector", "app=x"])
            .await;
        serve_exactly(&router, &[&mocks[0]]).await;
        let answered = answers_after(&router, "regular_pods", 0.0).await;
        // Behind the bookmark, so that the watch is known to have passed it.
        api.bookmark(700);
        api.put("b", pod("127.0.0.2", "x", false));
        api.bookmark(800);
        api.put("b", pod("127.0.0.2", "x", true));
        serve_exactly(&router, &[&mocks[0], &mocks[1]]).await;
        answers_after(&router, "regular_pods", answered).await;
        api.cut();
        eventually("it watches again from where it was", || async {
            let asked = api.asked();
            asked
                .last()
                .is_some_and(|q| q.get("resourceVersion").is_some_and(|v| v == "801"))
        })
        .await;
        api.put("c", pod("127.0.0.3", "x", true));
        serve_exactly(&router, &[&mocks[0], &mocks[1], &mocks[2]]).await;
        assert_eq!(api.lists(), 1);
    })
    .await;
}

#[tokio::test]
async fn version_that_is_gone_means_a_new_list_and_an_empty_one_empties_nothing() {
    timed(async {
        let (mocks, port) = on_one_port([&[], &[], &[]]).await;
        let api = Api::start().await;
        api.put("a", pod("127.0.0.1", "x", true));
        let kubeconfig = api.kubeconfig();
        let router = api
            .router(&kubeconfig, port, &["--selector", "app=x"])
            .await;
        serve_exactly(&router, &[&mocks[0]]).await;
        api.lose_all();
        api.cut();
        eventually("it lists again", || async { api.lists() == 2 }).await;
        eventually("the last worker is kept", || async {
            let kept = "baton_router_discovered_workers{source=\"regular_pods\",state=\"kept\"}";
            router.metric(kept).await == 1.0
        })
        .await;
        assert_eq!(router.chat().await.status, 200);
        api.put("b", pod("127.0.0.2", "x", true));
        serve_exactly(&router, &[&mocks[1]]).await;
    })
    .await;
}

#[tokio::test]
async fn refusal_by_the_api_server_is_reported_and_the_workers_stay() {
    timed(async {
        let (mocks, port) = on_one_port([&[], &[], &[]]).await;
        let api = Api::start().await;
        api.put("a", pod("127.0.0.1", "x", true));
        api.change(|cluster| cluster.is_forbidden = true);
        let kubeconfig = api.kubeconfig();
        let router = api
            .router(&kubeconfig, port, &["--selector", "app=x"])
            .await;
        stale(&router, "regular_pods", true).await;
        assert!(urls(&router).await.is_empty());
        api.change(|cluster| cluster.is_forbidden = false);
        serve_exactly(&router, &[&mocks[0]]).await;
        stale(&router, "regular_pods", false).await;

        api.change(|cluster| cluster.is_forbidden = true);
        api.cut();
        stale(&router, "regular_pods", true).await;
        assert_eq!(router.chat().await.status, 200);
        let failed =
            "baton_router_discovery_updates_total{result=\"failed\",source=\"regular_pods\"}";
        assert!(router.metric(failed).await >= 2.0);
    })
    .await;
}

#[tokio::test]
async fn real_api_server_speaks_tls_and_wants_a_token() {
    timed(async {
        let (mocks, port) = on_one_port([&[], &[], &[]]).await;
        let api = Api::start().await;
        api.put("a", pod("127.0.0.1", "x", true));
        api.change(|cluster| cluster.token = Some("t0ken".to_owned()));
        let authority = Authority::new();
        let server = encrypted(api.addr, &authority.issue("127.0.0.1"), None).await;
        let kubeconfig = api.kubeconfig_of(
            json!({"server": server, "certificate-authority": authority.cert.path()}),
            json!({"token": "t0ken"}),
        );
        let router = api
            .router(&kubeconfig, port, &["--selector", "app=x"])
            .await;
        serve_exactly(&router, &[&mocks[0]]).await;
    })
    .await;
}

#[tokio::test]
async fn cluster_that_cannot_be_found_ends_the_start() {
    timed(async {
        let flags = [
            "--service-discovery",
            "--selector",
            "a=b",
            "--kubeconfig",
            "/nowhere/at/all",
        ];
        let text = refused_start(&flags).await;
        assert!(
            text.contains("--kubeconfig /nowhere/at/all")
                && text.contains("give a kubeconfig file"),
            "{text}"
        );
    })
    .await;
}
