//! Flags that say where encryption begins and ends. Paths are read at the start, in
//! crate::transport::tls.

use clap::Args;
use rustls::pki_types::ServerName;

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsFlags {
    /// Serve HTTPS with this certificate, its chain after it (PEM)
    #[arg(long, value_name = "PATH")]
    pub tls_cert_path: Option<String>,
    /// Private key of that certificate (PEM)
    #[arg(long, value_name = "PATH")]
    pub tls_key_path: Option<String>,
    /// Certificate authorities that https:// workers are verified against, and self-signed
    /// certificates of workers (PEM); needed for such workers
    #[arg(long, alias = "ca-cert-path", value_name = "PATH", num_args = 1.., value_delimiter = ',')]
    pub ca_cert_paths: Vec<String>,
    /// Name that certificates of https:// workers must have, instead of the host of their URL; for
    /// pods, whose addresses change
    #[arg(long, value_name = "NAME")]
    pub worker_tls_name: Option<String>,
    /// Client certificate of the router for https:// workers (PEM)
    #[arg(long, value_name = "PATH")]
    pub client_cert_path: Option<String>,
    /// Private key of that certificate (PEM)
    #[arg(long, value_name = "PATH")]
    pub client_key_path: Option<String>,
}

impl TlsFlags {
    /// Every file that is named, with its flag.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let one = [
            ("--tls-cert-path", &self.tls_cert_path),
            ("--tls-key-path", &self.tls_key_path),
            ("--client-cert-path", &self.client_cert_path),
            ("--client-key-path", &self.client_key_path),
        ];
        let named = one
            .into_iter()
            .filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        named.chain(
            self.ca_cert_paths
                .iter()
                .map(|path| ("--ca-cert-paths", path.as_str())),
        )
    }

    /// Adds the problems between these flags.
    pub fn validate(&self, errors: &mut Vec<String>) {
        let pairs = [
            (
                ("--tls-cert-path", &self.tls_cert_path),
                ("--tls-key-path", &self.tls_key_path),
            ),
            (
                ("--client-cert-path", &self.client_cert_path),
                ("--client-key-path", &self.client_key_path),
            ),
        ];
        for ((cert, cert_path), (key, key_path)) in pairs {
            match (cert_path, key_path) {
                (Some(path), None) => errors.push(format!("{cert} {path}: give its {key} too")),
                (None, Some(path)) => errors.push(format!("{key} {path}: give its {cert} too")),
                _ => {}
            }
        }
        if let Some(path) = &self.client_cert_path
            && self.ca_cert_paths.is_empty()
        {
            errors.push(format!(
                "--client-cert-path {path}: is shown to https:// workers only; give \
                 --ca-cert-paths, which they need"
            ));
        }
        if let Some(name) = &self.worker_tls_name {
            if self.ca_cert_paths.is_empty() {
                errors.push(format!(
                    "--worker-tls-name {name}: is for https:// workers only; give --ca-cert-paths, \
                     which they need"
                ));
            }
            if let Err(err) = ServerName::try_from(name.as_str()) {
                errors.push(format!(
                    "--worker-tls-name {name}: {err}; give a DNS name or an address"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_refused() {
        let some = |text: &str| Some(text.to_owned());
        let problems = |tls: &TlsFlags| {
            let mut errors = Vec::new();
            tls.validate(&mut errors);
            errors
        };
        assert!(problems(&TlsFlags::default()).is_empty());
        for (tls, part) in [
            (
                TlsFlags {
                    tls_cert_path: some("c"),
                    ..TlsFlags::default()
                },
                "--tls-cert-path c: give its --tls-key-path too",
            ),
            (
                TlsFlags {
                    tls_key_path: some("k"),
                    ..TlsFlags::default()
                },
                "--tls-key-path k: give its --tls-cert-path too",
            ),
            (
                TlsFlags {
                    client_cert_path: some("c"),
                    client_key_path: some("k"),
                    ..TlsFlags::default()
                },
                "give --ca-cert-paths",
            ),
            (
                TlsFlags {
                    worker_tls_name: some("engine"),
                    ..TlsFlags::default()
                },
                "--worker-tls-name engine: is for https:// workers only",
            ),
            (
                TlsFlags {
                    worker_tls_name: some("no name"),
                    ca_cert_paths: vec!["ca".to_owned()],
                    ..TlsFlags::default()
                },
                "give a DNS name or an address",
            ),
        ] {
            let bad = problems(&tls);
            assert!(bad.iter().any(|text| text.contains(part)), "{bad:?}");
        }
    }
}
