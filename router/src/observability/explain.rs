//! Explanations for operators, with worker names in the place of ids, and for clients that send
//! `x-baton-explain`.
//!
//! * `x-baton-explain: 1`: the request is served as always; the answer has the decision in a header
//!   of the same name, and GET /v1/requests/{id} has every candidate with its terms;
//! * `x-baton-explain: dry-run`: the request is read and decided, nothing is sent; the answer is
//!   the explanation.
//!
//! Both show the fleet. With --control-plane-api-keys a dry run therefore needs such a key, and the
//! header is not sent: GET /v1/requests/{id}, which needs one too, has the rest.

use http::{HeaderMap, HeaderName};
use router_core::{Role, SelectionReason};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::error::RouteError;

const HEADER_NAME: &str = "x-baton-explain";
pub const HEADER: HeaderName = HeaderName::from_static(HEADER_NAME);

/// Explanation that the client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExplainMode {
    Nothing,
    Explain,
    DryRun,
}

impl ExplainMode {
    pub fn of(headers: &HeaderMap) -> Result<Self, RouteError> {
        let Some(value) = headers.get(HEADER) else {
            return Ok(ExplainMode::Nothing);
        };
        match value.as_bytes() {
            b"0" | b"false" => Ok(ExplainMode::Nothing),
            b"1" | b"true" => Ok(ExplainMode::Explain),
            b"dry-run" => Ok(ExplainMode::DryRun),
            _ => Err(RouteError::InvalidValue {
                param: HEADER_NAME,
                problem: "must be 1 or dry-run".into(),
            }),
        }
    }
}

/// Choice that would be made for one role.
#[derive(Serialize)]
pub struct DryRun {
    pub role: Role,
    pub worker: String,
    #[serde(flatten)]
    pub decision: SelectionReason,
    pub explanation: Option<Box<RawValue>>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn header_is_read_strictly() {
        let asks = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, HeaderValue::from_static(value));
            ExplainMode::of(&headers)
        };
        assert_eq!(asks("1").unwrap(), ExplainMode::Explain);
        assert_eq!(asks("dry-run").unwrap(), ExplainMode::DryRun);
        assert_eq!(asks("0").unwrap(), ExplainMode::Nothing);
        assert_eq!(
            ExplainMode::of(&HeaderMap::new()).unwrap(),
            ExplainMode::Nothing
        );
        let wrong = asks("please").unwrap_err().to_string();
        assert_eq!(wrong, "x-baton-explain must be 1 or dry-run");
    }
}
