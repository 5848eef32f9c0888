//! HTTPS for clients, and HTTPS with a certificate of our own to workers, from the files of the
//! flags. `tls_reload` keeps them current.
//!
//! TLS 1.2 and 1.3 by rustls with ring. Clients choose HTTP/1.1 or HTTP/2 inside, workers are
//! spoken to in HTTP/1.1. `worker_certificates` says which certificates of workers are accepted;
//! the system's roots are not asked, since workers are no public sites.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ServerConfig};
use tokio_rustls::TlsAcceptor;
use x509_cert::Certificate;
use x509_cert::der::Decode;

use crate::config::TlsFlags;
use crate::transport::worker_certificates::WorkerCertificates;

const HTTP_1_1: &[u8] = b"http/1.1";
pub const HTTP_2: &[u8] = b"h2";

/// Acceptor of clients, if they are to speak TLS.
pub fn acceptor(flags: &TlsFlags, has_h2: bool) -> Result<Option<TlsAcceptor>, String> {
    let (Some(cert), Some(key)) = (&flags.tls_cert_path, &flags.tls_key_path) else {
        return Ok(None);
    };
    let refused =
        |err: rustls::Error| format!("--tls-cert-path {cert}, --tls-key-path {key}: {err}");
    let chain = certificates("--tls-cert-path", cert)?;
    let private_key = private_key("--tls-key-path", key)?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, private_key)
        .map_err(refused)?;
    let protocols: &[&[u8]] = if has_h2 {
        &[HTTP_2, HTTP_1_1]
    } else {
        &[HTTP_1_1]
    };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    Ok(Some(TlsAcceptor::from(Arc::new(config))))
}

/// How https:// workers are reached, if they can be.
pub fn to_workers(flags: &TlsFlags) -> Result<Option<Arc<ClientConfig>>, String> {
    if flags.ca_cert_paths.is_empty() {
        return Ok(None);
    }
    let mut authorities = Vec::new();
    for path in &flags.ca_cert_paths {
        authorities.extend(certificates("--ca-cert-paths", path)?);
    }
    let verifier = WorkerCertificates::new(authorities)
        .map_err(|err| format!("--ca-cert-paths {}: {err}", flags.ca_cert_paths.join(" ")))?;
    let builder = ClientConfig::builder()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match (&flags.client_cert_path, &flags.client_key_path) {
        (Some(cert), Some(key)) => builder
            .with_client_auth_cert(
                certificates("--client-cert-path", cert)?,
                private_key("--client-key-path", key)?,
            )
            .map_err(|err| format!("--client-cert-path {cert}, --client-key-path {key}: {err}"))?,
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Ok(Some(Arc::new(config)))
}

/// Unix seconds at which the certificates of the flags expire, by metric label; of a chain the
/// earliest.
pub fn expiries(flags: &TlsFlags) -> Result<Vec<(&'static str, i64)>, String> {
    let chains = [
        ("server", "--tls-cert-path", &flags.tls_cert_path),
        ("client", "--client-cert-path", &flags.client_cert_path),
    ];
    let mut expiries = Vec::new();
    for (label, flag, path) in chains {
        let Some(path) = path else { continue };
        let mut earliest = i64::MAX;
        for cert in certificates(flag, path)? {
            let parsed = Certificate::from_der(&cert).map_err(|err| {
                format!("{flag} {path}: a certificate cannot be parsed: {err}; give X.509 in PEM")
            })?;
            let end = parsed
                .tbs_certificate
                .validity
                .not_after
                .to_unix_duration()
                .as_secs();
            earliest = earliest.min(i64::try_from(end).unwrap_or(i64::MAX));
        }
        expiries.push((label, earliest));
    }
    Ok(expiries)
}

fn certificates(flag: &str, path: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let refused = |err| format!("{flag} {path}: {err}; give a readable PEM file");
    let read = CertificateDer::pem_file_iter(path).map_err(refused)?;
    let certs: Vec<_> = read.collect::<Result<_, _>>().map_err(refused)?;
    if certs.is_empty() {
        return Err(format!(
            "{flag} {path}: holds no certificate; give a PEM file with one"
        ));
    }
    Ok(certs)
}

fn private_key(flag: &str, path: &str) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|err| {
        format!("{flag} {path}: {err}; give a readable PEM file with an unencrypted private key")
    })
}
