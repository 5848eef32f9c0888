//! Fault injection for tests: `{"rules": [{"on": "PROGRESS", "nth": 1, "do": "drop"}]}` in the
//! node's configuration.
//!
//! `on` is a message name (of messages this node sends, control connection only), `*` for any of
//! them, or `PAGE`: for pages this node pulls (a delay: of each page by shm and cuda_ipc, and of
//! each answer to a READ on the sending node), or `COPIED`: between the copy and the second
//! generation check, where only a hold applies. `nth` counts from 1; the rule fires for the nth
//! match and, with `"repeat": true`, for every later one.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The message is never sent.
    Drop,
    /// Sent twice.
    Dup,
    /// Sent this much later, behind messages that come after it.
    DelayMs(u64),
    /// Flip a bit of the frame, or of the page just copied.
    Flip,
    /// The connection is closed instead.
    Kill,
    /// (PAGE) The transport stops working (all but tcp).
    Break,
    /// (COPIED) Makes the file `<path>.reached`, then waits until `<path>.go` exists: a test acts
    /// in between.
    Hold(PathBuf),
}

const HOLD_LIMIT: Duration = Duration::from_secs(60);
const HOLD_POLL: Duration = Duration::from_millis(1);

/// Point where a copy waits for a test.
pub struct Hold {
    go: PathBuf,
    since: Instant,
}

impl Hold {
    fn open_file(path: &Path) -> Self {
        let reached = path.with_extension("reached");
        if let Err(err) = std::fs::write(&reached, b"") {
            tracing::error!(%err, path = %reached.display(), "fault injection: cannot mark a hold as reached");
        }
        Self {
            go: path.with_extension("go"),
            since: Instant::now(),
        }
    }

    fn is_over(&self) -> bool {
        self.go.exists() || self.since.elapsed() > HOLD_LIMIT
    }

    fn wait_here(self) {
        while !self.is_over() {
            std::thread::sleep(HOLD_POLL);
        }
    }

    pub async fn wait_async(self) {
        while !self.is_over() {
            tokio::time::sleep(HOLD_POLL).await;
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    on: String,
    #[serde(default = "first")]
    nth: u64,
    #[serde(default)]
    repeat: bool,
    #[serde(rename = "do")]
    fault: Fault,
    #[serde(skip)]
    seen: AtomicU64,
}

fn first() -> u64 {
    1
}

impl Rule {
    fn fires(&self) -> bool {
        let count = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        count == self.nth || (self.repeat && count > self.nth)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Faults {
    rules: Vec<Rule>,
}

impl Faults {
    fn find_fault(
        &self,
        on: impl Fn(&str) -> bool,
        kind: impl Fn(&Fault) -> bool,
    ) -> Option<Fault> {
        self.rules
            .iter()
            .filter(|rule| on(&rule.on) && kind(&rule.fault))
            .find(|rule| rule.fires())
            .map(|rule| rule.fault.clone())
    }

    pub fn on_send(&self, name: &str) -> Option<Fault> {
        self.find_fault(|on| on == name || on == "*", |_| true)
    }

    pub fn flip_page(&self) -> bool {
        self.find_fault(|on| on == "PAGE", |fault| *fault == Fault::Flip)
            .is_some()
    }

    pub fn transport_broken(&self) -> bool {
        self.find_fault(|on| on == "PAGE", |fault| *fault == Fault::Break)
            .is_some()
    }

    /// Delay of a page: a slow link.
    pub fn page_delay(&self) -> Option<Duration> {
        let is_delay = |fault: &Fault| matches!(fault, Fault::DelayMs(_));
        match self.find_fault(|on| on == "PAGE", is_delay)? {
            Fault::DelayMs(ms) => Some(Duration::from_millis(ms)),
            _ => None,
        }
    }

    /// Block the calling thread for the delay of a page.
    pub fn delay_page(&self) {
        if let Some(delay) = self.page_delay() {
            std::thread::sleep(delay);
        }
    }

    /// Block the calling thread at the hold between the copy and the second generation check.
    pub fn wait_copied(&self) {
        if let Some(hold) = self.hold_copied() {
            hold.wait_here();
        }
    }

    /// Hold between the copy and the second generation check.
    pub fn hold_copied(&self) -> Option<Hold> {
        match self.find_fault(|on| on == "COPIED", |fault| matches!(fault, Fault::Hold(_)))? {
            Fault::Hold(path) => Some(Hold::open_file(&path)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_fires_at_its_number_and_repeats_only_if_asked() {
        let faults: Faults = serde_json::from_str(
            r#"{"rules": [{"on": "PROGRESS", "nth": 2, "do": "drop"}, {"on": "PAGE", "do": "flip", "repeat": true}, {"on": "DONE", "do": {"delay_ms": 5}}]}"#,
        )
        .expect("valid rules");
        assert_eq!(faults.on_send("PROGRESS"), None);
        assert_eq!(faults.on_send("OPEN"), None);
        assert_eq!(faults.on_send("PROGRESS"), Some(Fault::Drop));
        assert_eq!(faults.on_send("PROGRESS"), None);
        assert!(faults.flip_page() && faults.flip_page());
        assert_eq!(faults.on_send("DONE"), Some(Fault::DelayMs(5)));
        assert!(
            serde_json::from_str::<Faults>(r#"{"rules": [{"on": "X", "do": "explode"}]}"#).is_err()
        );
    }
}
