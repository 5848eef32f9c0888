//! Address of a worker's events, from its description and from the flags.

use serde::Deserialize;

use crate::config::{KvEventEndpoint, KvEventFlags};
use crate::workers::load_guard::Candidate;
use crate::workers::worker::WorkerDescription;

/// Source of one rank's events.
#[derive(Debug, Clone, PartialEq, Eq, strum::Display)]
pub enum EventSource {
    /// `GET /v1/kv_events` of our engines.
    #[strum(to_string = "http")]
    Http { rank: u32 },
    /// vLLM's and SGLang's sockets, host:port.
    #[strum(to_string = "tcp://{events}")]
    Zmq {
        events: String,
        replay: Option<String>,
    },
}

/// SGLang's own flag, as its /get_server_info repeats it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct SglangConfig {
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
}

/// The candidate's source, or why it has none.
pub fn of(candidate: &Candidate, flags: &KvEventFlags) -> Result<EventSource, String> {
    let worker = &candidate.worker;
    let description = &candidate.description;
    let rank = match (candidate.rank, description.dp_size()) {
        (Some(rank), _) => rank,
        (None, 1) => 0,
        (None, ranks) => {
            return Err(format!(
                "its {ranks} ranks have a cache each and are one candidate; start the router with \
                 --dp-aware"
            ));
        }
    };
    if description.engine.as_deref() == Some("baton") {
        let state = description.internal_states.get(rank as usize);
        return match state.and_then(|state| state.kv_events.as_ref()) {
            Some(_) => Ok(EventSource::Http { rank }),
            None => Err("it announces none; start it with --kv-events-config '{\"enable_kv_cache_events\": true}'".to_owned()),
        };
    }
    let host = worker.url().host.as_str();
    let address = |endpoint: KvEventEndpoint| {
        endpoint.address(host, rank).ok_or_else(|| {
            format!("rank {rank} has no port: {endpoint:?} plus {rank} is beyond 65535")
        })
    };
    let of_flags = || {
        Some((
            flags.kv_events_endpoint.clone()?,
            flags.kv_events_replay_endpoint.clone(),
        ))
    };
    let (events, replay) = sglang(description)?
        .or_else(of_flags)
        .ok_or("it does not say where it publishes; see --kv-events-endpoint")?;
    Ok(EventSource::Zmq {
        events: address(events)?,
        replay: replay.map(address).transpose()?,
    })
}

/// Endpoints of SGLang's flag, if the worker shows it.
fn sglang(
    description: &WorkerDescription,
) -> Result<Option<(KvEventEndpoint, Option<KvEventEndpoint>)>, String> {
    let Some(text) = description
        .kv_events_config
        .as_deref()
        .filter(|text| !text.is_empty())
    else {
        return Ok(None);
    };
    let config: SglangConfig = serde_json::from_str(text)
        .map_err(|err| format!("cannot read its --kv-events-config: {err}"))?;
    if config.publisher.as_deref() != Some("zmq") {
        return Err("its --kv-events-config has no \"publisher\": \"zmq\"".to_owned());
    }
    let replay = config
        .replay_endpoint
        .map(|text| text.parse())
        .transpose()?;
    let endpoint = config.endpoint.as_deref().unwrap_or("tcp://*:5557"); // SGLang's default
    Ok(Some((endpoint.parse()?, replay)))
}
