//! Who may ask what: the shared key on all but the open paths, keys of their own on the paths that change the router.
//!
//! With --control-plane-api-keys the control paths take these keys and nothing else; each use is logged with the key's id.

use http::header;

use axum::extract::Request;

use crate::App;
use crate::config::KeyRole;
use crate::error::RouteError;
use crate::explain;

/// Paths that need no API key: probes and scrapers have none.
const OPEN_PATHS: [&str; 8] = [
    "/health",
    "/livez",
    "/liveness",
    "/readyz",
    "/readiness",
    "/health_generate",
    "/ping",
    "/metrics",
];

/// Paths that show or change the fleet or others' requests, and everything below them.
const CONTROL_PATHS: [&str; 9] = [
    "/workers",
    "/add_worker",
    "/remove_worker",
    "/list_workers",
    "/flush_cache",
    "/get_loads",
    "/start_profile",
    "/stop_profile",
    "/v1/requests",
];

fn is_control(path: &str) -> bool {
    CONTROL_PATHS.iter().any(|control| {
        let rest = path.strip_prefix(control);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

pub fn has_control_keys(app: &App) -> bool {
    !app.config.listen.control_plane_api_keys.is_empty()
}

/// A dry run shows the fleet, whatever its path.
fn is_dry_run(request: &Request) -> bool {
    explain::Asks::of(request.headers()).is_ok_and(|asks| asks == explain::Asks::DryRun)
}

/// An error is the answer to the request.
pub fn check(app: &App, request: &Request) -> Result<(), RouteError> {
    let path = request.uri().path();
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let control = &app.config.listen.control_plane_api_keys;
    if !control.is_empty() && (is_control(path) || is_dry_run(request)) {
        let known = given.and_then(|given| {
            // All are compared: the time does not tell which one is nearly right.
            control.iter().fold(None, |found, key| {
                is_same(given, key.key.as_bytes()).then_some(key).or(found)
            })
        });
        let key = known.ok_or(RouteError::InvalidControlKey)?;
        let (id, name, method) = (&key.id, &key.name, request.method());
        return match key.role {
            KeyRole::Admin => {
                tracing::info!(id, name, %method, path, "control request");
                Ok(())
            }
            KeyRole::User => {
                tracing::warn!(id, name, %method, path, "control request refused");
                Err(RouteError::Forbidden { id: id.clone() })
            }
        };
    }
    match &app.config.listen.api_key {
        Some(key) if !OPEN_PATHS.contains(&path) => {
            let is_right = given.is_some_and(|given| is_same(given, key.as_bytes()));
            is_right.then_some(()).ok_or(RouteError::InvalidApiKey)
        }
        _ => Ok(()),
    }
}

/// Compare in a time that does not depend on where the difference is.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0u8, |acc, (a, b)| acc | (a ^ b));
    a.len() == b.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_paths_are_whole_segments() {
        for path in [
            "/workers",
            "/workers/",
            "/workers/3",
            "/workers/3/drain",
            "/flush_cache",
            "/v1/requests/chatcmpl-1",
        ] {
            assert!(is_control(path), "{path}");
        }
        for path in ["/workersx", "/", "/v1/models", "/health", "/metrics"] {
            assert!(!is_control(path), "{path}");
        }
    }
}
