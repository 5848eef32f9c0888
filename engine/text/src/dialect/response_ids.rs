//! Ids of responses. A request has one id on all hops; each API puts its own prefix in front.

use super::Dialect;

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
    }

    #[test]
    fn spellings_of_an_id_name_each_other() {
        let all = ["7", "chatcmpl-7", "cmpl-7", "gnt-7"];
        for spelling in all {
            let mut found = id_spellings(spelling);
            assert_eq!(found[0], spelling);
            found.sort_unstable();
            assert_eq!(found, all);
        }
    }
}
