//! Explanations for people: worker names in the place of ids, and what a client may ask for with `x-baton-explain`.
//!
//! * `x-baton-explain: 1`: the request is served as always; the answer has the decision in a header of the same name, and
//!   GET /v1/requests/{id} has every candidate with its terms;
//! * `x-baton-explain: dry-run`: the request is read and decided, nothing is sent; the answer is the explanation.
//!
//! Both show the fleet. With --control-plane-api-keys a dry run therefore needs such a key, and the header is not sent:
//! GET /v1/requests/{id}, which needs one too, has the rest.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue};
use router_core::{Explanation, Role, Why, WorkerId};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::error::RouteError;
use crate::workers::Candidate;

pub const HEADER: &str = "x-baton-explain";

/// What the client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Asks {
    #[default]
    Nothing,
    Explain,
    DryRun,
}

impl Asks {
    pub fn of(headers: &HeaderMap) -> Result<Self, RouteError> {
        let Some(value) = headers.get(HEADER) else {
            return Ok(Asks::Nothing);
        };
        match value.as_bytes() {
            b"0" | b"false" => Ok(Asks::Nothing),
            b"1" | b"true" => Ok(Asks::Explain),
            b"dry-run" => Ok(Asks::DryRun),
            _ => Err(RouteError::InvalidValue {
                param: HEADER,
                problem: "must be 1 or dry-run".into(),
            }),
        }
    }
}

/// What would be chosen for one role.
#[derive(Serialize)]
pub struct DryRun {
    pub role: Role,
    pub worker: String,
    #[serde(flatten)]
    pub decision: Why,
    pub explanation: Option<Box<RawValue>>,
}

pub fn dry_run_answer(decisions: &[DryRun]) -> Response {
    axum::Json(serde_json::json!({ "dry_run": true, "decisions": decisions })).into_response()
}

/// The short form in the answer's head.
pub fn put_header(headers: &mut HeaderMap, summary: String) {
    if let Ok(value) = HeaderValue::try_from(summary) {
        headers.insert(HEADER, value);
    }
}

/// The name of a candidate; it is in the list its decision was made from.
pub fn name_of(candidates: &[Arc<Candidate>], id: WorkerId) -> &str {
    let found = candidates.iter().find(|c| c.id == id);
    found.map_or("unknown", |candidate| &candidate.name)
}

/// As JSON, each candidate with its name.
pub fn named(explanation: &Explanation, candidates: &[Arc<Candidate>]) -> Option<Box<RawValue>> {
    #[derive(Serialize)]
    struct Named<'a, T> {
        worker: &'a str,
        #[serde(flatten)]
        told: &'a T,
    }
    #[derive(Serialize)]
    struct Told<'a, B, T> {
        policy: &'a str,
        #[serde(flatten)]
        basis: &'a B,
        candidates: Vec<Named<'a, T>>,
    }
    let Explanation { policy, basis, candidates: weighed } = explanation;
    let weighed = weighed.iter().map(|told| Named { worker: name_of(candidates, told.id), told });
    let told = Told { policy, basis, candidates: weighed.collect() };
    match to_raw_value(&told) {
        Ok(json) => Some(json),
        Err(err) => {
            tracing::error!(%err, "cannot write an explanation");
            None
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_read_strictly() {
        let asks = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, HeaderValue::from_static(value));
            Asks::of(&headers)
        };
        assert_eq!(asks("1").unwrap(), Asks::Explain);
        assert_eq!(asks("dry-run").unwrap(), Asks::DryRun);
        assert_eq!(asks("0").unwrap(), Asks::Nothing);
        assert_eq!(Asks::of(&HeaderMap::new()).unwrap(), Asks::Nothing);
        let wrong = asks("please").unwrap_err().to_string();
        assert_eq!(wrong, "x-baton-explain must be 1 or dry-run");
    }
}
