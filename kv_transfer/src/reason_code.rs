//! Reason codes: why a room ended otherwise than by DONE. Metrics, wire and client errors use the
//! same codes.

use serde::{Deserialize, Serialize};

/// Why a room failed, was aborted or lost its lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[derive(strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum ReasonCode {
    /// The peer's socket closed, or three of its heartbeats are missing.
    PeerDead,
    /// The peer's transfer runtime lives, but its engine has stopped working.
    PeerStalled,
    /// The peer answered with another incarnation than the one this room was opened with.
    PeerRestarted,
    /// The decode side did not fetch the pages in time.
    LeaseExpired,
    /// A page was given to another request before it could be copied.
    StalePage,
    /// The copied bytes are not the bytes that were announced.
    Checksum,
    /// The last transfers from this prefill rank all brought damaged pages: new ones are refused
    /// for a while.
    Quarantined,
    /// Page layout, model or protocol version differ; the pair can never work.
    LayoutMismatch,
    /// The room number is in use; choose another one.
    DupRoom,
    /// A bounded table is full.
    NoCapacity,
    /// The request's own deadline passed.
    Deadline,
    /// No transport of the pair works, or the peer broke the protocol.
    TransportBroken,
    /// The client disconnected.
    ClientGone,
    /// The peer is draining and accepts no new rooms.
    Draining,
    /// The two sides tokenized different prompts, or count different pages.
    PromptMismatch,
    /// The prompt does not fit the prefill node.
    PromptTooLong,
    /// The prefill rank could not be found, or never received its half of the request.
    Unreachable,
    /// The request names a prefill rank that the prefill node has not.
    RankUnknown,
    /// The cluster key is wrong or missing on one side.
    Auth,
}

impl ReasonCode {
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// True if another attempt (a new room, perhaps another pair) can succeed.
    pub fn is_retryable(self) -> bool {
        !matches!(
            self,
            ReasonCode::LayoutMismatch
                | ReasonCode::Deadline
                | ReasonCode::ClientGone
                | ReasonCode::PromptMismatch
                | ReasonCode::PromptTooLong
                | ReasonCode::RankUnknown
                | ReasonCode::Auth
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_parses_back_and_travels_under_its_own_name() {
        for &code in ReasonCode::ALL {
            assert_eq!(code.as_str().parse(), Ok(code));
            let wire = serde_json::to_string(&code).expect("a unit variant serializes");
            assert_eq!(wire, format!("\"{code}\""));
        }
        assert!("peer_dead".parse::<ReasonCode>().is_err());
    }
}
