//! API keys: which key each path needs, and that a key of the control plane never reaches a worker.
//!
//! With --control-plane-api-keys the control paths take these keys and nothing else; each use is
//! logged with the key's id.

use std::borrow::Cow;

use http::{HeaderMap, header};

use axum::extract::Request;

use crate::config::{ControlKey, KeyRole};
use crate::dispatch::app::AppState;
use crate::error::RouteError;
use crate::observability::access_log::KeyLabel;
use crate::observability::explain::ExplainMode;
use crate::server::http_util::is_generation;

/// The key a path needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum AccessLevel {
    /// None: liveness probes and scrapers have no key.
    Open,
    /// --api-key, if it is set.
    Client,
    /// An admin key of --control-plane-api-keys if there are any, else as `Client`: the path shows
    /// or changes the fleet or the requests of others.
    Control,
}

pub fn has_control_keys(app: &AppState) -> bool {
    !app.config.listen.control_plane_api_keys.is_empty()
}

/// A dry run shows the fleet.
fn is_dry_run(request: &Request) -> bool {
    is_generation(request) && matches!(ExplainMode::of(request.headers()), Ok(ExplainMode::DryRun))
}

/// Paths of clients that show operators more.
pub const INFO_PATHS: [&str; 2] = ["/get_server_info", "/server_info"];
/// Label of the key of --api-key, which all clients share.
const CLIENT_KEY: &str = "api_key";

/// Returns the label of the key that the request was accepted with; `None` where none is asked for.
/// An error is the answer to the request.
pub fn check(
    app: &AppState,
    level: AccessLevel,
    request: &Request,
) -> Result<Option<KeyLabel>, RouteError> {
    let path = request.uri().path();
    let given = bearer(request.headers());
    if has_control_keys(app) && (level == AccessLevel::Control || is_dry_run(request)) {
        let known = given.and_then(|given| control_key(app, given));
        let key = known.ok_or(RouteError::InvalidControlKey)?;
        let id = &key.id;
        let name = &key.name;
        let method = request.method();
        return match key.role {
            KeyRole::Admin => {
                tracing::info!(id, name, %method, path, "control request");
                Ok(Some(KeyLabel(Cow::Owned(id.clone()))))
            }
            KeyRole::User => {
                tracing::warn!(id, name, %method, path, "control request refused");
                Err(RouteError::Forbidden { id: id.clone() })
            }
        };
    }
    match &app.config.listen.api_key {
        Some(key) if level != AccessLevel::Open => {
            // What operators are shown of a worker is more than what clients are.
            if INFO_PATHS.contains(&path)
                && let Some(known) = given.and_then(|given| control_key(app, given))
                && known.role == KeyRole::Admin
            {
                return Ok(Some(KeyLabel(Cow::Owned(known.id.clone()))));
            }
            let given = given.or_else(|| anthropic_key(request.headers()));
            let is_right = given.is_some_and(|given| is_same(given, key.as_bytes()));
            if !is_right {
                return Err(RouteError::InvalidApiKey);
            }
            Ok(Some(KeyLabel(Cow::Borrowed(CLIENT_KEY))))
        }
        _ => Ok(None),
    }
}

/// Mark of a request that came with an `admin` key of the control plane.
#[derive(Debug, Clone, Copy)]
pub struct OperatorRequest;

/// Replace a key of the control plane by the router's own key for workers. Returns true for one
/// with the role `admin`.
pub fn hide_control_key(app: &AppState, headers: &mut HeaderMap) -> bool {
    let Some(key) = bearer(headers).and_then(|given| control_key(app, given)) else {
        return false;
    };
    let is_admin = key.role == KeyRole::Admin;
    headers.remove(header::AUTHORIZATION);
    headers.extend(app.fleet.worker_headers());
    is_admin
}

/// KEY of `Authorization: Bearer KEY`; the scheme in any case (RFC 9110, 11.1).
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(b"bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| key.trim_ascii())
}

/// KEY of `x-api-key: KEY`, in which clients of Anthropic's API may send theirs.
fn anthropic_key(headers: &HeaderMap) -> Option<&[u8]> {
    Some(headers.get("x-api-key")?.as_bytes())
}

fn control_key<'a>(app: &'a AppState, given: &[u8]) -> Option<&'a ControlKey> {
    // All are compared: the time does not tell which one is nearly right.
    let keys = app.config.listen.control_plane_api_keys.iter();
    keys.fold(None, |found, key| {
        is_same(given, key.key.as_bytes()).then_some(key).or(found)
    })
}

/// Compare in a time that does not depend on where the difference is.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0u8, |acc, (a, b)| acc | (a ^ b));
    a.len() == b.len() && differing == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bearer_scheme_is_read_in_any_case() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(|key| String::from_utf8(key.to_vec()).unwrap())
        };
        for value in ["Bearer k", "bearer k", "BEARER  k "] {
            assert_eq!(read(value).as_deref(), Some("k"), "{value}");
        }
        for value in ["Basic k", "k", "Bearerk"] {
            assert_eq!(read(value), None, "{value}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
