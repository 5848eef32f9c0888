//! Body fields and headers that belong to routers: what a client sends under these names reaches no
//! worker through a router (docs/protocol.md §2). An engine that is asked directly reads those that
//! it documents.
//!
//! Fields and headers that clients and routers both set are no part of this table: `input_ids` with
//! its fingerprint, deadlines, ids of requests and traces.

use std::ops::Range;

use bytes::Bytes;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{BodyError, Key, pieces_without};
use crate::dialect::resume;

/// Fields by which two workers meet: the router's names and those that routers of other makes add.
pub const ROUTER_FIELD_PREFIX: &str = "bootstrap_";

/// Fields that routers add to bodies.
pub const ROUTER_FIELDS: [&str; 12] = [
    // Where prefill and decode worker meet (SGLang).
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    // DP ranks (SGLang).
    "data_parallel_rank",
    "data_parallel_rank_decode",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    // Blocks of another worker (vLLM): of the KV cache, and of the encoder's.
    "kv_transfer_params",
    "ec_transfer_params",
    // The beginning of an answer.
    resume::FIELD,
];

/// Headers between routers and workers.
pub const ROUTER_HEADER_PREFIX: &str = "x-baton-";
/// Header of a probe: other ready workers that could take this one's requests.
pub const READY_PEERS_HEADER: &str = "x-baton-ready-peers";
/// Header with the DP rank of its receiver (vLLM, SGLang).
pub const DP_RANK_HEADER: &str = "x-data-parallel-rank";

/// Headers that routers add to requests.
pub const ROUTER_HEADERS: [&str; 3] = [
    resume::EMIT_TOKENS_HEADER,
    READY_PEERS_HEADER,
    DP_RANK_HEADER,
];

/// True for a member of a body that only routers set.
pub fn is_router_field(name: &str) -> bool {
    name.starts_with(ROUTER_FIELD_PREFIX) || ROUTER_FIELDS.contains(&name)
}

/// True for a header that no client's request carries on to a worker. `name` is in lower case.
pub fn is_router_header(name: &str) -> bool {
    name.starts_with(ROUTER_HEADER_PREFIX) || ROUTER_HEADERS.contains(&name)
}

/// Returns a body of any API without the fields of routers. Cost: one pass over the bytes; a copy
/// only where there is such a field.
pub fn strip_router_fields(body: &Bytes) -> Result<Bytes, BodyError> {
    let start = body.iter().position(|b| *b == b'{').map_or(0, |at| at + 1);
    let mut fields = RouterFieldSpans {
        body,
        last_end: start,
        spans: Vec::new(),
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = json.deserialize_map(&mut fields).and_then(|()| json.end());
    read.map_err(|err| BodyError::InvalidJson {
        detail: err.to_string(),
    })?;
    let spans = fields.spans;
    if spans.is_empty() {
        return Ok(body.clone());
    }
    let pieces: Vec<Bytes> = pieces_without(body, spans, body.len()).collect();
    Ok(Bytes::from(pieces.concat()))
}

/// Visitor that collects the fields of routers, each from the end of the member before.
struct RouterFieldSpans<'a> {
    body: &'a [u8],
    last_end: usize,
    spans: Vec<Range<usize>>,
}

impl<'a> Visitor<'a> for &mut RouterFieldSpans<'a> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((Key(name), value)) = map.next_entry::<Key<'a>, &'a RawValue>()? {
            let start = value.get().as_ptr() as usize - self.body.as_ptr() as usize;
            let end = start + value.get().len();
            if is_router_field(&name) {
                self.spans.push(self.last_end..end);
            }
            self.last_end = end;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bodies_of_any_api_lose_the_fields_of_routers_alone() {
        let stripped = |body: &'static str| {
            let stripped = strip_router_fields(&Bytes::from_static(body.as_bytes()));
            stripped.map(|body| String::from_utf8(body.to_vec()).unwrap())
        };
        for (body, expected) in [
            (r#"{"input": 1e0}"#, r#"{"input": 1e0}"#),
            (r#"{"routed_dp_rank":9,"input":"a"}"#, r#"{"input":"a"}"#),
            (
                r#" {"input":"a" , "bootstrap_\u0068ost":{"x":[]}} "#,
                r#" {"input":"a"} "#,
            ),
            (r#"{"bootstrap_x":1}"#, "{}"),
            (
                r#"{"a":{"routed_dp_rank":1}}"#,
                r#"{"a":{"routed_dp_rank":1}}"#,
            ),
        ] {
            assert_eq!(stripped(body).unwrap(), expected);
        }
        for body in ["", "[]", "{} {}", r#"{"a":NaN,"routed_dp_rank":1}"#] {
            assert!(stripped(body).is_err(), "{body}");
        }
    }

    #[test]
    fn names_in_the_table_belong_to_routers_and_those_of_clients_do_not() {
        assert!(ROUTER_FIELDS.into_iter().all(is_router_field));
        assert!(ROUTER_HEADERS.into_iter().all(is_router_header));
        for name in [
            "input_ids",
            "tokenizer_fingerprint",
            "deadline_ms",
            "stream",
            "bootstrap",
        ] {
            assert!(!is_router_field(name), "{name}");
        }
        for name in [
            "x-request-id",
            "traceparent",
            "x-slo-ttft-ms",
            "x-tenant-id",
        ] {
            assert!(!is_router_header(name), "{name}");
        }
    }
}
