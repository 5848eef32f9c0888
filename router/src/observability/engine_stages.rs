//! Times an engine reports of a request's way to its first token: the header `x-baton-stages` of
//! its answers.
//!
//! 1. `dispatch::attempt` takes the header off a worker's answer: it is meant for routers, not for
//!    clients;
//! 2. the leg in the request's timeline keeps it (`request_timeline`);
//! 3. a decode worker's pull is added to its pair's traffic (pair_traffic.rs).

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;

use super::worker_headers::{headers, stage_keys};

pub const HEADER: HeaderName = HeaderName::from_static(headers::STAGES);
/// Longest name of a transport that is believed [bytes].
const MAX_TRANSPORT: usize = 16;

#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EngineStages {
    /// From the request's arrival at the engine until it got a slot and pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// D: how the prompt's pages came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull: Option<PagePull>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PagePull {
    /// shm, tcp, …; none: all pages were on D already.
    pub transport: String,
    pub pages: u64,
    pub bytes: u64,
    /// From the first pull to the last page verified.
    pub pull_ms: f64,
}

/// Take the header off. Malformed parts are left out: the times are for display only.
pub fn take(headers: &mut HeaderMap) -> Option<EngineStages> {
    headers.remove(HEADER).map(|value| read(&value))
}

fn read(value: &HeaderValue) -> EngineStages {
    let text = value.to_str().unwrap_or_default();
    let part = |name: &str| {
        let mut parts = text.split(';').filter_map(|part| part.split_once('='));
        parts
            .find(|(key, _)| key.trim() == name)
            .map(|(_, value)| value.trim())
    };
    let number = |name| part(name)?.parse::<u64>().ok();
    let ms = |name| number(name).map(|us| us as f64 / 1e3);
    let is_name = |name: &&str| {
        let is_plain = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        (1..=MAX_TRANSPORT).contains(&name.len()) && name.bytes().all(is_plain)
    };
    let pull = || {
        let transport = part(stage_keys::TRANSPORT).filter(is_name)?.to_owned();
        let pages = number(stage_keys::PAGES)?;
        let bytes = number(stage_keys::BYTES)?;
        let pull_ms = ms(stage_keys::PULL_US)?;
        Some(PagePull {
            transport,
            pages,
            bytes,
            pull_ms,
        })
    };
    EngineStages {
        queue_ms: ms(stage_keys::QUEUE_US),
        pull: pull(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn taken(text: &'static str) -> Option<EngineStages> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_static(text));
        let stages = take(&mut headers);
        assert!(headers.is_empty());
        stages
    }

    #[test]
    fn queue_and_pull_are_read_in_any_order() {
        let stages =
            taken("bytes=4096;pages=2; transport=shm;new=7;pull_us=1500;queue_us=20").unwrap();
        assert_eq!(stages.queue_ms, Some(0.02));
        let pull = PagePull {
            transport: "shm".into(),
            pages: 2,
            bytes: 4096,
            pull_ms: 1.5,
        };
        assert_eq!(stages.pull, Some(pull));
        assert_eq!(take(&mut HeaderMap::new()), None);
    }

    #[test]
    fn malformed_parts_are_left_out() {
        let none = EngineStages::default();
        for text in [
            "",
            "queue_us=-1",
            "transport=<b>;pages=1;bytes=1;pull_us=1",
            "transport=shm;pages=1;bytes=x;pull_us=1",
        ] {
            assert_eq!(taken(text), Some(none.clone()), "{text}");
        }
        let half = taken("queue_us=1000;transport=shm").unwrap();
        assert_eq!((half.queue_ms, half.pull), (Some(1.0), None));
    }
}
