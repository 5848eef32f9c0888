//! How long an HTTP/1 client may take over a request's head: hyper has one timer for that, which
//! begins when the connection begins to wait. Here a connection may lie idle for one time and take
//! another, shorter one from the first byte. While it waits, its place may be claimed for another.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Sleep, Timer};
use tokio::time::Instant;

use crate::server::connections::Place;

/// Timer of one connection, and what its reads tell the timer.
#[derive(Clone)]
pub struct HeaderReadTimeout {
    idle: Duration,
    head: Duration,
    /// A byte came since the connection began to wait for a head.
    head_started: Arc<AtomicBool>,
    place: Arc<Place>,
}

impl HeaderReadTimeout {
    pub fn new(idle: Duration, head: Duration, place: Arc<Place>) -> Self {
        Self {
            idle,
            head,
            head_started: Arc::default(),
            place,
        }
    }

    /// True if a head was begun, and, as the connection ended for its time, never finished.
    pub fn head_started(&self) -> bool {
        self.head_started.load(Ordering::Relaxed)
    }

    /// A byte of the connection was read.
    pub fn note_read(&self) {
        self.head_started.store(true, Ordering::Relaxed);
    }
}

/// hyper starts the timer when all of the last answer was sent; this decides how long it runs.
impl Timer for HeaderReadTimeout {
    fn sleep(&self, _duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.head_started.store(false, Ordering::Relaxed);
        self.place.await_request();
        let sleep = Box::pin(tokio::time::sleep(self.idle));
        Box::pin(Wait {
            limits: self.clone(),
            is_head: false,
            sleep,
        })
    }

    fn sleep_until(&self, _deadline: std::time::Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(self.idle)
    }
}

/// hyper asks it after each read that did not complete the head.
struct Wait {
    limits: HeaderReadTimeout,
    /// True if it runs for a head already.
    is_head: bool,
    sleep: Pin<Box<tokio::time::Sleep>>,
}

impl Sleep for Wait {}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_head && self.limits.head_started() {
            self.is_head = true;
            let until = Instant::now() + self.limits.head;
            self.sleep.as_mut().reset(until);
        }
        self.sleep.as_mut().poll(cx)
    }
}
