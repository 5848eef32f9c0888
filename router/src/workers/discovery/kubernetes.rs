//! Kubernetes pods of one label selector: a worker is a pod that is Ready and has an IP.
//!
//! kube's watcher lists once, then watches with bookmarks; it resumes a cut watch at the version it
//! had, lists again when that version is gone (410), and waits between failures (0.8 s doubling to
//! 30 s). An API server that accepts connections and sends nothing, not even the end of a watch, is
//! reported after [`MAX_SILENCE`]. A pod that is deleted, or has been asked to terminate, is
//! drained at once; one that stops being Ready or is missing from a new list is drained as soon as
//! another worker of its role is ready ([`DiscoveryFeed`]).
//!
//! It needs the verbs list and watch on pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use http::Response;
use http_body_util::BodyExt;
use kube::client::{ClientBuilder, DynBody};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind, NotUsed, Object};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, ResourceExt};
use router_core::Role;
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval};
use tower::util::MapResponseLayer;

use super::{AnswerTime, DiscoveredWorkers, DiscoveryFeed, RECHECK};
use crate::config::{WorkerSpec, WorkerUrl};

/// Where a prefill pod says its bootstrap port; the first found counts. The second is the name of
/// SGLang's router.
const BOOTSTRAP_PORT: [&str; 2] = ["baton.dev/bootstrap-port", "sglang.ai/bootstrap-port"];
/// Where a pod says its topology domain.
const TOPOLOGY: &str = "baton.dev/topology";
const ZONE: &str = "topology.kubernetes.io/zone";
/// A server of the same cluster that does not accept for this long is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// After this the API server ends a watch, and the next one begins: something comes at least so
/// often.
const WATCH_SECS: u32 = 55;
/// Longest time without a byte of the API server: a watch, and time to begin the next.
const MAX_SILENCE: Duration = Duration::from_secs(WATCH_SECS as u64 + 20);

/// Which pods, as what.
pub struct PodSelectors {
    pub role: Role,
    pub selector: String,
    pub port: u16,
    pub is_tls: bool,
    /// '*': all; none: that of the configuration, in a pod its own.
    pub namespace: Option<String>,
}

/// The parts of a pod that tell whether and where it serves. Other fields are not read: code for
/// all of `k8s_openapi`'s `Pod` takes seconds to compile, and a list of pods is mostly their
/// specifications.
type Pod = Object<NotUsed, PodStatus>;

#[derive(Debug, Clone, Default, Deserialize)]
struct PodStatus {
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Option<Vec<PodCondition>>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodCondition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
}

/// Find the API server. Nothing is sent yet. Each part of each answer that is no refusal sets
/// `answers`: the watcher keeps bookmarks, and the beginning and end of watches, to itself.
pub(super) async fn client(
    kubeconfig: Option<&str>,
    answers: AnswerTime,
) -> Result<Client, String> {
    let mut config = match kubeconfig {
        Some(path) => {
            let refused = |err: kube::config::KubeconfigError| {
                format!("--kubeconfig {path}: {err}; give a kubeconfig file")
            };
            let file = Kubeconfig::read_from(path).map_err(refused)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options)
                .await
                .map_err(refused)?
        }
        None => Config::infer().await.map_err(|err| {
            format!(
                "--service-discovery: no way to reach Kubernetes: {err}; run in a pod with a \
                 service account, or give --kubeconfig"
            )
        })?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(MAX_SILENCE);
    let builder = ClientBuilder::try_from(config);
    let builder = builder.map_err(|err| format!("--service-discovery: {err}"))?;
    let seen = MapResponseLayer::new(move |answer: Response<_>| {
        let answers = answer.status().is_success().then(|| answers.clone());
        let note = move || answers.iter().for_each(AnswerTime::set_to_now);
        note();
        answer.map(|body: Box<DynBody>| {
            body.map_frame(move |frame| {
                note();
                frame
            })
        })
    });
    Ok(builder.with_layer(&seen).build())
}

/// State of a pod as the router sees it.
#[derive(Debug, Clone, PartialEq)]
enum Seen {
    Serving(WorkerSpec),
    /// Asked to terminate.
    Ending(WorkerUrl),
    /// Not Ready, no address yet, or not usable.
    Nothing,
}

pub(super) async fn follow(mut feed: DiscoveryFeed, client: Client, wanted: PodSelectors) {
    let pods = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
    let default = client.default_namespace().to_owned();
    let (api, place): (Api<Pod>, String) = match wanted.namespace.as_deref().unwrap_or(&default) {
        "*" => (Api::all_with(client, &pods), "all namespaces".to_owned()),
        name => (
            Api::namespaced_with(client, name, &pods),
            format!("namespace {name}"),
        ),
    };
    tracing::info!(role = %wanted.role, selector = wanted.selector, place, "watching pods");
    let config = watcher::Config::default()
        .labels(&wanted.selector)
        .timeout(WATCH_SECS);
    let mut events = pin!(watcher(api, config).default_backoff());
    let mut pods = Pods::new(&wanted);
    let mut ticks = interval(RECHECK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = ticks.tick() => {
                if !feed.recheck() {
                    return;
                }
                let last_answer = *feed.answers.last.lock();
                feed.check_silence(last_answer, Instant::now(), MAX_SILENCE);
                continue;
            }
        };
        match event {
            Some(Ok(event)) => {
                let Some(found) = pods.take(event) else {
                    continue;
                };
                if found.named == 0 {
                    tracing::error!(
                        role = %wanted.role,
                        selector = wanted.selector,
                        place,
                        "no pod has these labels; compare them with kubectl get pods --show-labels"
                    );
                }
                feed.apply(found);
            }
            Some(Err(err)) => feed.failed(explained(&err, &place)),
            None => return feed.failed("the watch ended for good; restart the router".to_owned()),
        }
    }
}

/// All pods of the selector as they were last reported.
struct Pods<'a> {
    wanted: &'a PodSelectors,
    /// By uid: a pod recreated under an old name is another pod.
    known: HashMap<String, Seen>,
    /// A new list that is still coming in.
    relisted: HashMap<String, Seen>,
}

impl<'a> Pods<'a> {
    fn new(wanted: &'a PodSelectors) -> Self {
        Self {
            wanted,
            known: HashMap::new(),
            relisted: HashMap::new(),
        }
    }

    /// `Some` when the set of workers may have changed.
    fn take(&mut self, event: Event<Pod>) -> Option<DiscoveredWorkers> {
        let mut deleted = BTreeSet::new();
        match event {
            Event::Init => {
                self.relisted.clear();
                return None;
            }
            Event::InitApply(pod) => {
                self.relisted.insert(uid(&pod), seen(&pod, self.wanted));
                return None;
            }
            Event::InitDone => self.known = std::mem::take(&mut self.relisted),
            Event::Apply(pod) => {
                let now = seen(&pod, self.wanted);
                if self.known.insert(uid(&pod), now.clone()).as_ref() == Some(&now) {
                    return None;
                }
            }
            Event::Delete(pod) => {
                self.known.remove(&uid(&pod));
                deleted.extend(address(&pod, self.wanted));
            }
        }
        let mut workers: Vec<WorkerSpec> = Vec::new();
        for seen in self.known.values() {
            match seen {
                Seen::Serving(spec) => workers.push(spec.clone()),
                Seen::Ending(url) => {
                    deleted.insert(url.clone());
                }
                Seen::Nothing => {}
            }
        }
        Some(DiscoveredWorkers {
            workers,
            named: self.known.len(),
            deleted,
        })
    }
}

fn uid(pod: &Pod) -> String {
    let name = || format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    pod.uid().unwrap_or_else(name)
}

fn address(pod: &Pod, wanted: &PodSelectors) -> Option<WorkerUrl> {
    let ip = pod.status.as_ref()?.pod_ip.clone()?;
    (!ip.is_empty()).then_some(WorkerUrl {
        host: ip,
        port: wanted.port,
        is_tls: wanted.is_tls,
    })
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

fn seen(pod: &Pod, wanted: &PodSelectors) -> Seen {
    let Some(url) = address(pod, wanted) else {
        return Seen::Nothing;
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return Seen::Ending(url);
    }
    if !is_ready(pod) {
        return Seen::Nothing;
    }
    let port = if wanted.role == Role::Prefill {
        bootstrap_port(pod)
    } else {
        None
    };
    match WorkerSpec::new(&url.to_string(), wanted.role, port) {
        Ok(spec) => Seen::Serving(spec.in_topology(topology(pod))),
        Err(why) => {
            tracing::error!(
                pod = pod.name_any(),
                why,
                "pod is not used, correct its annotation"
            );
            Seen::Nothing
        }
    }
}

/// The annotation or label of ours, or the zone that Kubernetes 1.35 and later copy from the node.
fn topology(pod: &Pod) -> Option<String> {
    let notes = &pod.metadata.annotations;
    let labels = &pod.metadata.labels;
    let named = |from: &Option<BTreeMap<String, String>>, key| from.as_ref()?.get(key).cloned();
    named(notes, TOPOLOGY)
        .or_else(|| named(labels, TOPOLOGY))
        .or_else(|| named(labels, ZONE))
}

fn bootstrap_port(pod: &Pod) -> Option<&str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    BOOTSTRAP_PORT
        .iter()
        .find_map(|name| annotations.get(*name))
        .map(|port| port.trim())
}

fn explained(err: &watcher::Error, place: &str) -> String {
    let status = match err {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status,
        _ => return format!("{err}; is the API server up?"),
    };
    let message = &status.message;
    match status.code {
        401 | 403 => format!(
            "Kubernetes refuses ({}) to show the pods of {place}: {message}; give the router's \
             service account the verbs list and watch on pods there",
            status.code
        ),
        code => format!("Kubernetes answered {code} about the pods of {place}: {message}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn wanted(role: Role) -> PodSelectors {
        PodSelectors {
            role,
            selector: String::new(),
            port: 30000,
            is_tls: false,
            namespace: None,
        }
    }

    fn pod(changes: serde_json::Value) -> Pod {
        let mut value = json!({
            "metadata": {"name": "x", "uid": "u", "annotations": {}},
            "spec": {},
            "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
        });
        for (path, change) in changes.as_object().unwrap() {
            *value.pointer_mut(path).unwrap() = change.clone();
        }
        serde_json::from_value(value).unwrap()
    }

    fn spec(pod: &Pod, role: Role) -> WorkerSpec {
        match seen(pod, &wanted(role)) {
            Seen::Serving(spec) => spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_ready_pods_with_an_address_serve() {
        let role = Role::Decode;
        assert_eq!(
            spec(&pod(json!({})), role).url.to_string(),
            "http://10.0.0.1:30000"
        );
        let v6 = pod(json!({"/status/podIP": "fd00::1"}));
        assert_eq!(spec(&v6, role).url.to_string(), "http://[fd00::1]:30000");
        for changes in [
            json!({"/status/podIP": null}),
            json!({"/status": {}}),
            json!({"/status/conditions/0/status": "False"}),
            json!({"/status/conditions/0/type": "Initialized"}),
        ] {
            assert_eq!(seen(&pod(changes), &wanted(role)), Seen::Nothing);
        }
        let mut ending = pod(json!({}));
        let stamp = json!("2026-01-01T00:00:00Z");
        ending.metadata.deletion_timestamp = Some(serde_json::from_value(stamp).unwrap());
        let url = WorkerUrl::parse("http://10.0.0.1:30000").unwrap();
        assert_eq!(seen(&ending, &wanted(role)), Seen::Ending(url));
    }

    #[test]
    fn bootstrap_ports_come_from_either_annotation_of_prefill_pods() {
        use crate::config::BootstrapPort;
        let with = |annotations| pod(json!({"/metadata/annotations": annotations}));
        for (annotations, port) in [
            (json!({}), BootstrapPort::FromWorker),
            (
                json!({"sglang.ai/bootstrap-port": "8998"}),
                BootstrapPort::Port(8998),
            ),
            (
                json!({"baton.dev/bootstrap-port": "none"}),
                BootstrapPort::Null,
            ),
            (
                json!({"sglang.ai/bootstrap-port": "1", "baton.dev/bootstrap-port": "2"}),
                BootstrapPort::Port(2),
            ),
        ] {
            assert_eq!(
                spec(&with(annotations.clone()), Role::Prefill).bootstrap,
                port
            );
            assert_eq!(
                spec(&with(annotations), Role::Decode).bootstrap,
                BootstrapPort::FromWorker
            );
        }
        let bad = with(json!({"baton.dev/bootstrap-port": "x"}));
        assert_eq!(seen(&bad, &wanted(Role::Prefill)), Seen::Nothing);
    }

    #[test]
    fn topology_is_the_annotation_or_label_or_the_zone() {
        let ours = "baton.dev/topology";
        let zone = "topology.kubernetes.io/zone";
        for (annotations, labels, domain) in [
            (json!({ours: "a"}), json!({ours: "b", zone: "c"}), Some("a")),
            (json!({}), json!({ours: "b", zone: "c"}), Some("b")),
            (json!({}), json!({zone: "c"}), Some("c")),
            (json!({ours: ""}), json!({}), None),
            (json!({}), json!({}), None),
        ] {
            let mut given = pod(json!({"/metadata/annotations": annotations}));
            given.metadata.labels = serde_json::from_value(labels).unwrap();
            assert_eq!(spec(&given, Role::Decode).topology.as_deref(), domain);
        }
    }

    #[test]
    fn refusal_names_the_remedy() {
        let status = |code: u16| {
            let status = json!({"code": code, "message": "because"});
            let status: Box<kube::core::Status> = serde_json::from_value(status).unwrap();
            explained(
                &watcher::Error::InitialListFailed(kube::Error::Api(status)),
                "namespace x",
            )
        };
        let text = status(403);
        for part in [
            "(403)",
            "namespace x",
            "because",
            "verbs list and watch on pods",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(status(500).contains("answered 500"));
    }

    #[test]
    fn events_become_sets_of_workers() {
        let wanted = wanted(Role::Regular);
        let mut pods = Pods::new(&wanted);
        let a = pod(json!({"/metadata/uid": "a"}));
        let b = pod(json!({"/metadata/uid": "b", "/status/podIP": "10.0.0.2"}));
        assert!(pods.take(Event::Init).is_none());
        assert!(pods.take(Event::InitApply(a.clone())).is_none());
        assert_eq!(pods.take(Event::InitDone).unwrap().workers.len(), 1);
        let unready = pod(json!({"/metadata/uid": "c", "/status": {}}));
        let found = pods.take(Event::Apply(unready.clone())).unwrap();
        assert_eq!((found.workers.len(), found.named), (1, 2));
        let found = pods.take(Event::Delete(unready)).unwrap();
        assert_eq!((found.workers.len(), found.named), (1, 1));
        assert_eq!(pods.take(Event::Apply(b.clone())).unwrap().workers.len(), 2);
        assert!(pods.take(Event::Apply(b.clone())).is_none(), "nothing new");
        let found = pods.take(Event::Delete(a)).unwrap();
        assert_eq!((found.workers.len(), found.deleted.len()), (1, 1));
        // A new list without b does not say that b was deleted.
        assert!(pods.take(Event::Init).is_none());
        let found = pods.take(Event::InitDone).unwrap();
        assert_eq!((found.workers.len(), found.deleted.len()), (0, 0));
    }
}
