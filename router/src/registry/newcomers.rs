//! Workers that were registered a moment ago and not asked yet. A request that would find nobody waits for their first
//! probes, so that a router is of use from its first moment on, and a worker from its registration.

use std::time::Duration;

use router_core::Role;
use tokio::sync::watch;
use tokio::time::timeout;

use super::Registry;

/// A probe takes milliseconds; who is silent for this long is not waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How many there are.
#[derive(Default)]
pub struct Newcomers(watch::Sender<usize>);

/// A worker until its first probe has ended.
pub struct Newcomer(watch::Sender<usize>);

impl Registry {
    /// Of a worker whose task begins to probe it.
    pub fn newcomer(&self) -> Newcomer {
        self.newcomers.one_more()
    }

    /// While one of these roles has nobody ready and a worker was not asked yet: wait for that, a second at most.
    pub async fn introductions(&self, roles: &[Role]) {
        let is_settled = || roles.iter().all(|role| self.count(*role).1 > 0);
        self.newcomers.wait_unless(is_settled).await;
    }
}

impl Newcomers {
    fn one_more(&self) -> Newcomer {
        self.0.send_modify(|count| *count += 1);
        Newcomer(self.0.clone())
    }

    /// Wait until they all have been asked, or `is_settled` says that the others need not be.
    async fn wait_unless(&self, is_settled: impl Fn() -> bool) {
        if *self.0.borrow() == 0 {
            return;
        }
        let mut count = self.0.subscribe();
        let all_asked = async {
            loop {
                let left = *count.borrow_and_update();
                if left == 0 || is_settled() || count.changed().await.is_err() {
                    return;
                }
            }
        };
        let _ = timeout(LONGEST_WAIT, all_asked).await; // too late: the request is told who is not ready
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::time::Instant;

    use super::*;

    async fn waited(newcomers: &Newcomers, is_settled: impl Fn() -> bool) -> Duration {
        let begin = Instant::now();
        newcomers.wait_unless(is_settled).await;
        begin.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_waited_for_longer_than_it_helps() {
        let newcomers = Newcomers::default();
        assert_eq!(
            waited(&newcomers, || false).await,
            Duration::ZERO,
            "there are none"
        );
        let (first, second) = (newcomers.one_more(), newcomers.one_more());
        assert_eq!(
            waited(&newcomers, || true).await,
            Duration::ZERO,
            "others are ready"
        );
        assert_eq!(
            waited(&newcomers, || false).await,
            LONGEST_WAIT,
            "both are silent"
        );
        let is_ready = AtomicBool::new(false);
        let one_answers = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            is_ready.store(true, Ordering::SeqCst);
            drop(first);
        };
        let (took, ()) = tokio::join!(
            waited(&newcomers, || is_ready.load(Ordering::SeqCst)),
            one_answers
        );
        assert_eq!(took, Duration::from_millis(20), "one is enough");
        drop(second);
        assert_eq!(
            waited(&newcomers, || false).await,
            Duration::ZERO,
            "all were asked"
        );
    }
}
