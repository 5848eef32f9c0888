//! The way down.

use tokio::net::TcpStream;

use crate::support::{Act, Client, End, Mock, Router, TOKEN, eventually, timed};

#[tokio::test]
async fn streams_finish_and_new_connections_are_refused() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let addr = router.running.addr;
        let mut client = Client::connect(addr).await;
        let mut answering = client.chat(true).await;
        answering.piece().await.unwrap();
        let stopping = tokio::spawn(router.running.stop());
        eventually("the listener is closed", || async {
            TcpStream::connect(addr).await.is_err()
        })
        .await;
        assert!(!stopping.is_finished());
        mock.release();
        let reply = answering.read().await;
        assert!(reply.text().ends_with("data: [DONE]\n\n"));
        assert!(!reply.text().contains("error"));
        stopping.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn draining_is_visible_before_the_listener_closes() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &["--shutdown-delay-ms", "60000"]).await;
        let addr = router.running.addr;
        let stopping = tokio::spawn(router.running.stop());
        eventually("readyz says draining", || async {
            let mut client = Client::connect(addr).await;
            let asked = client.send(http::Method::GET, "/readyz", &[], "").await;
            let reply = asked.read().await;
            reply.status == 503 && reply.json()["error"]["code"] == "draining"
        })
        .await;
        stopping.abort();
    })
    .await;
}

#[tokio::test]
async fn when_the_grace_is_over_streams_get_an_error_event() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Hang)]).await;
        let router = Router::regular(&[&mock], &["--shutdown-grace-period-secs", "0"]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        answering.piece().await.unwrap();
        router.running.stop().await;
        let reply = answering.read().await;
        // No worker is to blame.
        assert_eq!(reply.error_event(), "draining");
    })
    .await;
}
