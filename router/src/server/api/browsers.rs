//! Requests that a web page of another site has a browser send, and names that it gives to this
//! router.
//!
//! A page needs no answer to do harm: a browser sends its POST to any address, that of this machine
//! included. A page reads answers too, as its own site's, if its host's name is changed to this
//! machine's address meanwhile (DNS rebinding). Engines have the same rules.

use std::net::IpAddr;

use axum::extract::Request;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Method, header};
use http_body::Body as _;

use super::auth::AccessLevel;
use crate::config::ListenFlags;
use crate::error::RouteError;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Paths whose GET changes something, or has workers compute; of engines too, which read this list.
pub const CHANGING_PATHS: [&str; 2] = ["/flush_cache", "/health_generate"];
/// Value of --allowed-hosts and --cors-allowed-origins that allows all.
const ANY: &str = "*";

/// Refuses a request of a foreign page, or by a name that is not this router's.
pub fn check(listen: &ListenFlags, request: &Request) -> Result<(), RouteError> {
    check_host(listen, request)?;
    check_origin(listen, request)
}

/// Refuses a foreign name where there is no key: a page of that name could read all answers.
fn check_host(listen: &ListenFlags, request: &Request) -> Result<(), RouteError> {
    // A page has no key: its requests are answered 401.
    if listen.api_key.is_some() {
        return Ok(());
    }
    let in_target = request.uri().authority().map(Authority::as_str);
    let in_header = text(request.headers(), &header::HOST);
    for host in in_target.into_iter().chain(in_header) {
        if !is_own_name(listen, &host_name(host)) {
            return Err(RouteError::HostNotAllowed { host: shown(host) });
        }
    }
    Ok(())
}

/// True for a name by which no page of another site can know this router. A page cannot be of an
/// address, nor of `localhost`, because browsers resolve that name themselves.
fn is_own_name(listen: &ListenFlags, name: &str) -> bool {
    let allowed = &listen.allowed_hosts;
    let is_named = |allowed: &String| allowed == ANY || allowed.eq_ignore_ascii_case(name);
    name == "localhost"
        || name == listen.host
        || name.parse::<IpAddr>().is_ok()
        || allowed.iter().any(is_named)
        // Names of a cluster's services or of a local network: no site on the internet has one.
        || (!listen.is_on_loopback() && !name.is_empty() && !name.contains('.'))
}

/// Lower case, without the port; an IPv6 address without brackets.
fn host_name(host: &str) -> String {
    let name = match host.strip_prefix('[') {
        Some(address) => address.split(']').next(),
        None => host.split(':').next(),
    };
    let name = name.unwrap_or_default();
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Refuses what a page of another site wants changed, by the rule of Go 1.25's HTTP server.
/// Programs that are no browsers send neither header.
fn check_origin(listen: &ListenFlags, request: &Request) -> Result<(), RouteError> {
    if is_reading(request) && !CHANGING_PATHS.contains(&request.uri().path()) {
        return Ok(());
    }
    let headers = request.headers();
    let origin = text(headers, &header::ORIGIN);
    let allowed = &listen.cors_allowed_origins;
    if allowed
        .iter()
        .any(|one| one == ANY || Some(one.as_str()) == origin)
    {
        return Ok(());
    }
    let is_foreign = match text(headers, &SEC_FETCH_SITE) {
        // A page cannot set it, and it is right behind a proxy that changes Host, too.
        Some(site) => !matches!(site, "same-origin" | "none"),
        None => origin.is_some_and(|origin| !is_own_origin(listen, request, origin)),
    };
    if !is_foreign {
        return Ok(());
    }
    let origin = origin.map_or_else(|| "another site".to_owned(), shown);
    let method = request.method().to_string();
    let path = request.uri().path().to_owned();
    Err(RouteError::ForeignOrigin {
        origin,
        method,
        path,
    })
}

fn is_reading(request: &Request) -> bool {
    matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    )
}

/// True if the page was loaded from the address, or a name, that this request is sent to.
fn is_own_origin(listen: &ListenFlags, request: &Request, origin: &str) -> bool {
    let Some((scheme, from)) = origin.split_once("://") else {
        return false; // "null": a file, or a page that hides where it is from
    };
    let in_target = request.uri().authority().map(Authority::as_str);
    let Some(to) = in_target.or_else(|| text(request.headers(), &header::HOST)) else {
        return false;
    };
    // A browser leaves out the port of its scheme; a proxy may have ended TLS.
    let port = match scheme {
        "https" => ":443",
        _ => ":80",
    };
    let without_port = |host: &str| host.strip_suffix(port).unwrap_or(host).to_ascii_lowercase();
    let is_named = |name: &String| name.eq_ignore_ascii_case(&host_name(from));
    without_port(from) == without_port(to) || listen.allowed_hosts.iter().any(is_named)
}

/// Refuses a body of a control path that is not declared as JSON. A browser lets any page send
/// forms and plain text to any server, but asks the server before it sends JSON. Generation paths
/// take any type: `curl -d` declares a form.
pub fn check_media_type(level: AccessLevel, request: &Request) -> Result<(), RouteError> {
    let is_read = !is_reading(request) && !request.body().is_end_stream();
    if level != AccessLevel::Control || !is_read {
        return Ok(());
    }
    let given = text(request.headers(), &header::CONTENT_TYPE).unwrap_or_default();
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let kind = if kind.is_empty() { "of no type" } else { kind };
    Err(RouteError::UnsupportedMediaType {
        problem: format!(
            "the body is {}; send it with content-type: application/json",
            shown(kind)
        ),
    })
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    // Other bytes are no name, origin or type of ours.
    Some(headers.get(name)?.to_str().unwrap_or("?"))
}

/// A part of a request's head, for a message.
fn shown(text: &str) -> String {
    text.chars().take(100).collect()
}
