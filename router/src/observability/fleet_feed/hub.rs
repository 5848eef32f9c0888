//! Feed of the fleet's state to web pages (`GET /ui/feed`): server-sent events, one shared snapshot
//! per second.
//!
//! 1. a page joins: it gets the latest snapshot at once; the first page starts the ticker;
//! 2. the ticker renders a snapshot each `PERIOD`, once for all pages. A page that reads slowly
//!    skips snapshots: only the latest one waits for it. The events keep the connection alive:
//!    there is one each second;
//! 3. a page leaves: its place is free. The ticker ends with the last page, and nothing is computed
//!    for none;
//! 4. the router drains: each page gets a last snapshot, and its stream ends.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use parking_lot::Mutex;
use prometheus::{Gauge, IntCounter};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::error::RouteError;

/// Pause between two snapshots.
const PERIOD: Duration = Duration::from_secs(1);
/// Most pages that listen at once: each costs a connection and a copy of the snapshot to the socket
/// per second.
pub const MAX_CLIENTS: usize = 64;

/// Event of the feed, rendered once.
#[derive(Debug, Clone, Default)]
pub struct RenderedSnapshot {
    /// Empty while the ticker does not run.
    event: Bytes,
    /// Set when the router drains: nothing follows.
    is_last: bool,
}

/// The pages that listen.
#[derive(Debug)]
pub struct FeedHub {
    period: Duration,
    /// True while the ticker runs. Locked while a page joins.
    is_ticking: Mutex<bool>,
    latest: watch::Sender<RenderedSnapshot>,
    clients: Gauge,
    snapshots: IntCounter,
}

impl FeedHub {
    pub fn new(clients: Gauge, snapshots: IntCounter) -> Self {
        let is_ticking = Mutex::default();
        let latest = watch::Sender::default();
        Self {
            period: PERIOD,
            is_ticking,
            latest,
            clients,
            snapshots,
        }
    }

    /// Take a place, which is free again when the receiver is dropped, and start the ticker if it
    /// does not run. `render` returns a snapshot as JSON and whether it is the last one, or `None`
    /// to end at once.
    pub fn join(
        self: &Arc<Self>,
        render: impl FnMut() -> Option<(Vec<u8>, bool)> + Send + 'static,
    ) -> Result<watch::Receiver<RenderedSnapshot>, RouteError> {
        let mut is_ticking = self.is_ticking.lock();
        if self.latest.borrow().is_last {
            return Err(RouteError::Draining);
        }
        if self.latest.receiver_count() >= MAX_CLIENTS {
            return Err(RouteError::FeedFull { limit: MAX_CLIENTS });
        }
        let mut updates = self.latest.subscribe();
        if std::mem::replace(&mut *is_ticking, true) {
            updates.mark_changed();
        } else {
            tokio::spawn(self.clone().tick(render));
        }
        Ok(updates)
    }

    /// Update the gauge of listening pages.
    pub fn update_clients(&self) {
        self.clients.set(self.latest.receiver_count() as f64);
    }

    async fn tick(self: Arc<Self>, mut render: impl FnMut() -> Option<(Vec<u8>, bool)>) {
        let mut turn = interval(self.period);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turn.tick().await;
            if self.stop_if_unheard() {
                return;
            }
            let (event, is_last) = match render() {
                Some((json, is_last)) => (
                    [b"event: snapshot\ndata: ", &json[..], b"\n\n"]
                        .concat()
                        .into(),
                    is_last,
                ),
                None => (Bytes::new(), true),
            };
            self.snapshots.inc();
            self.latest
                .send_replace(RenderedSnapshot { event, is_last });
            if is_last {
                return;
            }
        }
    }

    /// True, and the ticker counts as ended, if no page listens.
    fn stop_if_unheard(&self) -> bool {
        let mut is_ticking = self.is_ticking.lock();
        *is_ticking = self.latest.receiver_count() > 0;
        if !*is_ticking {
            self.latest.send_replace(RenderedSnapshot::default());
        }
        !*is_ticking
    }
}

/// Events until the router drains or the page leaves.
pub fn events(
    updates: watch::Receiver<RenderedSnapshot>,
) -> impl stream::Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold((updates, false), |(mut updates, is_over)| async move {
        if is_over {
            return None;
        }
        loop {
            updates.changed().await.ok()?;
            let latest = updates.borrow_and_update().clone();
            if !latest.event.is_empty() {
                return Some((Ok(latest.event), (updates, latest.is_last)));
            }
            if latest.is_last {
                return None;
            }
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::StreamExt;
    use tokio::time::{sleep, timeout};

    use super::*;

    /// Snapshots come as fast as they are taken.
    const SHORT: Duration = Duration::from_millis(1);
    /// A test sees the first snapshot only.
    const LONG: Duration = Duration::from_secs(3600);
    /// Reached only when something hangs.
    const DEADLINE: Duration = Duration::from_secs(30);

    type Page = Pin<Box<dyn stream::Stream<Item = Result<Bytes, Infallible>>>>;

    struct Scene {
        hub: Arc<FeedHub>,
        /// Snapshots rendered.
        renders: Arc<AtomicUsize>,
    }

    impl Scene {
        fn new(period: Duration) -> Self {
            let clients = Gauge::new("clients", "c").unwrap();
            let snapshots = IntCounter::new("snapshots", "s").unwrap();
            let hub = FeedHub {
                period,
                ..FeedHub::new(clients, snapshots)
            };
            Self {
                hub: Arc::new(hub),
                renders: Arc::default(),
            }
        }

        /// A page; the snapshots count up, and the one with the number `last` ends the feed.
        fn page(&self, last: usize) -> Result<Page, RouteError> {
            let renders = self.renders.clone();
            let render = move || {
                let number = renders.fetch_add(1, Ordering::SeqCst) + 1;
                Some((number.to_string().into_bytes(), number == last))
            };
            Ok(Box::pin(events(self.hub.join(render)?)))
        }

        fn clients(&self) -> f64 {
            self.hub.update_clients();
            self.hub.clients.get()
        }

        fn rendered(&self) -> usize {
            self.renders.load(Ordering::SeqCst)
        }

        async fn until(&self, is_true: impl Fn(&Self) -> bool) {
            let asking = async {
                while !is_true(self) {
                    sleep(SHORT).await;
                }
            };
            timeout(DEADLINE, asking).await.unwrap();
        }
    }

    /// Number of the page's next snapshot; `None` at the end.
    async fn next(page: &mut Page) -> Option<usize> {
        let event = timeout(DEADLINE, page.next()).await.unwrap()?.unwrap();
        let text = std::str::from_utf8(&event).unwrap();
        let data = text.strip_prefix("event: snapshot\ndata: ").unwrap();
        Some(data.strip_suffix("\n\n").unwrap().parse().unwrap())
    }

    #[tokio::test]
    async fn pages_share_snapshots_and_a_late_one_gets_the_latest_at_once() {
        let scene = Scene::new(LONG);
        let mut first = scene.page(0).unwrap();
        let mut second = scene.page(0).unwrap();
        assert_eq!(
            (next(&mut first).await, next(&mut second).await),
            (Some(1), Some(1))
        );
        let mut late = scene.page(0).unwrap();
        assert_eq!(next(&mut late).await, Some(1));
        assert_eq!((scene.rendered(), scene.hub.snapshots.get()), (1, 1));
    }

    #[tokio::test]
    async fn page_that_does_not_read_skips_to_the_latest_snapshot() {
        let scene = Scene::new(SHORT);
        let mut page = scene.page(0).unwrap();
        assert!(next(&mut page).await.is_some());
        let before = scene.rendered();
        scene.until(|scene| scene.rendered() > before + 10).await;
        assert!(
            next(&mut page).await > Some(before + 9),
            "one snapshot waits, not ten"
        );
    }

    #[tokio::test]
    async fn ticker_ends_with_the_last_page_and_starts_with_the_next() {
        let scene = Scene::new(SHORT);
        let mut first = scene.page(0).unwrap();
        let second = scene.page(0).unwrap();
        drop(second);
        assert!(next(&mut first).await.is_some());
        assert_eq!(scene.clients(), 1.0);
        drop(first);
        assert_eq!(scene.clients(), 0.0);
        scene.until(|scene| !*scene.hub.is_ticking.lock()).await;
        let before = scene.rendered();
        let mut again = scene.page(0).unwrap();
        assert!(next(&mut again).await > Some(before), "a new snapshot");
    }

    #[tokio::test]
    async fn pages_beyond_the_limit_are_refused_until_one_leaves() {
        let scene = Scene::new(LONG);
        let mut pages: Vec<_> = (0..MAX_CLIENTS).map(|_| scene.page(0).unwrap()).collect();
        let refused = scene.page(0).err();
        assert_eq!(refused, Some(RouteError::FeedFull { limit: MAX_CLIENTS }));
        assert_eq!(scene.clients(), MAX_CLIENTS as f64);
        pages.pop();
        assert!(scene.page(0).is_ok());
    }

    #[tokio::test]
    async fn streams_end_with_the_last_snapshot_and_no_page_joins_any_more() {
        let scene = Scene::new(SHORT);
        let mut page = scene.page(3).unwrap();
        let mut last = None;
        while let Some(number) = next(&mut page).await {
            last = Some(number);
        }
        assert_eq!((last, scene.rendered()), (Some(3), 3));
        assert_eq!(scene.page(3).err(), Some(RouteError::Draining));
    }
}
