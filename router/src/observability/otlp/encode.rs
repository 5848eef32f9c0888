//! Spans as bytes of OTLP's ExportTraceServiceRequest (protobuf; the numbers are opentelemetry-proto 1.x's field numbers).
//!
//! Why by hand: docs/decisions/0008-otlp-without-an-sdk.md.

use std::borrow::Cow;

/// Names of attributes and events: constants here, made of Python's strings in an engine.
pub type Name = Cow<'static, str>;

/// Origin of the spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceService {
    pub name: String,
    /// Beside the version, which is this program's.
    pub attributes: Vec<(String, String)>,
}

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSpan {
    pub trace: u128,
    pub id: u64,
    pub parent: Option<u64>,
    pub name: String,
    pub kind: SpanKind,
    /// [ns since 1970]
    pub start: u64,
    pub end: u64,
    pub attributes: Vec<(Name, AttributeValue)>,
    pub events: Vec<SpanEvent>,
    /// Why it counts as failed.
    pub error: Option<String>,
}

/// Something that happened during a span.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanEvent {
    /// [ns since 1970]
    pub at: u64,
    pub name: Name,
    pub attributes: Vec<(Name, AttributeValue)>,
}

impl SpanEvent {
    pub fn new(at: u64, name: &'static str) -> Self {
        Self { at, name: name.into(), attributes: Vec::new() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Internal = 1,
    Server = 2,
    Client = 3,
}

#[derive(Debug, Clone, PartialEq)]
pub enum AttributeValue {
    Text(String),
    Int(i64),
}

/// Encode one request for all these spans.
pub fn encode(service: &TraceService, spans: &[TraceSpan]) -> Vec<u8> {
    let mut resource = Message::default();
    let own =
        [("service.name", service.name.as_str()), ("service.version", env!("CARGO_PKG_VERSION"))];
    let more = service.attributes.iter();
    let more = more.map(|(key, value)| (key.as_str(), value.as_str()));
    for (key, value) in own.into_iter().chain(more) {
        resource.message(1, &attribute(key, &AttributeValue::Text(value.to_owned())));
    }
    let mut scope = Message::default();
    scope.text(1, "baton");
    let mut scope_spans = Message::default();
    scope_spans.message(1, &scope);
    for span in spans {
        scope_spans.message(2, &message(span));
    }
    let mut resource_spans = Message::default();
    resource_spans.message(1, &resource);
    resource_spans.message(2, &scope_spans);
    let mut request = Message::default();
    request.message(1, &resource_spans);
    request.0
}

fn message(span: &TraceSpan) -> Message {
    let mut out = Message::default();
    out.bytes(1, &span.trace.to_be_bytes());
    out.bytes(2, &span.id.to_be_bytes());
    if let Some(parent) = span.parent {
        out.bytes(4, &parent.to_be_bytes());
    }
    out.text(5, &span.name);
    out.int(6, span.kind as u64);
    out.fixed(7, span.start);
    out.fixed(8, span.end);
    for (key, value) in &span.attributes {
        out.message(9, &attribute(key, value));
    }
    for event in &span.events {
        let mut encoded = Message::default();
        encoded.fixed(1, event.at);
        encoded.text(2, &event.name);
        for (key, value) in &event.attributes {
            encoded.message(3, &attribute(key, value));
        }
        out.message(11, &encoded);
    }
    if let Some(error) = &span.error {
        const ERROR: u64 = 2;
        let mut status = Message::default();
        status.text(2, error);
        status.int(3, ERROR);
        out.message(15, &status);
    }
    out
}

fn attribute(key: &str, value: &AttributeValue) -> Message {
    let mut any = Message::default();
    match value {
        AttributeValue::Text(text) => any.text(1, text),
        AttributeValue::Int(number) => any.int(3, *number as u64), // two's complement, as int64 is written
    }
    let mut out = Message::default();
    out.text(1, key);
    out.message(2, &any);
    out
}

/// Protobuf's wire format, what is needed of it.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn int(&mut self, field: u64, number: u64) {
        self.varint(field << 3);
        self.varint(number);
    }

    fn fixed(&mut self, field: u64, number: u64) {
        self.varint(field << 3 | 1);
        self.0.extend(number.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn text(&mut self, field: u64, text: &str) {
        self.bytes(field, text.as_bytes());
    }

    fn message(&mut self, field: u64, message: &Message) {
        self.bytes(field, &message.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that the protobuf compiler's own code (opentelemetry-proto 1.45.2, Python) makes of the same span.
    #[test]
    fn a_span_is_written_as_the_protobuf_library_writes_it() {
        let span = TraceSpan {
            trace: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
            id: 2,
            parent: Some(0x00f0_67aa_0ba9_02b7),
            name: "decode".into(),
            kind: SpanKind::Client,
            start: 1_700_000_000_000_000_000,
            end: 1_700_000_000_000_000_300,
            attributes: vec![
                ("worker".into(), AttributeValue::Text("http://a".into())),
                ("tokens".into(), AttributeValue::Int(-300)),
            ],
            events: vec![SpanEvent {
                at: 1_700_000_000_000_000_200,
                name: "first_token".into(),
                attributes: vec![("n".into(), AttributeValue::Int(7))],
            }],
            error: Some("reset".into()),
        };
        let hex: String = message(&span).0.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, include_str!("span.hex").trim());
    }
}
