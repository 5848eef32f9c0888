//! Shared secrets of one cluster's engines: one, or two while the operator changes it.
//!
//! A node signs with the first key, accepts both, and answers with the key of the request. So a
//! cluster changes its key without downtime, one node after the other: accept the new key besides
//! the old one; sign with the new one; drop the old one.

use std::fmt;

/// Keys that a node accepts, one or two. `Debug` does not print them.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKeys {
    own: String,
    second: Option<String>,
}

impl ClusterKeys {
    /// `own` signs, `second` is accepted besides it.
    pub fn new(own: String, second: Option<String>) -> Self {
        Self { own, second }
    }

    /// The key that signs this node's requests.
    pub fn own_key(&self) -> &str {
        &self.own
    }

    /// Every accepted key, the own one first.
    pub fn accepted_keys(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.own.as_str()).chain(self.second.as_deref())
    }
}

impl From<&str> for ClusterKeys {
    fn from(own: &str) -> Self {
        Self::new(own.to_owned(), None)
    }
}

impl fmt::Debug for ClusterKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKeys(hidden)")
    }
}
