//! Other files in the form of tokenizer.json.

use serde_json::{Value, json};

/// Text of a tokenizer.json with these members.
pub fn tokenizer_json(
    model: Value,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    added_tokens: Vec<Value>,
) -> String {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": model,
    })
    .to_string()
}

/// An entry of `added_tokens`.
pub fn added_token(id: u32, content: &str, is_special: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": is_special,
    })
}

/// All pairs of tokens that are another one, those of the best `rank_of` first: nearly the merges
/// of a model that has ranks instead.
pub fn merges_of<'a>(
    tokens: impl Iterator<Item = &'a str>,
    rank_of: impl Fn(&str) -> Option<u32>,
) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for token in tokens {
        let Some(rank) = rank_of(token) else {
            continue;
        };
        for (middle, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(middle);
            let (Some(left_rank), Some(right_rank)) = (rank_of(left), rank_of(right)) else {
                continue;
            };
            found.push((rank, left_rank, right_rank, left, right));
        }
    }
    found.sort_unstable();
    let pairs = found.into_iter();
    pairs
        .map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned()))
        .collect()
}
