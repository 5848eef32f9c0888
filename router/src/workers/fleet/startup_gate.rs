//! Workers that were registered a moment ago and not asked yet. A request that would find no worker
//! waits for their first probes, so that a router is of use from its first moment on, and a worker
//! from its registration.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

/// A probe takes milliseconds; a worker that is silent for longer is not waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Workers that were not probed yet: each holds a receiver until its first probe has ended.
#[derive(Default)]
pub struct StartupGate(watch::Sender<()>);

pub type PendingProbe = watch::Receiver<()>;

impl StartupGate {
    pub fn one_more(&self) -> PendingProbe {
        self.0.subscribe()
    }

    /// Wait until they all have been asked, or `is_settled` says at one of the changes that the
    /// others need not be. Returns true if there was something to wait for.
    pub(super) async fn wait_unless(
        &self,
        is_settled: impl Fn() -> bool,
        changed: &watch::Sender<()>,
    ) -> bool {
        if self.0.is_closed() || is_settled() {
            return false;
        }
        let mut changes = changed.subscribe();
        let settled = async { while !is_settled() && changes.changed().await.is_ok() {} };
        let all_asked = async {
            tokio::select! {
                () = self.0.closed() => {}
                () = settled => {}
            }
        };
        // too late: the request's error says which workers are not ready
        let _ = timeout(LONGEST_WAIT, all_asked).await;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::FutureExt;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn wait_ends_when_settled_asked_or_after_the_limit() {
        let gate = StartupGate::default();
        let changed = watch::Sender::new(());
        let ends_at_once = |settled| gate.wait_unless(move || settled, &changed).now_or_never();
        assert!(ends_at_once(false).is_some(), "no pending probe");
        let first = gate.one_more();
        let second = gate.one_more();
        assert!(ends_at_once(true).is_some(), "others are ready");
        assert!(ends_at_once(false).is_none(), "both are silent");
        let begin = Instant::now();
        gate.wait_unless(|| false, &changed).await;
        assert!(begin.elapsed() >= LONGEST_WAIT, "both stayed silent");

        let is_ready = AtomicBool::new(false);
        let first_answers = async {
            tokio::task::yield_now().await;
            is_ready.store(true, Ordering::SeqCst);
            changed.send_replace(());
            drop(first);
        };
        let is_settled = || is_ready.load(Ordering::SeqCst);
        tokio::join!(gate.wait_unless(is_settled, &changed), first_answers);
        drop(second);
        assert!(ends_at_once(false).is_some(), "all were asked");
    }
}
