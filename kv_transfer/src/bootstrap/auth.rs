//! The signature of a bootstrap request.

use std::time::{SystemTime, UNIX_EPOCH};

use hmac::{Hmac, Mac};
use sha2::Sha256;

pub const AUTH_HEADER: &str = "x-baton-auth";
/// A signature is refused after this time; hosts' clocks must agree better than that.
const MAX_AGE_MS: u64 = 300_000;

pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |age| age.as_millis() as u64)
}

fn mac(key: &str, method: &str, path: &str, at_ms: u64, body: &[u8]) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("HMAC takes keys of any length");
    mac.update(format!("{method}\n{path}\n{at_ms}\n").as_bytes());
    mac.update(body);
    mac
}

pub fn sign(key: &str, method: &str, path: &str, at_ms: u64, body: &[u8]) -> String {
    let tag = mac(key, method, path, at_ms, body).finalize().into_bytes();
    let hex: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{at_ms} {hex}")
}

/// Why a request is refused, or `Ok`.
pub fn verify(
    key: &str,
    method: &str,
    path: &str,
    now_ms: u64,
    body: &[u8],
    header: Option<&str>,
) -> Result<(), String> {
    let header = header.ok_or(format!(
        "this server has a cluster key and wants a signature in {AUTH_HEADER}"
    ))?;
    let (at, hex) = header.split_once(' ').ok_or("the signature has no time")?;
    let at: u64 = at
        .parse()
        .map_err(|_| "the signature's time is no number")?;
    let tag = unhex(hex).ok_or("the signature is no hexadecimal")?;
    mac(key, method, path, at, body)
        .verify_slice(&tag)
        .map_err(|_| "the signature is wrong: the cluster keys differ")?;
    if at.abs_diff(now_ms) > MAX_AGE_MS {
        return Err(format!(
            "the signature is {} s old; compare the hosts' clocks",
            at.abs_diff(now_ms) / 1000
        ));
    }
    Ok(())
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let bytes = pairs
        .iter()
        .map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?))
        .collect();
    rest.is_empty().then_some(bytes).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_covers_method_path_time_and_body_and_grows_old() {
        let header = sign("key", "PUT", "/route", 1000, b"{}");
        let check = |key, method, path, now, body: &[u8]| {
            verify(key, method, path, now, body, Some(&header)).is_ok()
        };
        assert!(check("key", "PUT", "/route", 1000 + MAX_AGE_MS, b"{}"));
        assert!(!check("other", "PUT", "/route", 1000, b"{}"));
        assert!(!check("key", "DELETE", "/route", 1000, b"{}"));
        assert!(!check("key", "PUT", "/route?x", 1000, b"{}"));
        assert!(!check("key", "PUT", "/route", 1000, b"{ }"));
        assert!(!check("key", "PUT", "/route", 1001 + MAX_AGE_MS, b"{}"));
        assert!(verify("key", "PUT", "/route", 1000, b"{}", None).is_err());
        for garbage in ["", "1000", "x y", "1000 zz", "1000 abc"] {
            assert!(verify("key", "PUT", "/route", 1000, b"{}", Some(garbage)).is_err());
        }
    }
}
