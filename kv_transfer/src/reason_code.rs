//! Reason codes: why a room ended otherwise than by DONE. Metrics, wire and client errors use the same codes.

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal, retryable: $retryable:literal;)*) => {
        /// Why a room failed, was aborted or lost its lease.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum ReasonCode { $($(#[doc = $doc])* #[serde(rename = $text)] $name,)* }

        impl ReasonCode {
            pub const ALL: &'static [ReasonCode] = &[$(ReasonCode::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self { $(ReasonCode::$name => $text,)* }
            }

            /// True if another attempt (a new room, perhaps another pair) can succeed.
            pub fn retryable(self) -> bool {
                match self { $(ReasonCode::$name => $retryable,)* }
            }
        }
    };
}

codes! {
    /// The peer's socket closed, or three of its heartbeats are missing.
    PeerDead = "PEER_DEAD", retryable: true;
    /// The peer's transfer runtime lives, but its engine has stopped working.
    PeerStalled = "PEER_STALLED", retryable: true;
    /// The peer answered with another incarnation than the one this room was opened with.
    PeerRestarted = "PEER_RESTARTED", retryable: true;
    /// The decode side did not fetch the pages in time.
    LeaseExpired = "LEASE_EXPIRED", retryable: true;
    /// A page was given to another request before it could be copied.
    StalePage = "STALE_PAGE", retryable: true;
    /// The copied bytes are not the bytes that were announced.
    Checksum = "CHECKSUM", retryable: true;
    /// The last transfers from this prefill rank all brought damaged pages: new ones are refused for a while.
    Quarantined = "QUARANTINED", retryable: true;
    /// Page layout, model or protocol version differ; the pair can never work.
    LayoutMismatch = "LAYOUT_MISMATCH", retryable: false;
    /// The room number is in use; choose another one.
    DupRoom = "DUP_ROOM", retryable: true;
    /// A bounded table is full.
    NoCapacity = "NO_CAPACITY", retryable: true;
    /// The request's own deadline passed.
    Deadline = "DEADLINE", retryable: false;
    /// No transport of the pair works, or the peer broke the protocol.
    TransportBroken = "TRANSPORT_BROKEN", retryable: true;
    /// The client disconnected.
    ClientGone = "CLIENT_GONE", retryable: false;
    /// The peer is draining and accepts no new rooms.
    Draining = "DRAINING", retryable: true;
    /// The two sides tokenized different prompts, or count different pages.
    PromptMismatch = "PROMPT_MISMATCH", retryable: false;
    /// The prompt does not fit the prefill node.
    PromptTooLong = "PROMPT_TOO_LONG", retryable: false;
    /// The prefill rank could not be found, or never received its half of the request.
    Unreachable = "UNREACHABLE", retryable: true;
    /// The cluster key is wrong or missing on one side.
    Auth = "AUTH", retryable: false;
}

impl ReasonCode {
    pub fn parse(text: &str) -> Option<ReasonCode> {
        ReasonCode::ALL.iter().copied().find(|code| code.as_str() == text)
    }
}

impl std::fmt::Display for ReasonCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_parses_back_and_travels_under_its_own_name() {
        for &code in ReasonCode::ALL {
            assert_eq!(ReasonCode::parse(code.as_str()), Some(code));
            let wire = serde_json::to_string(&code).expect("a unit variant serializes");
            assert_eq!(wire, format!("\"{code}\""));
        }
        assert_eq!(ReasonCode::parse("peer_dead"), None);
    }
}
