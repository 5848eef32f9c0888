//! Load reports of engines: the header `x-baton-load` of answers, and `GET /v1/loads`
//! (docs/protocol.md §2).
//!
//! 1. `dispatch::attempt` takes the header off every answer of a worker: it is meant for routers,
//!    not for clients;
//! 2. health.rs asks for the same with each probe, so that workers without answers are known too;
//! 3. the policy of the worker's role observes it (`Event::Reported`).
//!
//! Both name the incarnation of the engine that reports: a report of another process than the one
//! that described itself is not taken.

use std::collections::HashMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use router_core::RunningLoad;
use serde::Deserialize;

use crate::observability::worker_headers::{headers, load_keys};
use crate::workers::kv_event_status::lenient;

pub const HEADER: HeaderName = HeaderName::from_static(headers::LOAD);

/// Queue of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    pub rank: u32,
    /// Prompt tokens it has still to compute, begun or not.
    pub queued_tokens: u64,
    /// Running batch and KV pages, if all of that was reported.
    pub running: Option<RunningLoad>,
    /// Of the pages used, those of windows, chunks and states; `None`: the model has no such layers,
    /// or the engine tells nothing of them.
    pub further_pages: Option<u64>,
    /// Requests that wait for a slot, if that was reported.
    pub queued_requests: Option<u64>,
    /// Tokens since the rank's start, if both were reported.
    pub totals: Option<TokenTotals>,
    /// How long ago that was true [ms].
    pub age_ms: u64,
}

/// Tokens that a rank has computed and generated since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenTotals {
    /// Prompt tokens that went through the model.
    pub prefilled: u64,
    pub generated: u64,
    /// Drafted tokens, and those of them that were drawn; 0 of engines that do not draft.
    pub drafted: u64,
    pub accepted: u64,
}

impl TokenTotals {
    fn of(
        prefilled: Option<u64>,
        generated: Option<u64>,
        drafted: Option<u64>,
        accepted: Option<u64>,
    ) -> Option<Self> {
        Some(Self {
            prefilled: prefilled?,
            generated: generated?,
            drafted: drafted.unwrap_or(0),
            accepted: accepted.unwrap_or(0),
        })
    }
}

/// Header of an answer: the incarnation that gave it, and its load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadHeader<'a> {
    pub incarnation: Option<&'a str>,
    /// `None`: the rank has not reported anything yet, or no rank gave the answer.
    pub report: Option<LoadReport>,
}

/// Answer of `GET /v1/loads`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolledLoads {
    pub incarnation: Option<String>,
    /// Ranks that have reported something.
    pub reports: Vec<LoadReport>,
}

/// Result of a report; a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum ReportStatus {
    Taken,
    /// The rank has not reported yet, it is one of several behind one candidate, or another process
    /// reports than the one that described itself.
    Unused,
    Malformed,
    /// The worker was asked and gave no answer.
    Failed,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not name=number parts with semicolons between, or rank, started_tokens or age_ms is missing"
)]
pub struct MalformedReport;

/// Take the header off. Only the first is returned, should there be several.
pub fn take(headers: &mut HeaderMap) -> Option<HeaderValue> {
    headers.remove(HEADER)
}

/// Read the header. Cost: one pass, nothing allocated.
pub fn of_header(value: &HeaderValue) -> Result<LoadHeader<'_>, MalformedReport> {
    let text = value.to_str().map_err(|_| MalformedReport)?;
    let mut incarnation = None;
    let mut rank = None;
    let mut queued = None;
    let mut started = None;
    let mut age_ms = None;
    let mut running = None;
    let mut waiting = None;
    let mut pages_free = None;
    let mut pages = None;
    let mut further_pages = None;
    let mut prefilled = None;
    let mut generated = None;
    let mut drafted = None;
    let mut accepted = None;
    for part in text.split(';') {
        let (name, value) = part.split_once('=').ok_or(MalformedReport)?;
        let place = match name.trim() {
            load_keys::INCARNATION => {
                incarnation = Some(value.trim());
                continue;
            }
            load_keys::RANK => &mut rank,
            load_keys::QUEUED_TOKENS => &mut queued,
            load_keys::STARTED_TOKENS => &mut started,
            load_keys::AGE_MS => &mut age_ms,
            load_keys::RUNNING => &mut running,
            load_keys::QUEUED => &mut waiting,
            load_keys::PAGES_FREE => &mut pages_free,
            load_keys::PAGES => &mut pages,
            load_keys::FURTHER_PAGES => &mut further_pages,
            load_keys::PREFILLED => &mut prefilled,
            load_keys::GENERATED => &mut generated,
            load_keys::DRAFTED => &mut drafted,
            load_keys::ACCEPTED => &mut accepted,
            _ => continue,
        };
        *place = Some(value.trim().parse::<u64>().map_err(|_| MalformedReport)?);
    }
    let unreported = LoadHeader {
        incarnation,
        report: None,
    };
    let rank = match (rank, incarnation) {
        (None, Some(_)) => return Ok(unreported),
        (rank, _) => rank.ok_or(MalformedReport)?,
    };
    let rank = u32::try_from(rank).map_err(|_| MalformedReport)?;
    let Some(queued) = queued else {
        return Ok(unreported);
    };
    let running = || {
        Some(running_load(
            running?.saturating_add(waiting?),
            pages_free?,
            pages?,
        ))
    };
    let report = LoadReport {
        rank,
        queued_tokens: started.ok_or(MalformedReport)?.saturating_add(queued),
        running: running(),
        further_pages,
        queued_requests: waiting,
        totals: TokenTotals::of(prefilled, generated, drafted, accepted),
        age_ms: age_ms.ok_or(MalformedReport)?,
    };
    Ok(LoadHeader {
        incarnation,
        report: Some(report),
    })
}

/// Read the answer of `GET /v1/loads`.
pub fn of_loads(body: &[u8]) -> Result<PolledLoads, serde_json::Error> {
    #[derive(Deserialize)]
    struct Loads {
        #[serde(default, deserialize_with = "lenient")]
        incarnation: Option<String>,
        loads: Vec<OfRank>,
    }
    #[derive(Deserialize)]
    struct OfRank {
        dp_rank: u32,
        age_ms: Option<u64>,
        prefilled_tokens: Option<u64>,
        generated_tokens: Option<u64>,
        drafted_tokens: Option<u64>,
        accepted_tokens: Option<u64>,
        load: Option<Load>,
    }
    #[derive(Deserialize)]
    struct Load {
        queued_tokens: u64,
        started_tokens: u64,
        /// By kind of page group.
        #[serde(default)]
        further_pages: HashMap<String, GroupUsage>,
        #[serde(flatten)]
        running: Option<Running>,
    }
    #[derive(Deserialize)]
    struct GroupUsage {
        held: u64,
    }
    #[derive(Deserialize)]
    struct Running {
        running_requests: u64,
        queued_requests: u64,
        transfer_requests: u64,
        pages_free: u64,
        pages_evictable: u64,
        pages: u64,
    }
    let running = |load: Running| {
        let waiting = load.queued_requests.saturating_add(load.transfer_requests);
        let requests = load.running_requests.saturating_add(waiting);
        let free = load.pages_free.saturating_add(load.pages_evictable);
        running_load(requests, free, load.pages)
    };
    let Loads { incarnation, loads } = serde_json::from_slice(body)?;
    let reports = loads.into_iter().filter_map(|of| {
        let load = of.load?;
        Some(LoadReport {
            rank: of.dp_rank,
            queued_tokens: load.queued_tokens.saturating_add(load.started_tokens),
            queued_requests: load.running.as_ref().map(|running| running.queued_requests),
            running: load.running.map(running),
            further_pages: (load.further_pages.into_values())
                .map(|usage| usage.held)
                .reduce(u64::saturating_add),
            totals: TokenTotals::of(
                of.prefilled_tokens,
                of.generated_tokens,
                of.drafted_tokens,
                of.accepted_tokens,
            ),
            age_ms: of.age_ms?,
        })
    });
    Ok(PolledLoads {
        incarnation,
        reports: reports.collect(),
    })
}

fn running_load(requests: u64, pages_free: u64, pages: u64) -> RunningLoad {
    RunningLoad {
        requests,
        pages_used: pages.saturating_sub(pages_free),
        pages,
    }
}

/// Load of a candidate that stands for all these ranks.
pub fn sum(reports: &[LoadReport]) -> Option<LoadReport> {
    let plus = u64::saturating_add;
    let add_running = |(a, b): (RunningLoad, RunningLoad)| RunningLoad {
        requests: plus(a.requests, b.requests),
        pages_used: plus(a.pages_used, b.pages_used),
        pages: plus(a.pages, b.pages),
    };
    let add_totals = |(a, b): (TokenTotals, TokenTotals)| TokenTotals {
        prefilled: plus(a.prefilled, b.prefilled),
        generated: plus(a.generated, b.generated),
        drafted: plus(a.drafted, b.drafted),
        accepted: plus(a.accepted, b.accepted),
    };
    reports.iter().copied().reduce(|sum, report| LoadReport {
        rank: sum.rank,
        queued_tokens: plus(sum.queued_tokens, report.queued_tokens),
        running: sum.running.zip(report.running).map(add_running),
        further_pages: (sum.further_pages.zip(report.further_pages)).map(|(a, b)| plus(a, b)),
        queued_requests: sum
            .queued_requests
            .zip(report.queued_requests)
            .map(|(a, b)| plus(a, b)),
        totals: sum.totals.zip(report.totals).map(add_totals),
        age_ms: sum.age_ms.max(report.age_ms),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<LoadReport>, MalformedReport> {
        Ok(of_header(&HeaderValue::from_str(text).unwrap())?.report)
    }

    const FULL: &str = "rank=3;reqs=2;tokens=900;age_ms=40;running=1;queued=1;queued_tokens=500;started_tokens=70;\
        pages_free=12;pages=64;further_pages=9;prefill_rate=9000;decode_rate=100;prefilled=700;generated=80;\
        drafted=40;accepted=30;bands=high:300,default:200";

    #[test]
    fn engines_header_is_read_in_any_order() {
        let wanted = LoadReport {
            rank: 3,
            queued_tokens: 570,
            running: Some(RunningLoad {
                requests: 2,
                pages_used: 52,
                pages: 64,
            }),
            further_pages: Some(9),
            queued_requests: Some(1),
            totals: Some(TokenTotals {
                prefilled: 700,
                generated: 80,
                drafted: 40,
                accepted: 30,
            }),
            age_ms: 40,
        };
        assert_eq!(read(FULL), Ok(Some(wanted)));
        let mut parts: Vec<&str> = FULL.split(';').collect();
        parts.reverse();
        assert_eq!(read(&parts.join("; ")), Ok(Some(wanted)));
        // Before its first report a rank tells what its front knows.
        assert_eq!(read("rank=0;reqs=1;tokens=20"), Ok(None));
    }

    #[test]
    fn incarnation_is_read_with_and_without_a_report() {
        let value = |text: &str| HeaderValue::from_str(text).unwrap();
        let with_report = value(&format!("inc=9f86d081884c7d65;{FULL}"));
        let read_whole = of_header(&with_report).unwrap();
        assert_eq!(read_whole.incarnation, Some("9f86d081884c7d65"));
        assert_eq!(read_whole.report, read(FULL).unwrap());
        let alone = value("inc=9f86d081884c7d65");
        let read_alone = of_header(&alone).unwrap();
        assert_eq!(read_alone.incarnation, Some("9f86d081884c7d65"));
        assert_eq!(read_alone.report, None);
    }

    #[test]
    fn what_is_no_load_is_malformed() {
        for text in [
            "",
            "busy",
            "rank=0;;queued_tokens=1;started_tokens=0;age_ms=0",
            "queued_tokens=1;started_tokens=0;age_ms=0",
            "rank=0;queued_tokens=1;started_tokens=0",
            "rank=0;queued_tokens=1;age_ms=0",
            "rank=0;queued_tokens=-1;started_tokens=0;age_ms=0",
            "rank=0;queued_tokens=1e9;started_tokens=0;age_ms=0",
            "rank=0;queued_tokens=99999999999999999999;started_tokens=0;age_ms=0",
            "rank=4294967296;queued_tokens=1;started_tokens=0;age_ms=0",
            "rank=0;queued_tokens=1;started_tokens=0;age_ms=None",
        ] {
            assert_eq!(read(text), Err(MalformedReport), "{text}");
        }
        let bytes = HeaderValue::from_bytes(b"rank=\xff").unwrap();
        assert_eq!(of_header(&bytes), Err(MalformedReport));
    }

    #[test]
    fn loads_are_read_and_summed() {
        let body = br#"{"incarnation":"a","dp_rank_count":3,"loads":[
            {"dp_rank":0,"num_reqs":1,"age_ms":10,"prefilled_tokens":100,"generated_tokens":20,"drafted_tokens":8,"accepted_tokens":6,"load":{"queued_tokens":5,"started_tokens":6,"bands":{},
                "running_requests":3,"queued_requests":2,"transfer_requests":1,"pages_free":4,"pages_evictable":5,"pages":16,"further_pages":{"window":{"held":3,"cached":1},"state":{"held":2,"cached":0}}}},
            {"dp_rank":1,"num_reqs":0,"age_ms":null,"load":null},
            {"dp_rank":2,"num_reqs":1,"age_ms":30,"prefilled_tokens":5,"generated_tokens":1,"load":{"queued_tokens":0,"started_tokens":9,
                "running_requests":1,"queued_requests":0,"transfer_requests":0,"pages_free":16,"pages_evictable":0,"pages":16,"further_pages":{"window":{"held":1,"cached":7}}}},
            {"dp_rank":3,"num_reqs":1,"age_ms":30,"load":{"queued_tokens":0,"started_tokens":0}}]}"#;
        let polled = of_loads(body).unwrap();
        assert_eq!(polled.incarnation.as_deref(), Some("a"));
        let reports = polled.reports;
        assert_eq!(
            reports.iter().map(|r| r.rank).collect::<Vec<_>>(),
            [0, 2, 3]
        );
        let all = sum(&reports[..2]).unwrap();
        assert_eq!((all.queued_tokens, all.age_ms), (20, 30));
        assert_eq!(all.queued_requests, Some(2));
        assert_eq!(all.further_pages, Some(6));
        let totals = TokenTotals {
            prefilled: 105,
            generated: 21,
            drafted: 8,
            accepted: 6,
        };
        assert_eq!(all.totals, Some(totals));
        let running = RunningLoad {
            requests: 7,
            pages_used: 7,
            pages: 32,
        };
        assert_eq!(all.running, Some(running));
        assert_eq!(
            sum(&reports).unwrap().running,
            None,
            "one rank does not tell"
        );
        assert_eq!(sum(&[]), None);
        assert!(of_loads(b"[]").is_err());
    }
}
