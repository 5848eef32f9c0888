//! KV events as they are written: vLLM's and SGLang's msgpack, and our engines' lines of JSON.
//!
//! One batch is `[ts, [event, …], dp_rank]`, or (vLLM of 2026) a map with these names; one event is
//! `["BlockStored", …]` or a map with a `type`. Both forms are read wherever they stand, fields
//! that a version does not have are absent, and fields behind the known ones are passed over.

use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};

use router_core::cache_namespace;
use router_core::kv::{EngineHash, KvEvent, StoredBlocks};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A message's payload.
#[derive(Debug, Deserialize)]
#[serde(remote = "Self")]
pub struct EventBatch {
    /// Unix time [s].
    pub ts: f64,
    #[serde(deserialize_with = "events")]
    pub events: Vec<KvEvent>,
}

impl<'de> Deserialize<'de> for EventBatch {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = EventBatch;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a batch of KV events")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<EventBatch, A::Error> {
                EventBatch::deserialize(MapAccessDeserializer::new(map))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EventBatch, A::Error> {
                let batch = EventBatch::deserialize(SeqAccessDeserializer::new(&mut seq))?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(batch)
            }
        }
        from.deserialize_any(Either)
    }
}

/// A line of `GET /v1/kv_events`.
#[derive(Debug, Deserialize)]
pub struct StreamLine {
    pub r#type: EventKind,
    /// Number of a batch; of the first batch that is not in a snapshot.
    #[serde(default)]
    pub seq: u64,
    /// Unix time [s].
    #[serde(default)]
    pub ts: f64,
    #[serde(default, deserialize_with = "events")]
    pub events: Vec<KvEvent>,
    pub error: Option<DecodedBatch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    Snapshot,
    Batch,
    Error,
}

#[derive(Debug, Deserialize)]
pub struct DecodedBatch {
    pub message: String,
}

pub fn of_msgpack(payload: &[u8]) -> Result<EventBatch, String> {
    rmp_serde::from_slice(payload).map_err(|err| err.to_string())
}

pub fn of_json(line: &[u8]) -> Result<StreamLine, String> {
    serde_json::from_slice(line).map_err(|err| err.to_string())
}

/// Events about the cache that prompts are matched with: those of other tiers and of further layer
/// groups are left out.
fn events<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<KvEvent>, D::Error> {
    Ok(Vec::<Written>::deserialize(from)?
        .into_iter()
        .filter_map(|written| written.0)
        .collect())
}

struct Written(Option<KvEvent>);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a KV event")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Fields, A::Error> {
                Fields::deserialize(MapAccessDeserializer::new(map))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Fields, A::Error> {
                Fields::of_array(seq)
            }
        }
        let fields = from.deserialize_any(Either)?;
        Ok(Written(fields.event().map_err(D::Error::custom)?))
    }
}

/// An event's fields, of whatever kind it is.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Fields {
    r#type: String,
    block_hashes: Vec<Name>,
    parent_block_hash: Option<Name>,
    token_ids: Vec<u32>,
    block_size: u32,
    lora_id: Option<i64>,
    medium: Option<String>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<Option<Vec<Part>>>>,
    group_idx: Option<u32>,
}

impl Fields {
    fn of_array<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        /// The next field, or its default where the array ends before it.
        fn next<'de, A: SeqAccess<'de>, T: Deserialize<'de> + Default>(
            seq: &mut A,
        ) -> Result<T, A::Error> {
            Ok(seq.next_element()?.unwrap_or_default())
        }
        let mut fields = Fields {
            r#type: next(&mut seq)?,
            ..Fields::default()
        };
        match fields.r#type.as_str() {
            "BlockStored" => {
                fields.block_hashes = next(&mut seq)?;
                fields.parent_block_hash = next(&mut seq)?;
                fields.token_ids = next(&mut seq)?;
                fields.block_size = next(&mut seq)?;
                fields.lora_id = next(&mut seq)?;
                fields.medium = next(&mut seq)?;
                fields.lora_name = next(&mut seq)?;
                fields.extra_keys = next(&mut seq)?;
                fields.group_idx = next(&mut seq)?;
            }
            "BlockRemoved" => {
                fields.block_hashes = next(&mut seq)?;
                fields.medium = next(&mut seq)?;
                fields.group_idx = next(&mut seq)?;
            }
            _ => {}
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(fields)
    }

    fn event(self) -> Result<Option<KvEvent>, String> {
        let is_device = self
            .medium
            .as_deref()
            .is_none_or(|medium| medium.eq_ignore_ascii_case("gpu"));
        let is_ours = is_device && self.group_idx.unwrap_or(0) == 0;
        match self.r#type.as_str() {
            "AllBlocksCleared" => Ok(Some(KvEvent::Cleared)),
            "BlockStored" if is_ours => Ok(Some(KvEvent::Stored(self.stored()))),
            "BlockRemoved" if is_ours => {
                let hashes = self.block_hashes.into_iter().map(|name| name.0);
                Ok(Some(KvEvent::Removed(hashes.collect())))
            }
            "BlockStored" | "BlockRemoved" => Ok(None),
            other => Err(format!("unknown KV event {other:?}")),
        }
    }

    fn stored(self) -> StoredBlocks {
        let mut keys: Vec<Option<Vec<Part>>> = self.extra_keys.unwrap_or_default();
        let begins = self.parent_block_hash.is_none();
        let first = keys.first_mut().filter(|_| begins).and_then(Option::take);
        let mut space = first.map(name_of).unwrap_or_default();
        if let Some(lora) = self.lora_name.or(self.lora_id.map(|id| id.to_string()))
            && begins
        {
            // prompts here are not distinguished by adapter
            space = format!("\u{1}lora {lora}\u{1}{space}");
        }
        let salts = keys.into_iter().enumerate();
        let salts = salts.filter_map(|(at, keys)| Some((at, hash_of(&keys?))));
        StoredBlocks {
            hashes: self.block_hashes.iter().map(|name| name.0).collect(),
            parent: self.parent_block_hash.map(|name| name.0),
            tokens: self.token_ids,
            block_tokens: self.block_size,
            namespace: space,
            salts: salts.collect(),
        }
    }
}

/// The namespace that a request with these keys has. One key is vLLM's `cache_salt`; our engines
/// give both places.
fn name_of(keys: Vec<Part>) -> String {
    match keys.as_slice() {
        [Part::Text(salt)] => cache_namespace(salt, ""),
        [Part::Text(salt), Part::Text(key)] => cache_namespace(salt, key),
        _ => format!("\u{1}{:016x}", hash_of(&keys)),
    }
}

fn hash_of<T: Hash>(value: &T) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

/// A block's name: an integer of either sign, or bytes.
#[derive(Default, Deserialize)]
#[serde(from = "Part")]
struct Name(EngineHash);

impl From<Part> for Name {
    fn from(part: Part) -> Self {
        match part {
            Part::Number(number) => Name(number),
            other => Name(hash_of(&other)),
        }
    }
}

/// Anything that may stand in a key.
#[derive(Debug, Hash, PartialEq, Eq)]
enum Part {
    Nothing,
    Number(u64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Part>),
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Anything;
        impl<'de> Visitor<'de> for Anything {
            type Value = Part;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, a text, bytes or a list of these")
            }
            fn visit_unit<E>(self) -> Result<Part, E> {
                Ok(Part::Nothing)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Part, E> {
                Ok(Part::Number(u64::from(value)))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Part, E> {
                Ok(Part::Number(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Part, E> {
                Ok(Part::Number(value.cast_unsigned()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Part, E> {
                Ok(Part::Number(value.to_bits()))
            }
            fn visit_str<E>(self, value: &str) -> Result<Part, E> {
                Ok(Part::Text(value.to_owned()))
            }
            fn visit_bytes<E>(self, value: &[u8]) -> Result<Part, E> {
                Ok(Part::Bytes(value.to_vec()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Part, A::Error> {
                let mut list = Vec::new();
                while let Some(part) = seq.next_element()? {
                    list.push(part);
                }
                Ok(Part::List(list))
            }
        }
        from.deserialize_any(Anything)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STORED: &str =
        r#"["BlockStored",[-1,2],null,[5,6,7,8],2,null,"GPU",null,[["salt","key"],null]]"#;

    fn stored(namespace: &str) -> KvEvent {
        KvEvent::Stored(StoredBlocks {
            hashes: vec![u64::MAX, 2],
            parent: None,
            tokens: vec![5, 6, 7, 8],
            block_tokens: 2,
            namespace: namespace.to_owned(),
            salts: vec![],
        })
    }

    /// JSON stands for msgpack here: both are read by the same code.
    fn read(events: &str) -> Result<Vec<KvEvent>, String> {
        let batch: EventBatch =
            serde_json::from_str(&format!("[1.5,[{events}],0]")).map_err(|e| e.to_string())?;
        let packed = rmp_serde::to_vec(
            &serde_json::from_str::<serde_json::Value>(&format!("[1,[{events}],0,7]")).unwrap(),
        );
        assert_eq!(of_msgpack(&packed.unwrap()).unwrap().events, batch.events);
        Ok(batch.events)
    }

    #[test]
    fn arrays_and_maps_of_every_length_are_the_same_events() {
        assert_eq!(read(STORED), Ok(vec![stored("salt\0key")]));
        let old = r#"["BlockStored",[-1,2],null,[5,6,7,8],2,null]"#;
        assert_eq!(read(old), Ok(vec![stored("")]));
        let new = r#"{"type":"BlockStored","block_hashes":[-1,2],"parent_block_hash":null,"token_ids":[5,6,7,8],
            "block_size":2,"lora_id":null,"medium":"GPU","lora_name":null,"extra_keys":[["salt"],null],"group_idx":0,"kv_cache_spec_kind":"x"}"#;
        assert_eq!(read(new), Ok(vec![stored("salt\0")]));
        assert_eq!(
            read(
                r#"["BlockRemoved",[7],"GPU",0,"more"],{"type":"BlockRemoved","block_hashes":[8]},["AllBlocksCleared"]"#
            ),
            Ok(vec![
                KvEvent::Removed(vec![7]),
                KvEvent::Removed(vec![8]),
                KvEvent::Cleared
            ])
        );
        let map = rmp_serde::to_vec(
            &serde_json::json!({"ts": 2.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3}),
        );
        assert_eq!(
            of_msgpack(&map.unwrap()).unwrap().events,
            [KvEvent::Cleared]
        );
    }

    #[test]
    fn other_tiers_and_groups_are_left_out_and_nonsense_is_refused() {
        let elsewhere = r#"["BlockStored",[1],null,[5],1,null,"CPU"],["BlockRemoved",[1],"DISK"],["BlockRemoved",[1],null,1]"#;
        assert_eq!(read(elsewhere), Ok(vec![]));
        for bad in [
            r#"["BlockMoved",[1]]"#,
            "[]",
            "7",
            r#"["BlockStored",[1],null,["a"],1]"#,
        ] {
            assert!(
                serde_json::from_str::<EventBatch>(&format!("[1.5,[{bad}]]")).is_err(),
                "{bad}"
            );
        }
        assert!(of_msgpack(b"\x93\xcb").is_err());
    }

    #[test]
    fn adapters_not_distinguished_here_get_a_name_no_prompt_has() {
        let lora = r#"["BlockStored",[1],null,[5],1,3,"GPU","sql"]"#;
        let image = r#"["BlockStored",[1],null,[5],1,null,"GPU",null,[["image",[4,5]]]]"#;
        let inner = r#"["BlockStored",[1,2],9,[5,6],1,null,"GPU",null,[null,["image"]]]"#;
        let names: Vec<(String, usize)> = [lora, image, inner]
            .iter()
            .map(|event| match &read(event).unwrap()[0] {
                KvEvent::Stored(stored) => (stored.namespace.clone(), stored.salts.len()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(
            names[0].0.contains("sql") && names[1].0.starts_with('\u{1}'),
            "{names:?}"
        );
        assert_eq!(names[2], (String::new(), 1));
    }

    #[test]
    fn lines_of_our_engines_are_read() {
        let line = r#"{"type":"batch","epoch":"9f","dp_rank":0,"seq":17,"ts":1.5,"events":[{"type":"BlockRemoved","block_hashes":[18446744073709551615],"medium":"GPU"}]}"#;
        let read = of_json(line.as_bytes()).unwrap();
        assert_eq!(
            (read.r#type, read.seq, read.ts),
            (EventKind::Batch, 17, 1.5)
        );
        assert_eq!(read.events, [KvEvent::Removed(vec![u64::MAX])]);
        let line =
            r#"{"type":"error","error":{"message":"the rank is gone","code":"engine_dead"}}"#;
        let read = of_json(line.as_bytes()).unwrap();
        assert_eq!(read.r#type, EventKind::Error);
        assert_eq!(read.error.unwrap().message, "the rank is gone");
    }
}
