//! Members of a JSON object as the client wrote them: each value is a slice of its text, so that
//! digits, escapes and the order of keys survive.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::refusal::{RefusalCode, TextRefusal};

/// An object's members in their order, without those that are null.
#[derive(Debug, Clone)]
pub struct JsonMembers<'a> {
    /// Name of the object in refusals; empty for the body.
    place: String,
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> JsonMembers<'a> {
    pub fn of_body(body: &'a str) -> Result<Self, TextRefusal> {
        let members: MemberList<'a> = serde_json::from_str(body).map_err(|err| {
            let message = format!("the body is not a JSON object: {err}");
            TextRefusal::new(RefusalCode::InvalidJson, message, "")
        })?;
        Ok(Self::new(String::new(), members))
    }

    /// `place`: name of the value in refusals.
    pub fn read(value: &'a RawValue, place: impl Into<String>) -> Result<Self, TextRefusal> {
        let place = place.into();
        match serde_json::from_str(value.get()) {
            Ok(members) => Ok(Self::new(place, members)),
            Err(_) => Err(invalid(&place, "must be an object")),
        }
    }

    fn new(place: String, list: MemberList<'a>) -> Self {
        let mut members = list.0;
        members.retain(|(_, value)| value.get() != "null");
        Self { place, members }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.members.iter().map(|(name, value)| (&**name, *value))
    }

    /// Name of the object in refusals.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Name of a member in refusals.
    pub fn path(&self, name: &str) -> String {
        if self.place.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.place)
        }
    }

    /// A member's value; the last one of several with this name.
    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        let mut members = self.members.iter().rev();
        let found = members.find(|(key, _)| key == name);
        found.map(|(_, value)| *value)
    }

    pub fn require(&self, name: &str) -> Result<&'a RawValue, TextRefusal> {
        self.get(name).ok_or_else(|| missing(&self.path(name)))
    }

    pub fn text(&self, name: &str) -> Result<Option<String>, TextRefusal> {
        let value = self.get(name);
        value
            .map(|value| read_text(value, &self.path(name)))
            .transpose()
    }

    pub fn require_text(&self, name: &str) -> Result<String, TextRefusal> {
        read_text(self.require(name)?, &self.path(name))
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, TextRefusal> {
        match self.get(name).map(RawValue::get) {
            None => Ok(None),
            Some("true") => Ok(Some(true)),
            Some("false") => Ok(Some(false)),
            Some(_) => Err(invalid(&self.path(name), "must be true or false")),
        }
    }

    pub fn integer(&self, name: &str) -> Result<Option<u64>, TextRefusal> {
        let value = self.get(name).map(|value| value.get().parse());
        value
            .transpose()
            .map_err(|_| invalid(&self.path(name), "must be a whole number, 0 or more"))
    }

    /// Elements of an array, each with its name in refusals.
    pub fn array(&self, name: &str) -> Result<Option<Vec<(&'a RawValue, String)>>, TextRefusal> {
        let place = self.path(name);
        let value = self.get(name);
        value.map(|value| read_array(value, &place)).transpose()
    }

    pub fn object(&self, name: &str) -> Result<Option<JsonMembers<'a>>, TextRefusal> {
        let value = self.get(name);
        value
            .map(|value| JsonMembers::read(value, self.path(name)))
            .transpose()
    }
}

/// `place`: name of the value in refusals.
pub fn read_text(value: &RawValue, place: &str) -> Result<String, TextRefusal> {
    serde_json::from_str(value.get()).map_err(|_| invalid(place, "must be a string"))
}

/// Elements of an array, each with its name in refusals. `place`: that of the array.
pub fn read_array<'a>(
    value: &'a RawValue,
    place: &str,
) -> Result<Vec<(&'a RawValue, String)>, TextRefusal> {
    let items: Vec<&'a RawValue> =
        serde_json::from_str(value.get()).map_err(|_| invalid(place, "must be an array"))?;
    let items = items.into_iter().enumerate();
    Ok(items
        .map(|(index, item)| (item, format!("{place}[{index}]")))
        .collect())
}

pub fn is_text(value: &RawValue) -> bool {
    value.get().starts_with('"')
}

/// `place` with a problem that a client can mend.
pub fn invalid(place: &str, problem: &str) -> TextRefusal {
    TextRefusal::invalid(place, format!("{place} {problem}"))
}

pub fn missing(place: &str) -> TextRefusal {
    let message = format!("{place} is required");
    TextRefusal::new(RefusalCode::MissingField, message, place)
}

pub fn unsupported(place: &str, problem: &str) -> TextRefusal {
    let message = format!("{place} {problem}");
    TextRefusal::new(RefusalCode::UnsupportedParameter, message, place)
}

/// A text as JSON.
pub fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// JSON with a space behind each comma and colon and no other white space, as Python writes it:
/// models have seen the arguments of calls in this form.
pub fn spaced_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut is_string = false;
    let mut is_escaped = false;
    for character in json.chars() {
        if is_string {
            is_string = is_escaped || character != '"';
            is_escaped = !is_escaped && character == '\\';
            out.push(character);
            continue;
        }
        if character.is_ascii_whitespace() {
            continue;
        }
        is_string = character == '"';
        out.push(character);
        if matches!(character, ',' | ':') {
            out.push(' ');
        }
    }
    out
}

/// Object that is written member by member.
#[derive(Debug, Clone, Default)]
pub struct ObjectText(String);

impl ObjectText {
    /// Appends a member whose value is JSON already.
    pub fn push(&mut self, name: &str, json: &str) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        self.0.push_str(&quote(name));
        self.0.push(':');
        self.0.push_str(json);
    }

    pub fn push_text(&mut self, name: &str, text: &str) {
        self.push(name, &quote(text));
    }

    /// Appends a member as it is in `from`, if it is there.
    pub fn copy(&mut self, name: &str, from: &JsonMembers<'_>) {
        if let Some(value) = from.get(name) {
            self.push(name, value.get());
        }
    }

    /// The members, without braces.
    pub fn into_members(self) -> String {
        self.0
    }

    pub fn finish(self) -> String {
        format!("{{{}}}", self.0)
    }
}

/// `[a,b]` of JSON values.
pub fn array_text(items: &[String]) -> String {
    format!("[{}]", items.join(","))
}

struct MemberList<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

#[derive(Deserialize)]
struct MemberName<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for MemberList<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = MemberList<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::with_capacity(map.size_hint().unwrap_or(8));
                while let Some((MemberName(name), value)) =
                    map.next_entry::<MemberName<'de>, &'de RawValue>()?
                {
                    members.push((name, value));
                }
                Ok(MemberList(members))
            }
        }

        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_text_and_null_members_are_absent() {
        let body = r#"{"a": {"z": 1e0, "b": 12345678901234567890123}, "n": null, "t": "\u00e9", "t": "x"}"#;
        let members = JsonMembers::of_body(body).unwrap();
        let inner = members.object("a").unwrap().unwrap();
        assert_eq!(inner.get("b").unwrap().get(), "12345678901234567890123");
        assert_eq!(inner.path("b"), "a.b");
        assert!(members.get("n").is_none());
        assert_eq!(members.text("t").unwrap().unwrap(), "x");
        assert_eq!(members.require("n").unwrap_err().message, "n is required");
    }

    #[test]
    fn white_space_of_json_is_pythons() {
        let json = "{\n \"a\" : [1e5 ,\t-0],\"b, \\\"c\\\\\":{ } ,\"d\":\"x: y\"}";
        let spaced = r#"{"a": [1e5, -0], "b, \"c\\": {}, "d": "x: y"}"#;
        assert_eq!(spaced_json(json), spaced);
    }

    #[test]
    fn wrong_types_are_refused_by_name() {
        let body = r#"{"list": [1, {"x": 1}], "flag": 1, "count": -1}"#;
        let members = JsonMembers::of_body(body).unwrap();
        let items = members.array("list").unwrap().unwrap();
        let (first, place) = &items[0];
        assert_eq!(read_text(first, place).unwrap_err().param, "list[0]");
        let (second, place) = &items[1];
        let second = JsonMembers::read(second, place.as_str()).unwrap();
        assert_eq!(second.text("x").unwrap_err().param, "list[1].x");
        assert_eq!(members.boolean("flag").unwrap_err().param, "flag");
        assert_eq!(members.integer("count").unwrap_err().param, "count");
        let broken = JsonMembers::of_body("[]").unwrap_err();
        assert_eq!(broken.code, RefusalCode::InvalidJson);
    }
}
