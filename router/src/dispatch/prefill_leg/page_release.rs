//! Messages to prefill workers about prompts that no decode worker will pull, so that the pages are
//! free at once and not when their lease ends. Best effort: at most `MAX_RELEASES` are sent at a
//! time, each within `LIMIT`; the lease ends anyway.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Uri, header};
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::dispatch::app::AppState;
use crate::transport::request_body::BodySegments;
use crate::transport::upstream::RequestHead;
use crate::workers::worker::Worker;

/// Pages of a Baton worker are kept for 3 s without a reader.
const LIMIT: Duration = Duration::from_secs(2);

/// Have `worker` free the pages that it computed for these rooms. Workers of other makes do not
/// know the request.
pub fn release_pages(app: &Arc<AppState>, worker: &Arc<Worker>, rooms: &[u64]) {
    if !worker.description().is_baton() {
        return;
    }
    let count = |app: &AppState, result| app.metrics.releases.with_label_values(&[result]).inc();
    let Ok(runtime) = Handle::try_current() else {
        count(app, "skipped"); // the process ends
        return;
    };
    let Ok(place) = app.releases.clone().try_acquire_owned() else {
        count(app, "skipped");
        return;
    };
    let body = serde_json::json!({"bootstrap_room": rooms}).to_string();
    let app = app.clone();
    let worker = worker.clone();
    runtime.spawn(async move {
        let mut headers = app.fleet.worker_headers();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        let head = RequestHead::new(Method::POST, Uri::from_static("/abort_request"), headers);
        let sending = async {
            let sent = worker
                .pool
                .send(&head, BodySegments::from(Bytes::from(body)), &|| ())
                .await;
            let mut answer = sent
                .ok()
                .filter(|sent| sent.status().is_success())?
                .into_body();
            while let Some(piece) = answer.piece().await {
                piece.ok()?; // read to its end, the connection can be used again
            }
            Some(())
        };
        let is_sent = matches!(timeout(LIMIT, sending).await, Ok(Some(())));
        count(&app, if is_sent { "sent" } else { "failed" });
        drop(place);
    });
}
