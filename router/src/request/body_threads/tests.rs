use std::thread::current;

use futures_util::FutureExt;
use tokio::sync::OwnedSemaphorePermit;

use super::*;

/// Takes all places: work on large bodies waits until the answer is dropped.
pub fn occupy(threads: &BodyThreads) -> OwnedSemaphorePermit {
    let places = u32::try_from(threads.places.available_permits()).unwrap();
    threads
        .places
        .clone()
        .try_acquire_many_owned(places)
        .unwrap()
}

#[tokio::test]
async fn large_bodies_leave_the_thread_and_wait_for_a_place_and_small_ones_do_not() {
    let threads = BodyThreads::default();
    let here = current().id();
    let on = |bytes| threads.run(bytes, || current().id());
    assert_eq!(on(INLINE_BYTES).await.unwrap(), here);
    assert_ne!(on(INLINE_BYTES + 1).await.unwrap(), here);
    let occupied = occupy(&threads);
    assert_eq!(on(INLINE_BYTES).now_or_never(), Some(Ok(here)));
    let mut waiting = Box::pin(on(INLINE_BYTES + 1));
    assert_eq!((&mut waiting).now_or_never(), None);
    drop(occupied);
    assert_ne!(waiting.await.unwrap(), here);
}

#[tokio::test]
async fn panic_of_the_work_is_an_error_and_returns_its_place() {
    let threads = BodyThreads::default();
    let places = threads.places.available_permits();
    let failed = threads.run(1 << 20, || panic!("a defect")).await;
    let err: RouteError = failed.map(|(): ()| ()).unwrap_err();
    assert_eq!(err.code(), "internal_error");
    assert!(err.to_string().contains("1048576 bytes"), "{err}");
    assert_eq!(threads.places.available_permits(), places);
}
