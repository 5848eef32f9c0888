//! A request's timeline as spans of a trace.

use super::{AttemptTimeline, RequestStage, RequestTimeline, TimelineRecords, ms, rounded};
use crate::observability::otlp::{
    KeyValue, Span, SpanKind, TraceContext, failed_status, int_attribute, new_id, span_event,
    span_id_bytes, text_attribute, trace_id_bytes,
};

impl RequestTimeline {
    /// The ended request as spans; `None` if it is not to be traced.
    pub fn spans(&self, method: &str) -> Option<Vec<Span>> {
        let context = self.trace.filter(|trace| trace.is_sampled)?;
        let records = self.records.lock();
        let at = |ms: f64| self.received_unix_ns + (ms * 1e6) as u64;
        let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
        let ended_ms = stage(RequestStage::Ended).unwrap_or_else(|| ms(self.started));
        let request = self.root_span(method, &context, &records, ended_ms);
        let child = |id, name: &str, kind: SpanKind, from_ms: f64, to_ms: f64| Span {
            trace_id: trace_id_bytes(context.trace),
            span_id: span_id_bytes(id),
            parent_span_id: span_id_bytes(context.span),
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: at(from_ms),
            end_time_unix_nano: at(to_ms),
            ..Default::default()
        };
        let mut spans = vec![request];
        let mut attempt = 0;
        for leg in &records.legs {
            if attempt != leg.attempt {
                attempt = leg.attempt;
                let failed = records.failures.iter().find(|failed| failed.attempt + 1 == attempt);
                let from = failed.map(|failed| failed.at_ms).or(stage(RequestStage::Tokenised));
                let from = from.unwrap_or(leg.chosen_ms);
                let mut decide = child(new_id(), "decide", SpanKind::Internal, from, leg.chosen_ms);
                decide.attributes.push(int_attribute("baton.attempt", attempt));
                spans.push(decide);
            }
            let to = leg.ended_ms.unwrap_or(ended_ms);
            let mut span =
                child(leg.span, leg.role.into_str(), SpanKind::Client, leg.chosen_ms, to);
            span.attributes = leg.attributes();
            let events = [("sent", leg.sent_ms), ("first_token", leg.first_token_ms)];
            let events =
                events.into_iter().filter_map(|(name, ms)| Some(span_event(at(ms?), name)));
            span.events = events.collect();
            span.status = (leg.outcome == Some("failed")).then(|| {
                let failed = records.failures.iter().find(|failed| failed.attempt == leg.attempt);
                failed_status(failed.map_or("failed", |failed| failed.reason))
            });
            spans.push(span);
        }
        Some(spans)
    }

    /// Span of the whole request.
    fn root_span(
        &self,
        method: &str,
        context: &TraceContext,
        records: &TimelineRecords,
        ended_ms: f64,
    ) -> Span {
        let at = |ms: f64| self.received_unix_ns + (ms * 1e6) as u64;
        let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
        let (status, outcome) = records.end.unwrap_or((0, "unknown"));
        let mut request = Span {
            trace_id: trace_id_bytes(context.trace),
            span_id: span_id_bytes(context.span),
            parent_span_id: context.parent.map_or_else(Vec::new, span_id_bytes),
            name: format!("{method} {}", self.route),
            kind: SpanKind::Server.into(),
            start_time_unix_nano: at(0.0),
            end_time_unix_nano: at(ended_ms),
            attributes: vec![
                text_attribute("http.request.method", method),
                text_attribute("http.route", self.route),
                int_attribute("http.response.status_code", status),
                text_attribute("baton.request_id", records.rid.as_str()),
                text_attribute("baton.outcome", outcome),
                int_attribute("baton.attempts", records.legs.last().map_or(0, |leg| leg.attempt)),
            ],
            status: (status >= 500 || outcome == "error_event").then(|| failed_status(outcome)),
            ..Default::default()
        };
        let failovers = records.failures.iter().filter(|f| f.failover_at_token.is_some());
        request.events.extend(failovers.map(|failed| span_event(at(failed.at_ms), "failover")));
        for (name, ms) in [
            ("read", stage(RequestStage::Read)),
            ("admitted", stage(RequestStage::Admitted)),
            ("tokenised", stage(RequestStage::Tokenised)),
            ("first_byte", stage(RequestStage::FirstByte)),
        ] {
            request.events.extend(ms.map(|ms| span_event(at(ms), name)));
        }
        request
    }
}

impl AttemptTimeline {
    fn attributes(&self) -> Vec<KeyValue> {
        let mut attributes = vec![
            int_attribute("baton.attempt", self.attempt),
            text_attribute("baton.worker", &*self.worker),
            text_attribute("baton.why", self.why.into_str()),
        ];
        attributes.extend(self.room.map(|room| int_attribute("baton.room", room as i64)));
        attributes.extend(self.outcome.map(|outcome| text_attribute("baton.outcome", outcome)));
        if let Some(forecast) = self.why.forecast() {
            attributes.push(int_attribute("baton.predicted_ttft_ms", forecast.ttft_ms));
            attributes.push(int_attribute("baton.predicted_cached_tokens", forecast.cached_tokens));
        }
        if let Some(usage) = self.usage {
            let counts = [
                ("gen_ai.usage.input_tokens", Some(usage.prompt_tokens)),
                ("gen_ai.usage.output_tokens", usage.completion_tokens),
                ("baton.cached_tokens", usage.cached_tokens),
            ];
            let counts = counts.into_iter().filter_map(|(name, tokens)| Some((name, tokens?)));
            attributes.extend(counts.map(|(name, tokens)| int_attribute(name, tokens)));
        }
        attributes
    }
}
