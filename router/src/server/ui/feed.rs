//! `GET /ui/feed`: the state of the fleet as server-sent events.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderValue, header};

use super::snapshot::FleetSnapshot;
use crate::dispatch::app::AppState;
use crate::error::RouteError;
use crate::observability::fleet_feed::hub::events;
use crate::response::stream_headers::sse_headers;

pub async fn feed(State(app): State<Arc<AppState>>) -> Result<Response, RouteError> {
    if app.is_draining() {
        return Err(RouteError::Draining);
    }
    let weak = Arc::downgrade(&app);
    let render = move || {
        let app = weak.upgrade()?;
        let snapshot = FleetSnapshot::of(&app);
        let failed = |err: &_| tracing::error!(%err, "cannot write a snapshot of the fleet");
        let json = serde_json::to_vec(&snapshot).inspect_err(failed).ok()?;
        Some((json, snapshot.is_draining))
    };
    let updates = app.feed.join(render)?;
    let mut response = Response::new(Body::from_stream(events(updates)));
    let headers = response.headers_mut();
    sse_headers(headers);
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    Ok(response)
}
