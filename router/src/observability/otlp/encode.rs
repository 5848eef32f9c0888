//! Spans as an OTLP request. Messages and encoding are those of opentelemetry-proto; why without
//! its SDK: docs/decisions/0008-otlp-without-an-sdk.md.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::Event;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message;

/// Origin of the spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceService {
    pub name: String,
    /// Beside the version, which is this program's.
    pub attributes: Vec<(String, String)>,
}

/// Encode one request for all these spans.
pub fn encode(service: TraceService, spans: Vec<Span>) -> Vec<u8> {
    let mut attributes = vec![
        text_attribute("service.name", service.name),
        text_attribute("service.version", env!("CARGO_PKG_VERSION")),
    ];
    attributes.extend(
        service
            .attributes
            .into_iter()
            .map(|(key, value)| text_attribute(key, value)),
    );
    let scope = Some(InstrumentationScope {
        name: "baton".to_owned(),
        ..Default::default()
    });
    let scope_spans = vec![ScopeSpans {
        scope,
        spans,
        ..Default::default()
    }];
    let resource = Some(Resource {
        attributes,
        ..Default::default()
    });
    let resource_spans = vec![ResourceSpans {
        resource,
        scope_spans,
        ..Default::default()
    }];
    ExportTraceServiceRequest { resource_spans }.encode_to_vec()
}

pub fn text_attribute(key: impl Into<String>, value: impl Into<String>) -> KeyValue {
    attribute(key.into(), Value::StringValue(value.into()))
}

pub fn int_attribute(key: impl Into<String>, value: impl Into<i64>) -> KeyValue {
    attribute(key.into(), Value::IntValue(value.into()))
}

fn attribute(key: String, value: Value) -> KeyValue {
    KeyValue {
        key,
        value: Some(AnyValue { value: Some(value) }),
        ..Default::default()
    }
}

/// Something that happened during a span, at a time in ns since 1970.
pub fn span_event(at_unix_ns: u64, name: impl Into<String>) -> Event {
    Event {
        time_unix_nano: at_unix_ns,
        name: name.into(),
        ..Default::default()
    }
}

/// Status of a span that counts as failed.
pub fn failed_status(reason: impl Into<String>) -> Status {
    Status {
        message: reason.into(),
        code: StatusCode::Error.into(),
    }
}

/// Trace ids and span ids are big-endian, as in `traceparent`.
pub fn trace_id_bytes(id: u128) -> Vec<u8> {
    id.to_be_bytes().to_vec()
}

pub fn span_id_bytes(id: u64) -> Vec<u8> {
    id.to_be_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

    use super::*;

    /// Bytes that the protobuf compiler's own code (opentelemetry-proto 1.45.2, Python) makes of
    /// the same span.
    #[test]
    fn span_is_written_as_the_protobuf_library_writes_it() {
        let mut event = span_event(1_700_000_000_000_000_200, "first_token");
        event.attributes.push(int_attribute("n", 7));
        let span = Span {
            trace_id: trace_id_bytes(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736),
            span_id: span_id_bytes(2),
            parent_span_id: span_id_bytes(0x00f0_67aa_0ba9_02b7),
            name: "decode".to_owned(),
            kind: SpanKind::Client.into(),
            start_time_unix_nano: 1_700_000_000_000_000_000,
            end_time_unix_nano: 1_700_000_000_000_000_300,
            attributes: vec![
                text_attribute("worker", "http://a"),
                int_attribute("tokens", -300),
            ],
            events: vec![event],
            status: Some(failed_status("reset")),
            ..Default::default()
        };
        let hex: String = span
            .encode_to_vec()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(hex, include_str!("span.hex").trim());
    }
}
