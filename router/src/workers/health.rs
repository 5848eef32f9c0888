//! Health task of each worker, from its registration on: probes it and reads its description.
//!
//! 1. starting: probe after 0.1 s, then with growing pauses up to --worker-startup-check-interval;
//! 2. good probe: GET /get_server_info (older and newer name tried), of workers of other makes also
//!    which APIs they lack; check the role, `Ready`;
//! 3. ready: probe every --health-check-interval-secs, and at once when a request met a refused or
//!    broken connection. Refused: `Unhealthy` now, since nothing listens there; other failures
//!    count up to --health-failure-threshold; a request without an answer for
//!    --silent-request-probe-secs has the worker probed within `SILENCE_PAUSE`. If neither the
//!    probe nor any request gets a byte for as long as `silence_limit` allows, the worker hangs:
//!    `Unhealthy` now;
//! 4. our engines are asked for their load (GET /v1/loads) with each good probe, and while they
//!    drain, because no answer may report it; vLLM's for the names of their models
//!    (GET /v1/models), to which LoRA adapters are added while they run;
//! 5. a probe answered 503 `draining`: `Draining`, probed every second (or the interval, if
//!    shorter) until it is good: back to 2;
//! 6. unhealthy: probe every second (or the interval, if shorter) until --health-success-threshold
//!    good ones, back to 2;
//! 7. a probe, a load report or an answer states another incarnation than the description: back to
//!    1 at once. A worker that states none is described again after each sign of a restart, and
//!    once a minute; another description is another process.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_text::dialect::Dialect;
use baton_text::dialect::body::router_fields::READY_PEERS_HEADER;
use baton_text::dialect::sse::error_code;
use baton_text::dialect::translate::chat_translation::is_translatable;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use router_core::{DescribedProcess, DescriptionTrust, HealthCounter, ProcessSign, Role};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::config::WorkerSpec;
use crate::error::RouteError;
use crate::transport::upstream::{RequestHead, SendError};
use crate::workers::fleet::WorkerFleet;
use crate::workers::fleet::startup_gate::PendingProbe;
use crate::workers::kv_event_status::lenient;
use crate::workers::kv_events;
use crate::workers::load_report::{self, ReportStatus};
use crate::workers::worker::{Worker, WorkerDescription, WorkerState};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const RECOVERY_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two looks for a due description, where no health checks run.
const DESCRIPTION_PAUSE: Duration = Duration::from_secs(60);
/// Longest answer read from /get_server_info [bytes].
const MAX_DESCRIPTION: usize = 1 << 20;

/// Header of a probe: other ready workers that could take this one's requests.
const READY_PEERS: HeaderName = HeaderName::from_static(READY_PEERS_HEADER);

/// Pause between two probes that requests without an answer ask for.
const SILENCE_PAUSE: Duration = Duration::from_secs(1);
/// A silent worker has this long to answer a probe, for each failure of --health-failure-threshold.
const SILENCE_STEP: Duration = Duration::from_millis(500);
/// ... or this many times its slowest recent probe, if that is more: SGLang's /health takes a
/// second when all is well.
const SILENCE_FACTOR: u32 = 4;

/// Outcome of a probe; a metric label.
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
enum Probe {
    /// The worker is well.
    Good,
    /// The worker answers that it drains.
    Draining,
    /// No answer at all, neither to the probe nor to any request. `is_certain`: requests had none
    /// for long before.
    Silent { reason: String, is_certain: bool },
    /// The probe could not be sent, for lack of something on this side.
    Unsent(String),
    /// Nothing listens: certain knowledge, no second opinion needed.
    Refused(String),
    /// The worker answers with an error, or with nothing that is understood.
    Bad(String),
}

impl Probe {
    /// Why it failed.
    fn failure(&self) -> Option<&str> {
        match self {
            Probe::Good | Probe::Draining => None,
            Probe::Silent { reason, .. }
            | Probe::Unsent(reason)
            | Probe::Refused(reason)
            | Probe::Bad(reason) => Some(reason),
        }
    }
}

/// Register a worker and start probing it.
pub fn register(fleet: &Arc<WorkerFleet>, spec: WorkerSpec) -> Result<Arc<Worker>, RouteError> {
    let worker = fleet.add(spec)?;
    tracing::info!(url = %worker.url(), role = %worker.role(), id = worker.id, "worker registered");
    let pending = Some(fleet.startup_gate.one_more());
    let watching = watch(Arc::downgrade(fleet), Arc::downgrade(&worker), pending);
    worker.health_task.lock().spawn(watching);
    Ok(worker)
}

/// Outcome of a probe, with the incarnation that the answer states.
struct ProbeResult {
    probe: Probe,
    incarnation: Option<String>,
}

/// State of the task between probes.
struct Watch {
    /// `None` until the first good probe.
    counter: Option<HealthCounter>,
    registered: Instant,
    is_reported_late: bool,
    pause: Duration,
    /// Slowest recent good probe.
    slowest: Duration,
}

/// Weak references: the task must keep neither the router nor a removed worker alive.
async fn watch(fleet: Weak<WorkerFleet>, worker: Weak<Worker>, mut pending: Option<PendingProbe>) {
    let mut seen = Watch::new();
    let mut is_silent = false;
    loop {
        let (Some(fleet), Some(worker)) = (fleet.upgrade(), worker.upgrade()) else {
            return;
        };
        if fleet.config.health.disable_health_check {
            seen.pause = seen.describe_unprobed(&fleet, &worker).await;
            drop(pending.take());
        } else {
            let silence_limit = seen.silence_limit(&fleet);
            let begin = Instant::now();
            let result = probe(&fleet, &worker, silence_limit, is_silent).await;
            if matches!(result.probe, Probe::Good | Probe::Draining) {
                seen.slowest = begin.elapsed().max(seen.slowest.mul_f64(0.9));
            }
            let is_good = matches!(result.probe, Probe::Good);
            let answers = is_good || matches!(result.probe, Probe::Draining);
            seen.pause = seen.take(&fleet, &worker, result).await;
            drop(pending.take());
            if answers && worker.state().reports_load() && worker.description().is_baton() {
                ask_load(&fleet, &worker).await;
            } else if is_good && worker.is_ready() && worker.description().is_vllm() {
                ask_models(&fleet, &worker).await;
            }
        }
        drop(fleet);
        // Sleeping on the worker's own Notify keeps it alive for one pause at most; a removal
        // aborts this task anyway.
        is_silent = tokio::select! {
            () = sleep(seen.pause) => false,
            () = worker.suspect.notified() => false,
            () = async {
                sleep(SILENCE_PAUSE).await;
                worker.silent.notified().await;
            } => true,
        };
    }
}

impl Watch {
    fn new() -> Self {
        Self {
            counter: None,
            registered: Instant::now(),
            is_reported_late: false,
            pause: FIRST_PAUSE,
            slowest: Duration::ZERO,
        }
    }

    /// Without health checks a registered worker counts as healthy. Its description is still read,
    /// until it tells one, and again when it is due. Returns the pause before the next look.
    async fn describe_unprobed(&self, fleet: &WorkerFleet, worker: &Arc<Worker>) -> Duration {
        let is_registered_as_ready = worker.state() == WorkerState::Ready;
        if is_registered_as_ready && !worker.is_description_due() {
            return DESCRIPTION_PAUSE;
        }
        // A worker that cannot be asked now is asked again.
        let description = describe(fleet, worker).await.ok().flatten();
        let process = description.as_ref().map(process_of);
        fleet.set_state(worker, WorkerState::Ready, description);
        kv_events::start(fleet, worker);
        let Some(process) = process else {
            return self.longer_pause(fleet);
        };
        worker.process_described(process);
        DESCRIPTION_PAUSE
    }

    /// Take the worker out if another process answers than the one that described itself. Its
    /// start-up begins.
    fn check_process(&mut self, fleet: &WorkerFleet, worker: &Arc<Worker>, result: &ProbeResult) {
        let sign = match (&result.probe, &result.incarnation) {
            (_, Some(stated)) => Some(ProcessSign::Stated(stated)),
            (Probe::Refused(_) | Probe::Bad(_) | Probe::Silent { .. }, None) => {
                Some(ProcessSign::Broken)
            }
            (Probe::Good | Probe::Draining | Probe::Unsent(_), None) => None,
        };
        if let Some(sign) = sign {
            worker.observe_process(sign);
        }
        if worker.state() == WorkerState::Ready && worker.is_replaced() {
            let reason =
                Some("another process answers, it has not described itself yet".to_owned());
            let state = WorkerState::Starting { reason };
            fleet.set_state(worker, state, Some(WorkerDescription::default()));
            *self = Self::new();
        }
    }

    /// Act on a probe; returns the pause before the next.
    async fn take(
        &mut self,
        fleet: &WorkerFleet,
        worker: &Arc<Worker>,
        result: ProbeResult,
    ) -> Duration {
        self.check_process(fleet, worker, &result);
        let ProbeResult { probe, incarnation } = result;
        if self.counter.is_none()
            && let Some(reason) = probe.failure()
        {
            return self.starting(fleet, worker, reason);
        }
        let config = &fleet.config.health;
        let failures = config.health_failure_threshold;
        let successes = config.health_success_threshold;
        let counter = self
            .counter
            .get_or_insert_with(|| HealthCounter::new(failures, successes));
        let change = match &probe {
            Probe::Unsent(reason) => {
                tracing::warn!(url = %worker.url(), reason, "cannot send a health probe");
                None
            }
            Probe::Good | Probe::Draining => counter.record_probe(true),
            Probe::Bad(_)
            | Probe::Silent {
                is_certain: false, ..
            } => counter.record_probe(false),
            Probe::Refused(_)
            | Probe::Silent {
                is_certain: true, ..
            } => {
                // A certain failure counts as all that the verdict takes.
                (0..failures).find_map(|_| counter.record_probe(false))
            }
        };
        let is_hung = matches!(probe, Probe::Silent { .. });
        let is_out = is_hung || !counter.is_healthy();
        match probe {
            Probe::Draining => {
                fleet.set_state(worker, WorkerState::Draining, None);
            }
            // A rejected one may have been restarted with other flags, a draining one was
            // undrained.
            Probe::Good if change.is_some() || worker.state().awaits_admission() => {
                admit(fleet, worker, incarnation.is_some()).await;
            }
            Probe::Good if worker.is_ready() && worker.is_description_due() => {
                describe_again(fleet, worker).await;
            }
            failed if change == Some(false) => {
                let reason = failed.failure().unwrap_or_default().to_owned();
                fleet.set_state(worker, WorkerState::Unhealthy { reason, is_hung }, None);
            }
            _ => {}
        }
        let interval = Duration::from_secs(config.health_check_interval_secs);
        // One that drains may end between two probes: a broken one is no reason to wait longer for
        // the process that follows.
        let is_awaited = matches!(
            worker.state(),
            WorkerState::Starting { .. } | WorkerState::Draining
        );
        // A worker that is out may return.
        if is_out || is_awaited {
            interval.min(RECOVERY_PAUSE)
        } else {
            interval
        }
    }

    /// A probe failed before the first good one.
    fn starting(&mut self, fleet: &WorkerFleet, worker: &Arc<Worker>, reason: &str) -> Duration {
        let limit = Duration::from_secs(fleet.config.workers.worker_startup_timeout_secs);
        if self.registered.elapsed() >= limit && !self.is_reported_late {
            self.is_reported_late = true;
            let waited_s = limit.as_secs();
            tracing::error!(
                url = %worker.url(),
                waited_s,
                reason,
                "worker did not start in time; still trying"
            );
        }
        let reason = Some(reason.to_owned());
        fleet.set_state(worker, WorkerState::Starting { reason }, None);
        self.longer_pause(fleet)
    }

    /// How long a worker whose requests are silent has for a probe.
    fn silence_limit(&self, fleet: &WorkerFleet) -> Duration {
        let least = SILENCE_STEP * fleet.config.health.health_failure_threshold.max(1);
        (self.slowest * SILENCE_FACTOR)
            .max(least)
            .min(probe_timeout(fleet))
    }

    fn longer_pause(&self, fleet: &WorkerFleet) -> Duration {
        let longest = Duration::from_secs(fleet.config.workers.worker_startup_check_interval);
        self.pause.mul_f64(1.5).min(longest)
    }
}

/// `silence_limit`: the limit when requests are silent, be that at once (`is_silent`) or from some
/// time on.
async fn probe(
    fleet: &WorkerFleet,
    worker: &Worker,
    silence_limit: Duration,
    mut is_silent: bool,
) -> ProbeResult {
    let path = &fleet.config.health.health_check_endpoint;
    let begin = Instant::now();
    let heard = worker.pool.heard();
    let asking = get_with(worker, path, probe_headers(fleet, worker));
    tokio::pin!(asking);
    let silence = async {
        if !is_silent {
            worker.silent.notified().await;
        }
    };
    let answer = tokio::select! {
        biased;
        answer = timeout(probe_timeout(fleet), &mut asking) => answer,
        () = silence => {
            is_silent = true;
            timeout(silence_limit, &mut asking).await
        }
    };
    let incarnation = match &answer {
        Ok(Ok(body) | Err(GetError::Status { body, .. })) => stated_incarnation(body),
        Ok(Err(_)) | Err(_) => None,
    };
    let probe = match answer {
        Err(_) if worker.pool.heard() == heard => Probe::Silent {
            reason: format!(
                "{path} gave no answer for {:.1} s",
                begin.elapsed().as_secs_f64()
            ),
            is_certain: is_silent,
        },
        Err(_) => Probe::Bad(format!("{path} gave no answer, but requests got some")),
        Ok(Err(GetError::Send(SendError::Refused(cause)))) => Probe::Refused(cause),
        Ok(Err(GetError::Status { status: 503, body }))
            if error_code(&body).as_deref() == Some("draining") =>
        {
            Probe::Draining
        }
        Ok(Err(GetError::Send(err @ SendError::Exhausted(_)))) => Probe::Unsent(err.to_string()),
        Ok(Err(err)) => Probe::Bad(format!("{path}: {err}")),
        Ok(Ok(_)) => Probe::Good,
    };
    fleet
        .metrics
        .probes
        .with_label_values(&[worker.role().into_str(), (&probe).into()])
        .inc();
    ProbeResult { probe, incarnation }
}

/// Incarnation that an answer to a probe states; only ours do.
fn stated_incarnation(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Stated {
        #[serde(default, deserialize_with = "lenient")]
        incarnation: Option<String>,
    }
    let stated: Stated = serde_json::from_slice(body).ok()?;
    stated.incarnation
}

#[derive(Debug, thiserror::Error)]
enum GetError {
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("status {status}")]
    Status { status: u16, body: Vec<u8> },
    #[error("{0}")]
    Failed(String),
}

fn probe_timeout(fleet: &WorkerFleet) -> Duration {
    Duration::from_secs(fleet.config.health.health_check_timeout_secs)
}

/// Headers of a health probe. Our engines learn from it how many others could take their requests,
/// which `baton drain` asks them (docs/protocol.md §2).
fn probe_headers(fleet: &WorkerFleet, worker: &Worker) -> HeaderMap {
    let mut headers = fleet.worker_headers();
    if worker.description().is_baton() {
        headers.insert(READY_PEERS, HeaderValue::from(fleet.ready_peers(worker)));
    }
    headers
}

async fn get(fleet: &WorkerFleet, worker: &Worker, path: &str) -> Result<Vec<u8>, GetError> {
    get_with(worker, path, fleet.worker_headers()).await
}

async fn get_with(worker: &Worker, path: &str, headers: HeaderMap) -> Result<Vec<u8>, GetError> {
    let uri = Uri::try_from(path).map_err(|err| GetError::Failed(err.to_string()))?;
    let head = RequestHead::new(Method::GET, uri, headers);
    let response = worker.pool.send_alone(&head).await?;
    let status = response.status().as_u16();
    let body = response.into_body().read_at_most(MAX_DESCRIPTION).await;
    let body = body.map_err(|err| GetError::Failed(err.to_string()))?;
    let too_long = || GetError::Failed(format!("answer is longer than {MAX_DESCRIPTION} bytes"));
    let body = body.ok_or_else(too_long)?;
    match status {
        200..300 => Ok(body),
        _ => Err(GetError::Status { status, body }),
    }
}

/// Body of a good answer that comes within --health-check-timeout-secs.
async fn get_in_time(
    fleet: &WorkerFleet,
    worker: &Worker,
    path: &str,
) -> Result<Vec<u8>, GetError> {
    let limit = probe_timeout(fleet);
    let answer = timeout(limit, get(fleet, worker, path)).await;
    answer.unwrap_or_else(|_| {
        let waited_s = limit.as_secs();
        Err(GetError::Failed(format!("no answer for {waited_s} s")))
    })
}

/// Ask the worker about itself. `Ok(None)`: it tells nothing. `Err`: it may tell more when it is
/// asked again.
async fn describe(
    fleet: &WorkerFleet,
    worker: &Worker,
) -> Result<Option<WorkerDescription>, GetError> {
    let described = read_description(fleet, worker).await?;
    if described.as_ref().is_some_and(WorkerDescription::is_baton) {
        return Ok(described);
    }
    let missing_apis = missing_apis(fleet, worker).await;
    if missing_apis.is_empty() {
        return Ok(described);
    }
    Ok(Some(WorkerDescription {
        missing_apis,
        ..described.unwrap_or_default()
    }))
}

/// APIs for which the router has a translation and the worker no path: GET on a path that takes
/// POST alone is answered 405, on a path that is not there 404. A worker that gives no answer keeps
/// its description.
async fn missing_apis(fleet: &WorkerFleet, worker: &Worker) -> Vec<Dialect> {
    let known = worker.description();
    let mut missing = Vec::new();
    for dialect in Dialect::ALL {
        if !is_translatable(dialect) {
            continue;
        }
        let is_missing = match get_in_time(fleet, worker, dialect.path()).await {
            Err(GetError::Status { status, .. }) => status == 404,
            Ok(_) => false,
            Err(_) => known.lacks_api(dialect),
        };
        if is_missing {
            missing.push(dialect);
        }
    }
    missing
}

/// Read the worker's own description; both names of the path are tried.
async fn read_description(
    fleet: &WorkerFleet,
    worker: &Worker,
) -> Result<Option<WorkerDescription>, GetError> {
    let mut failure = None;
    for path in ["/get_server_info", "/server_info"] {
        let body = match get_in_time(fleet, worker, path).await {
            Ok(body) => body,
            Err(GetError::Status { status, .. }) if status < 500 => continue,
            Err(err) => {
                failure = Some(err);
                continue;
            }
        };
        match serde_json::from_slice(&body) {
            Ok(description) => return Ok(Some(description)),
            Err(err) => {
                tracing::warn!(
                    url = %worker.url(),
                    path,
                    %err,
                    "cannot read the worker's description"
                );
            }
        }
    }
    // vLLM has no server info, but reports its version here; SGLang has no such path. An engine of
    // Baton says that it is one: its server info may need another key.
    let answer = ask(fleet, worker, "/version").await;
    let answer = answer.filter(|answer| answer["engine"] != "baton");
    let version = answer.and_then(|answer| Some(answer["version"].as_str()?.to_owned()));
    let Some(version) = version else {
        return failure.map_or(Ok(None), Err);
    };
    Ok(Some(WorkerDescription {
        engine: Some("vllm".to_owned()),
        version: Some(version),
        served_model_names: model_names(fleet, worker).await.unwrap_or_default(),
        ..WorkerDescription::default()
    }))
}

/// The JSON of `path`, if the worker has that.
async fn ask(fleet: &WorkerFleet, worker: &Worker, path: &str) -> Option<Value> {
    let body = get_in_time(fleet, worker, path).await.ok()?;
    serde_json::from_slice(&body).ok()
}

/// The names under which a worker of OpenAI's API takes requests.
async fn model_names(fleet: &WorkerFleet, worker: &Worker) -> Option<Vec<String>> {
    let answer = ask(fleet, worker, "/v1/models").await?;
    let names = answer["data"]
        .as_array()?
        .iter()
        .map(|model| model["id"].as_str());
    names.map(|name| name.map(str::to_owned)).collect()
}

/// Learn which models a vLLM worker serves by now. Names of which none has stayed are another
/// process's.
async fn ask_models(fleet: &WorkerFleet, worker: &Arc<Worker>) {
    let Some(names) = model_names(fleet, worker).await else {
        return;
    };
    let known = worker.description();
    if known.served_model_names == names {
        return;
    }
    let renamed = WorkerDescription {
        served_model_names: names,
        ..(*known).clone()
    };
    if renamed.is_of_same_process(&known) {
        fleet.set_state(worker, WorkerState::Ready, Some(renamed));
    } else {
        worker.observe_process(ProcessSign::Broken);
        describe_again(fleet, worker).await;
    }
}

/// Tell the policies what a worker has to do. That it does not say is no reason to take it out.
async fn ask_load(fleet: &WorkerFleet, worker: &Worker) {
    let body = get_in_time(fleet, worker, "/v1/loads").await;
    let fate = match body.map(|body| load_report::of_loads(&body)) {
        Err(_) => ReportStatus::Failed,
        Ok(Ok(polled)) => {
            let stated = polled.incarnation.as_deref();
            let sign = stated.map_or(ProcessSign::Unstated, ProcessSign::Stated);
            let trust = worker.observe_process(sign);
            let is_taken =
                trust != DescriptionTrust::Missing && fleet.loads_reported(worker, &polled.reports);
            if is_taken {
                ReportStatus::Taken
            } else {
                ReportStatus::Unused
            }
        }
        Ok(Err(err)) => {
            tracing::debug!(url = %worker.url(), %err, "cannot read /v1/loads");
            ReportStatus::Malformed
        }
    };
    let labels = [worker.role().into_str(), "poll", fate.into_str()];
    fleet.metrics.load_reports.with_label_values(&labels).inc();
}

/// The worker answers probes: find out what it is, and let it in unless it is something else. One
/// that states its incarnation stays out as long as it cannot be asked.
async fn admit(fleet: &WorkerFleet, worker: &Arc<Worker>, states_incarnation: bool) {
    let described = match describe(fleet, worker).await {
        Ok(described) => described,
        Err(err) if states_incarnation => {
            let reason = Some(format!("its description cannot be read: {err}"));
            fleet.set_state(worker, WorkerState::Starting { reason }, None);
            return;
        }
        Err(_) => None,
    };
    enter(fleet, worker, described);
}

/// The process of a ready worker may be another one by now: read its description again.
async fn describe_again(fleet: &WorkerFleet, worker: &Arc<Worker>) {
    match describe(fleet, worker).await {
        Ok(Some(described)) => enter(fleet, worker, Some(described)),
        Ok(None) => worker.process_described(DescribedProcess::Unread),
        Err(err) => {
            tracing::debug!(
                url = %worker.url(),
                %err,
                "cannot read the worker's description again"
            );
        }
    }
}

fn process_of(description: &WorkerDescription) -> DescribedProcess {
    let stated = description.incarnation.clone();
    stated.map_or(DescribedProcess::Unnamed, DescribedProcess::Named)
}

/// Let a worker in with this description, unless it is something else than what it was registered
/// as. `None`: it tells nothing.
fn enter(fleet: &WorkerFleet, worker: &Arc<Worker>, described: Option<WorkerDescription>) {
    let process = described
        .as_ref()
        .map_or(DescribedProcess::Unread, process_of);
    let mut description = described.unwrap_or_default();
    if let Some(given) = fleet.config.workers.dp_size(worker.role()) {
        if let Some(reported) = description.dp_size.filter(|reported| *reported != given) {
            tracing::warn!(
                url = %worker.url(),
                reported,
                given,
                "the worker reports another number of ranks than the flag; the flag counts"
            );
        }
        description.dp_size = Some(given);
    }
    let objection = objection(worker, &description);
    let state = objection.map_or(WorkerState::Ready, |reason| WorkerState::Rejected {
        reason,
    });
    let is_changed = fleet.set_state(worker, state, Some(description));
    worker.process_described(process);
    if is_changed && let Some(why) = fleet.incompatibility(worker) {
        tracing::warn!(url = %worker.url(), role = %worker.role(), why, "worker cannot be paired");
        fleet.probe_partners(worker);
    }
    kv_events::start(fleet, worker);
}

/// Why this worker cannot serve in its role.
fn objection(worker: &Worker, description: &WorkerDescription) -> Option<String> {
    let role = worker.role();
    let wanted = if role == Role::Regular {
        "null"
    } else {
        role.into_str()
    };
    let mode = description
        .disaggregation_mode
        .as_deref()
        .filter(|mode| *mode != wanted)?;
    Some(format!(
        "its --disaggregation-mode is {mode}, it is registered as {role} worker"
    ))
}
