//! Ids of responses. A request has one id on all hops; each API puts its own prefix in front.

use sha2::{Digest, Sha256};

use super::Dialect;

/// Characters of a derived id behind its prefix.
const DERIVED_CHARS: usize = 24;
const BASE_62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The response's id: a client's own id of its request as it is, else the request's id with the
/// prefix of OpenAI's API in front, so that logs of all hops meet (matches vLLM). The router's ids
/// have it already.
pub fn response_id(dialect: Dialect, rid: Option<String>, request_id: &str) -> String {
    let prefix = if dialect.fields().prefixes_response_ids {
        dialect.id_prefix()
    } else {
        ""
    };
    match rid {
        Some(rid) => rid,
        None if request_id.starts_with(prefix) => request_id.to_owned(),
        None => format!("{prefix}{request_id}"),
    }
}

/// Id of a part of a response: `prefix` and characters that follow from the response's id, the
/// choice and the part's place alone, so that every engine that gives the answer writes the same
/// id.
pub fn derived_id(prefix: &str, response_id: &str, choice: usize, index: usize) -> String {
    let digest = Sha256::new()
        .chain_update(response_id)
        .chain_update((choice as u64).to_le_bytes())
        .chain_update((index as u64).to_le_bytes())
        .finalize();
    let mut id = String::with_capacity(prefix.len() + DERIVED_CHARS);
    id.push_str(prefix);
    for byte in &digest[..DERIVED_CHARS] {
        id.push(char::from(BASE_62[usize::from(*byte) % BASE_62.len()]));
    }
    id
}

/// Ids that name the same request: this one first, then those with another prefix or none.
pub fn id_spellings(request_id: &str) -> Vec<String> {
    let plain = Dialect::without_prefix(request_id);
    let prefixed = Dialect::ALL.map(|dialect| format!("{}{plain}", dialect.id_prefix()));
    let mut spellings = vec![request_id.to_owned()];
    for other in std::iter::once(plain.to_owned()).chain(prefixed) {
        if !spellings.contains(&other) {
            spellings.push(other);
        }
    }
    spellings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_added_once() {
        assert_eq!(response_id(Dialect::Completions, None, "7"), "cmpl-7");
        assert_eq!(response_id(Dialect::Completions, None, "cmpl-7"), "cmpl-7");
        assert_eq!(
            response_id(Dialect::Completions, Some("mine".to_owned()), "7"),
            "mine"
        );
        assert_eq!(response_id(Dialect::Generate, None, "7"), "7");
        assert_eq!(response_id(Dialect::Messages, None, "7"), "msg_7");
        assert_eq!(response_id(Dialect::Responses, None, "resp_7"), "resp_7");
    }

    #[test]
    fn derived_ids_differ_by_response_choice_and_place() {
        let first = derived_id("call_", "resp_1", 0, 0);
        assert_eq!(first.len(), "call_".len() + DERIVED_CHARS);
        assert!(
            first["call_".len()..]
                .chars()
                .all(|c| c.is_ascii_alphanumeric())
        );
        assert_eq!(first, derived_id("call_", "resp_1", 0, 0));
        for other in [
            derived_id("call_", "resp_1", 0, 1),
            derived_id("call_", "resp_1", 1, 0),
            derived_id("call_", "resp_2", 0, 0),
        ] {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn spellings_of_an_id_name_each_other() {
        let all = ["7", "chatcmpl-7", "cmpl-7", "gnt-7", "msg_7", "resp_7"];
        for spelling in all {
            let mut found = id_spellings(spelling);
            assert_eq!(found[0], spelling);
            found.sort_unstable();
            assert_eq!(found, all);
        }
    }
}
