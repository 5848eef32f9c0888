//! HTTPS to clients, and to workers that ask for the router's certificate. Certificates are made
//! here, for this run.

use std::net::SocketAddr;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::clients::limits::H2;

use crate::support::{Client, Mock, Router, TempFile, chat, eventually, refused_start, timed};

/// A certificate with its key, as files and as text.
pub struct Identity {
    cert: TempFile,
    key: TempFile,
    cert_pem: String,
    key_pem: String,
}

impl Identity {
    fn new(cert_pem: String, key: &KeyPair) -> Identity {
        let key_pem = key.serialize_pem();
        Identity {
            cert: TempFile::new(&cert_pem),
            key: TempFile::new(&key_pem),
            cert_pem,
            key_pem,
        }
    }

    fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![CertificateDer::from_pem_slice(self.cert_pem.as_bytes()).unwrap()]
    }

    fn private(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes()).unwrap()
    }
}

pub struct Authority {
    pub cert: TempFile,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Authority {
            cert: TempFile::new(&pem),
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    pub fn issue(&self, name: &str) -> Identity {
        self.issue_until(name, 4096)
    }

    /// A certificate that ends with the year before `year`.
    fn issue_until(&self, name: &str, year: i32) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        Identity::new(cert.pem(), &key)
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        let cert = CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap();
        roots.add(cert).unwrap();
        roots
    }
}

/// TLS in front of a plain server; with `clients`, only for clients with a certificate of theirs.
/// Returns its URL.
pub async fn encrypted(behind: SocketAddr, own: &Identity, clients: Option<&Authority>) -> String {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => {
            let roots = Arc::new(clients.roots());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let config = builder.with_single_cert(own.chain(), own.private());
    let acceptor = TlsAcceptor::from(Arc::new(config.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut near) = acceptor.accept(stream).await else {
                    return; // a client without the certificate
                };
                let mut far = TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    format!("https://{addr}")
}

async fn connect(router: &Router, authority: &Authority) -> Result<Client, std::io::Error> {
    Ok(Client::over(encrypted_to(router, authority, &[]).await?).await)
}

/// `offers`: what the client would speak inside.
async fn encrypted_to(
    router: &Router,
    authority: &Authority,
    offers: &[&[u8]],
) -> Result<TlsStream<TcpStream>, std::io::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(authority.roots())
        .with_no_client_auth();
    config.alpn_protocols = offers.iter().map(|offer| offer.to_vec()).collect();
    let stream = TcpStream::connect(router.running.addr).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let tls = TlsConnector::from(Arc::new(config));
    tls.connect(name, stream).await
}

#[tokio::test]
async fn tls_agrees_on_the_http_inside() {
    timed(async {
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        for (streams, agreed) in [("256", &b"h2"[..]), ("0", b"http/1.1")] {
            let flags = [
                "--tls-cert-path",
                own.cert.path(),
                "--tls-key-path",
                own.key.path(),
                "--http2-max-streams",
                streams,
            ];
            let router = Router::start(&flags).await;
            let both = [&b"h2"[..], b"http/1.1"];
            let stream = encrypted_to(&router, &authority, &both).await.unwrap();
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(agreed));
            if agreed == b"h2" {
                let mut client = H2::over(stream).await;
                let response = client.post(&chat(false)).await;
                assert_eq!(
                    (response.status(), response.version()),
                    (http::StatusCode::SERVICE_UNAVAILABLE, http::Version::HTTP_2,)
                );
            } else {
                let mut client = Client::over(stream).await;
                assert_eq!(get(&mut client, "/health").await["status"], "ok");
            }
        }
    })
    .await;
}

async fn get(client: &mut Client, path: &str) -> serde_json::Value {
    let answer = client.send(http::Method::GET, path, &[], "").await;
    answer.read().await.json()
}

#[tokio::test]
async fn earliest_end_of_each_chain_is_a_metric() {
    timed(async {
        let authority = Authority::new();
        let (long, short) = (
            authority.issue_until("127.0.0.1", 2040),
            authority.issue_until("ca", 2035),
        );
        let chain = TempFile::new(&format!("{}{}", long.cert_pem, short.cert_pem));
        let own = authority.issue_until("router", 2031);
        let router = Router::start(&[
            "--tls-cert-path",
            chain.path(),
            "--tls-key-path",
            long.key.path(),
            "--ca-cert-paths",
            authority.cert.path(),
            "--client-cert-path",
            own.cert.path(),
            "--client-key-path",
            own.key.path(),
        ])
        .await;
        let mut client = connect(&router, &authority).await.unwrap();
        let page = client.send(http::Method::GET, "/metrics", &[], "").await;
        let page = page.read().await.text();
        // date -u -d 2035-01-01 +%s, and of 2031
        for (certificate, end) in [("server", 2_051_222_400), ("client", 1_924_992_000)] {
            let line = format!(
                "baton_router_certificate_expiry_timestamp_seconds{{certificate=\"{certificate}\"}} {end}\n"
            );
            assert!(page.contains(&line), "{line}");
        }
    })
    .await;
}

#[tokio::test]
async fn clients_speak_https_with_the_certificate_given() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        let url = mock.url();
        let flags = ["--worker-urls", &url, "--tls-cert-path", own.cert.path()];
        let flags = [&flags[..], &["--tls-key-path", own.key.path()]].concat();
        let router = Router::start(&flags).await;
        let mut client = connect(&router, &authority).await.unwrap();
        eventually("it is ready", || async {
            let mut client = connect(&router, &authority).await.unwrap();
            get(&mut client, "/readyz").await["status"] == "ready"
        })
        .await;
        let streamed = client.chat(true).await.read().await;
        assert!(streamed.text().ends_with("data: [DONE]\n\n"));
        assert_eq!(
            get(&mut client, "/workers").await["total"],
            1,
            "the connection is kept"
        );

        let stranger = Authority::new();
        let refused = connect(&router, &stranger).await.err().unwrap();
        assert!(
            refused.to_string().contains("invalid peer certificate"),
            "{refused}"
        );
        drop(client);
        router.running.stop().await;
    })
    .await;
}

#[tokio::test]
async fn workers_are_reached_over_mutual_tls() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let (fleet, clients) = (Authority::new(), Authority::new());
        let url = encrypted(mock.addr, &fleet.issue("127.0.0.1"), Some(&clients)).await;
        let own = clients.issue("router");
        let ca = ["--worker-urls", &url, "--ca-cert-path", fleet.cert.path()];
        let shown = [
            "--client-cert-path",
            own.cert.path(),
            "--client-key-path",
            own.key.path(),
        ];
        let router = Router::start(&[&ca[..], &shown[..]].concat()).await;
        router.all_ready(1).await;
        assert_eq!(
            router.get("/workers").await.json()["workers"][0]["url"],
            url
        );
        assert_eq!(router.chat().await.status, 200);
        let streamed = router.post("/v1/chat/completions", &chat(true)).await;
        assert!(streamed.text().ends_with("data: [DONE]\n\n"));
        assert_eq!(mock.count(), 2);
    })
    .await;
}

#[tokio::test]
async fn renewed_certificates_serve_new_connections() {
    timed(async {
        let (old, new) = (Authority::new(), Authority::new());
        let (first, second) = (old.issue("127.0.0.1"), new.issue("127.0.0.1"));
        let flags = ["--tls-cert-path", first.cert.path(), "--tls-key-path"];
        let router = Router::start(&[&flags[..], &[first.key.path()]].concat()).await;
        let mut before = connect(&router, &old).await.unwrap();
        // The certificate alone does not fit the old key: it waits for its own.
        first.cert.write(&second.cert_pem);
        eventually("a certificate without its key is reported", || async {
            let mut client = connect(&router, &old).await.unwrap();
            let page = client.send(http::Method::GET, "/metrics", &[], "").await;
            let page = page.read().await.text();
            page.contains("baton_router_certificate_reloads_total{result=\"failed\"} 1\n")
        })
        .await;
        first.key.write(&second.key_pem);
        eventually("the new certificate is shown", || async {
            connect(&router, &new).await.is_ok()
        })
        .await;
        assert!(connect(&router, &old).await.is_err());
        assert_eq!(
            get(&mut before, "/health").await["status"],
            "ok",
            "the connection is kept"
        );
    })
    .await;
}

#[tokio::test]
async fn renewed_client_certificates_and_roots_reach_workers() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let (fleet, clients) = (Authority::new(), Authority::new());
        let (strangers, others) = (Authority::new(), Authority::new());
        let url = encrypted(mock.addr, &fleet.issue("127.0.0.1"), Some(&clients)).await;
        let own = strangers.issue("router");
        let ca = ["--worker-urls", &url, "--ca-cert-path", others.cert.path()];
        let shown = [
            "--client-cert-path",
            own.cert.path(),
            "--client-key-path",
            own.key.path(),
        ];
        let router = Router::start(&[&ca[..], &shown[..]].concat()).await;
        eventually("a probe failed", || async {
            let probes = "baton_router_health_probes_total{result=\"bad\"";
            router.metric(probes).await > 0.0
        })
        .await;
        let renewed = clients.issue("router");
        others.cert.write(&fleet.pem);
        own.cert.write(&renewed.cert_pem);
        own.key.write(&renewed.key_pem);
        router.all_ready(1).await;
        assert_eq!(router.chat().await.status, 200);
    })
    .await;
}

/// The router's view of a worker that it does not take, or that does not take it.
async fn reason(flags: &[&str]) -> String {
    let router = Router::start(flags).await;
    eventually("a probe failed", || async {
        router
            .metric("baton_router_health_probes_total{result=\"bad\"")
            .await
            > 0.0
    })
    .await;
    let answer = router.chat().await;
    assert_eq!(answer.code(), "no_worker");
    router.get("/workers").await.json()["workers"][0]["state"].to_string()
}

#[tokio::test]
async fn wrong_certificates_keep_a_worker_out() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let (fleet, clients) = (Authority::new(), Authority::new());
        let own = clients.issue("router");
        let shown = [
            "--client-cert-path",
            own.cert.path(),
            "--client-key-path",
            own.key.path(),
        ];
        let right = encrypted(mock.addr, &fleet.issue("127.0.0.1"), Some(&clients)).await;
        let misnamed = encrypted(mock.addr, &fleet.issue("elsewhere"), Some(&clients)).await;
        let of_fleet = ["--ca-cert-paths", fleet.cert.path()];
        let of_others = ["--ca-cert-paths", clients.cert.path()];
        for (url, ca, shown) in [
            (&misnamed, &of_fleet, &shown[..]),
            (&right, &of_others, &shown[..]),
            (&right, &of_fleet, &[]),
        ] {
            let flags = [&["--worker-urls", url.as_str()][..], &ca[..], shown].concat();
            assert_eq!(reason(&flags).await, "\"starting\"");
        }
        assert_eq!(mock.count(), 0);
    })
    .await;
}

/// A certificate as `openssl req -x509` makes it: self-signed, with the CA flag, and without
/// subjectAltName unless `names` has some. It ends with the year before `year`.
fn self_signed(names: &[&str], year: i32) -> Identity {
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = rcgen::date_time_ymd(year, 1, 1);
    let cert = params.self_signed(&key).unwrap();
    Identity::new(cert.pem(), &key)
}

#[tokio::test]
async fn listed_self_signed_certificate_is_accepted() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let nameless = self_signed(&[], 4096);
        let named = self_signed(&["127.0.0.1"], 4096);
        let first = encrypted(mock.addr, &nameless, None).await;
        let second = encrypted(mock.addr, &named, None).await;
        let workers = ["--worker-urls", &first, &second];
        let paths = ["--ca-cert-paths", nameless.cert.path(), named.cert.path()];
        let router = Router::start(&[&workers[..], &paths[..]].concat()).await;
        router.all_ready(2).await;
        assert_eq!(router.chat().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn other_certificates_without_the_host_are_refused() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let fleet = Authority::new();
        let signed = fleet.issue("elsewhere");
        let both = TempFile::new(&format!("{}{}", fleet.pem, signed.cert_pem));
        let expired = self_signed(&[], 2020);
        let misnamed = self_signed(&["elsewhere"], 4096);
        // Same subject, same issuer, another key: only the bytes tell them apart.
        let double = self_signed(&[], 4096);
        let listed_double = self_signed(&[], 4096);
        for (shown, listed) in [
            (&signed, both.path()),
            (&expired, expired.cert.path()),
            (&misnamed, misnamed.cert.path()),
            (&double, listed_double.cert.path()),
        ] {
            let url = encrypted(mock.addr, shown, None).await;
            let flags = ["--worker-urls", url.as_str(), "--ca-cert-paths", listed];
            assert_eq!(reason(&flags).await, "\"starting\"");
        }
        assert_eq!(mock.count(), 0);
    })
    .await;
}

#[tokio::test]
async fn unusable_tls_files_end_the_start() {
    timed(async {
        let authority = Authority::new();
        let (own, other) = (authority.issue("a"), authority.issue("b"));
        let empty = TempFile::new("");
        let (cert, key) = (own.cert.path(), own.key.path());
        for (flags, part) in [
            (
                ["--tls-cert-path", "/nowhere", "--tls-key-path", key],
                "--tls-cert-path /nowhere: ",
            ),
            (
                ["--tls-cert-path", empty.path(), "--tls-key-path", key],
                "holds no certificate",
            ),
            (
                ["--tls-cert-path", cert, "--tls-key-path", cert],
                "unencrypted private key",
            ),
            (
                ["--tls-cert-path", cert, "--tls-key-path", other.key.path()],
                "--tls-key-path",
            ),
            (
                ["--ca-cert-paths", key, "--log-level", "info"],
                "--ca-cert-paths",
            ),
            (
                ["--worker-urls", "https://a:1", "--log-level", "info"],
                "--ca-cert-paths",
            ),
        ] {
            let text = refused_start(&flags).await;
            assert!(text.contains(part), "{flags:?}: {text}");
        }
        let router = Router::start(&[]).await;
        let reply = router
            .post("/workers", &json!({"url": "https://a:1"}))
            .await;
        assert_eq!(reply.code(), "invalid_value");
        assert!(
            reply
                .text()
                .contains("start the router with --ca-cert-paths"),
            "{}",
            reply.text()
        );
    })
    .await;
}

#[tokio::test]
async fn unfinished_handshake_gives_its_place_to_a_new_client() {
    timed(async {
        let authority = Authority::new();
        let own = authority.issue("127.0.0.1");
        let flags = ["--tls-cert-path", own.cert.path(), "--max-connections", "1"];
        let flags = [&flags[..], &["--tls-key-path", own.key.path()]].concat();
        let router = Router::start(&flags).await;
        let mut silent = TcpStream::connect(router.running.addr).await.unwrap();
        let mut client = connect(&router, &authority).await.unwrap();
        assert_eq!(get(&mut client, "/livez").await["status"], "ok");
        let mut first = [0];
        let read = tokio::io::AsyncReadExt::read(&mut silent, &mut first).await;
        assert!(!matches!(read, Ok(1..)), "an answer came");
    })
    .await;
}
