//! Cache events of workers, for the policy that routes by them (docs/routing.md).
//!
//! The life of a feed, one per candidate of a role with the policy `cost`:
//!
//! 1. the worker has described itself ([`start`]): [`source`] names the address of its events, or
//!    the reason why it has no events;
//! 2. a task reads them, over HTTP from our engines ([`http`]) or ZeroMQ from vLLM and SGLang
//!    ([`zmq`], [`zmtp`]), in one wire format or the other ([`wire`]);
//! 3. the [`reader`] keeps the rank's replica and reports changes to the policies; a stream that
//!    ends is opened again, with growing pauses;
//! 4. the candidate leaves the fleet: its task is stopped, and the policy forgets it.
//!
//! Unread events wait in the connection: there is no queue here that could grow.

/// Encoding of events.
mod codec;
/// Events over HTTP.
mod http;
/// Where a worker publishes events.
mod source;
/// Subscription to one worker.
mod subscriber;
/// Events over ZeroMQ.
mod zmq;
/// ZeroMQ's wire protocol.
mod zmtp;

use std::time::Duration;

use router_core::Role;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use self::source::EventSource;
use self::subscriber::{EventReader, SubscriptionEnd};
use crate::config::KvEventsMode;
use crate::workers::fleet::WorkerFleet;
use crate::workers::kv_event_status::SyncState;
use crate::workers::load_guard::Candidate;
use crate::workers::worker::Worker;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// After an end that trying again soon would not change.
const LASTING_PAUSE: Duration = Duration::from_secs(60);
/// A stream that lived so long was a good one.
const GOOD_STREAM: Duration = Duration::from_secs(10);

/// Say once what will not happen.
pub fn announce(fleet: &WorkerFleet) {
    let policy = |role| fleet.policy_set.policy(role);
    let uses = Role::ALL
        .into_iter()
        .any(|role| policy(role).as_cost().is_some());
    let flags = &fleet.config.kv_events;
    if uses && flags.kv_events == KvEventsMode::Auto && !fleet.config.tokens.is_named() {
        tracing::info!(
            "what workers announce of their caches is not read: prompts are not tokenized here; \
             give --model-path"
        );
    }
}

/// Start the feeds of a worker that has described itself. Running feeds continue.
pub fn start(fleet: &WorkerFleet, worker: &Worker) {
    for candidate in fleet.candidates_at(worker) {
        let mut task = candidate.feed.task.lock();
        if task.is_some() {
            continue;
        }
        match source_of(fleet, &candidate) {
            Ok(source) => *task = Some(follow(fleet, &candidate, source)),
            Err(reason) => {
                let mut status = candidate.feed.status.lock();
                status.state = SyncState::Off;
                status.reason = Some(reason);
            }
        }
    }
}

fn source_of(fleet: &WorkerFleet, candidate: &Candidate) -> Result<EventSource, String> {
    let policy = fleet.policy_set.policy(candidate.worker.role());
    if policy.as_cost().is_none() {
        return Err(format!("policy {} does not read them", policy.name()));
    }
    match fleet.config.kv_events.kv_events {
        KvEventsMode::Off => Err("--kv-events off".to_owned()),
        KvEventsMode::Auto if !fleet.config.tokens.is_named() => {
            Err("prompts are not tokenized here; give --model-path, or --kv-events on".to_owned())
        }
        KvEventsMode::Auto | KvEventsMode::On => source::of(candidate, &fleet.config.kv_events),
    }
}

fn follow(fleet: &WorkerFleet, candidate: &Candidate, source: EventSource) -> AbortHandle {
    let mut status = candidate.feed.status.lock();
    status.state = SyncState::Connecting;
    status.reason = None;
    status.source = Some(source.to_string());
    drop(status);
    let mut reader = EventReader::new(fleet, candidate);
    let pool = candidate.worker.pool.clone();
    let headers = fleet.worker_headers();
    // Holds neither the router nor the worker: the candidate stops it when it leaves.
    let following = async move {
        let mut pause = FIRST_PAUSE;
        let mut last = None;
        let mut last_reported = String::new();
        loop {
            let begun = Instant::now();
            let Err(end) = match &source {
                EventSource::Http { rank } => {
                    http::follow(&mut reader, &pool, &headers, *rank).await
                }
                EventSource::Zmq { events, replay } => {
                    zmq::follow(&mut reader, events, replay.as_deref(), &mut last).await
                }
            };
            reader.ended(&end);
            if matches!(end, SubscriptionEnd::Replica(_)) {
                last = None;
            }
            if begun.elapsed() >= GOOD_STREAM {
                pause = FIRST_PAUSE;
            }
            let why = end.to_string();
            if why == last_reported {
                tracing::debug!(worker = %reader.name, %source, why, "no events again");
            } else {
                tracing::warn!(worker = %reader.name, %source, why, "no events of its cache; trying again");
                last_reported = why;
            }
            sleep(if end.is_lasting() {
                LASTING_PAUSE
            } else {
                pause
            })
            .await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    };
    tokio::spawn(following).abort_handle()
}
