//! Workers that come and go by themselves: their sources, and the way of changes to the fleet.
//!
//! A source ([`file`], [`pods`]) owns a [`DiscoveryFeed`] and gives it the list of all its workers
//! at each change. The feed registers new workers, drains those no longer listed, and replaces
//! those with another role or bootstrap port.
//!
//! Invariants:
//!
//! * a feed touches only workers which it registered itself: those of flags and of POST /workers
//!   are not its business, and one which an operator removed stays out until the source stops
//!   naming it and names it again;
//! * a source that cannot be read changes nothing: the last good answer stays,
//!   `baton_router_discovery_is_stale` says so;
//! * a worker that reports that it drains stays until it ends, is deleted or fails: it may return,
//!   and gets nothing meanwhile;
//! * a ready worker that is merely no longer named is probed, and drained only while another one of
//!   its role is ready: no list, however wrong, empties the pool. Being deleted, which a source
//!   says of a worker by name, needs no replacement.

/// Workers listed in a file.
mod file;
/// Workers that are pods.
mod kubernetes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::GaugeVec;
use router_core::Role;

use crate::clock::unix_time;
use crate::config::{WorkerSpec, WorkerUrl};
use crate::workers::fleet::WorkerFleet;
use crate::workers::health::register;
use crate::workers::worker::{Worker, WorkerState};

/// How often it is looked whether workers that were kept for want of others can go, and whether the
/// router is still there.
const RECHECK: Duration = Duration::from_secs(1);

/// Start all sources the flags name. The first reading of the file happens here, so that its
/// mistakes end the start.
pub async fn start(fleet: &Arc<WorkerFleet>) -> Result<(), String> {
    let flags = &fleet.config.discovery;
    if let Some(path) = &flags.discovery_file {
        file::start(
            DiscoveryFeed::new(fleet, "file"),
            path.into(),
            fleet.serving_roles(),
        )?;
    }
    for (role, selector) in flags.selectors(fleet.is_pd()) {
        let source = match role {
            Role::Regular => "regular_pods",
            Role::Prefill => "prefill_pods",
            Role::Decode => "decode_pods",
        };
        let wanted = kubernetes::PodSelectors {
            role,
            selector,
            port: flags.service_discovery_port,
            is_tls: flags.is_tls(),
            namespace: flags.service_discovery_namespace.clone(),
        };
        let feed = DiscoveryFeed::new(fleet, source);
        // A client per source, so that the answers to each are seen apart.
        let client = kubernetes::client(flags.kubeconfig.as_deref(), feed.answers.clone()).await?;
        tokio::spawn(kubernetes::follow(feed, client, wanted));
    }
    Ok(())
}

/// Time at which a source gave data last, also shown as a gauge. A source without changes is alive
/// as long as this advances.
#[derive(Clone)]
struct AnswerTime {
    gauges: GaugeVec,
    source: &'static str,
    /// Time of the last answer, or of the start before the first.
    last: Arc<Mutex<Instant>>,
}

impl AnswerTime {
    fn new(fleet: &WorkerFleet, source: &'static str) -> Self {
        let gauges = fleet.metrics.discovery_answered.clone();
        Self {
            gauges,
            source,
            last: Arc::new(Mutex::new(Instant::now())),
        }
    }

    fn set_to_now(&self) {
        self.gauges
            .with_label_values(&[self.source])
            .set(unix_time().as_secs_f64());
        *self.last.lock() = Instant::now();
    }
}

/// Workers that a source sees.
#[derive(Debug, Default)]
pub struct DiscoveredWorkers {
    pub workers: Vec<WorkerSpec>,
    /// Workers that the source names, in any state. None at all may be a wrong selector.
    pub named: usize,
    /// Not only absent: the source saw them end.
    pub deleted: BTreeSet<WorkerUrl>,
}

/// A list that names nothing but workers.
impl From<Vec<WorkerSpec>> for DiscoveredWorkers {
    fn from(workers: Vec<WorkerSpec>) -> Self {
        Self {
            named: workers.len(),
            workers,
            deleted: BTreeSet::new(),
        }
    }
}

/// The fleet's side of one source.
pub struct DiscoveryFeed {
    fleet: Weak<WorkerFleet>,
    /// Metric label.
    source: &'static str,
    answers: AnswerTime,
    own: BTreeMap<WorkerUrl, Arc<Worker>>,
    /// No longer named, kept because no other worker of the role is ready.
    kept: BTreeSet<WorkerUrl>,
    /// Those of `kept` that were named in the answer before: they are being probed.
    fresh: BTreeSet<WorkerUrl>,
    /// The failure in force, to log each only once, and when it was seen last.
    failure: Option<(String, Instant)>,
}

impl DiscoveryFeed {
    fn new(fleet: &Arc<WorkerFleet>, source: &'static str) -> Self {
        fleet.metrics.discovery_stale.with_label_values(&[source]);
        Self {
            fleet: Arc::downgrade(fleet),
            source,
            answers: AnswerTime::new(fleet, source),
            own: BTreeMap::new(),
            kept: BTreeSet::new(),
            fresh: BTreeSet::new(),
            failure: None,
        }
    }

    /// The source was read: bring the fleet in line.
    fn apply(&mut self, found: DiscoveredWorkers) {
        let Some(fleet) = self.fleet.upgrade() else {
            return;
        };
        if found.named > 0 {
            fleet.discovered.lock().insert(self.source);
        }
        fleet
            .metrics
            .discovery_updates
            .with_label_values(&[self.source, "applied"])
            .inc();
        self.clear_failure(&fleet);
        let named: BTreeMap<WorkerUrl, WorkerSpec> = found
            .workers
            .into_iter()
            .map(|spec| (spec.url.clone(), spec))
            .collect();
        for (url, spec) in &named {
            if self.own.get(url).is_some_and(|worker| worker.spec == *spec) {
                continue;
            }
            self.drop_own(&fleet, url);
            match register(&fleet, spec.clone()) {
                Ok(worker) => {
                    self.own.insert(url.clone(), worker);
                }
                Err(err) => {
                    tracing::warn!(source = self.source, %err, "cannot register a worker that was found");
                }
            }
        }
        let gone = self.own.keys().filter(|url| !named.contains_key(*url));
        let before = std::mem::replace(&mut self.kept, gone.cloned().collect());
        self.fresh = self.kept.difference(&before).cloned().collect();
        for worker in self.fresh.iter().filter_map(|url| self.own.get(url)) {
            worker.suspect.notify_one(); // a pod that drains is no longer Ready: find out
        }
        for url in found.deleted.intersection(&self.kept.clone()) {
            self.drop_own(&fleet, url);
        }
        self.drop_unneeded(&fleet);
        self.show(&fleet);
    }

    /// The source could not be read: what was found before stays.
    fn failed(&mut self, why: String) {
        if let Some(fleet) = self.fleet.upgrade() {
            fleet
                .metrics
                .discovery_updates
                .with_label_values(&[self.source, "failed"])
                .inc();
            fleet
                .metrics
                .discovery_stale
                .with_label_values(&[self.source])
                .set(1.0);
            if self.failure.as_ref().is_none_or(|(known, _)| *known != why) {
                tracing::error!(
                    source = self.source,
                    why,
                    workers = self.own.len(),
                    "discovery failed, the workers found before stay"
                );
            }
            self.failure = Some((why, Instant::now()));
        }
    }

    /// Judge a source that reports changes only: it is stale once it was silent for too long, and
    /// works again after it gave data.
    fn check_silence(&mut self, last_answer: Instant, now: Instant, limit: Duration) {
        let silent = now.saturating_duration_since(last_answer);
        if self.failure.is_none() && silent > limit {
            self.failed(format!(
                "no data for {} s, where something comes once a minute; see whether the API server answers (kubectl get --raw \
                 /readyz) and whether a proxy or network policy holds its answers back",
                silent.as_secs()
            ));
        } else if self
            .failure
            .as_ref()
            .is_some_and(|(_, at)| last_answer > *at)
            && let Some(fleet) = self.fleet.upgrade()
        {
            self.clear_failure(&fleet);
        }
    }

    /// See whether kept workers can go now. False: the router is gone, and the source can end.
    fn recheck(&mut self) -> bool {
        let Some(fleet) = self.fleet.upgrade() else {
            return false;
        };
        self.fresh.clear();
        if !self.kept.is_empty() {
            self.drop_unneeded(&fleet);
            self.show(&fleet);
        }
        true
    }

    fn clear_failure(&mut self, fleet: &WorkerFleet) {
        fleet
            .metrics
            .discovery_stale
            .with_label_values(&[self.source])
            .set(0.0);
        if self.failure.take().is_some() {
            tracing::info!(source = self.source, "discovery works again");
        }
    }

    fn drop_own(&mut self, fleet: &Arc<WorkerFleet>, url: &WorkerUrl) {
        self.kept.remove(url);
        if let Some(worker) = self.own.remove(url) {
            fleet.drain(&worker);
        }
    }

    /// Drain the kept workers that are not needed any more.
    fn drop_unneeded(&mut self, fleet: &Arc<WorkerFleet>) {
        let workers = fleet.workers();
        let kept = self.kept.iter().filter_map(|url| self.own.get(url));
        let kept: BTreeSet<u64> = kept.map(|worker| worker.id).collect();
        // An operator may have removed one: then it is not in the list.
        let serving = || workers.iter().filter(|w| w.is_ready());
        let is_needed = |worker: &Arc<Worker>| {
            let is_probed = worker.is_ready() && self.fresh.contains(worker.url());
            if is_probed || worker.state() == WorkerState::Draining {
                return true;
            }
            let mut others = serving().filter(|w| w.role() == worker.role());
            serving().any(|w| w.id == worker.id) && !others.any(|w| !kept.contains(&w.id))
        };
        let can_go = self
            .kept
            .iter()
            .filter(|url| !self.own.get(*url).is_some_and(is_needed));
        for url in can_go.cloned().collect::<Vec<_>>() {
            self.drop_own(fleet, &url);
        }
    }

    fn show(&self, fleet: &WorkerFleet) {
        let of_kept = self
            .kept
            .difference(&self.fresh)
            .filter_map(|url| self.own.get(url));
        let kept = of_kept.filter(|worker| worker.is_ready()).count();
        let gauge = |state| {
            fleet
                .metrics
                .discovered
                .with_label_values(&[self.source, state])
        };
        let was = gauge("kept").get();
        let shown = kept as f64;
        gauge("named").set((self.own.len() - self.kept.len()) as f64);
        gauge("kept").set(shown);
        if shown > was {
            tracing::warn!(
                source = self.source,
                kept,
                "workers are no longer named, but no other of their role is ready: they stay until \
                 one is"
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::config::RouterConfig;

    struct World {
        fleet: Arc<WorkerFleet>,
        feed: DiscoveryFeed,
    }

    fn spec(text: &str) -> WorkerSpec {
        let (role, url) = text.split_once(' ').unwrap();
        let role = match role {
            "p" => Role::Prefill,
            _ => Role::Decode,
        };
        WorkerSpec::new(url, role, None).unwrap()
    }

    impl World {
        fn new() -> World {
            let argv = ["baton-router", "--pd-disaggregation"].map(str::to_owned);
            let config = RouterConfig::parse(&argv).unwrap();
            let (_cut, seen) = watch::channel(false);
            let metrics = Arc::new(crate::observability::metrics::RouterMetrics::new().unwrap());
            let (policy_set, _) = crate::server::build_policy_set(&config, &metrics).unwrap();
            let fleet = Arc::new(WorkerFleet::new(
                Arc::new(config),
                metrics,
                policy_set,
                None,
                seen,
            ));
            let feed = DiscoveryFeed::new(&fleet, "file");
            World { fleet, feed }
        }

        fn apply(&mut self, workers: &[&str], deleted: &[&str]) {
            let deleted = deleted.iter().map(|url| WorkerUrl::parse(url).unwrap());
            let found = DiscoveredWorkers {
                named: workers.len(),
                workers: workers.iter().map(|text| spec(text)).collect(),
                deleted: deleted.collect(),
            };
            self.feed.apply(found);
        }

        /// The source was read, and a moment has passed.
        fn settle(&mut self, workers: &[&str], deleted: &[&str]) {
            self.apply(workers, deleted);
            self.feed.recheck();
        }

        /// All that are registered become ready, but for those that drain.
        fn all_ready(&self) {
            for worker in self.fleet.workers() {
                self.fleet.set_state(&worker, WorkerState::Ready, None);
            }
        }

        /// Workers that can be chosen or may become so.
        fn urls(&self) -> Vec<String> {
            let workers = self.fleet.workers();
            let workers = workers.iter().filter(|w| w.state() != WorkerState::Leaving);
            let mut urls: Vec<String> = workers
                .map(|w| format!("{} {}", &w.role().into_str()[..1], w.url().authority()))
                .collect();
            urls.sort();
            urls
        }
    }

    #[tokio::test]
    async fn what_is_named_is_registered_and_what_is_not_goes() {
        let mut world = World::new();
        world.apply(&["p a:1", "p b:1", "d c:1"], &[]);
        world.all_ready();
        assert_eq!(world.urls(), ["d c:1", "p a:1", "p b:1"]);
        world.apply(&["p b:1", "d c:1", "d e:1"], &[]);
        assert_eq!(
            world.urls(),
            ["d c:1", "d e:1", "p a:1", "p b:1"],
            "it is probed first"
        );
        world.feed.recheck();
        assert_eq!(world.urls(), ["d c:1", "d e:1", "p b:1"]);
    }

    #[tokio::test]
    async fn worker_that_drains_is_kept_for_its_return() {
        let mut world = World::new();
        world.apply(&["p a:1", "p b:1"], &[]);
        world.all_ready();
        let worker = world.fleet.workers()[0].clone();
        world.fleet.set_state(&worker, WorkerState::Draining, None);
        world.settle(&["p b:1"], &[]);
        assert_eq!(world.urls(), ["p a:1", "p b:1"]);
        let kept = world.fleet.metrics.discovered.clone();
        assert_eq!(kept.with_label_values(&["file", "kept"]).get(), 0.0);
        world.settle(&["p a:1", "p b:1"], &[]);
        let again = world.fleet.workers()[0].clone();
        assert_eq!(again.id, worker.id, "it was never removed");
        world.fleet.set_state(&worker, WorkerState::Draining, None);
        world.settle(&["p b:1"], &["http://a:1"]);
        assert_eq!(world.urls(), ["p b:1"], "a deletion is certain");
    }

    #[tokio::test]
    async fn last_ready_of_a_role_stays_until_another_is_ready() {
        let mut world = World::new();
        world.settle(&["p a:1", "d c:1"], &[]);
        world.all_ready();
        world.settle(&[], &[]);
        assert_eq!(world.urls(), ["d c:1", "p a:1"]);
        // A whole new fleet is named, and does not answer yet.
        world.settle(&["p b:1", "d e:1"], &[]);
        assert_eq!(world.urls(), ["d c:1", "d e:1", "p a:1", "p b:1"]);
        assert_eq!(world.feed.kept.len(), 2);
        world.all_ready();
        world.feed.recheck();
        assert_eq!(world.urls(), ["d e:1", "p b:1"]);
        assert!(world.feed.kept.is_empty());
    }

    #[tokio::test]
    async fn deleted_or_dead_worker_needs_no_replacement() {
        let mut world = World::new();
        world.settle(&["p a:1", "d c:1"], &[]);
        world.all_ready();
        world.settle(&["d c:1"], &["http://a:1"]);
        assert_eq!(world.urls(), ["d c:1"]);
        world.settle(&[], &[]);
        assert_eq!(world.urls(), ["d c:1"]);
        let worker = world.fleet.workers().pop().unwrap();
        let reason = String::new();
        let state = WorkerState::Unhealthy {
            reason,
            is_hung: false,
        };
        world.fleet.set_state(&worker, state, None);
        world.feed.recheck();
        assert!(world.urls().is_empty());
    }

    #[tokio::test]
    async fn new_role_is_a_new_worker_and_what_others_registered_stays() {
        let mut world = World::new();
        register(&world.fleet, spec("p z:1")).unwrap();
        world.settle(&["p a:1", "d z:1"], &[]);
        assert_eq!(world.urls(), ["p a:1", "p z:1"]);
        world.settle(&["d a:1"], &[]);
        assert_eq!(world.urls(), ["d a:1", "p z:1"]);
        world.settle(&[], &[]);
        assert_eq!(world.urls(), ["p z:1"]);
    }

    #[tokio::test]
    async fn what_an_operator_removed_stays_out_while_it_is_named() {
        let mut world = World::new();
        world.settle(&["p a:1"], &[]);
        let id = world.fleet.workers()[0].id;
        world.fleet.remove(id);
        world.settle(&["p a:1", "d c:1"], &[]);
        assert_eq!(world.urls(), ["d c:1"]);
        world.settle(&["d c:1"], &[]);
        world.settle(&["p a:1", "d c:1"], &[]);
        assert_eq!(world.urls(), ["d c:1", "p a:1"]);
    }

    #[tokio::test]
    async fn failed_reading_changes_nothing_and_is_reported() {
        let mut world = World::new();
        world.apply(&["p a:1"], &[]);
        world.feed.failed("unreadable".into());
        assert_eq!(world.urls(), ["p a:1"]);
        let stale = world.fleet.metrics.discovery_stale.clone();
        assert_eq!(stale.with_label_values(&["file"]).get(), 1.0);
        world.apply(&["p a:1"], &[]);
        assert_eq!(stale.with_label_values(&["file"]).get(), 0.0);
    }

    #[tokio::test]
    async fn source_that_names_no_worker_makes_no_router_ready() {
        let mut world = World::new();
        world.feed.apply(DiscoveredWorkers::default());
        assert!(world.fleet.discovered.lock().is_empty());
        world.feed.apply(DiscoveredWorkers {
            named: 1,
            ..DiscoveredWorkers::default()
        });
        assert_eq!(world.fleet.discovered.lock().len(), 1);
    }

    #[tokio::test]
    async fn silent_source_is_stale_until_it_gives_data() {
        let limit = Duration::from_secs(75);
        let mut world = World::new();
        world.apply(&["p a:1"], &[]);
        let stale = world.fleet.metrics.discovery_stale.clone();
        let is_stale = || stale.with_label_values(&["file"]).get() == 1.0;
        let heard = Instant::now();
        world.feed.check_silence(heard, heard + limit, limit);
        assert!(!is_stale());
        let later = heard + limit + Duration::from_secs(1);
        world.feed.check_silence(heard, later, limit);
        let (why, _) = world.feed.failure.as_ref().unwrap();
        assert!(is_stale() && why.contains("no data for 76 s") && why.contains("kubectl"));
        assert_eq!(world.urls(), ["p a:1"]);
        world.feed.check_silence(later, later, limit);
        assert!(!is_stale());
    }

    #[tokio::test]
    async fn failure_ends_with_data_though_nothing_changed() {
        let limit = Duration::from_secs(75);
        let mut world = World::new();
        world.apply(&["p a:1"], &[]);
        let before = Instant::now();
        world.feed.failed("refused".into());
        world.feed.check_silence(before, before, limit);
        assert!(
            world.feed.failure.is_some(),
            "an older answer proves nothing"
        );
        let later = Instant::now() + Duration::from_secs(1);
        world.feed.check_silence(later, later, limit);
        assert!(world.feed.failure.is_none());
    }
}
