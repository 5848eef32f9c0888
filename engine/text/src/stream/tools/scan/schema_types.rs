//! Types that a tool's JSON Schema gives its parameters, and raw text to values of these types.

use serde_json::Value;

use super::json_text::quoted;
use super::python_literal::python_literal_to_json;

/// Most schemas that are visited for one parameter: references may form cycles.
const MAX_VISITS: usize = 256;

/// Type of a JSON value, in the order in which a raw text is tried as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum JsonType {
    Null,
    Integer,
    Number,
    Boolean,
    Object,
    Array,
    String,
}

/// Types that a parameter may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParameterTypes {
    /// At least one type, in ascending order.
    Known(Vec<JsonType>),
    /// The schema gives none.
    Unknown,
}

impl ParameterTypes {
    /// Types of a parameter in the schema of a tool's parameters.
    pub fn of_parameter(schema: &Value, name: &str) -> Self {
        let Some(parameter) = find_property(schema, name) else {
            return Self::of_additional(schema);
        };
        Self::of_schema(schema, parameter)
    }

    /// Types of a parameter that the schema does not name: text, if it allows no such parameter.
    fn of_additional(schema: &Value) -> Self {
        match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => Self::Known(vec![JsonType::String]),
            Some(additional @ Value::Object(_)) => Self::of_schema(schema, additional),
            _ => Self::Unknown,
        }
    }

    fn of_schema(root: &Value, schema: &Value) -> Self {
        let mut types = Vec::new();
        collect_types(root, schema, &mut types);
        types.sort_unstable();
        types.dedup();
        if types.is_empty() {
            Self::Unknown
        } else {
            Self::Known(types)
        }
    }

    /// True if a value of this type is allowed.
    pub fn allow(&self, wanted: JsonType) -> bool {
        match self {
            Self::Known(types) => types.contains(&wanted),
            Self::Unknown => true,
        }
    }

    /// True if every text is a value as it is.
    pub fn is_text_only(&self) -> bool {
        *self == Self::Known(vec![JsonType::String])
    }

    /// JSON text for the raw text of a value: of the first type that fits, else a string.
    pub fn to_json(&self, raw: &str) -> String {
        let candidates = json_candidates(raw);
        let fitting = match self {
            Self::Known(types) => types.iter().find_map(|&wanted| match wanted {
                JsonType::String => Some(quoted(raw)),
                _ => find_typed(&candidates, wanted),
            }),
            Self::Unknown => None,
        };
        let any_non_string = || {
            candidates
                .iter()
                .find(|json| !json.starts_with('"'))
                .cloned()
        };
        fitting
            .or_else(any_non_string)
            .unwrap_or_else(|| quoted(raw))
    }
}

/// JSON text for a raw text that is meant to be JSON.
pub fn json_or_text(raw: &str) -> String {
    let trimmed = raw.trim();
    if is_json(trimmed) {
        return trimmed.to_owned();
    }
    ParameterTypes::Unknown.to_json(raw)
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// Readings of a raw text as a JSON value: as JSON, and as a Python literal.
fn json_candidates(raw: &str) -> Vec<String> {
    let trimmed = raw.trim();
    if is_json(trimmed) {
        return vec![trimmed.to_owned()];
    }
    python_literal_to_json(trimmed).into_iter().collect()
}

fn find_typed(candidates: &[String], wanted: JsonType) -> Option<String> {
    let has_type = |json: &&String| match wanted {
        JsonType::Number => matches!(type_of(json), JsonType::Integer | JsonType::Number),
        _ => type_of(json) == wanted,
    };
    candidates.iter().find(has_type).cloned()
}

/// Type of a JSON text.
fn type_of(json: &str) -> JsonType {
    match json.as_bytes().first() {
        Some(b'{') => JsonType::Object,
        Some(b'[') => JsonType::Array,
        Some(b'"') => JsonType::String,
        Some(b't' | b'f') => JsonType::Boolean,
        Some(b'n') => JsonType::Null,
        _ if json.contains(['.', 'e', 'E']) => JsonType::Number,
        _ => JsonType::Integer,
    }
}

/// Schema of a property, also of one below `$ref`, `anyOf`, `oneOf` or `allOf`.
fn find_property<'a>(root: &'a Value, name: &str) -> Option<&'a Value> {
    visit_schemas(root, root, |schema| {
        match schema.get("properties").and_then(|all| all.get(name)) {
            Some(property) => SchemaVisit::Found(property),
            None => SchemaVisit::Descend,
        }
    })
}

/// Appends the types of a schema, and of those that it refers to or is composed of.
fn collect_types(root: &Value, schema: &Value, types: &mut Vec<JsonType>) {
    let _: Option<()> = visit_schemas(root, schema, |schema| {
        let own_types = named_types(schema);
        if own_types.is_empty() {
            let listed = listed_values(schema);
            types.extend(listed.into_iter().map(|value| type_of(&value.to_string())));
            return SchemaVisit::Descend;
        }
        types.extend(own_types);
        SchemaVisit::Skip
    });
}

/// Outcome of the visit of a schema.
enum SchemaVisit<T> {
    Found(T),
    /// Related schemas are visited, too.
    Descend,
    Skip,
}

/// Visits a schema and those related to it, at most [`MAX_VISITS`], until one is what is searched.
fn visit_schemas<'a, T>(
    root: &'a Value,
    schema: &'a Value,
    mut visit: impl FnMut(&'a Value) -> SchemaVisit<T>,
) -> Option<T> {
    let mut pending = vec![schema];
    for _ in 0..MAX_VISITS {
        let schema = pending.pop()?;
        match visit(schema) {
            SchemaVisit::Found(found) => return Some(found),
            SchemaVisit::Descend => pending.extend(related_schemas(root, schema).into_iter().rev()),
            SchemaVisit::Skip => {}
        }
    }
    None
}

/// Types that `type` names.
fn named_types(schema: &Value) -> Vec<JsonType> {
    let names = match schema.get("type") {
        Some(Value::Array(names)) => names.iter().collect(),
        Some(name) => vec![name],
        None => Vec::new(),
    };
    names
        .into_iter()
        .filter_map(Value::as_str)
        .filter_map(|name| name.parse().ok())
        .collect()
}

/// Values that `enum` or `const` allows.
fn listed_values(schema: &Value) -> Vec<&Value> {
    let listed = schema
        .get("enum")
        .and_then(Value::as_array)
        .map_or(Vec::new(), |values| values.iter().collect());
    let constant = schema.get("const");
    listed.into_iter().chain(constant).collect()
}

/// Schemas that this one refers to or is composed of.
fn related_schemas<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let target = schema
        .get("$ref")
        .and_then(Value::as_str)
        .and_then(|reference| reference.strip_prefix('#'))
        .and_then(|pointer| root.pointer(pointer));
    let composed = ["anyOf", "oneOf", "allOf"]
        .into_iter()
        .filter_map(|keyword| schema.get(keyword).and_then(Value::as_array))
        .flatten();
    target.into_iter().chain(composed).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic fails the test")]
mod tests {
    use serde_json::json;

    use super::*;

    fn convert(schema: Value, raw: &str) -> String {
        let tool = json!({"type": "object", "properties": {"p": schema}});
        ParameterTypes::of_parameter(&tool, "p").to_json(raw)
    }

    #[test]
    fn text_becomes_value_of_first_fitting_type() {
        let cases = [
            (json!({"type": "string"}), "007", r#""007""#),
            (json!({"type": "string"}), "null", r#""null""#),
            (json!({"type": "string"}), "  x  ", r#""  x  ""#),
            (json!({"type": "integer"}), "5", "5"),
            (json!({"type": "integer"}), " 5\n", "5"),
            (json!({"type": "integer"}), "five", r#""five""#),
            (json!({"type": "integer"}), "5.5", "5.5"),
            (json!({"type": "number"}), "1e3", "1e3"),
            (json!({"type": "number"}), "5", "5"),
            (json!({"type": "boolean"}), "True", "true"),
            (json!({"type": "boolean"}), "false", "false"),
            (json!({"type": "null"}), "None", "null"),
            (json!({"type": "object"}), "{'a': None}", r#"{"a": null}"#),
            (json!({"type": "object"}), r#"{"a":1}"#, r#"{"a":1}"#),
            (json!({"type": "array"}), "[1,2", r#""[1,2""#),
            (json!({"type": ["string", "null"]}), "null", "null"),
            (json!({"type": ["string", "integer"]}), "12", "12"),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "number"}]}),
                "1.5",
                "1.5",
            ),
            (
                json!({"anyOf": [{"type": "string"}, {"type": "number"}]}),
                "x",
                r#""x""#,
            ),
            (json!({"enum": ["a", "b"]}), "5", r#""5""#),
            (json!({"enum": [1, 2]}), "2", "2"),
            (json!({}), "12", "12"),
            (json!({}), r#""12""#, r#""\"12\"""#),
            (json!({}), "x", r#""x""#),
        ];
        for (schema, raw, expected) in cases {
            assert_eq!(convert(schema.clone(), raw), expected, "{schema} {raw}");
        }
    }

    #[test]
    fn references_are_followed_and_cycles_end() {
        let tool = json!({
            "properties": {"p": {"$ref": "#/$defs/Count"}, "q": {"$ref": "#/$defs/Loop"}},
            "$defs": {
                "Count": {"type": "integer"},
                "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
            },
        });
        let count = ParameterTypes::of_parameter(&tool, "p");
        assert_eq!(count, ParameterTypes::Known(vec![JsonType::Integer]));
        let cycle = ParameterTypes::of_parameter(&tool, "q");
        assert_eq!(cycle, ParameterTypes::Unknown);
    }

    #[test]
    fn property_of_a_part_of_the_schema_is_found() {
        let tool = json!({"allOf": [{"properties": {"p": {"type": "integer"}}}, {}]});
        let types = ParameterTypes::of_parameter(&tool, "p");
        assert_eq!(types, ParameterTypes::Known(vec![JsonType::Integer]));
    }

    #[test]
    fn unnamed_parameter_is_text_if_none_is_allowed() {
        let closed = json!({"properties": {}, "additionalProperties": false});
        assert!(ParameterTypes::of_parameter(&closed, "p").is_text_only());
        let typed = json!({"additionalProperties": {"type": "integer"}});
        let types = ParameterTypes::of_parameter(&typed, "p");
        assert_eq!(types, ParameterTypes::Known(vec![JsonType::Integer]));
        let open = ParameterTypes::of_parameter(&json!({}), "p");
        assert_eq!(open, ParameterTypes::Unknown);
    }
}
