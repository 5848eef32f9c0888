//! Signatures of bootstrap requests and of their answers.
//!
//! A request is signed over method, path, time, a nonce and its body; the answer over the request's
//! signature, status and body, so that it answers this request only. The server remembers the
//! signatures of changes for as long as they could be sent again.

use std::collections::BTreeSet;

use std::time::{SystemTime, UNIX_EPOCH};

use hmac::{Hmac, Mac};
use sha2::Sha256;

pub const AUTH_HEADER: &str = "x-baton-auth";
/// A signature is refused after this time; hosts' clocks must agree better than that.
const MAX_AGE_MS: u64 = 300_000;
/// Signatures remembered: `MAX_RANKS` ranks register every 5 s for `MAX_AGE_MS`.
const MAX_SEEN: usize = 65_536;

pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |age| age.as_millis() as u64)
}

fn head_mac(key: &str, head: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("HMAC takes keys of any length");
    mac.update(head.as_bytes());
    mac.update(body);
    mac
}

fn hex_digest(mac: Hmac<Sha256>) -> String {
    let tag = mac.finalize().into_bytes();
    tag.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn request_mac(key: &str, method: &str, path: &str, stamp: &str, body: &[u8]) -> Hmac<Sha256> {
    head_mac(key, &format!("{method}\n{path}\n{stamp}\n"), body)
}

/// The header of a request: time, nonce and tag.
pub fn sign_request(key: &str, method: &str, path: &str, at_ms: u64, body: &[u8]) -> String {
    let stamp = format!("{at_ms} {:016x}", rand::random::<u64>());
    let tag = hex_digest(request_mac(key, method, path, &stamp, body));
    format!("{stamp} {tag}")
}

fn answer_mac(key: &str, request: &str, status: u16, body: &[u8]) -> Hmac<Sha256> {
    head_mac(key, &format!("answer\n{request}\n{status}\n"), body)
}

/// The header of an answer; `request` is the header of its request.
pub fn sign_answer(key: &str, request: &str, status: u16, body: &[u8]) -> String {
    hex_digest(answer_mac(key, request, status, body))
}

pub fn is_answer_signed(
    key: &str,
    request: &str,
    status: u16,
    body: &[u8],
    header: Option<&str>,
) -> bool {
    let tag = header.and_then(decode_hex);
    tag.is_some_and(|tag| {
        answer_mac(key, request, status, body)
            .verify_slice(&tag)
            .is_ok()
    })
}

/// Accepted signatures that are not too old yet, by time.
#[derive(Debug, Default)]
pub struct SeenSignatures(BTreeSet<(u64, String)>);

impl SeenSignatures {
    /// Records a request signed at `at_ms`. `Err`: it is a repetition, or too many are remembered.
    pub fn accept_signature(
        &mut self,
        at_ms: u64,
        header: &str,
        now_ms: u64,
    ) -> Result<(), &'static str> {
        while self
            .0
            .first()
            .is_some_and(|(at, _)| at.saturating_add(MAX_AGE_MS) < now_ms)
        {
            self.0.pop_first();
        }
        if self.0.len() >= MAX_SEEN {
            return Err("too many changes within five minutes");
        }
        if self.0.insert((at_ms, header.to_owned())) {
            Ok(())
        } else {
            Err("the signature was used before")
        }
    }
}

/// Time of a valid request's signature, or the reason of its refusal.
pub fn verify_signature(
    key: &str,
    method: &str,
    path: &str,
    now_ms: u64,
    body: &[u8],
    header: Option<&str>,
) -> Result<u64, String> {
    let header = header.ok_or(format!(
        "this server has a cluster key and wants a signature in {AUTH_HEADER}"
    ))?;
    let (stamp, hex) = header.rsplit_once(' ').ok_or("the signature has no time")?;
    let (time_text, _nonce) = stamp
        .split_once(' ')
        .ok_or("the signature has no nonce: update the engine that sent it")?;
    let signed_at_ms: u64 = time_text
        .parse()
        .map_err(|_| "the signature's time is no number")?;
    let tag = decode_hex(hex).ok_or("the signature is no hexadecimal")?;
    request_mac(key, method, path, stamp, body)
        .verify_slice(&tag)
        .map_err(|_| "the signature is wrong: the cluster keys differ")?;
    let age_ms = signed_at_ms.abs_diff(now_ms);
    if age_ms > MAX_AGE_MS {
        return Err(format!(
            "the signature is {} s old; compare the hosts' clocks",
            age_ms / 1000
        ));
    }
    Ok(signed_at_ms)
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, odd_digit) = text.as_bytes().as_chunks::<2>();
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let bytes = pairs
        .iter()
        .map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?))
        .collect();
    odd_digit.is_empty().then_some(bytes).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signature_covers_method_path_time_and_body_and_grows_old() {
        let header = sign_request("key", "PUT", "/route", 1000, b"{}");
        let check = |key, method, path, now, body: &[u8]| {
            verify_signature(key, method, path, now, body, Some(&header)).is_ok()
        };
        assert!(check("key", "PUT", "/route", 1000 + MAX_AGE_MS, b"{}"));
        assert!(!check("other", "PUT", "/route", 1000, b"{}"));
        assert!(!check("key", "DELETE", "/route", 1000, b"{}"));
        assert!(!check("key", "PUT", "/route?x", 1000, b"{}"));
        assert!(!check("key", "PUT", "/route", 1000, b"{ }"));
        assert!(!check("key", "PUT", "/route", 1001 + MAX_AGE_MS, b"{}"));
        assert!(verify_signature("key", "PUT", "/route", 1000, b"{}", None).is_err());
        for garbage in ["", "1000", "x y", "1000 zz", "1000 abc", "1000 0 abc"] {
            assert!(verify_signature("key", "PUT", "/route", 1000, b"{}", Some(garbage)).is_err());
        }
    }

    #[test]
    fn answer_is_signed_for_one_request() {
        let request = sign_request("key", "GET", "/route", 1000, b"");
        let other = sign_request("key", "GET", "/route", 1000, b"");
        let header = sign_answer("key", &request, 200, b"{}");
        let is_signed =
            |key, request, status| is_answer_signed(key, request, status, b"{}", Some(&header));
        assert!(is_signed("key", &request, 200));
        assert!(!is_signed("key", &other, 200) && !is_signed("key", &request, 404));
        assert!(!is_signed("guess", &request, 200));
        assert!(!is_answer_signed("key", &request, 200, b"{}", None));
    }

    #[test]
    fn signature_is_used_once_within_its_age() {
        let mut seen = SeenSignatures::default();
        assert!(
            seen.accept_signature(1000, "a", 1000).is_ok()
                && seen.accept_signature(1000, "b", 1000).is_ok()
        );
        assert!(seen.accept_signature(1000, "a", 1000 + MAX_AGE_MS).is_err());
        assert!(seen.accept_signature(2000, "c", 1001 + MAX_AGE_MS).is_ok());
        assert_eq!(seen.0.len(), 1, "older ones are refused by their age");
    }
}
