use super::*;

#[test]
fn codes_are_read_from_the_nested_object_only() {
    assert_eq!(
        error_code(br#"{"error":{"message":"m","code":"queue_full"}}"#).as_deref(),
        Some("queue_full")
    );
    for body in [
        &b"oops"[..],
        b"{}",
        br#"{"error":"x"}"#,
        br#"{"error":{"code":500}}"#,
    ] {
        assert_eq!(error_code(body), None);
    }
}

#[test]
fn retry_after_is_read_in_seconds_and_as_a_date() {
    let read = |text: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(header::RETRY_AFTER, text.parse().unwrap());
        retry_after_ms(&headers)
    };
    assert_eq!(read("7"), Some(7_000));
    assert_eq!(read("Sun, 06 Nov 1994 08:49:37 GMT"), Some(0));
    assert!(read("Thu, 01 Jan 2099 00:00:00 GMT").is_some_and(|ms| ms > 1_000_000));
    assert_eq!(["soon", "-1", ""].map(read), [None; 3]);
    assert_eq!(retry_after_ms(&HeaderMap::new()), None);
}

/// A future is copied each time it is handed on, a dozen times per request when it is spawned. With
/// the TLS handshake of a new connection in it, it had 12 KB, of which P + D copied 160 KB per
/// request.
#[test]
fn attempt_is_small_enough_to_be_moved() {
    fn future_bytes<F: Future>(_: impl Fn(UpstreamAttempt) -> F) -> usize {
        size_of::<F>()
    }
    let open = future_bytes(UpstreamAttempt::open);
    let drain = future_bytes(|attempt: UpstreamAttempt| attempt.drain(false));
    assert!(
        open.max(drain) < 6 << 10,
        "open {open} bytes, drain {drain} bytes"
    );
}
