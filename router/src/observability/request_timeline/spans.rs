//! A request's timeline as spans of a trace.

use super::{AttemptTimeline, RequestStage, RequestTimeline, TimelineRecords, ms, rounded};
use crate::observability::otlp::{
    KeyValue, Span, SpanKind, failed_status, int_attribute, new_id, span_event, span_id_bytes,
    text_attribute, trace_id_bytes,
};

impl RequestTimeline {
    /// The ended request as spans; `None` if it is not to be traced.
    pub fn spans(&self, method: &str) -> Option<Vec<Span>> {
        let context = self.trace.filter(|trace| trace.is_sampled)?;
        let records = self.records.lock();
        let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
        let ended_ms = stage(RequestStage::Ended).unwrap_or_else(|| ms(self.started));
        let span = |id, parent: Option<u64>, name: &str, kind: SpanKind, from_ms, to_ms| Span {
            trace_id: trace_id_bytes(context.trace),
            span_id: span_id_bytes(id),
            parent_span_id: parent.map_or_else(Vec::new, span_id_bytes),
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: self.unix_ns(from_ms),
            end_time_unix_nano: self.unix_ns(to_ms),
            ..Default::default()
        };
        let name = format!("{method} {}", self.route);
        let mut request = span(
            context.span,
            context.parent,
            &name,
            SpanKind::Server,
            0.0,
            ended_ms,
        );
        self.describe_request(&mut request, method, &records);
        let mut spans = vec![request];
        let parent = Some(context.span);
        let mut attempt = 0;
        for leg in &records.legs {
            if attempt != leg.attempt {
                attempt = leg.attempt;
                for (name, from, to) in stages_before(&records, leg) {
                    let mut before = span(new_id(), parent, name, SpanKind::Internal, from, to);
                    before
                        .attributes
                        .push(int_attribute("baton.attempt", attempt));
                    spans.push(before);
                }
            }
            let from = leg.chosen_ms;
            let to = leg.ended_ms.unwrap_or(ended_ms);
            let mut leg_span = span(
                leg.span,
                parent,
                leg.role.into_str(),
                SpanKind::Client,
                from,
                to,
            );
            leg_span.attributes = leg.attributes();
            let events = [("sent", leg.sent_ms), ("first_token", leg.first_token_ms)];
            let events = events
                .into_iter()
                .filter_map(|(name, ms)| Some((name, ms?)));
            leg_span.events = events
                .map(|(name, ms)| span_event(self.unix_ns(ms), name))
                .collect();
            leg_span.status = (leg.outcome == Some("failed")).then(|| {
                let failed = records
                    .failures
                    .iter()
                    .find(|failed| failed.attempt == leg.attempt);
                failed_status(failed.map_or("failed", |failed| failed.reason.into_str()))
            });
            spans.push(leg_span);
        }
        Some(spans)
    }

    fn unix_ns(&self, ms: f64) -> u64 {
        self.received_unix_ns + (ms * 1e6) as u64
    }

    /// Attributes, status and events of the whole request's span.
    fn describe_request(&self, span: &mut Span, method: &str, records: &TimelineRecords) {
        let (status, outcome) = records.end.unwrap_or((0, "unknown"));
        span.attributes = vec![
            text_attribute("http.request.method", method),
            text_attribute("http.route", self.route),
            int_attribute("http.response.status_code", status),
            text_attribute("baton.request_id", records.rid.as_str()),
            text_attribute("baton.outcome", outcome),
            int_attribute(
                "baton.attempts",
                records.legs.last().map_or(0, |leg| leg.attempt),
            ),
        ];
        span.status = (status >= 500 || outcome == "error_event").then(|| failed_status(outcome));
        let failovers = records
            .failures
            .iter()
            .filter(|f| f.failover_at_token.is_some());
        let failovers = failovers.map(|failed| ("failover", failed.at_ms));
        let stages = [
            ("read", RequestStage::Read),
            ("admitted", RequestStage::Admitted),
            ("tokenized", RequestStage::Tokenized),
            ("first_byte", RequestStage::FirstByte),
        ];
        let stages = stages
            .into_iter()
            .filter_map(|(name, stage)| Some((name, rounded(records.stages[stage as usize]?))));
        let events = failovers.chain(stages);
        span.events = events
            .map(|(name, ms)| span_event(self.unix_ns(ms), name))
            .collect();
    }
}

/// Stages of an attempt before its first leg: name, begin and end.
fn stages_before(
    records: &TimelineRecords,
    leg: &AttemptTimeline,
) -> Vec<(&'static str, f64, f64)> {
    let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
    let mut failures = records.failures.iter();
    let failed = failures.find(|failed| failed.attempt + 1 == leg.attempt);
    let begin = failed
        .map(|failed| failed.at_ms)
        .or(stage(RequestStage::Tokenized))
        .unwrap_or(leg.chosen_ms);
    let waited_until = stage(RequestStage::WorkerReady).filter(|_| leg.attempt == 1);
    match waited_until {
        None => vec![("decide", begin, leg.chosen_ms)],
        Some(ready_ms) => vec![
            ("worker_wait", begin, ready_ms),
            ("decide", ready_ms, leg.chosen_ms),
        ],
    }
}

impl AttemptTimeline {
    fn attributes(&self) -> Vec<KeyValue> {
        let mut attributes = vec![
            int_attribute("baton.attempt", self.attempt),
            text_attribute("baton.worker", &*self.worker),
            text_attribute("baton.why", self.why.into_str()),
        ];
        attributes.extend(
            self.room
                .map(|room| int_attribute("baton.room", room as i64)),
        );
        attributes.extend(
            self.outcome
                .map(|outcome| text_attribute("baton.outcome", outcome)),
        );
        if let Some(forecast) = self.why.forecast() {
            attributes.push(int_attribute("baton.predicted_ttft_ms", forecast.ttft_ms));
            attributes.push(int_attribute(
                "baton.predicted_cached_tokens",
                forecast.cached_tokens,
            ));
        }
        if let Some(usage) = self.usage {
            let counts = [
                ("gen_ai.usage.input_tokens", Some(usage.prompt_tokens)),
                ("gen_ai.usage.output_tokens", usage.completion_tokens),
                ("baton.cached_tokens", usage.cached_tokens),
            ];
            let counts = counts
                .into_iter()
                .filter_map(|(name, tokens)| Some((name, tokens?)));
            attributes.extend(counts.map(|(name, tokens)| int_attribute(name, tokens)));
        }
        attributes
    }
}
