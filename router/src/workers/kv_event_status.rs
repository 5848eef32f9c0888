//! Status of a rank's events: the announcement of its worker, and the progress of its reader.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::task::AbortHandle;

/// A candidate's feed.
#[derive(Default)]
pub struct EventSubscription {
    pub(super) status: Arc<Mutex<SubscriptionStatus>>,
    pub(super) task: Mutex<Option<AbortHandle>>,
}

impl EventSubscription {
    pub fn status(&self) -> SubscriptionStatus {
        self.status.lock().clone()
    }

    /// The candidate leaves.
    pub fn stop(&self) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
    }
}

/// How much is known of a rank's cache; a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum SyncState {
    /// Not followed.
    #[default]
    Off,
    /// Nothing has arrived yet.
    Connecting,
    /// The index has what the rank has stored.
    Exact,
    /// Something was missed, or it is not heard now.
    Doubtful,
}

/// Status as GET /workers shows it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SubscriptionStatus {
    pub state: SyncState,
    pub source: Option<String>,
    /// Why it is not exact.
    pub reason: Option<String>,
    /// The rank's pages that are known.
    pub blocks: usize,
    pub next_seq: Option<u64>,
    pub gaps: u64,
    pub resyncs: u64,
}

/// Entry of `internal_states` in /get_server_info, one per rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct RankState {
    /// Our engines: they announce, over HTTP too.
    #[serde(default)]
    pub kv_events: Option<AnnouncedEvents>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AnnouncedEvents {
    pub epoch: String,
}

/// Keys that other engines may use for something else: a value of another shape counts as none.
pub fn lenient<'de, D: Deserializer<'de>, T: Default + DeserializeOwned>(
    from: D,
) -> Result<T, D::Error> {
    Ok(serde_json::from_value(serde_json::Value::deserialize(from)?).unwrap_or_default())
}
