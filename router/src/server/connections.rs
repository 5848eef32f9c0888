//! Places of connections: how many clients hold, in all and per source address, and which of them
//! are closed when a new client needs one.
//!
//! The life of a place:
//!
//! 1. taken by a new connection, which waits for its first request;
//! 2. while a request is in progress, from its whole head to the last byte of its answer, the place
//!    cannot be claimed;
//! 3. where there is none for a new client, the one that has waited longest without a request is
//!    claimed: of the same address if that has its share, else of all;
//! 4. its connection ends, unless a request began at the same time: then another one is claimed;
//! 5. released when the connection has ended.
//!
//! Invariant: no more than the limit are open, those that end for another included.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::config::{AddressBlock, LimitFlags};

/// The network of an IPv6 address: a client chooses its own addresses within it.
const IPV6_NETWORK: u128 = !(u64::MAX as u128);

/// A new connection keeps its place for so long, in which the runtime sees what it sent at once.
const FRESH: Duration = Duration::from_millis(20);

/// How many places there are.
#[derive(Debug, Clone)]
pub struct PlaceLimits {
    pub all: usize,
    /// Most of one address; `None`: as many as there are.
    pub per_address: Option<usize>,
    /// Addresses that may have all places.
    pub trusted_proxies: Vec<AddressBlock>,
}

impl PlaceLimits {
    /// Limits of the listener for clients.
    pub fn of(limits: &LimitFlags) -> Self {
        Self {
            all: limits.max_connections,
            per_address: limits.connections_per_address(),
            trusted_proxies: limits.trusted_proxies.clone(),
        }
    }

    /// The most that `client` may have; `None`: all.
    fn share(&self, client: IpAddr) -> Option<usize> {
        let mut proxies = self.trusted_proxies.iter();
        let is_proxy = proxies.any(|block| block.contains(client));
        self.per_address.filter(|_| !is_proxy)
    }
}

/// Places of one listener.
pub struct PlaceTable {
    limits: PlaceLimits,
    places: Mutex<Places>,
    /// Notified when a place is released, or its connection begins to wait for a request, while
    /// the listener waits for that.
    changed: Notify,
}

#[derive(Default)]
struct Places {
    open: usize,
    /// Turn of the next connection that begins to wait.
    next_turn: u64,
    /// Connections without a request. A low turn has waited long.
    waiting: BTreeMap<u64, Arc<PlaceState>>,
    by_source: HashMap<IpAddr, SourcePlaces>,
    /// The listener waits for `changed`.
    is_awaited: bool,
}

#[derive(Default)]
struct SourcePlaces {
    open: usize,
    /// Turns of its connections without a request.
    waiting: BTreeSet<u64>,
}

/// State that a place shares with the table. `activity` is locked after `PlaceTable::places`.
struct PlaceState {
    source: IpAddr,
    activity: Mutex<Activity>,
    /// Notified when the place is claimed.
    claimed: Notify,
    /// Notified when the claimed place is released, or kept for a request that began.
    settled: Notify,
}

#[derive(Clone, Copy)]
enum Activity {
    /// No request is in progress since this turn.
    Waiting(u64),
    Busy,
    /// The connection ends, unless a request begins first.
    Claimed,
}

/// Result of a search for a place.
enum Vacancy {
    Free,
    /// `other` ends soon, because the table is full, or its address has its share.
    Claimed {
        other: Arc<PlaceState>,
        is_full: bool,
    },
    /// The connections of the address all have requests, and it has its share.
    ShareInUse,
    /// All connections have requests.
    NoneWaits,
}

impl PlaceTable {
    pub fn new(limits: PlaceLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            places: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Waits for a place for a connection of `client`; calls `on_full` when all are in use. `None`:
    /// the connections of the address all have requests, and it has its share.
    pub async fn take(
        self: &Arc<Self>,
        client: IpAddr,
        mut on_full: impl FnMut(),
    ) -> Option<Place> {
        let source = source_of(client);
        loop {
            match self.find_vacancy(client, source) {
                Vacancy::Free => return Some(self.open(source)),
                Vacancy::Claimed { other, is_full } => {
                    if is_full {
                        on_full();
                    }
                    other.claimed.notify_one();
                    // Not before it has ended: the sockets that are open stay below the limit.
                    other.settled.notified().await;
                }
                Vacancy::ShareInUse => return None,
                Vacancy::NoneWaits => {
                    on_full();
                    self.changed.notified().await;
                }
            }
        }
    }

    fn find_vacancy(&self, client: IpAddr, source: IpAddr) -> Vacancy {
        let places = &mut *self.places.lock();
        places.is_awaited = false;
        let own = places.by_source.get(&source);
        let has_share = |own: &&SourcePlaces| {
            let share = self.limits.share(client);
            share.is_some_and(|share| own.open >= share)
        };
        let full_source = own.filter(has_share);
        let is_full = full_source.is_none();
        let turn = match full_source {
            Some(own) => own.waiting.first().copied(),
            // The share of the address goes first: a client with many idle connections claims its
            // own.
            None if places.open < self.limits.all => return Vacancy::Free,
            None => places.waiting.keys().next().copied(),
        };
        match turn.and_then(|turn| places.end_wait(turn)) {
            Some(other) => {
                *other.activity.lock() = Activity::Claimed;
                Vacancy::Claimed { other, is_full }
            }
            // Waiting for one of its requests would keep the clients behind it waiting, too.
            None if !is_full => Vacancy::ShareInUse,
            None => {
                places.is_awaited = true;
                Vacancy::NoneWaits
            }
        }
    }

    fn open(self: &Arc<Self>, source: IpAddr) -> Place {
        let places = &mut *self.places.lock();
        places.open += 1;
        places.by_source.entry(source).or_default().open += 1;
        let state = Arc::new(PlaceState {
            source,
            activity: Mutex::new(Activity::Busy),
            claimed: Notify::new(),
            settled: Notify::new(),
        });
        places.begin_wait(&state);
        Place {
            table: self.clone(),
            state,
            taken_at: Instant::now(),
        }
    }
}

impl Places {
    fn begin_wait(&mut self, state: &Arc<PlaceState>) {
        let turn = self.next_turn;
        self.next_turn += 1;
        *state.activity.lock() = Activity::Waiting(turn);
        self.waiting.insert(turn, state.clone());
        let source = self.by_source.entry(state.source).or_default();
        source.waiting.insert(turn);
    }

    fn end_wait(&mut self, turn: u64) -> Option<Arc<PlaceState>> {
        let state = self.waiting.remove(&turn)?;
        if let Some(source) = self.by_source.get_mut(&state.source) {
            source.waiting.remove(&turn);
        }
        Some(state)
    }
}

/// A connection's place, until it is dropped.
pub struct Place {
    table: Arc<PlaceTable>,
    state: Arc<PlaceState>,
    taken_at: Instant,
}

impl Place {
    /// A request's head is whole: the place cannot be claimed, and is kept if it was just claimed.
    pub fn begin_request(&self) {
        let places = &mut *self.table.places.lock();
        let activity = std::mem::replace(&mut *self.state.activity.lock(), Activity::Busy);
        match activity {
            Activity::Waiting(turn) => {
                places.end_wait(turn);
            }
            Activity::Claimed => self.state.settled.notify_one(),
            Activity::Busy => {}
        }
    }

    /// The last byte of an answer was sent, or no request has come yet.
    pub fn await_request(&self) {
        let places = &mut *self.table.places.lock();
        let activity = *self.state.activity.lock();
        // Still waiting is an older turn, and a claimed place stays claimed.
        if matches!(activity, Activity::Busy) {
            places.begin_wait(&self.state);
            self.table.note_change(places);
        }
    }

    /// Waits until the connection should end for another one.
    pub async fn until_claimed(&self) {
        loop {
            if !self.is_claimed() {
                self.state.claimed.notified().await;
                continue;
            }
            let age = self.taken_at.elapsed();
            if age >= FRESH {
                return;
            }
            // The head of a request may have come already, and not be read before this.
            sleep(FRESH - age).await;
        }
    }

    fn is_claimed(&self) -> bool {
        matches!(*self.state.activity.lock(), Activity::Claimed)
    }
}

impl PlaceTable {
    fn note_change(&self, places: &mut Places) {
        // A permit without a waiter would let a later wait end at once, for nothing.
        if std::mem::take(&mut places.is_awaited) {
            self.changed.notify_one();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let places = &mut *self.table.places.lock();
        places.open -= 1;
        match *self.state.activity.lock() {
            Activity::Waiting(turn) => {
                places.end_wait(turn);
            }
            Activity::Claimed => self.state.settled.notify_one(),
            Activity::Busy => {}
        }
        if let Entry::Occupied(mut source) = places.by_source.entry(self.state.source) {
            source.get_mut().open -= 1;
            if source.get().open == 0 {
                source.remove();
            }
        }
        self.table.note_change(places);
    }
}

/// Source that counts as one client: an IPv4 address, or the network of an IPv6 address.
pub fn source_of(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & IPV6_NETWORK).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    fn table(all: usize, per_address: Option<usize>, proxies: &[&str]) -> Arc<PlaceTable> {
        let trusted_proxies = proxies.iter().map(|text| text.parse().unwrap()).collect();
        PlaceTable::new(PlaceLimits {
            all,
            per_address,
            trusted_proxies,
        })
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// A connection's task: ends when its place is claimed.
    fn hold(place: Place) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move { place.until_claimed().await })
    }

    async fn take(table: &Arc<PlaceTable>, client: &str) -> Option<Place> {
        let taken = table.take(address(client), || {});
        timeout(Duration::from_secs(30), taken).await.unwrap()
    }

    #[tokio::test]
    async fn longest_waiting_connection_without_request_gives_its_place() {
        let table = table(3, None, &[]);
        let busy = take(&table, "10.0.0.1").await.unwrap();
        busy.begin_request();
        let first = take(&table, "10.0.0.2").await.unwrap();
        // After its request it waits behind the third one.
        first.begin_request();
        let third = hold(take(&table, "10.0.0.3").await.unwrap());
        first.await_request();
        let first = hold(first);
        let _fourth = take(&table, "10.0.0.4").await.unwrap();
        third.await.unwrap();
        assert!(!first.is_finished());
        let _fifth = take(&table, "10.0.0.5").await.unwrap();
        first.await.unwrap();
        assert_eq!(table.places.lock().open, 3);
    }

    #[tokio::test]
    async fn address_with_its_share_displaces_its_own_connections_alone() {
        let table = table(100, Some(2), &[]);
        let other = hold(take(&table, "10.0.0.9").await.unwrap());
        let first = hold(take(&table, "10.0.0.1").await.unwrap());
        let second = take(&table, "10.0.0.1").await.unwrap();
        second.begin_request();
        let third = take(&table, "10.0.0.1").await.unwrap();
        first.await.unwrap();
        third.begin_request();
        assert!(
            take(&table, "10.0.0.1").await.is_none(),
            "two have requests"
        );
        drop(third);
        assert!(take(&table, "10.0.0.1").await.is_some());
        assert!(!other.is_finished());
    }

    #[tokio::test]
    async fn trusted_proxy_has_no_share_and_an_ipv6_network_has_one() {
        let table = table(100, Some(1), &["10.1.0.0/16", "::1"]);
        let mut held = Vec::new();
        for client in [
            "10.1.2.3",
            "10.1.2.3",
            "::1",
            "::1",
            "::ffff:10.1.9.9",
            "fd00::1",
        ] {
            let place = take(&table, client).await.unwrap();
            place.begin_request();
            held.push(place);
        }
        assert!(
            take(&table, "fd00::2").await.is_none(),
            "the network of fd00::1"
        );
        assert!(take(&table, "fd00:0:0:1::2").await.is_some());
    }

    #[tokio::test]
    async fn request_that_begins_while_its_place_is_claimed_keeps_it() {
        let table = table(2, None, &[]);
        let first = take(&table, "10.0.0.1").await.unwrap();
        let second = hold(take(&table, "10.0.0.2").await.unwrap());
        let taking = tokio::spawn({
            let table = table.clone();
            async move { take(&table, "10.0.0.3").await }
        });
        // Its connection sees the claim only after the head of a request.
        while !matches!(*first.state.activity.lock(), Activity::Claimed) {
            tokio::task::yield_now().await;
        }
        first.begin_request();
        assert!(taking.await.unwrap().is_some());
        second.await.unwrap();
        let claimed = first.until_claimed();
        tokio::pin!(claimed);
        assert!(
            futures_util::poll!(claimed).is_pending(),
            "it has a request"
        );
    }

    #[tokio::test]
    async fn listener_full_of_requests_waits_for_the_end_of_one() {
        let table = table(1, None, &[]);
        let busy = take(&table, "10.0.0.1").await.unwrap();
        busy.begin_request();
        let taking = table.take(address("10.0.0.2"), || {});
        tokio::pin!(taking);
        assert!(futures_util::poll!(taking.as_mut()).is_pending());
        busy.await_request();
        let _busy = hold(busy);
        let taken = timeout(Duration::from_secs(30), taking).await.unwrap();
        assert!(taken.is_some());
        assert_eq!(table.places.lock().by_source.len(), 1);
    }
}
