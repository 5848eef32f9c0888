//! Headers that belong to one connection.

use http::{HeaderMap, HeaderName, header};

static HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers that are for the worker whatever `Connection` names (RFC 9110, 7.6.1: a sender must not
/// name those that are intended for all recipients): without its credentials a worker would refuse
/// a request that the router has accepted, and without its id the two logs would not fit together.
static END_TO_END: [HeaderName; 4] = [
    header::AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    header::CONTENT_TYPE,
    HeaderName::from_static("x-request-id"),
];

/// Remove headers that belong to one connection, those that `Connection` names included (RFC 9110,
/// 7.6.1), and those for which `is_own` holds.
pub fn remove_hop_by_hop(headers: &mut HeaderMap, is_own: impl Fn(&HeaderName) -> bool) {
    let nominated: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .filter(|name| !END_TO_END.contains(name))
        .collect();
    // Comparing a name is much cheaper than looking it up, and most are not there.
    let is_removed =
        |name: &&HeaderName| HOP_BY_HOP.contains(name) || nominated.contains(name) || is_own(name);
    let removed: Vec<HeaderName> = headers.keys().filter(is_removed).cloned().collect();
    for name in removed {
        headers.remove(name);
    }
}

/// Headers of a worker's answer that belong to the answer, not to its connection.
pub fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    remove_hop_by_hop(&mut kept, |name| *name == header::CONTENT_LENGTH);
    kept
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn headers_that_connection_names_are_removed_with_it() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Secret"),
            ("connection", "http2-settings,,"),
            ("x-secret", "1"),
            ("http2-settings", "AAMAAABk"),
            ("te", "trailers"),
            ("x-more", "1"),
            ("x-kept", "1"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers, |name| name == "x-more");
        let left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(left, ["x-kept"]);
    }

    #[test]
    fn credentials_and_ids_are_end_to_end_whatever_connection_names() {
        let mut headers = HeaderMap::new();
        for name in &END_TO_END {
            headers.append(name, HeaderValue::from_static("kept"));
            headers.append(header::CONNECTION, HeaderValue::from(name.clone()));
        }
        remove_hop_by_hop(&mut headers, |_| false);
        assert_eq!(headers.len(), END_TO_END.len());
        assert!(headers.values().all(|value| value == "kept"));
    }
}
