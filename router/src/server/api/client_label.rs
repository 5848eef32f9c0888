//! Which client a request is from, for workers: the header `x-baton-client`.
//!
//! Engines give clients turns by it, where their requests wait for the same thing: all requests
//! come from the address of a router, with the key that all clients share.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

use crate::observability::access_log::ClientAddress;
use crate::observability::worker_headers::headers;
use crate::server::connections::source_of;

pub const HEADER: HeaderName = HeaderName::from_static(headers::CLIENT);

/// Replaces what a client has written itself.
pub fn insert(headers: &mut HeaderMap, client: Option<&ClientAddress>) {
    match client {
        Some(ClientAddress(address)) => {
            headers.insert(HEADER, label(*address));
        }
        None => {
            headers.remove(HEADER);
        }
    }
}

/// A digest: what it is made of is not for workers.
fn label(address: IpAddr) -> HeaderValue {
    let bits = match source_of(address) {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    };
    let digest = Sha256::digest(bits.to_be_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    HeaderValue::from(u64::from_be_bytes(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label_of(address: &str) -> HeaderValue {
        label(address.parse().expect("an address"))
    }

    #[test]
    fn clients_differ_by_address_and_by_ipv6_network() {
        assert_eq!(label_of("192.0.2.1"), label_of("::ffff:192.0.2.1"));
        assert_ne!(label_of("192.0.2.1"), label_of("192.0.2.2"));
        assert_eq!(label_of("2001:db8::1"), label_of("2001:db8::ffff:1"));
        assert_ne!(label_of("2001:db8::1"), label_of("2001:db8:0:1::1"));
    }

    #[test]
    fn label_of_a_client_itself_is_replaced() {
        let mut headers = HeaderMap::new();
        headers.append(HEADER, HeaderValue::from_static("1"));
        headers.append(HEADER, HeaderValue::from_static("2"));
        let client = ClientAddress(IpAddr::from([192, 0, 2, 1]));
        insert(&mut headers, Some(&client));
        let sent: Vec<_> = headers.get_all(HEADER).iter().collect();
        assert_eq!(sent, [label_of("192.0.2.1")]);
        insert(&mut headers, None);
        assert!(headers.is_empty());
    }
}
