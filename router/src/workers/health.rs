//! Health task of each worker, from its registration on: probes it and reads its description.
//!
//! 1. starting: probe after 0.1 s, then with growing pauses up to --worker-startup-check-interval;
//! 2. good probe: GET /get_server_info (older and newer name tried), check the role, `Ready`;
//! 3. ready: probe every --health-check-interval-secs, and at once when a request met a refused or
//!    broken connection. Refused: `Unhealthy` now, since nothing listens there; other failures
//!    count up to --health-failure-threshold; a request without an answer for
//!    --silent-request-probe-secs has the worker probed within `SILENCE_PAUSE`. If neither the
//!    probe nor any request gets a byte for as long as `silence_limit` allows, the worker hangs:
//!    `Unhealthy` now;
//! 4. our engines are asked with each good probe, and while they drain, how much they have to do
//!    (GET /v1/loads): no answer may report it; vLLM's for the names of their models (GET /v1/models), to which LoRA
//!    adapters are added while they run;
//! 5. a probe answered 503 `draining`: `Draining`, probed every second (or the interval, if
//!    shorter) until it is good: back to 2;
//! 6. unhealthy: probe every second (or the interval, if shorter) until --health-success-threshold
//!    good ones, back to 2.

use std::sync::{Arc, Weak};
use std::time::Duration;

use http::{Method, Uri};
use router_core::{HealthCounter, Role};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::config::WorkerSpec;
use crate::error::RouteError;
use crate::response::sse::code_of;
use crate::transport::upstream::{RequestHead, SendError};
use crate::workers::fleet::WorkerFleet;
use crate::workers::fleet::startup_gate::PendingProbe;
use crate::workers::kv_events;
use crate::workers::load_report::{self, ReportStatus};
use crate::workers::worker::{Worker, WorkerDescription, WorkerState};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const RECOVERY_PAUSE: Duration = Duration::from_secs(1);
/// Longest answer read from /get_server_info [bytes].
const MAX_DESCRIPTION: usize = 1 << 20;

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
    let (registered, pause, slowest) = (Instant::now(), FIRST_PAUSE, Duration::ZERO);
    let mut seen = Watch {
        counter: None,
        registered,
        is_reported_late: false,
        pause,
        slowest,
    };
    let mut is_silent = false;
    loop {
        let (Some(fleet), Some(worker)) = (fleet.upgrade(), worker.upgrade()) else {
            return;
        };
        if fleet.config.health.disable_health_check {
            // Whatever is registered counts as healthy; what it tells about itself is still asked
            // for, until it tells.
            let description = describe(&fleet, &worker).await;
            let is_described = description.is_some();
            fleet.set_state(&worker, WorkerState::Ready, description);
            kv_events::start(&fleet, &worker);
            if is_described {
                return;
            }
            drop(pending.take());
            seen.pause = seen.longer_pause(&fleet);
        } else {
            let silence_limit = seen.silence_limit(&fleet);
            let begin = Instant::now();
            let probe = probe(&fleet, &worker, silence_limit, is_silent).await;
            if matches!(probe, Probe::Good | Probe::Draining) {
                seen.slowest = begin.elapsed().max(seen.slowest.mul_f64(0.9));
            }
            let is_good = matches!(probe, Probe::Good);
            let answers = is_good || matches!(probe, Probe::Draining);
            seen.pause = seen.take(&fleet, &worker, probe).await;
            drop(pending.take());
            if answers && worker.state().reports_load() && worker.tells_loads() {
                ask_load(&fleet, &worker).await;
            } else if is_good && worker.is_ready() && worker.is_vllm() {
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
    /// Act on a probe; returns the pause before the next.
    async fn take(&mut self, fleet: &WorkerFleet, worker: &Arc<Worker>, probe: Probe) -> Duration {
        if self.counter.is_none()
            && let Some(reason) = probe.failure()
        {
            return self.starting(fleet, worker, reason);
        }
        let config = &fleet.config.health;
        let (failures, successes) = (
            config.health_failure_threshold,
            config.health_success_threshold,
        );
        let counter = self
            .counter
            .get_or_insert_with(|| HealthCounter::new(failures, successes));
        let change = match &probe {
            Probe::Unsent(reason) => {
                tracing::warn!(url = %worker.url(), reason, "cannot send a health probe");
                None
            }
            Probe::Good | Probe::Draining => counter.record(true),
            Probe::Bad(_)
            | Probe::Silent {
                is_certain: false, ..
            } => counter.record(false),
            Probe::Refused(_)
            | Probe::Silent {
                is_certain: true, ..
            } => {
                // A certain failure counts as all that the verdict takes.
                (0..failures).find_map(|_| counter.record(false))
            }
        };
        let is_hung = matches!(probe, Probe::Silent { .. });
        let is_out = is_hung || matches!(probe, Probe::Draining) || !counter.is_healthy();
        match probe {
            Probe::Draining => {
                fleet.set_state(worker, WorkerState::Draining, None);
            }
            // A rejected one may have been restarted with other flags, a draining one was
            // undrained.
            Probe::Good if change.is_some() || worker.state().awaits_admission() => {
                admit(fleet, worker).await;
            }
            failed if change == Some(false) => {
                let reason = failed.failure().unwrap_or_default().to_owned();
                fleet.set_state(worker, WorkerState::Unhealthy { reason, is_hung }, None);
            }
            _ => {}
        }
        let interval = Duration::from_secs(config.health_check_interval_secs);
        // A worker that is out may return.
        if is_out {
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
            tracing::error!(url = %worker.url(), waited_s, reason, "worker did not start in time; still trying");
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
) -> Probe {
    let path = &fleet.config.health.health_check_endpoint;
    let (begin, heard) = (Instant::now(), worker.pool.heard());
    let asking = get(fleet, worker, path);
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
        Ok(Err(GetError::Draining)) => Probe::Draining,
        Ok(Err(GetError::Send(err @ SendError::Exhausted(_)))) => Probe::Unsent(err.to_string()),
        Ok(Err(err)) => Probe::Bad(format!("{path}: {err}")),
        Ok(Ok(_)) => Probe::Good,
    };
    fleet
        .metrics
        .probes
        .with_label_values(&[worker.role().into_str(), (&probe).into()])
        .inc();
    probe
}

#[derive(Debug, thiserror::Error)]
enum GetError {
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("the worker drains")]
    Draining,
    #[error("{0}")]
    Failed(String),
}

fn probe_timeout(fleet: &WorkerFleet) -> Duration {
    Duration::from_secs(fleet.config.health.health_check_timeout_secs)
}

async fn get(fleet: &WorkerFleet, worker: &Worker, path: &str) -> Result<Vec<u8>, GetError> {
    let uri = Uri::try_from(path).map_err(|err| GetError::Failed(err.to_string()))?;
    let head = RequestHead::new(Method::GET, uri, fleet.worker_headers());
    let response = worker.pool.send_alone(&head).await?;
    let status = response.status().as_u16();
    let body = response.into_body().read_at_most(MAX_DESCRIPTION).await;
    let body = body.map_err(|err| GetError::Failed(err.to_string()))?;
    let too_long = || GetError::Failed(format!("answer is longer than {MAX_DESCRIPTION} bytes"));
    let body = body.ok_or_else(too_long)?;
    match status {
        200..300 => Ok(body),
        503 if code_of(&body).as_deref() == Some("draining") => Err(GetError::Draining),
        _ => Err(GetError::Failed(format!("status {status}"))),
    }
}

/// Body of a good answer that comes within --health-check-timeout-secs.
async fn get_in_time(fleet: &WorkerFleet, worker: &Worker, path: &str) -> Option<Vec<u8>> {
    timeout(probe_timeout(fleet), get(fleet, worker, path))
        .await
        .ok()?
        .ok()
}

/// Ask the worker about itself; both names of the path are tried.
async fn describe(fleet: &WorkerFleet, worker: &Worker) -> Option<WorkerDescription> {
    for path in ["/get_server_info", "/server_info"] {
        let Some(body) = get_in_time(fleet, worker, path).await else {
            continue;
        };
        match serde_json::from_slice(&body) {
            Ok(description) => return Some(description),
            Err(err) => {
                tracing::warn!(url = %worker.url(), path, %err, "cannot read the worker's description");
            }
        }
    }
    // vLLM has no server info, but reports its version here; SGLang and Baton have no such path.
    let answer = ask(fleet, worker, "/version").await?;
    Some(WorkerDescription {
        engine: Some("vllm".to_owned()),
        version: Some(answer["version"].as_str()?.to_owned()),
        served_model_names: model_names(fleet, worker).await.unwrap_or_default(),
        ..WorkerDescription::default()
    })
}

/// The JSON of `path`, if the worker has that.
async fn ask(fleet: &WorkerFleet, worker: &Worker, path: &str) -> Option<Value> {
    serde_json::from_slice(&get_in_time(fleet, worker, path).await?).ok()
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

/// Learn which models a vLLM worker serves by now.
async fn ask_models(fleet: &WorkerFleet, worker: &Arc<Worker>) {
    let Some(names) = model_names(fleet, worker).await else {
        return;
    };
    let known = worker.description();
    if known.served_model_names != names {
        let description = WorkerDescription {
            served_model_names: names,
            ..(*known).clone()
        };
        fleet.set_state(worker, WorkerState::Ready, Some(description));
    }
}

/// Tell the policies what a worker has to do. That it does not say is no reason to take it out.
async fn ask_load(fleet: &WorkerFleet, worker: &Worker) {
    let body = get_in_time(fleet, worker, "/v1/loads").await;
    let fate = match body.map(|body| load_report::of_loads(&body)) {
        None => ReportStatus::Failed,
        Some(Ok(reports)) if fleet.loads_reported(worker, &reports) => ReportStatus::Taken,
        Some(Ok(_)) => ReportStatus::Unused,
        Some(Err(err)) => {
            tracing::debug!(url = %worker.url(), %err, "cannot read /v1/loads");
            ReportStatus::Malformed
        }
    };
    let labels = [worker.role().into_str(), "poll", fate.into_str()];
    fleet.metrics.load_reports.with_label_values(&labels).inc();
}

/// The worker answers probes: find out what it is, and let it in unless it is something else.
async fn admit(fleet: &WorkerFleet, worker: &Arc<Worker>) {
    let mut description = describe(fleet, worker).await.unwrap_or_default();
    if let Some(given) = fleet.config.workers.dp_size(worker.role()) {
        if let Some(reported) = description.dp_size.filter(|reported| *reported != given) {
            tracing::warn!(url = %worker.url(), reported, given, "the worker tells another number of ranks than the flag; the flag counts");
        }
        description.dp_size = Some(given);
    }
    let objection = objection(worker, &description);
    let state = objection.map_or(WorkerState::Ready, |reason| WorkerState::Rejected {
        reason,
    });
    let is_news = fleet.set_state(worker, state, Some(description));
    if is_news && let Some(why) = fleet.incompatibility(worker) {
        tracing::warn!(url = %worker.url(), role = %worker.role(), why, "worker cannot be paired");
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
