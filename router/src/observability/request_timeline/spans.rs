//! A request's timeline as spans of a trace.

use super::{AttemptTimeline, RequestStage, RequestTimeline, TimelineRecords, ms, rounded};
use crate::observability::otlp::{
    self, AttributeValue, Name, SpanEvent, SpanKind, TraceContext, TraceSpan,
};

impl RequestTimeline {
    /// The ended request as spans; `None` if it is not to be traced.
    pub fn spans(&self, method: &str) -> Option<Vec<TraceSpan>> {
        let context = self.trace.filter(|trace| trace.is_sampled)?;
        let records = self.records.lock();
        let at = |ms: f64| self.received_unix_ns + (ms * 1e6) as u64;
        let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
        let ended_ms = stage(RequestStage::Ended).unwrap_or_else(|| ms(self.started));
        let request = self.root_span(method, &context, &records, ended_ms);
        let child = |id, name: &str, kind, from_ms: f64, to_ms: f64| TraceSpan {
            trace: context.trace,
            id,
            parent: Some(context.span),
            name: name.to_owned(),
            kind,
            start: at(from_ms),
            end: at(to_ms),
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        };
        let mut spans = vec![request];
        let mut attempt = 0;
        for leg in &records.legs {
            if attempt != leg.attempt {
                attempt = leg.attempt;
                let failed = records.failures.iter().find(|failed| failed.attempt + 1 == attempt);
                let from = failed.map(|failed| failed.at_ms).or(stage(RequestStage::Tokenised));
                let from = from.unwrap_or(leg.chosen_ms);
                let mut decide =
                    child(otlp::new_id(), "decide", SpanKind::Internal, from, leg.chosen_ms);
                decide
                    .attributes
                    .push(("baton.attempt".into(), AttributeValue::Int(attempt.into())));
                spans.push(decide);
            }
            let to = leg.ended_ms.unwrap_or(ended_ms);
            let mut span =
                child(leg.span, leg.role.into_str(), SpanKind::Client, leg.chosen_ms, to);
            span.attributes = leg.attributes();
            let events = [("sent", leg.sent_ms), ("first_token", leg.first_token_ms)];
            let events =
                events.into_iter().filter_map(|(name, ms)| Some(SpanEvent::new(at(ms?), name)));
            span.events = events.collect();
            span.error = (leg.outcome == Some("failed")).then(|| {
                let failed = records.failures.iter().find(|failed| failed.attempt == leg.attempt);
                failed.map_or("failed", |failed| failed.reason).to_owned()
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
    ) -> TraceSpan {
        let at = |ms: f64| self.received_unix_ns + (ms * 1e6) as u64;
        let stage = |stage: RequestStage| records.stages[stage as usize].map(rounded);
        let (status, outcome) = records.end.unwrap_or((0, "unknown"));
        let mut request = TraceSpan {
            trace: context.trace,
            id: context.span,
            parent: context.parent,
            name: format!("{method} {}", self.route),
            kind: SpanKind::Server,
            start: at(0.0),
            end: at(ended_ms),
            attributes: vec![
                ("http.request.method".into(), AttributeValue::Text(method.to_owned())),
                ("http.route".into(), AttributeValue::Text(self.route.to_owned())),
                ("http.response.status_code".into(), AttributeValue::Int(status.into())),
                ("baton.request_id".into(), AttributeValue::Text(records.rid.clone())),
                ("baton.outcome".into(), AttributeValue::Text(outcome.to_owned())),
                (
                    "baton.attempts".into(),
                    AttributeValue::Int(records.legs.last().map_or(0, |leg| leg.attempt.into())),
                ),
            ],
            events: Vec::new(),
            error: (status >= 500 || outcome == "error_event").then(|| outcome.to_owned()),
        };
        let failovers = records.failures.iter().filter(|f| f.failover_at_token.is_some());
        request.events.extend(failovers.map(|failed| SpanEvent::new(at(failed.at_ms), "failover")));
        for (name, ms) in [
            ("read", stage(RequestStage::Read)),
            ("admitted", stage(RequestStage::Admitted)),
            ("tokenised", stage(RequestStage::Tokenised)),
            ("first_byte", stage(RequestStage::FirstByte)),
        ] {
            request.events.extend(ms.map(|ms| SpanEvent::new(at(ms), name)));
        }
        request
    }
}

impl AttemptTimeline {
    fn attributes(&self) -> Vec<(Name, AttributeValue)> {
        let text = |text: &str| AttributeValue::Text(text.to_owned());
        let mut attributes = vec![
            ("baton.attempt".into(), AttributeValue::Int(self.attempt.into())),
            ("baton.worker".into(), text(&self.worker)),
            ("baton.why".into(), text(self.why.into_str())),
        ];
        attributes
            .extend(self.room.map(|room| ("baton.room".into(), AttributeValue::Int(room as i64))));
        attributes.extend(self.outcome.map(|outcome| ("baton.outcome".into(), text(outcome))));
        if let Some(forecast) = self.why.forecast() {
            let cached = AttributeValue::Int(forecast.cached_tokens.into());
            attributes.push((
                "baton.predicted_ttft_ms".into(),
                AttributeValue::Int(forecast.ttft_ms.into()),
            ));
            attributes.push(("baton.predicted_cached_tokens".into(), cached));
        }
        if let Some(usage) = self.usage {
            let mut count = |name: &'static str, tokens: Option<u32>| {
                attributes
                    .extend(tokens.map(|tokens| (name.into(), AttributeValue::Int(tokens.into()))));
            };
            count("gen_ai.usage.input_tokens", Some(usage.prompt_tokens));
            count("gen_ai.usage.output_tokens", usage.completion_tokens);
            count("baton.cached_tokens", usage.cached_tokens);
        }
        attributes
    }
}
