//! A request that breaks the workers it is sent to breaks two, and its body is refused for a while.

use serde_json::json;

use crate::support::{Act, End, Mock, Router, timed};

const FREE: [&str; 2] = ["--disable-circuit-breaker", "--disable-health-check"];

#[tokio::test]
async fn request_that_breaks_workers_is_tried_on_one_other() {
    timed(async {
        let mut workers = Vec::new();
        for _ in 0..6 {
            workers.push(Mock::start(&[Act::Drop]).await);
        }
        let all: Vec<&Mock> = workers.iter().collect();
        let router = Router::regular(&all, &FREE).await;
        let broken = || workers.iter().map(Mock::count).sum::<usize>();
        let reply = router.chat().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (502, "upstream_error")
        );
        assert_eq!(broken(), 2);
        // Again, and nothing is sent; another body is.
        let reply = router.chat().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (422, "poison_request")
        );
        assert_eq!(broken(), 2);
        let other = json!({"model": "m", "messages": []});
        let reply = router.post("/v1/chat/completions", &other).await;
        assert_eq!(reply.status, 502);
        assert!(broken() > 2);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn stream_that_breaks_workers_without_progress_is_given_up() {
    timed(async {
        let info = json!({"engine": "baton", "baton_features": ["resume"]});
        let mut workers = Vec::new();
        for _ in 0..6 {
            // The first one gets as far as token 2, the others break at once.
            let acts = [Act::CountTo(2, 0, End::Break), Act::Drop];
            workers.push(Mock::start(&acts).await.with_info(info.clone()));
        }
        for worker in &mut workers[1..] {
            worker.acts(&[Act::Drop]);
        }
        let all: Vec<&Mock> = workers.iter().collect();
        let router = Router::regular(&all, &FREE).await;
        let reply = router.chat_stream().await;
        assert_eq!(reply.error_event(), "upstream_error", "{}", reply.text());
        let broken = workers.iter().filter(|worker| worker.count() > 0).count();
        assert_eq!(broken, 3, "one with progress and two without");
        router.no_load().await;
    })
    .await;
}
