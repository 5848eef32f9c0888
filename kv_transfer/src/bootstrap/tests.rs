use std::time::Duration;

use super::super::{BootstrapClient, RankRegistration};
use super::*;

fn registration(port: u16, id: &str) -> RankRegistration {
    serde_json::from_value(
        json!({"role": "Prefill", "rank_ip": "", "rank_port": port, "instance_id": id}),
    )
    .expect("valid")
}

fn client(server: &BootstrapServer, key: Option<&str>) -> BootstrapClient {
    BootstrapClient {
        host: "127.0.0.1".into(),
        port: server.port(),
        cluster_keys: key.map(Into::into),
        loopback_only: true,
        timeout: Duration::from_secs(5),
    }
}

#[tokio::test]
async fn rank_registers_is_found_and_leaves() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).expect("a free port");
    let client = client(&server, None);
    assert_eq!(
        client.topology().await.expect_err("empty").status(),
        Some(StatusCode::NOT_FOUND)
    );
    client
        .register_rank(&registration(77, "a"))
        .await
        .expect("accepted");
    assert_eq!(
        client
            .topology()
            .await
            .expect("known")
            .sizes
            .prefill_dp_size,
        1
    );
    let route = client.rank_route(0).await.expect("known");
    assert_eq!(
        (
            route.rank_ip.as_str(),
            route.rank_port,
            route.instance_id.as_str()
        ),
        ("127.0.0.1", 77, "a"),
        "the address is filled in"
    );
    assert_eq!(
        client.rank_route(1).await.expect_err("unknown").status(),
        Some(StatusCode::NOT_FOUND)
    );
    let mut conflicting = registration(78, "b");
    conflicting.pp_size = 2;
    assert_eq!(
        client
            .register_rank(&conflicting)
            .await
            .expect_err("conflict")
            .status(),
        Some(StatusCode::CONFLICT)
    );
    client
        .unregister_rank(&registration(77, "a"))
        .await
        .expect("gone");
    assert_eq!(
        client.rank_route(0).await.expect_err("unknown").status(),
        Some(StatusCode::NOT_FOUND)
    );
    assert!(server.is_serving());
}

#[tokio::test]
async fn with_a_cluster_key_a_forged_route_is_refused() {
    let server =
        BootstrapServer::start("127.0.0.1", 0, Some("secret".into())).expect("a free port");
    for key in [None, Some("guess")] {
        let err = client(&server, key)
            .register_rank(&RankRegistration {
                rank_ip: "evil".into(),
                ..registration(1, "evil")
            })
            .await
            .expect_err("refused");
        assert_eq!(err.status(), Some(StatusCode::UNAUTHORIZED), "{err}");
        assert_eq!(
            client(&server, key)
                .rank_route(0)
                .await
                .expect_err("refused")
                .status(),
            Some(StatusCode::UNAUTHORIZED)
        );
    }
    assert_eq!((server.refused_total(), server.refused_unsigned()), (4, 4));
    client(&server, Some("secret"))
        .register_rank(&registration(2, "good"))
        .await
        .expect("accepted");
    assert_eq!(
        client(&server, Some("secret"))
            .rank_route(0)
            .await
            .expect("known")
            .rank_port,
        2
    );
}

#[tokio::test]
async fn recorded_change_of_a_route_is_refused() {
    use super::super::auth::sign_request;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server =
        BootstrapServer::start("127.0.0.1", 0, Some("secret".into())).expect("a free port");
    let body = json!({"role": "Prefill", "rank_ip": "h", "rank_port": 1}).to_string();
    let signature = sign_request("secret", "PUT", "/route", unix_ms(), body.as_bytes());
    let request = format!(
        "PUT /route HTTP/1.1\r\nhost: x\r\n{AUTH_HEADER}: {signature}\r\nconnection: \
         close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port()))
            .await
            .expect("connect");
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        answers.push(answer.split(' ').nth(1).map(str::to_owned));
    }
    assert_eq!(answers, [Some("200".into()), Some("401".into())]);
    assert_eq!(server.refused_total(), 1);
}

#[tokio::test]
async fn unsigned_answer_is_refused_by_a_client_with_a_key() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).expect("a free port");
    client(&server, None)
        .register_rank(&registration(1, "a"))
        .await
        .expect("accepted");
    let err = client(&server, Some("secret")).rank_route(0).await;
    assert!(
        matches!(err, Err(super::super::HttpError::Untrusted(_))),
        "{err:?}"
    );
}

#[tokio::test]
async fn unusable_requests_get_their_http_status() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).expect("a free port");
    let ask = async |request: &str| {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port()))
            .await
            .expect("connect");
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        answer.split(' ').nth(1).map(str::to_owned)
    };
    let request = |line: &str| format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert_eq!(ask(&request("GET /health")).await.as_deref(), Some("200"));
    assert_eq!(
        ask(&request("GET /route?engine_rank=0")).await.as_deref(),
        Some("400")
    );
    assert_eq!(
        ask(&request(
            "GET /route?engine_rank=-5&target_dp_group=9&target_pp_rank=0"
        ))
        .await
        .as_deref(),
        Some("404")
    );
    assert_eq!(ask(&request("POST /route")).await.as_deref(), Some("405"));
    assert_eq!(ask(&request("PUT /route")).await.as_deref(), Some("400"));
    assert_eq!(ask(&request("GET /etc")).await.as_deref(), Some("404"));
}

#[tokio::test]
async fn silent_connections_make_space_for_requests() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).expect("a free port");
    let mut silent = Vec::new();
    for _ in 0..=CONNECTIONS_PER_SOURCE {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).await;
        silent.push(stream.expect("accepted"));
    }
    let client = client(&server, None);
    client
        .register_rank(&registration(77, "a"))
        .await
        .expect("answered");
    assert!(server.refused_total() > 0);
}
