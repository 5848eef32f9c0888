//! Certificates and keys that are renewed while the router runs (cert-manager, ACME clients).
//!
//! 1. [`TlsFiles::open`] reads all files of the TLS flags; a mistake ends the start.
//! 2. [`follow`] compares their content every [`POLL`] and, when it changed, rebuilds both sides.
//! 3. New connections, from clients and to workers, use the newest that could be built; existing
//!    ones keep theirs.
//!
//! Files that do not fit together, such as a new certificate beside the old key, change nothing:
//! they are tried again at each poll.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::config::TlsFlags;
use crate::observability::metrics::RouterMetrics;
use crate::transport::files::read_regular_file;
use crate::transport::tls;

/// Pause between two looks at the files. Renewals come days before the end of a certificate.
const POLL: Duration = Duration::from_secs(2);

pub type ClientTls = watch::Receiver<TlsAcceptor>;

/// How https:// workers are reached.
#[derive(Clone)]
pub struct WorkerTls {
    config: watch::Receiver<Arc<ClientConfig>>,
    /// Name that certificates must have; none: the host of the worker's URL.
    name: Option<ServerName<'static>>,
}

impl WorkerTls {
    /// TLS over `stream` with the newest certificates, if the worker's has the name it must have.
    pub async fn handshake(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> io::Result<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(self.config.borrow().clone());
        let name = match &self.name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other)?,
        };
        connector.connect(name, stream).await
    }
}

/// The files of the TLS flags, and both sides built from them.
pub struct TlsFiles {
    flags: TlsFlags,
    has_h2: bool,
    digest: [u8; 32],
    to_clients: Option<watch::Sender<TlsAcceptor>>,
    to_workers: Option<watch::Sender<Arc<ClientConfig>>>,
    expiries: Vec<(&'static str, i64)>,
}

impl TlsFiles {
    /// `Err` names the flag and what is wrong with its file.
    pub fn open(flags: &TlsFlags, has_h2: bool) -> Result<Self, String> {
        Ok(Self {
            flags: flags.clone(),
            has_h2,
            digest: digest(flags)?,
            to_clients: tls::acceptor(flags, has_h2)?.map(watch::Sender::new),
            to_workers: tls::to_workers(flags)?.map(watch::Sender::new),
            expiries: tls::expiries(flags)?,
        })
    }

    /// Present when clients speak TLS.
    pub fn for_clients(&self) -> Option<ClientTls> {
        self.to_clients.as_ref().map(watch::Sender::subscribe)
    }

    /// Present when https:// workers can be reached.
    pub fn for_workers(&self) -> Option<WorkerTls> {
        let name = self.flags.worker_tls_name.clone();
        let name = name.and_then(|name| ServerName::try_from(name).ok()); // checked with the flags
        self.to_workers.as_ref().map(|sender| WorkerTls {
            config: sender.subscribe(),
            name,
        })
    }

    pub fn show_expiries(&self, metrics: &RouterMetrics) {
        for (certificate, end) in &self.expiries {
            metrics
                .certificate_expiry
                .with_label_values(&[certificate])
                .set(*end as f64);
        }
    }

    /// Reads the files again. Returns false when nothing changed. After an error all is as before.
    fn reload(&mut self) -> Result<bool, String> {
        let digest = digest(&self.flags)?;
        if digest == self.digest {
            return Ok(false);
        }
        let to_clients = tls::acceptor(&self.flags, self.has_h2)?;
        let to_workers = tls::to_workers(&self.flags)?;
        self.expiries = tls::expiries(&self.flags)?;
        if let (Some(sender), Some(acceptor)) = (&self.to_clients, to_clients) {
            sender.send_replace(acceptor);
        }
        if let (Some(sender), Some(config)) = (&self.to_workers, to_workers) {
            sender.send_replace(config);
        }
        self.digest = digest;
        Ok(true)
    }

    fn is_used(&self) -> bool {
        let clients = self.to_clients.as_ref().is_some_and(|s| !s.is_closed());
        clients || self.to_workers.as_ref().is_some_and(|s| !s.is_closed())
    }
}

/// Over the content of all files, in the order of the flags.
fn digest(flags: &TlsFlags) -> Result<[u8; 32], String> {
    let mut hash = Sha256::new();
    for (flag, path) in flags.files() {
        let unreadable = |err| format!("{flag} {path}: {err}; give a readable PEM file");
        let content = read_regular_file(Path::new(path)).map_err(unreadable)?;
        hash.update((content.len() as u64).to_le_bytes());
        hash.update(&content);
    }
    Ok(hash.finalize().into())
}

/// Keeps both sides current until nothing uses them.
pub fn follow(files: TlsFiles, metrics: Arc<RouterMetrics>) {
    tokio::spawn(async move {
        let mut files = files;
        let mut turn = interval(POLL);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failure = None;
        while files.is_used() {
            turn.tick().await;
            let reload = move || (files.reload(), files);
            let Ok((outcome, back)) = tokio::task::spawn_blocking(reload).await else {
                return; // the runtime ends, or the reading panicked and says so itself
            };
            files = back;
            let count = |result| {
                metrics
                    .certificate_reloads
                    .with_label_values(&[result])
                    .inc()
            };
            match outcome {
                Ok(true) => {
                    count("applied");
                    files.show_expiries(&metrics);
                    tracing::info!("certificates changed; new connections use the new ones");
                    failure = None;
                }
                Ok(false) => failure = None,
                Err(why) if failure.as_ref() != Some(&why) => {
                    count("failed");
                    tracing::error!(
                        why,
                        "changed certificates cannot be used, the old ones stay"
                    );
                    failure = Some(why);
                }
                Err(_) => {}
            }
        }
    });
}
