//! Traces (`--enable-trace`): one trace from the client through the router to both workers,
//! exported as OTLP.
//!
//! The life of a trace:
//!
//! 1. a request comes with a W3C `traceparent`, or gets a new trace; a parent that was not sampled
//!    is followed in that;
//! 2. each leg has a span of its own, which the worker gets as its `traceparent`: the worker's
//!    spans hang below it;
//! 3. when the request has ended, its timeline (`request_timeline`) is turned into spans: request,
//!    decide and leg by attempt. Nothing is done while the request runs but drawing ids, so tracing
//!    costs the same whether or not anybody collects;
//! 4. a task of its own sends them in batches. Its queue is bounded: spans that do not fit, or
//!    cannot be delivered, are dropped and counted. A request never waits for a collector.

/// Exporter on a thread of its own.
mod background;
/// Encoding of spans.
mod encode;
/// Sending of spans.
mod export;

use std::fmt::Write;

use http::{HeaderMap, HeaderValue};
use rand::RngCore;

pub use opentelemetry_proto::tonic::common::v1::KeyValue;
pub use opentelemetry_proto::tonic::trace::v1::Span;
pub use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

pub use self::background::BackgroundExporter;
pub use self::encode::{
    TraceService, failed_status, int_attribute, span_event, span_id_bytes, text_attribute,
    trace_id_bytes,
};
pub use self::export::SpanExporter;

pub const TRACEPARENT: &str = "traceparent";

/// Where a request stands in its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    pub trace: u128,
    /// The request's own span.
    pub span: u64,
    pub parent: Option<u64>,
    pub is_sampled: bool,
}

impl TraceContext {
    /// Continue the client's trace, or begin one.
    pub fn of(headers: &HeaderMap) -> Self {
        let (trace, parent, is_sampled) = match headers.get(TRACEPARENT).and_then(parse) {
            Some((trace, parent, is_sampled)) => (trace, Some(parent), is_sampled),
            None => (
                (u128::from(new_id()) << 64) | u128::from(new_id()),
                None,
                true,
            ),
        };
        Self {
            trace,
            span: new_id(),
            parent,
            is_sampled,
        }
    }

    /// Header for the receiver of a leg.
    pub fn header(&self, leg: u64) -> HeaderValue {
        let mut text = String::with_capacity(55);
        let trace = self.trace;
        let flags = u8::from(self.is_sampled);
        let written = write!(text, "00-{trace:032x}-{leg:016x}-{flags:02x}");
        written.expect("writing to a String cannot fail");
        HeaderValue::try_from(text).expect("hexadecimal digits and dashes are header characters")
    }
}

/// Ids must not be zero.
pub fn new_id() -> u64 {
    rand::rng().next_u64().max(1)
}

/// (trace, parent, sampled) of a header as W3C Trace Context has it; later versions may add to the
/// end.
fn parse(value: &HeaderValue) -> Option<(u128, u64, bool)> {
    let mut parts = value.to_str().ok()?.trim().split('-');
    let mut hex = |digits: usize| {
        let part = parts.next()?;
        let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (part.len() == digits && part.bytes().all(is_hex)).then_some(part)
    };
    let version = hex(2)?;
    let trace = u128::from_str_radix(hex(32)?, 16).ok()?;
    let parent = u64::from_str_radix(hex(16)?, 16).ok()?;
    let flags = u8::from_str_radix(hex(2)?, 16).ok()?;
    let is_complete = version != "00" || parts.next().is_none();
    let is_valid = version != "ff" && trace != 0 && parent != 0 && is_complete;
    is_valid.then_some((trace, parent, flags & 1 == 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(u128, u64, bool)> {
        parse(&HeaderValue::from_str(text).unwrap())
    }

    #[test]
    fn traceparent_is_read_and_written_as_w3c_has_it() {
        // The example of the specification.
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let (trace, parent, is_sampled) = read(text).unwrap();
        assert!(is_sampled && parent == 0x00f0_67aa_0ba9_02b7);
        let context = TraceContext {
            trace,
            span: 1,
            parent: Some(parent),
            is_sampled,
        };
        assert_eq!(context.header(parent), text);
        assert!(!read(&text.replace("-01", "-00")).unwrap().2);
        assert!(
            read(&text.replacen("00", "cc", 1)).is_some(),
            "a later version"
        );
        assert!(read(&format!("cc{}-more", &text[2..])).is_some());
        for wrong in [
            "",
            "00",
            &text[..54],
            &format!("{text}-more"),
            &text.replacen("00", "ff", 1),
            &text.replace("4bf9", "4BF9"),
            &text.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &text.replace("00f067aa0ba902b7", &"0".repeat(16)),
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn request_without_a_trace_begins_one() {
        let a = TraceContext::of(&HeaderMap::new());
        let b = TraceContext::of(&HeaderMap::new());
        assert!(a.is_sampled && a.parent.is_none() && a.trace != b.trace && a.span != b.span);
    }
}
