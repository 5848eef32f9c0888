//! Headers of streams of server-sent events.

use http::{HeaderMap, HeaderValue, header};

const MEDIA_TYPE: &str = "text/event-stream";

/// True if the headers announce server-sent events.
pub fn is_sse(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(MEDIA_TYPE.as_bytes()))
}

/// Headers of every stream: proxies must not keep or hold it back.
pub fn sse_headers(headers: &mut HeaderMap) {
    headers
        .entry(header::CONTENT_TYPE)
        .or_insert(HeaderValue::from_static(MEDIA_TYPE));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-cache"));
}
