//! Workers that answer nothing, and workers that are only slow.

use serde_json::json;

use crate::support::{Act, Mock, Router, eventually, timed};

/// No probe comes by itself: only silence brings one.
const FLAGS: [&str; 8] = [
    "--silent-request-probe-secs",
    "1",
    "--health-failure-threshold",
    "1",
    "--health-check-interval-secs",
    "600",
    "--health-check-timeout-secs",
    "600",
];

#[tokio::test]
async fn request_at_a_hung_worker_moves_to_another_before_its_first_byte() {
    timed(async {
        let (hung, good) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&hung, &good], &FLAGS).await;
        hung.freeze();
        // Round robin: one of the two meets the hung worker.
        let (whole, stream) = tokio::join!(router.chat(), router.chat_stream());
        assert_eq!((whole.status, stream.status), (200, 200));
        assert_eq!(good.count(), 2);
        let retries = "baton_router_retries_total{reason=\"hung\"}";
        assert_eq!(router.metric(retries).await, 1.0);
        let workers = router.get("/workers").await.json();
        assert_eq!(workers["workers"][0]["state"], "unhealthy", "{workers}");
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn fan_out_does_not_wait_for_a_worker_found_hung() {
    timed(async {
        let (hung, good) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let models = json!({"object": "list", "data": [{"id": "m"}]});
        good.answers("/v1/models", 200, models.clone());
        let router = Router::regular(&[&hung, &good], &FLAGS).await;
        hung.freeze();
        assert_eq!(router.get("/v1/models").await.json(), models);
    })
    .await;
}

#[tokio::test]
async fn slow_worker_that_answers_probes_keeps_its_request() {
    timed(async {
        let slow = Mock::start(&[Act::Gated(200, "late")]).await;
        let other = Mock::start(&[]).await;
        let router = Router::regular(&[&slow, &other], &FLAGS).await;
        let probes = "baton_router_health_probes_total{result=\"good\",role=\"regular\"}";
        let before = router.metric(probes).await;
        let release = async {
            eventually("silence brought a probe", || async {
                router.metric(probes).await > before
            })
            .await;
            slow.release();
        };
        let (reply, ()) = tokio::join!(router.chat(), release);
        assert_eq!(reply.json()["id"], "late");
        assert_eq!((slow.count(), other.count()), (1, 0));
        router.all_ready(2).await;
    })
    .await;
}
