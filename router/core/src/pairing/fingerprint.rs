//! Compatibility: the facts that two workers must share before one decodes the other's prompts.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

/// Fields that a worker may report under `fingerprint`, in the order of a [`WorkerFingerprint`].
pub const FINGERPRINT_FIELDS: [&str; 8] = [
    "model",
    "tokenizer",
    "chat_template",
    "page_size",
    "dtype",
    "kv_layout",
    "grammar",
    "answer_format",
];

/// Number per aspect; 0 is one that the worker did not report, which fits every other: SGLang's and
/// vLLM's report none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "Vec<u64>")]
pub struct WorkerFingerprint([u64; FINGERPRINT_FIELDS.len()]);

impl From<Vec<u64>> for WorkerFingerprint {
    /// Numbers as a decision log has them: one of an older router has fewer aspects.
    fn from(numbers: Vec<u64>) -> Self {
        Self(std::array::from_fn(|i| {
            numbers.get(i).copied().unwrap_or(0)
        }))
    }
}

impl WorkerFingerprint {
    /// `value_of` gives the value of each aspect.
    pub fn from_values(value_of: impl Fn(&str) -> Option<String>) -> Self {
        Self(FINGERPRINT_FIELDS.map(|aspect| value_of(aspect).map_or(0, |text| hash_value(&text))))
    }

    pub fn is_compatible(&self, other: &WorkerFingerprint) -> bool {
        self.differing_fields(other).next().is_none()
    }

    /// Aspects that both tell and that are not equal.
    pub fn differing_fields(
        &self,
        other: &WorkerFingerprint,
    ) -> impl Iterator<Item = &'static str> + use<> {
        let pairs: [(u64, u64); FINGERPRINT_FIELDS.len()] =
            std::array::from_fn(|i| (self.0[i], other.0[i]));
        let all = FINGERPRINT_FIELDS.into_iter().zip(pairs);
        all.filter(|(_, (a, b))| *a != 0 && *b != 0 && a != b)
            .map(|(aspect, _)| aspect)
    }
}

fn hash_value(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish().max(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn fingerprint(page_size: &str, dtype: &str) -> WorkerFingerprint {
        WorkerFingerprint::from_values(|aspect| match aspect {
            "page_size" if !page_size.is_empty() => Some(page_size.to_owned()),
            "dtype" if !dtype.is_empty() => Some(dtype.to_owned()),
            _ => None,
        })
    }

    #[test]
    fn only_fields_of_both_can_differ() {
        let a = fingerprint("16", "bf16");
        let b = fingerprint("32", "bf16");
        let unreported = WorkerFingerprint::default();
        assert_eq!(a.differing_fields(&b).collect::<Vec<_>>(), ["page_size"]);
        assert!(
            a.is_compatible(&a) && a.is_compatible(&unreported) && unreported.is_compatible(&b)
        );
        assert!(
            fingerprint("", "bf16").is_compatible(&a) && !fingerprint("", "f32").is_compatible(&a)
        );
    }

    #[test]
    fn numbers_of_an_older_router_are_read() {
        let older: WorkerFingerprint = serde_json::from_str("[1,2,3,4,5,6]").unwrap();
        let own = WorkerFingerprint([1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(older.is_compatible(&own));
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(
            serde_json::from_str::<WorkerFingerprint>(&text).unwrap(),
            own
        );
    }
}
