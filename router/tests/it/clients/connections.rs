//! Places of connections: which ones end for others, who waits, and that probes have their own.

use std::net::SocketAddr;
use std::time::Duration;

use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::clients::limits::{H2, cuts, rest, text};
use crate::support::{Act, Client, End, Mock, Router, TOKEN, chat, timed};

/// A connection from this address of the machine.
async fn connect_from(source: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Waits until the router has closed the connection without an answer.
async fn until_closed(mut stream: TcpStream) {
    // A reset is an end, too.
    let read = stream.read(&mut [0]).await.unwrap_or(0);
    assert_eq!(read, 0, "an answer came");
}

async fn status(mut client: Client, path: &str) -> u16 {
    let answer = client.send(Method::GET, path, &[], "").await;
    answer.read().await.status
}

async fn status_from(source: &str, to: SocketAddr, path: &str) -> u16 {
    let stream = connect_from(source, to).await;
    status(Client::over(stream).await, path).await
}

/// A worker whose first answer is a stream that ends after `Mock::release`.
async fn slow_worker() -> Mock {
    Mock::start(&[Act::Stream(vec![TOKEN], End::Gate), Act::Answer]).await
}

#[tokio::test]
async fn connections_without_a_request_give_their_places_and_streams_keep_theirs() {
    timed(async {
        let mock = slow_worker().await;
        let flags = [
            "--max-connections",
            "8",
            "--max-connections-per-address",
            "0",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut stream = client.chat(true).await;
        assert_eq!(stream.piece().await.unwrap(), TOKEN);
        let mut silent = Vec::new();
        for i in 0..24 {
            let source = format!("127.0.0.{}", 2 + i % 20);
            let mut one = connect_from(&source, router.running.addr).await;
            if i % 2 == 0 {
                let half = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n";
                one.write_all(half).await.unwrap();
            }
            silent.push(one);
        }
        assert_eq!(router.get("/livez").await.status, 200);
        // 24 and the last one, with 7 places between them.
        for one in silent.drain(..18) {
            until_closed(one).await;
        }
        assert!(cuts(&router, "displaced").await >= 18.0);
        mock.release();
        let rest = stream.read().await.text();
        assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    })
    .await;
}

#[tokio::test]
async fn client_waits_for_a_place_while_all_connections_have_requests() {
    timed(async {
        let mock = slow_worker().await;
        let router = Router::regular(&[&mock], &["--max-connections", "1"]).await;
        let mut first = Client::connect(router.running.addr).await;
        let mut stream = first.chat(true).await;
        assert_eq!(stream.piece().await.unwrap(), TOKEN);
        // The kernel accepts it, and so many others as a burst brings.
        let mut waiting = connect_from("127.0.2.1", router.running.addr).await;
        let request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        waiting.write_all(request).await.unwrap();
        let mut waiting = tokio::spawn(async move { rest(&mut waiting).await });
        let somaxconn = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let mut burst = Vec::new();
        for i in 0..300.min(somaxconn.trim().parse::<u32>().unwrap()) - 1 {
            let source = format!("127.0.1.{}", 1 + i % 250);
            burst.push(connect_from(&source, router.running.addr).await);
        }
        let early = tokio::time::timeout(Duration::from_millis(50), &mut waiting).await;
        assert!(early.is_err(), "all connections have requests");
        mock.release();
        assert!(stream.read().await.text().ends_with("data: [DONE]\n\n"));
        // The first client's connection has no request any more.
        let answer = waiting.await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    })
    .await;
}

#[tokio::test]
async fn address_has_a_share_unless_it_is_a_trusted_proxy() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let share = ["--max-connections-per-address", "2"];
        let router = Router::regular(&[&mock], &share).await;
        let mut busy = Vec::new();
        for _ in 0..2 {
            let mut client =
                Client::over(connect_from("127.0.0.2", router.running.addr).await).await;
            let mut stream = client.chat(true).await;
            assert_eq!(stream.piece().await.unwrap(), TOKEN);
            busy.push((client, stream));
        }
        until_closed(connect_from("127.0.0.2", router.running.addr).await).await;
        assert_eq!(cuts(&router, "share").await, 1.0);
        // Others are served, and displace none of it.
        assert_eq!(
            status_from("127.0.0.3", router.running.addr, "/livez").await,
            200
        );
        for (_, stream) in busy {
            mock.release();
            assert!(stream.read().await.text().ends_with("data: [DONE]\n\n"));
        }
        let proxy = [
            &share[..],
            &["--trusted-proxies", "192.0.2.1", "127.0.0.0/8"],
        ]
        .concat();
        let router = Router::regular(&[&mock], &proxy).await;
        let mut busy = Vec::new();
        for _ in 0..3 {
            let mut client =
                Client::over(connect_from("127.0.0.2", router.running.addr).await).await;
            let mut stream = client.chat(true).await;
            assert_eq!(stream.piece().await.unwrap(), TOKEN);
            busy.push((client, stream));
        }
        assert_eq!(cuts(&router, "share").await, 0.0);
    })
    .await;
}

#[tokio::test]
async fn idle_http2_connection_is_displaced_and_one_with_a_stream_is_not() {
    timed(async {
        let mock = slow_worker().await;
        let flags = [
            "--max-connections",
            "2",
            "--max-connections-per-address",
            "0",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        let mut busy = H2::connect(&router).await;
        let waiting = busy.post(&chat(true)).await;
        // Its preface came, and no request.
        let idle = H2::connect(&router).await;
        for _ in 0..3 {
            assert_eq!(router.get("/livez").await.status, 200);
        }
        idle.closed().await;
        mock.release();
        assert!(text(waiting).await.ends_with("data: [DONE]\n\n"));
    })
    .await;
}

#[tokio::test]
async fn probes_answer_on_their_own_port_while_clients_have_all_connections() {
    timed(async {
        let mock = slow_worker().await;
        let flags = [
            "--max-connections",
            "1",
            "--health-port",
            "0",
            "--api-key",
            "k",
        ];
        let router = Router::start(&[&flags[..], &["--worker-urls", &mock.url()]].concat()).await;
        let health = router.running.health_addr.unwrap();
        let key = [("authorization", "Bearer k")];
        let body = chat(true).to_string();
        let mut client = Client::connect(router.running.addr).await;
        let path = "/v1/chat/completions";
        let mut stream = loop {
            let answer = client.send(Method::POST, path, &key, &body).await;
            if answer.response.status() == 200 {
                break answer;
            }
            answer.read().await;
        };
        assert_eq!(stream.piece().await.unwrap(), TOKEN);
        let mut silent = Vec::new();
        for _ in 0..200 {
            silent.push(TcpStream::connect(health).await.unwrap());
        }
        for path in ["/livez", "/readyz", "/health", "/ping"] {
            let probe = Client::connect(health).await;
            assert_eq!(status(probe, path).await, 200, "{path}");
        }
        for path in ["/metrics", "/workers", "/v1/models", "/"] {
            let probe = Client::connect(health).await;
            assert_eq!(status(probe, path).await, 404, "{path}");
        }
        mock.release();
        assert!(stream.read().await.text().ends_with("data: [DONE]\n\n"));
    })
    .await;
}
