//! GET /v1/models in the form of Anthropic's API.

use serde_json::{Value, json};

/// Header by which clients of Anthropic's API are known.
pub const ANTHROPIC_VERSION_HEADER: &str = "anthropic-version";

/// A list of models in OpenAI's form, or one of them, in Anthropic's.
pub fn to_anthropic_models(body: &Value) -> Value {
    let Some(cards) = body["data"].as_array() else {
        return to_anthropic_model(body);
    };
    let id_of = |card: Option<&Value>| card.map_or(Value::Null, |card| card["id"].clone());
    json!({
        "data": cards.iter().map(to_anthropic_model).collect::<Vec<_>>(),
        "first_id": id_of(cards.first()),
        "last_id": id_of(cards.last()),
        "has_more": false,
    })
}

fn to_anthropic_model(card: &Value) -> Value {
    let created_secs = card["created"].as_i64().unwrap_or(0);
    let created_at = jiff::Timestamp::from_second(created_secs).unwrap_or_default();
    let mut model = json!({
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created_at.to_string(),
    });
    if let Some(tokens) = card["max_model_len"].as_u64() {
        model["max_input_tokens"] = json!(tokens);
    }
    model
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_and_single_model_have_anthropics_members() {
        let card =
            json!({"id": "m", "object": "model", "created": 1_764_115_200, "max_model_len": 8192});
        let model = json!({
            "type": "model", "id": "m", "display_name": "m", "created_at": "2025-11-26T00:00:00Z",
            "max_input_tokens": 8192,
        });
        assert_eq!(to_anthropic_models(&card), model);
        let other = json!({"id": "n"});
        let list = to_anthropic_models(&json!({"object": "list", "data": [card, other]}));
        assert_eq!(list["data"][0], model);
        assert_eq!(list["data"][1]["created_at"], "1970-01-01T00:00:00Z");
        let [first, last] = [&list["first_id"], &list["last_id"]];
        assert_eq!((first, last), (&json!("m"), &json!("n")));
        let empty = to_anthropic_models(&json!({"data": []}));
        assert_eq!(empty["last_id"], Value::Null);
        assert_eq!(empty["has_more"], false);
    }
}
