//! Which certificates of workers are accepted.
//!
//! A certificate that a CA signed descends from `--ca-cert-paths` and names the worker's host
//! (RFC 5280 path validation and RFC 6125 names, by webpki). A self-signed certificate is its own
//! authority, and most guides make one with `openssl req -x509`, which sets the CA flag and leaves
//! out subjectAltName; path validation takes neither. Such a certificate is accepted where
//! `--ca-cert-paths` holds that very certificate, byte for byte: the operator has named the only
//! key that can complete the handshake. Its dates are checked all the same, and a host name that it
//! states must be the worker's.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::ext::pkix::SubjectAltName;

/// Hosts whose refused certificate has been logged. More are refused without a line of their own.
const MAX_LOGGED_HOSTS: usize = 1024;

/// Verifies what a worker shows in its handshake.
#[derive(Debug)]
pub struct WorkerCertificates {
    path_validation: Arc<WebPkiServerVerifier>,
    /// Certificates of `--ca-cert-paths`, in DER.
    trusted: HashSet<Vec<u8>>,
    /// Host and reason of each refusal that the log has: probes repeat them every few seconds.
    logged: Mutex<HashSet<(String, String)>>,
}

impl WorkerCertificates {
    /// `Err` says which certificate cannot be a trust anchor, or that there is none.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        let mut trusted = HashSet::new();
        for certificate in certificates {
            trusted.insert(certificate.to_vec());
            roots.add(certificate)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let path_validation =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|err| Error::General(err.to_string()))?;
        Ok(Self {
            path_validation,
            trusted,
            logged: Mutex::new(HashSet::new()),
        })
    }

    /// Accepts a self-signed certificate that the operator has listed itself.
    fn verify_listed(
        &self,
        shown: &CertificateDer<'_>,
        host: &ServerName<'_>,
        now: UnixTime,
        refusal: Error,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = parse(shown)?;
        // A CA that is listed vouches for certificates of other names, so the exception ends here:
        // a holder of any certificate of that CA could otherwise answer for every worker.
        if !is_self_signed(&certificate) || !self.trusted.contains(shown.as_ref()) {
            return Err(refusal);
        }
        check_dates(&certificate, now)?;
        if names_hosts(&certificate) {
            verify_server_name(&ParsedCertificate::try_from(shown)?, host)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    /// Logs why `host` is refused and what to do, once for each reason.
    fn log_refusal(&self, shown: &CertificateDer<'_>, host: &ServerName<'_>, refusal: &Error) {
        let host = host.to_str().into_owned();
        let reason = refusal.to_string();
        let mut logged = self.logged.lock();
        if logged.len() >= MAX_LOGGED_HOSTS || !logged.insert((host.clone(), reason.clone())) {
            return;
        }
        drop(logged);
        let remedy = self.remedy(shown, refusal);
        tracing::warn!(host, reason, remedy, "a worker's certificate is refused");
    }

    fn remedy(&self, shown: &CertificateDer<'_>, refusal: &Error) -> &'static str {
        if matches!(
            refusal,
            Error::InvalidCertificate(
                CertificateError::Expired
                    | CertificateError::ExpiredContext { .. }
                    | CertificateError::NotValidYet
                    | CertificateError::NotValidYetContext { .. }
            )
        ) {
            return "renew it, or set the clock of this machine";
        }
        let is_listed = self.trusted.contains(shown.as_ref());
        match parse(shown).map(|certificate| is_self_signed(&certificate)) {
            Ok(true) if !is_listed => {
                "it is self-signed: give this very certificate as one of --ca-cert-paths"
            }
            Ok(_) if is_name_refusal(refusal) => {
                "issue one whose subjectAltName has the host of the worker's URL, or name what it \
                 has by --worker-tls-name"
            }
            Ok(_) => "give the certificate of the CA that signed it as one of --ca-cert-paths",
            Err(_) => "issue an X.509 certificate of version 3",
        }
    }
}

impl ServerCertVerifier for WorkerCertificates {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.path_validation
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            .or_else(|refusal| self.verify_listed(end_entity, server_name, now, refusal))
            .inspect_err(|refusal| self.log_refusal(end_entity, server_name, refusal))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.path_validation
            .verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.path_validation
            .verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.path_validation.supported_verify_schemes()
    }
}

fn parse(shown: &CertificateDer<'_>) -> Result<Certificate, Error> {
    Certificate::from_der(shown)
        .map_err(|err| CertificateError::Other(OtherError(Arc::new(err))).into())
}

fn is_self_signed(certificate: &Certificate) -> bool {
    certificate.tbs_certificate.issuer == certificate.tbs_certificate.subject
}

fn names_hosts(certificate: &Certificate) -> bool {
    // An extension that cannot be read counts as one that states names: the name check refuses it.
    !matches!(
        certificate.tbs_certificate.get::<SubjectAltName>(),
        Ok(None)
    )
}

fn check_dates(certificate: &Certificate, now: UnixTime) -> Result<(), CertificateError> {
    let validity = &certificate.tbs_certificate.validity;
    if now.as_secs() < validity.not_before.to_unix_duration().as_secs() {
        return Err(CertificateError::NotValidYet);
    }
    if now.as_secs() > validity.not_after.to_unix_duration().as_secs() {
        return Err(CertificateError::Expired);
    }
    Ok(())
}

fn is_name_refusal(refusal: &Error) -> bool {
    matches!(
        refusal,
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }
        )
    )
}
