//! Ends, errors and forms of answers of workers of other makes: what is translated or merged is
//! finished by a finish_reason alone, errors in any form count as failures, and streams that pass
//! unchanged stay as their worker wrote them.

use baton_text::dialect::Dialect;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::support::{Act, DONE, End, FINISH, Mock, Reply, Router, TOKEN, chat, timed};

const APIS: [Dialect; 2] = [Dialect::Responses, Dialect::Messages];

/// Errors of other servers, as the first event of a stream.
const ERROR_EVENTS: [&str; 6] = [
    "data: \
     {\"object\":\"error\",\"message\":\"oom\",\"type\":\"InternalServerError\",\"code\":500}\n\n",
    "data: { \"error\": {\"message\": \"oom\"}}\n\n",
    "data: {\"id\":\"c1\",\"choices\":[],\"error\":{\"message\":\"oom\",\"code\":502}}\n\n",
    "data: {\"error\":\"oom\"}\r\n\r\n",
    "data: {\"detail\":\"oom\"}\n\n",
    "retry: 3\n\nevent: error\rdata: oom\r\r",
];

fn request(api: Dialect, stream: bool) -> Value {
    match api {
        Dialect::Responses => json!({"model": "m", "input": "hi", "stream": stream}),
        Dialect::Messages => json!({
            "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
            "stream": stream,
        }),
        _ => chat(stream),
    }
}

async fn ask(router: &Router, api: Dialect, stream: bool) -> Reply {
    router.post(api.path(), &request(api, stream)).await
}

/// A worker of chat requests alone.
async fn foreign(acts: &[Act]) -> Mock {
    Mock::start(acts).await.lacks(&APIS)
}

fn whole(text: &str, finish: &Value) -> Value {
    json!({"id": "c1", "object": "chat.completion", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish},
    ]})
}

/// The error that a stream of one of the two APIs ends with.
fn error_at_end(api: Dialect, reply: &Reply) -> Value {
    assert_eq!(reply.status, 200);
    let events = reply.events();
    let [.., error, done] = events.as_slice() else {
        panic!("too few events: {events:?}");
    };
    assert_eq!(done, "[DONE]");
    let error: Value = serde_json::from_str(error).unwrap();
    match api {
        Dialect::Responses => {
            assert_eq!(error["type"], "response.failed");
            error["response"]["error"].clone()
        }
        _ => {
            assert_eq!(error["type"], "error");
            error["error"].clone()
        }
    }
}

#[tokio::test]
async fn error_as_first_event_is_tried_again_elsewhere() {
    timed(async {
        for error in ERROR_EVENTS {
            for api in [Dialect::Chat, Dialect::Responses, Dialect::Messages] {
                let bad = foreign(&[Act::Stream(vec![error, DONE], End::Clean)]).await;
                let good = foreign(&[]).await;
                let router = Router::regular(&[&bad, &good], &[]).await;
                for _ in 0..2 {
                    let text = ask(&router, api, true).await.text();
                    assert!(text.contains("\"a\"") && !text.contains("oom"), "{text}");
                }
                assert!(bad.count() >= 1, "{error} {api:?}");
                assert_eq!(good.count(), 2, "{error} {api:?}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn error_of_the_only_worker_reaches_the_client_with_its_message() {
    timed(async {
        for error in ERROR_EVENTS {
            let worker = foreign(&[Act::Stream(vec![error, DONE], End::Clean)]).await;
            let router = Router::regular(&[&worker], &[]).await;
            for api in APIS {
                let reply = ask(&router, api, true).await;
                assert_eq!(error_at_end(api, &reply)["message"], "oom", "{error}");
            }
            // A stream that passes unchanged has the worker's own words.
            let passed = ask(&router, Dialect::Chat, true).await.text();
            let begin = error.find("event").or(error.find("data")).unwrap();
            assert_eq!(passed, format!("{}{DONE}", &error[begin..]));
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn translated_stream_without_a_finish_is_an_error() {
    const ODD: &str = "data: {\"object\":\"error\",\"message\":\"oom\",\"code\":500}\n\n";
    timed(async {
        for (events, message) in [
            (vec![TOKEN, DONE], "without a finish_reason"),
            (vec![TOKEN, ODD, FINISH, DONE], "oom"),
        ] {
            let worker = foreign(&[Act::Stream(events.clone(), End::Clean)]).await;
            let router = Router::regular(&[&worker], &[]).await;
            for api in APIS {
                let reply = ask(&router, api, true).await;
                let error = error_at_end(api, &reply);
                let text = error["message"].as_str().unwrap();
                assert!(text.contains(message), "{text}");
            }
            let passed = ask(&router, Dialect::Chat, true).await;
            assert_eq!(passed.text(), events.concat());
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn whole_answer_that_is_an_error_is_tried_again_and_refused() {
    let error = json!({"object": "error", "message": "oom", "code": 503});
    let unfinished = whole("a", &Value::Null);
    timed(async {
        for (answer, apis, status) in [
            (
                &error,
                &[Dialect::Chat, Dialect::Responses, Dialect::Messages][..],
                503,
            ),
            (&unfinished, &APIS[..], 502),
            (&json!({"choices": []}), &APIS[..], 502),
            (&json!({"ok": true}), &APIS[..], 502),
        ] {
            for api in apis {
                let good = Act::Json(whole("b", &json!("stop")));
                let bad = foreign(&[Act::Json(answer.clone()), good]).await;
                let router = Router::regular(&[&bad], &[]).await;
                let reply = ask(&router, *api, false).await;
                assert_eq!(reply.status, 200, "{answer} {}", reply.text());
                assert!(reply.text().contains("\"b\""), "{}", reply.text());
                let bad = foreign(&[Act::Json(answer.clone())]).await;
                let router = Router::regular(&[&bad], &[]).await;
                let reply = ask(&router, *api, false).await;
                assert_eq!(reply.status, status, "{answer}");
                let is_own = answer["message"] == "oom";
                assert_eq!(reply.text().contains("oom"), is_own, "{}", reply.text());
                if *api == Dialect::Chat {
                    assert_eq!(&reply.json(), answer);
                } else {
                    assert!(reply.json()["error"]["message"].is_string());
                }
                router.no_load().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn error_in_the_answer_of_a_prefill_worker_ends_the_attempt() {
    timed(async {
        let error = json!({"error": {"message": "oom", "code": 500}});
        let p = Mock::start(&[Act::Json(error), Act::Answer]).await;
        let d = Mock::start(&[Act::Hang, Act::Answer]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router.chat().await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!((p.count(), d.count()), (2, 2));
    })
    .await;
}

#[tokio::test]
async fn merged_answer_is_finished_by_its_reason_alone() {
    const OPEN: &str = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[],\"finish_reason\":null}}\n\n";
    const LAST: &str =
        "data: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}\n\n";
    let answer = |finish: Value| {
        Act::Json(json!({"text": "a", "meta_info": {
            "input_token_logprobs": [[-0.5, 2, null]], "finish_reason": finish,
        }}))
    };
    timed(async {
        let ask = |stream: bool| json!({"text": "x", "stream": stream, "return_logprob": true});
        let whole = || answer(json!({"type": "stop"}));
        for (last, is_whole) in [(vec![OPEN, LAST, DONE], true), (vec![OPEN, DONE], false)] {
            let p = Mock::start(&[whole()]).await;
            let d = Mock::start(&[Act::Stream(last, End::Clean)]).await;
            let router = Router::pd(&[&p], &[&d], &[]).await;
            let reply = router.post("/generate", &ask(true)).await;
            assert!(reply.text().contains("-0.5"), "{}", reply.text());
            if is_whole {
                assert!(reply.text().ends_with(&[LAST, DONE].concat()));
            } else {
                assert_eq!(reply.error_event(), "upstream_error");
            }
        }
        let p = Mock::start(&[whole()]).await;
        let d = Mock::start(&[answer(Value::Null), whole()]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router.post("/generate", &ask(false)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(d.count(), 2, "the unfinished answer is tried again");
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn token_count_that_is_an_error_is_refused_in_anthropics_form() {
    const PATH: &str = "/v1/messages/count_tokens";
    timed(async {
        let worker = Mock::start(&[]).await;
        let router = Router::regular(&[&worker], &[]).await;
        worker.answers(PATH, 200, json!({"detail": "oom"}));
        let reply = router.post(PATH, &request(Dialect::Messages, false)).await;
        assert_eq!(reply.status, 502);
        assert_eq!(reply.json()["type"], "error");
        assert_eq!(reply.json()["error"]["message"], "oom");
    })
    .await;
}

#[tokio::test]
async fn error_that_ends_a_passed_stream_is_its_only_one() {
    const ODD: &str = "data: {\"object\":\"error\",\"message\":\"oom\",\"code\":500}\n\n";
    timed(async {
        let worker = foreign(&[Act::Stream(vec![TOKEN, ODD], End::Clean)]).await;
        let router = Router::regular(&[&worker], &[]).await;
        let passed = ask(&router, Dialect::Chat, true).await;
        assert_eq!(passed.text(), format!("{TOKEN}{ODD}\n{DONE}"));
    })
    .await;
}

/// A worker that answers each chat request with these bytes, whatever they are.
struct RawWorker {
    url: String,
    task: JoinHandle<()>,
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RawWorker {
    async fn start(answer: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, answer.clone()));
            }
        });
        Self { url, task }
    }
}

/// Serves one request and closes the connection, in the middle of the answer's bytes now and then.
async fn serve(mut stream: TcpStream, answer: Vec<u8>) {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    let is_whole = |request: &[u8]| {
        let text = String::from_utf8_lossy(request).to_lowercase();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |length| length.parse().unwrap());
        (body.len() >= length).then_some(())
    };
    while is_whole(&request).is_none() {
        let Ok(read @ 1..) = stream.read(&mut piece).await else {
            return;
        };
        request.extend_from_slice(&piece[..read]);
    }
    let answer = if request.starts_with(b"POST /v1/chat/completions ") {
        answer
    } else if request.starts_with(b"GET /health ") {
        head("200 OK", "text/plain", &[], "ok")
    } else {
        head("404 Not Found", "application/json", &[], "{}")
    };
    for part in answer.chunks(37) {
        if stream.write_all(part).await.is_err() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

fn head(status: &str, kind: &str, headers: &[String], body: &str) -> Vec<u8> {
    let headers = headers.concat();
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n{body}")
        .into_bytes()
}

async fn router_of(worker: &RawWorker) -> Router {
    let router = Router::start(&["--worker-urls", &worker.url]).await;
    router.all_ready(1).await;
    router
}

/// The rules are those of WHATWG HTML 9.2.6 and of RFC 9110, 8.3.1.
#[tokio::test]
async fn event_streams_of_the_standard_are_read_and_pass_as_they_are() {
    timed(async {
        let plain = [TOKEN, TOKEN, FINISH, DONE].concat();
        let members = "\"choices\":[{\"delta\":{\"content\":\"a\"},";
        let in_two = plain.replace(members, &format!("\ndata: {members}\ndata:"));
        let fields = format!(
            "\u{feff}retry: 3\n\n{}",
            plain.replace("data", ": c\nid: 1\nx\ndata")
        );
        let kind = "text/event-stream";
        for (stream, kind) in [
            (plain.clone(), "Text/Event-Stream"),
            (plain.clone(), "TEXT/EVENT-STREAM ;charset=UTF-8"),
            (plain.replace('\n', "\r\n"), kind),
            (plain.replace('\n', "\r"), kind),
            (plain.replace("data: ", "data:"), kind),
            (in_two.clone(), kind),
            (in_two.replace('\n', "\r"), kind),
            (fields.clone(), kind),
            (fields.replace('\n', "\r\n"), kind),
        ] {
            let worker = RawWorker::start(head("200 OK", kind, &[], &stream)).await;
            let router = router_of(&worker).await;
            for api in APIS {
                let reply = ask(&router, api, true).await;
                let text = reply.text();
                assert_eq!(reply.status, 200, "{stream:?} {text}");
                assert!(text.contains("message_stop") || text.contains("response.completed"));
                assert!(
                    text.contains("\"aa\"") || text.matches("\"a\"").count() == 2,
                    "{text}"
                );
            }
            let passed = ask(&router, Dialect::Chat, true).await;
            assert_eq!(passed.text(), stream);
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn answer_with_many_headers_passes() {
    timed(async {
        for count in [101, 900] {
            let headers: Vec<String> = (0..count).map(|at| format!("x-h{at}: {at}\r\n")).collect();
            let body = whole("a", &json!("stop")).to_string();
            let answer = head("200 OK", "application/json", &headers, &body);
            let worker = RawWorker::start(answer).await;
            let router = router_of(&worker).await;
            let request = request(Dialect::Chat, false).to_string();
            let mut client = TcpStream::connect(router.running.addr).await.unwrap();
            let length = request.len();
            let sent = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: \
                 {length}\r\nconnection: close\r\n\r\n{request}"
            );
            client.write_all(sent.as_bytes()).await.unwrap();
            let mut reply = String::new();
            client.read_to_string(&mut reply).await.unwrap();
            assert!(reply.starts_with("HTTP/1.1 200 "), "{reply}");
            for header in &headers {
                assert!(reply.contains(header), "{header}");
            }
        }
    })
    .await;
}
