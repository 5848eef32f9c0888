//! The static files of the web page, compiled into the binary.
//!
//! The policy in `CONTENT_SECURITY_POLICY` lets them load from this router only: no inline script
//! or style, no other origin, no frame around them.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use sha2::{Digest, Sha256};

use crate::error::RouteError;
use crate::server::http_util::{HandlerResult, PathText};

const CONTENT_SECURITY_POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

struct Asset {
    name: &'static str,
    media_type: &'static str,
    bytes: &'static [u8],
    /// Changes with the bytes.
    etag: HeaderValue,
}

macro_rules! assets {
    ($($name:literal: $media_type:expr),* $(,)?) => {
        [$(Asset::new($name, $media_type, include_bytes!(concat!("../../../ui/", $name)))),*]
    };
}

static ASSETS: LazyLock<[Asset; 12]> = LazyLock::new(|| {
    assets! {
        "index.html": HTML,
        "chat.html": HTML,
        "theme.js": SCRIPT,
        "app.js": SCRIPT,
        "cluster.js": SCRIPT,
        "charts.js": SCRIPT,
        "nodes.js": SCRIPT,
        "chat.js": SCRIPT,
        "timeline.js": SCRIPT,
        "explanation.js": SCRIPT,
        "style.css": "text/css; charset=utf-8",
        "icon.svg": "image/svg+xml",
    }
});

impl Asset {
    fn new(name: &'static str, media_type: &'static str, bytes: &'static [u8]) -> Self {
        let digest = format!("{:x}", Sha256::digest(bytes));
        let etag = HeaderValue::try_from(format!("\"{}\"", &digest[..24]));
        let etag = etag.expect("hexadecimal digits between quotes");
        Self {
            name,
            media_type,
            bytes,
            etag,
        }
    }

    fn answer(&self, asked: &HeaderMap) -> Response {
        let is_known = asked.get(header::IF_NONE_MATCH) == Some(&self.etag);
        let mut response = if is_known {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            self.bytes.into_response()
        };
        let headers = response.headers_mut();
        let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
        put(header::CONTENT_TYPE, self.media_type);
        put(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY);
        put(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
        put(header::X_FRAME_OPTIONS, "DENY");
        put(header::REFERRER_POLICY, "no-referrer");
        // Asked about with each load: files of two versions of the router must not be mixed.
        put(header::CACHE_CONTROL, "no-cache");
        headers.insert(
            "cross-origin-opener-policy",
            HeaderValue::from_static("same-origin"),
        );
        headers.insert(
            "cross-origin-resource-policy",
            HeaderValue::from_static("same-origin"),
        );
        headers.insert(header::ETAG, self.etag.clone());
        response
    }
}

/// `/ui`: the pages name each other relative to `/ui/`, also behind a proxy that adds a prefix.
pub async fn to_folder() -> Response {
    (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, "ui/")]).into_response()
}

/// `/ui/`: the cluster view.
pub async fn index(headers: HeaderMap) -> Response {
    ASSETS[0].answer(&headers)
}

/// `/ui/{file}`.
pub async fn file(uri: Uri, PathText(name): PathText, headers: HeaderMap) -> HandlerResult {
    let asset = ASSETS.iter().find(|asset| asset.name == name);
    let asset = asset.ok_or_else(|| RouteError::NotFound {
        path: uri.path().to_owned(),
    })?;
    Ok(asset.answer(&headers))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Largest sum of all files [bytes].
    const MOST: usize = 150_000;

    #[test]
    fn files_are_small_and_each_is_compiled_in() {
        let sum: usize = ASSETS.iter().map(|asset| asset.bytes.len()).sum();
        assert!(sum <= MOST, "{sum} bytes");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/ui");
        let mut on_disk: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut served: Vec<_> = ASSETS.iter().map(|asset| asset.name.to_owned()).collect();
        on_disk.sort();
        served.sort();
        assert_eq!(served, on_disk);
        assert_eq!(ASSETS[0].name, "index.html");
    }

    #[test]
    fn pages_have_no_inline_script_or_style_and_name_no_other_origin() {
        for asset in ASSETS.iter() {
            let text = std::str::from_utf8(asset.bytes).unwrap();
            for absolute in [
                "https://",
                "//cdn",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "eval(",
            ] {
                assert!(!text.contains(absolute), "{} has {absolute}", asset.name);
            }
            let plain = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!plain.contains("http://"), "{}", asset.name);
            if asset.media_type == HTML {
                for inline in ["<style", " style=", " onclick=", " onload=", "<script>"] {
                    assert!(!text.contains(inline), "{} has {inline}", asset.name);
                }
            }
        }
    }
}
