//! Headers of streams of server-sent events.

use http::{HeaderMap, HeaderValue, header};

const MEDIA_TYPE: &str = "text/event-stream";

/// True if the headers announce server-sent events. Names of media types have no case, and
/// parameters may follow them (RFC 9110, 8.3.1).
pub fn is_sse(headers: &HeaderMap) -> bool {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else {
        return false;
    };
    let name = kind.as_bytes().split(|byte| *byte == b';').next();
    name.is_some_and(|name| {
        name.trim_ascii()
            .eq_ignore_ascii_case(MEDIA_TYPE.as_bytes())
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_type_is_compared_without_case_and_parameters() {
        for (kind, is_stream) in [
            ("text/event-stream", true),
            ("Text/Event-Stream", true),
            ("TEXT/EVENT-STREAM;charset=UTF-8", true),
            ("text/event-stream ; charset=utf-8; x=\"a;b\"", true),
            ("text/event-streams", false),
            ("application/json", false),
            ("application/json; x=text/event-stream", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            assert_eq!(is_sse(&headers), is_stream, "{kind}");
        }
        assert!(!is_sse(&HeaderMap::new()));
    }
}
