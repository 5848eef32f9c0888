use super::*;

#[test]
fn codes_are_read_from_the_nested_object_only() {
    assert_eq!(
        code_of(br#"{"error":{"message":"m","code":"queue_full"}}"#).as_deref(),
        Some("queue_full")
    );
    for body in [&b"oops"[..], b"{}", br#"{"error":"x"}"#, br#"{"error":{"code":500}}"#] {
        assert_eq!(code_of(body), None);
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

#[test]
fn error_events_are_recognised_at_the_front() {
    let event = b"data: {\"error\":{\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
    assert_eq!(code_of(error_event(event).unwrap()).as_deref(), Some("draining"));
    assert!(error_event(b"event: error\ndata: {\"error\": {}}\n\n").is_some());
    assert!(error_event(b"data: {\"choices\":[\"error\"]}\n\n").is_none());
    assert!(error_event(b": keep-alive\n\n").is_none());
}

#[test]
fn error_behind_other_events_is_found_however_the_stream_is_cut() {
    let error = "data: {\"error\":{\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
    for before in
        ["", "data: {\"choices\":[]}\n\n", ": keep-alive\n\ndata: {\"a\":1}\r\n\r\n: x\n\n"]
    {
        for error in [error.to_owned(), format!("event: error\n{error}")] {
            let text = format!("{before}{error}");
            for cut in 0..text.len() {
                let (first, second) = text.as_bytes().split_at(cut);
                let mut finder = ErrorFinder::default();
                let (first, second) = (finder.find(first), finder.find(second));
                let found = first.or(second).unwrap();
                assert!(text.as_bytes()[before.len()..].starts_with(&found), "{cut}");
                let code = error_event(&found).and_then(code_of);
                assert_eq!(code.as_deref(), Some("draining"), "{cut}");
            }
            let mut finder = ErrorFinder::default();
            let mut found = text.bytes().filter_map(|byte| finder.find(&[byte]));
            assert!(found.next().is_some());
        }
    }
    let mut finder = ErrorFinder::default();
    let answer = b"data: {\"text\":\"data: {\\\"error\\\"\"}\n\ndata: [DONE]\n\n";
    assert!(answer.iter().all(|byte| finder.find(&[*byte]).is_none()));
    assert!(finder.text.len() < answer.len());
}

#[test]
fn start_of_a_stream_is_recognized_however_it_is_cut() {
    let error = "data: {\"error\":{\"code\":\"draining\"}}\n\n";
    for (before, event) in
        [("", error.to_owned()), (": keep-alive\n\n: x\r\n\r\n", format!("event: error\n{error}"))]
    {
        let text = format!("{before}{event}");
        for cut in 1..text.len() - 1 {
            let expected = match cut > before.len() {
                true => StreamStart::Unclear,
                false => StreamStart::Comment,
            };
            assert_eq!(stream_start(&text.as_bytes()[..cut]), expected, "{cut}");
        }
        let whole = stream_start(text.as_bytes());
        assert_eq!(whole, StreamStart::Error(before.len()));
    }
    for answer in ["data: {\"choices\":[", "data: {}\n\n", "id: 1\n", "event: x\n"] {
        assert_eq!(stream_start(answer.as_bytes()), StreamStart::Answer);
    }
}
