//! Leg to a chosen worker, as every attempt sets it up: headers, body, and the prompt's token ids.

use bytes::Bytes;
use http::HeaderValue;
use router_core::Role;

use crate::dispatch::app::AppState;
use crate::dispatch::attempt::UpstreamAttempt;
use crate::dispatch::attempt::answer_translation::AnswerTranslation;
use crate::dispatch::chat_form::{RequestForm, to_chat_head};
use crate::dispatch::context::{LegBody, RequestContext};
use crate::observability::otlp::TRACEPARENT;
use crate::response::failover;
use crate::workers::load_guard::{Candidate, LoadGuard};

/// The prompt's token ids as a member of the body, if this worker would compute the same ids.
pub fn forwarded_ids<'a>(
    app: &AppState,
    request: &'a RequestContext,
    candidate: &Candidate,
) -> Option<&'a Bytes> {
    let input_ids = request.routing.prompt.input_ids.as_ref()?;
    let fingerprint = &app.tokens.as_ref()?.fingerprint;
    if !candidate.description.takes_ids_of(fingerprint) {
        return None;
    }
    app.metrics
        .ids_forwarded
        .with_label_values(&[candidate.worker.role().into_str()])
        .inc();
    Some(input_ids)
}

/// Build the leg that sends `body` to the chosen worker.
pub fn build_leg(
    app: &AppState,
    request: &RequestContext,
    chosen: LoadGuard,
    body: LegBody,
) -> UpstreamAttempt {
    let mut head = request.head.clone();
    if let Some(traceparent) = chosen.timeline.traceparent() {
        head.more.insert(TRACEPARENT, traceparent);
    }
    let candidate = &chosen.candidate;
    let is_prefill = candidate.worker.role() == Role::Prefill;
    if !is_prefill {
        observe_overhead(app, request);
    }
    let mut translation = None;
    if let RequestForm::Chat(form) = &body.form {
        to_chat_head(&mut head);
        // The client does not see the answer of a prefill worker.
        translation = (!is_prefill).then(|| Box::new(AnswerTranslation::new(request, form)));
    }
    let has_token_ids = !is_prefill && request.is_resumable(app, candidate);
    if has_token_ids {
        head.more
            .insert(failover::HEADER, HeaderValue::from_static("1"));
    }
    UpstreamAttempt {
        guard: chosen,
        head,
        body: body.segments,
        limit: app.config.request_timeout(),
        has_token_ids,
        translation,
    }
}

/// Observe the router's own share of the time to the first token.
pub fn observe_overhead(app: &AppState, request: &RequestContext) {
    if request.record.attempts == 1 {
        let overhead = app
            .metrics
            .overhead
            .with_label_values(&[request.record.route]);
        overhead.observe(request.admission.ready_at.elapsed().as_secs_f64());
    }
}
