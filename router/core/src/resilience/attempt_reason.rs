//! Reasons why an attempt failed, and their classes: is another attempt of use?
//!
//! A reason is a typed value here and a label in metrics, logs and timelines
//! ([`AttemptReason::into_str`]). Its class decides about retries (`retry_verdict`).

use std::fmt;

use serde::{Serialize, Serializer};
use strum::{EnumString, IntoStaticStr, VariantArray};

/// Class of a failure: is trying again of use?
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray)]
pub enum RetryClass {
    /// About this request: it would be refused anywhere, or its time or its sender's quota is used
    /// up.
    Refused,
    /// An unexplained error: one other worker gives a second opinion.
    Unexplained,
    /// The worker or the pair broke: another may do it.
    Broken,
    /// The worker is leaving or has just started: another may do it at once, and nothing is wrong
    /// with this one.
    Leaving,
    /// The worker has too much to do: another may do it, after a pause.
    Overloaded,
}

impl RetryClass {
    /// Class of an answer's status without a code of the protocol: another engine's, or a proxy's.
    pub fn of_status(status: u16) -> RetryClass {
        match status {
            500 => RetryClass::Unexplained,
            408 | 502 | 503 | 504 => RetryClass::Broken,
            429 => RetryClass::Overloaded,
            _ => RetryClass::Refused,
        }
    }

    /// True if the worker counts as having failed (circuit breaker).
    pub fn blames_worker(self) -> bool {
        matches!(self, RetryClass::Unexplained | RetryClass::Broken)
    }
}

/// Error codes of docs/protocol.md §5.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    EnumString,
    IntoStaticStr,
    VariantArray,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum ProtocolCode {
    InvalidValue,
    InvalidJson,
    MissingField,
    UnsupportedParameter,
    ContextLengthExceeded,
    InvalidApiKey,
    Forbidden,
    ForeignOrigin,
    HostNotAllowed,
    ModelNotFound,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    DuplicateWorker,
    WrongState,
    FingerprintMismatch,
    PayloadTooLarge,
    HeadTooLarge,
    MalformedHead,
    TargetTooLong,
    UnsupportedMediaType,
    RateLimitExceeded,
    TenantQueueFull,
    Aborted,
    ConfigError,
    TooManyWorkers,
    Timeout,
    Deadline,
    PoisonRequest,
    GrammarFailed,
    InternalError,
    NonfiniteLogits,
    DuplicateRoom,
    PrefillFailed,
    KvTransferFailed,
    KvTransferTimeout,
    UpstreamError,
    PairIncompatible,
    PromptMismatch,
    BootstrapUnreachable,
    EngineDead,
    Draining,
    NotReady,
    QueueFull,
    QueueTimeout,
    NoWorker,
    NoPair,
    TtftTooLate,
    ConnectionsExhausted,
    BodyMemoryFull,
    FeedFull,
}

impl ProtocolCode {
    /// `None`: not a code of the protocol.
    pub fn parse(code: &str) -> Option<ProtocolCode> {
        code.parse().ok()
    }

    pub fn retry_class(self) -> RetryClass {
        use ProtocolCode::*;
        match self {
            InvalidValue
            | InvalidJson
            | MissingField
            | UnsupportedParameter
            | ContextLengthExceeded
            | InvalidApiKey
            | Forbidden
            | ForeignOrigin
            | HostNotAllowed
            | ModelNotFound
            | NotFound
            | MethodNotAllowed
            | RequestTimeout
            | DuplicateWorker
            | WrongState
            | FingerprintMismatch
            | PayloadTooLarge
            | HeadTooLarge
            | MalformedHead
            | TargetTooLong
            | UnsupportedMediaType
            | RateLimitExceeded
            | TenantQueueFull
            | Aborted
            | ConfigError
            | TooManyWorkers
            | Timeout
            | Deadline
            | PoisonRequest
            | GrammarFailed => RetryClass::Refused,
            InternalError | NonfiniteLogits => RetryClass::Unexplained,
            DuplicateRoom | PrefillFailed | KvTransferFailed | KvTransferTimeout
            | UpstreamError | PairIncompatible | PromptMismatch | BootstrapUnreachable
            | EngineDead => RetryClass::Broken,
            Draining | NotReady => RetryClass::Leaving,
            QueueFull | QueueTimeout | NoWorker | NoPair | TtftTooLate | ConnectionsExhausted
            | BodyMemoryFull | FeedFull => RetryClass::Overloaded,
        }
    }
}

/// Status of an answer without a code of the protocol, as a label: a closed set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, VariantArray)]
#[strum(const_into_str)]
pub enum StatusLabel {
    /// A successful status whose body is an error event.
    #[strum(serialize = "error_event")]
    ErrorEvent,
    #[strum(serialize = "status_408")]
    RequestTimeout,
    #[strum(serialize = "status_429")]
    TooManyRequests,
    #[strum(serialize = "status_500")]
    InternalServerError,
    #[strum(serialize = "status_502")]
    BadGateway,
    #[strum(serialize = "status_503")]
    ServiceUnavailable,
    #[strum(serialize = "status_504")]
    GatewayTimeout,
    #[strum(serialize = "status_4xx")]
    OtherClientError,
    #[strum(serialize = "status_other")]
    Other,
}

impl StatusLabel {
    pub fn from_status(status: u16) -> StatusLabel {
        match status {
            408 => StatusLabel::RequestTimeout,
            429 => StatusLabel::TooManyRequests,
            500 => StatusLabel::InternalServerError,
            502 => StatusLabel::BadGateway,
            503 => StatusLabel::ServiceUnavailable,
            504 => StatusLabel::GatewayTimeout,
            200..=299 => StatusLabel::ErrorEvent,
            400..=499 => StatusLabel::OtherClientError,
            _ => StatusLabel::Other,
        }
    }
}

/// Reason why an attempt at a worker failed, or why a worker's answer broke off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttemptReason {
    /// No connection could be opened: nothing reached the worker.
    Connect,
    /// The connection, or the answer on it, broke off.
    Reset,
    /// The worker sent nothing for --request-timeout-secs. The request's time is over, and the
    /// worker is to blame.
    Silent,
    /// The worker sends nothing and fails its health checks.
    Hung,
    /// Another process than the one that the router knew at the address refused the request.
    Restarted,
    /// The worker answered with an error code of the protocol.
    Code(ProtocolCode),
    /// The worker answered with an error without such a code.
    Status(StatusLabel),
}

impl AttemptReason {
    /// Label of metrics, logs and timelines.
    pub const fn into_str(self) -> &'static str {
        match self {
            AttemptReason::Connect => "connect",
            AttemptReason::Reset => "reset",
            AttemptReason::Silent => "silent",
            AttemptReason::Hung => "hung",
            AttemptReason::Restarted => "restarted",
            AttemptReason::Code(code) => code.into_str(),
            AttemptReason::Status(label) => label.into_str(),
        }
    }

    /// True if the worker, or the connection to it, was lost rather than the request refused.
    pub fn is_unreached(self) -> bool {
        matches!(
            self,
            AttemptReason::Connect | AttemptReason::Reset | AttemptReason::Hung
        )
    }

    /// True if the worker has gone or is leaving, as far as the reason tells, rather than having
    /// refused the request.
    pub fn is_worker_loss(self) -> bool {
        self.is_unreached()
            || matches!(
                self,
                AttemptReason::Code(
                    ProtocolCode::EngineDead | ProtocolCode::Draining | ProtocolCode::NotReady
                )
            )
    }

    /// True if the worker has gone or is leaving, or the prefill worker of a decode worker that
    /// reports it.
    pub fn is_pair_loss(self) -> bool {
        self.is_worker_loss()
            || matches!(
                self,
                AttemptReason::Code(
                    ProtocolCode::KvTransferFailed
                        | ProtocolCode::PrefillFailed
                        | ProtocolCode::BootstrapUnreachable
                )
            )
    }

    /// True if the worker, or its connection, ended with the request in hand.
    pub fn is_break(self) -> bool {
        matches!(
            self,
            AttemptReason::Reset | AttemptReason::Code(ProtocolCode::EngineDead)
        )
    }

    /// True if a decode worker reports trouble that is more likely its prefill worker's.
    pub fn blames_partner(self) -> bool {
        matches!(
            self,
            AttemptReason::Code(
                ProtocolCode::KvTransferFailed
                    | ProtocolCode::KvTransferTimeout
                    | ProtocolCode::PrefillFailed
                    | ProtocolCode::BootstrapUnreachable
            )
        )
    }
}

impl fmt::Display for AttemptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.into_str())
    }
}

impl Serialize for AttemptReason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.into_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// (code, status) of each row in the table of docs/protocol.md §5.
    fn documented_codes() -> Vec<(&'static str, u16)> {
        let page = include_str!("../../../../docs/protocol.md");
        let (_, errors) = page
            .split_once("\n## 5. Errors")
            .expect("the page has the section");
        let (table, _) = errors.split_once("\n## ").expect("it is not the last");
        let rows = table
            .lines()
            .filter_map(|row| row.strip_prefix("| `")?.split_once("` | "));
        rows.map(|(code, cells)| (code, cells[..3].parse().expect("a status")))
            .collect()
    }

    #[test]
    fn every_code_of_the_protocol_has_a_class() {
        let documented = documented_codes();
        assert!(documented.len() > 30, "the table has moved");
        for (code, status) in documented {
            let parsed = ProtocolCode::parse(code);
            let parsed = parsed.unwrap_or_else(|| panic!("{code} is not in the enum"));
            assert_eq!(parsed.into_str(), code);
            // Errors that the sender of the request can mend are never retried.
            if (400..500).contains(&status) && parsed != ProtocolCode::DuplicateRoom {
                assert_eq!(parsed.retry_class(), RetryClass::Refused, "{code}");
            }
        }
        assert_eq!(ProtocolCode::parse("no_such_code"), None);
    }

    #[test]
    fn statuses_of_other_engines_have_these_classes() {
        for (class, expected) in [
            (RetryClass::Unexplained, vec![500]),
            (RetryClass::Broken, vec![408, 502, 503, 504]),
            (RetryClass::Overloaded, vec![429]),
            (RetryClass::Leaving, vec![]),
        ] {
            let of_class: Vec<u16> = (100..600)
                .filter(|&status| RetryClass::of_status(status) == class)
                .collect();
            assert_eq!(of_class, expected, "{class:?}");
        }
    }

    #[test]
    fn labels_of_reasons_are_distinct() {
        let mut labels = vec!["connect", "reset", "silent", "hung", "restarted"];
        labels.extend(
            ProtocolCode::VARIANTS
                .iter()
                .map(|code| AttemptReason::Code(*code).into_str()),
        );
        labels.extend(
            StatusLabel::VARIANTS
                .iter()
                .map(|status| AttemptReason::Status(*status).into_str()),
        );
        let distinct: BTreeSet<&str> = labels.iter().copied().collect();
        assert_eq!(distinct.len(), labels.len());
    }

    #[test]
    fn status_labels_name_the_status_or_its_kind() {
        for (status, label) in [
            (200, "error_event"),
            (299, "error_event"),
            (301, "status_other"),
            (400, "status_4xx"),
            (408, "status_408"),
            (429, "status_429"),
            (499, "status_4xx"),
            (500, "status_500"),
            (501, "status_other"),
            (502, "status_502"),
            (503, "status_503"),
            (504, "status_504"),
        ] {
            assert_eq!(
                StatusLabel::from_status(status).into_str(),
                label,
                "{status}"
            );
        }
    }

    #[test]
    fn losses_and_breaks_are_these_labels() {
        let every = [
            AttemptReason::Connect,
            AttemptReason::Reset,
            AttemptReason::Silent,
            AttemptReason::Hung,
            AttemptReason::Restarted,
        ];
        let codes = ProtocolCode::VARIANTS.iter();
        let every: Vec<AttemptReason> = every
            .into_iter()
            .chain(codes.map(|code| AttemptReason::Code(*code)))
            .collect();
        let labels = |rule: fn(AttemptReason) -> bool| -> Vec<&str> {
            let matching = every.iter().filter(|reason| rule(**reason));
            matching.map(|reason| reason.into_str()).collect()
        };
        assert_eq!(labels(AttemptReason::is_break), ["reset", "engine_dead"]);
        assert_eq!(
            labels(AttemptReason::is_worker_loss),
            [
                "connect",
                "reset",
                "hung",
                "engine_dead",
                "draining",
                "not_ready"
            ]
        );
        assert_eq!(
            labels(|reason| reason.is_pair_loss() && !reason.is_worker_loss()),
            [
                "prefill_failed",
                "kv_transfer_failed",
                "bootstrap_unreachable"
            ]
        );
        assert_eq!(
            labels(AttemptReason::blames_partner),
            [
                "prefill_failed",
                "kv_transfer_failed",
                "kv_transfer_timeout",
                "bootstrap_unreachable"
            ]
        );
    }
}
