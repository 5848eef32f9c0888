//! Phases of a body, with a worker that sends one event and then nothing.

use baton_text::dialect::Dialect;
use baton_text::dialect::body::BodyIndex;
use http::{HeaderMap, Method, Request, Uri};
use router_core::{AttemptReason, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::event::{ResumeFailure, ResumedAnswer, StreamFailure, WorkerLoss};
use super::resume::ResumeAttempt;
use super::*;
use crate::config::{RouterConfig, WorkerSpec};
use crate::dispatch::attempt::{UpstreamAttempt, upstream_error};
use crate::dispatch::context::{
    AdmittedRequest, AttemptState, RoutingInputs, read_header_deadlines,
};
use crate::observability::access_log::AccessLogEntry;
use crate::observability::metrics::RouterMetrics;
use crate::response::failover::BrokenStream;
use crate::transport::request_body::BodySegments;
use crate::transport::upstream::RequestHead;
use crate::workers::fleet::selection::SelectionRequest;
use crate::workers::worker::WorkerState;

const BODY: &[u8] = br#"{"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const EVENT: &str = ": baton {\"ids\":[5],\"seed\":7,\"created\":9}\ndata: {\"a\":1}\n\n";

/// A router with one worker that sends `EVENT` and then nothing.
struct Scene {
    app: Arc<AppState>,
    /// Connections to workers are cut when it is dropped.
    _cut: watch::Sender<bool>,
}

impl Scene {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let mut connections = Vec::new();
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(BODY) {
                    let count = connection.read_buf(&mut request).await.unwrap();
                    assert!(count > 0, "the request ended early");
                }
                let chunk = format!("{HEAD}{:x}\r\n{EVENT}\r\n", EVENT.len());
                connection.write_all(chunk.as_bytes()).await.unwrap();
                connections.push(connection);
            }
        });
        let config = RouterConfig::parse(&["baton-router".to_owned()]).unwrap();
        let metrics = Arc::new(RouterMetrics::new().unwrap());
        let (policy_set, _) = crate::server::build_policy_set(&config, &metrics).unwrap();
        let (cut, cut_seen) = watch::channel(false);
        let app = AppState::new(config, metrics, policy_set, None, cut_seen);
        let spec = WorkerSpec::new(&url, Role::Regular, None).unwrap();
        let worker = app.fleet.add(spec).unwrap();
        app.fleet.set_state(&worker, WorkerState::Ready, None);
        Self {
            app: Arc::new(app),
            _cut: cut,
        }
    }

    fn request(&self) -> Box<RequestContext> {
        let head = Request::builder().body(()).unwrap();
        let body = Bytes::from_static(BODY);
        Box::new(RequestContext {
            head: RequestHead::new(Method::POST, Uri::from_static("/"), HeaderMap::new()),
            scan: Arc::new(BodyIndex::of(&body, Dialect::Chat).unwrap()),
            body,
            chat_form: None,
            routing: RoutingInputs::default(),
            admission: AdmittedRequest::new(None, std::time::Duration::ZERO),
            attempts: AttemptState::default(),
            header_deadlines: read_header_deadlines(&HeaderMap::new()),
            record: AccessLogEntry::new(&self.app.sinks, "/", "POST", &head, "r".to_owned()),
        })
    }

    async fn opened(&self) -> UpstreamResponse {
        let wanted = SelectionRequest::default();
        let guard = self.app.fleet.choose(Role::Regular, &wanted, &[]).unwrap();
        let leg = UpstreamAttempt {
            guard,
            head: self.request().head,
            body: BodySegments::from(Bytes::from_static(BODY)),
            limit: self.app.config.request_timeout(),
            has_token_ids: true,
            translation: None,
        };
        leg.open().await.unwrap()
    }

    fn answer(&self) -> ClientAnswer {
        let memory = &self.app.failover_memory;
        let mut answer = ClientAnswer::reported_stream(StatusCode::OK, false, memory, 0);
        answer.push(Bytes::from_static(EVENT.as_bytes())).unwrap();
        answer
    }

    async fn relay(&self) -> Relay {
        let request = RelayedRequest::Resumable(self.request());
        let limit = self.app.config.request_timeout();
        Relay::new(request, self.opened().await, None, limit)
    }

    async fn loss(&self) -> WorkerLoss {
        let guard = self.opened().await.guard;
        let err = upstream_error(&guard, "broke off its answer", String::new());
        WorkerLoss {
            failure: StreamFailure::Router(err),
            reason: AttemptReason::Reset,
        }
    }

    async fn phase(&self, name: &str, answer: &mut ClientAnswer) -> BodyPhase {
        match name {
            "Relaying" => BodyPhase::Relaying(self.relay().await),
            "Resuming" => {
                let leg = self.relay().await.leg;
                let loss = self.loss().await;
                let buffer = answer.resumable().unwrap();
                let attempt = ResumeAttempt::start(&self.app, self.request(), leg, loss, buffer);
                BodyPhase::Resuming(attempt)
            }
            _ => BodyPhase::default(),
        }
    }

    async fn event(&self, name: &str) -> BodyEvent {
        match name {
            "AnswerCompleted" => BodyEvent::AnswerCompleted,
            "ResumeDisabled" => BodyEvent::ResumeDisabled(NotResumable::Memory),
            "WorkerLost" => BodyEvent::WorkerLost(self.loss().await),
            "ResumeOpened" => BodyEvent::ResumeOpened(Box::new(ResumedAnswer {
                request: self.request(),
                opened: self.opened().await,
                prefill: None,
            })),
            _ => BodyEvent::ResumeFailed(self.request(), ResumeFailure::NotAStream),
        }
    }
}

fn name_of(phase: &BodyPhase) -> &'static str {
    phase.into()
}

fn text_of(answer: &mut ClientAnswer) -> String {
    let pieces: Vec<u8> = std::iter::from_fn(|| answer.pop()).flatten().collect();
    String::from_utf8(pieces).unwrap()
}

#[tokio::test]
async fn every_pair_of_phase_and_event_is_a_transition_or_an_error() {
    const PHASES: [&str; 3] = ["Relaying", "Resuming", "Ended"];
    const EVENTS: [&str; 5] = [
        "AnswerCompleted",
        "ResumeDisabled",
        "WorkerLost",
        "ResumeOpened",
        "ResumeFailed",
    ];
    let scene = Scene::new().await;
    for phase_name in PHASES {
        for event_name in EVENTS {
            let mut answer = scene.answer();
            let mut phase = scene.phase(phase_name, &mut answer).await;
            let event = scene.event(event_name).await;
            let result = phase.step(event, &scene.app, &mut answer);
            let next = match (phase_name, event_name) {
                ("Relaying", "AnswerCompleted") => "Ended",
                ("Relaying", "ResumeDisabled") => "Relaying",
                ("Relaying", "WorkerLost") => "Resuming",
                ("Resuming", "ResumeOpened") => "Relaying",
                ("Resuming", "ResumeFailed") => "Ended",
                _ => {
                    let text = result.unwrap_err().to_string();
                    assert!(
                        text.contains(phase_name) && text.contains(event_name),
                        "{text}"
                    );
                    assert_eq!(name_of(&phase), phase_name, "the phase is as it was");
                    continue;
                }
            };
            assert_eq!(result, Ok(()), "{phase_name} {event_name}");
            assert_eq!(name_of(&phase), next, "{phase_name} {event_name}");
        }
    }
}

#[tokio::test]
async fn lost_worker_of_a_stream_that_cannot_be_resumed_ends_it_with_one_error_event() {
    let scene = Scene::new().await;
    let mut answer = scene.answer();
    let mut phase = scene.phase("Relaying", &mut answer).await;
    for event in ["ResumeDisabled", "WorkerLost"] {
        let event = scene.event(event).await;
        phase.step(event, &scene.app, &mut answer).unwrap();
    }
    assert_eq!(name_of(&phase), "Ended");
    let text = text_of(&mut answer);
    assert_eq!(text.matches("{\"error\"").count(), 1, "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn lost_worker_of_an_answer_that_is_no_stream_cuts_the_connection() {
    let scene = Scene::new().await;
    let mut answer = ClientAnswer::whole(StatusCode::OK);
    let mut phase = scene.phase("Relaying", &mut answer).await;
    let event = scene.event("WorkerLost").await;
    phase.step(event, &scene.app, &mut answer).unwrap();
    let BodyPhase::Ended(ended) = phase else {
        panic!("it has ended");
    };
    let truncation = ended.truncation.unwrap().to_string();
    assert!(truncation.contains("broke off its answer"), "{truncation}");
    assert_eq!(text_of(&mut answer), "");
}

#[tokio::test]
async fn stream_that_was_finished_before_the_worker_was_lost_is_complete() {
    const FINISH: &[u8] = b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n";
    let scene = Scene::new().await;
    let mut answer = ClientAnswer::stream(StatusCode::OK, false);
    answer.push(Bytes::from_static(FINISH)).unwrap();
    let mut phase = scene.phase("Relaying", &mut answer).await;
    let event = scene.event("WorkerLost").await;
    phase.step(event, &scene.app, &mut answer).unwrap();
    let text = text_of(&mut answer);
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(!text.contains("error"), "{text}");
}

#[tokio::test]
async fn error_event_of_the_worker_is_passed_on_when_no_worker_resumes() {
    let scene = Scene::new().await;
    let mut answer = scene.answer();
    let error = "data: {\"error\":{\"code\":\"draining\"}}\n\n";
    let broken: BrokenStream = answer.push(Bytes::from(error)).unwrap_err();
    let mut phase = scene.phase("Relaying", &mut answer).await;
    let disabled = scene.event("ResumeDisabled").await;
    phase.step(disabled, &scene.app, &mut answer).unwrap();
    let lost = BodyEvent::WorkerLost(WorkerLoss {
        reason: AttemptReason::Code(broken.code),
        failure: StreamFailure::Worker(broken),
    });
    phase.step(lost, &scene.app, &mut answer).unwrap();
    let text = text_of(&mut answer);
    assert!(text.contains(error), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn event_out_of_place_cuts_the_connection_with_an_internal_error() {
    let scene = Scene::new().await;
    let mut body = ProxyBody {
        app: scene.app.clone(),
        answer: scene.answer(),
        phase: BodyPhase::Relaying(scene.relay().await),
    };
    body.handle(scene.event("ResumeFailed").await);
    assert_eq!(text_of(&mut body.answer).matches("data:").count(), 1);
    let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
    let err = frame.unwrap().unwrap_err().to_string();
    assert!(err.contains("ResumeFailed in phase Relaying"), "{err}");
    assert!(body.is_end_stream());
}
