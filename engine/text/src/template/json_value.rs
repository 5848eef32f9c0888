//! JSON to template values, with every integer exact.
//!
//! serde_json reads integers beyond 64 bits, and -0, as floats, and rounds floats of 17 digits to
//! the next one at times. Tool calls hold such numbers (identifiers of 20 and more digits), and
//! templates print them back into prompts: as Python has them, and so transformers.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};
use serde::de::IgnoredAny;

/// Deepest nesting that is read and printed: each level takes stack.
pub const MAX_DEPTH: usize = 256;

/// Read a JSON text. `Err`: what is wrong with it, and where.
pub fn read_json(text: &str) -> Result<Value, String> {
    let mut reader = JsonReader { text, at: 0 };
    let value = reader.read_value(0)?;
    reader.skip_space();
    if reader.at < text.len() {
        return Err(reader.describe_fault("is followed by other text"));
    }
    Ok(value)
}

/// Members of an object, in its order; `None`: it is none.
pub fn members_of(value: &Value) -> Option<Vec<(String, Value)>> {
    let is_object = value.kind() == ValueKind::Map;
    let keys = value.try_iter().ok().filter(|_| is_object)?;
    keys.map(|key| Some((key.as_str()?.to_owned(), value.get_item(&key).ok()?)))
        .collect()
}

/// An integer beyond 128 bits, by its digits.
#[derive(Debug)]
pub struct LongInteger(String);

impl Object for LongInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

struct JsonReader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> JsonReader<'a> {
    fn describe_fault(&self, what: &str) -> String {
        format!("JSON {what} (byte {})", self.at)
    }

    fn next_byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.next_byte(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// The next byte that is no space, if it is `wanted`, is passed over.
    fn skip_byte(&mut self, wanted: u8) -> bool {
        self.skip_space();
        let is_there = self.next_byte() == Some(wanted);
        self.at += usize::from(is_there);
        is_there
    }

    fn read_value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(self.describe_fault(&format!("is nested more than {MAX_DEPTH} deep")));
        }
        self.skip_space();
        match self.next_byte() {
            Some(b'{') => self.read_object(depth),
            Some(b'[') => self.read_array(depth),
            Some(b'"') => self.read_string().map(Value::from),
            Some(b'-' | b'0'..=b'9') => self.read_number(),
            _ => self.read_word(),
        }
    }

    fn read_object(&mut self, depth: usize) -> Result<Value, String> {
        self.at += 1;
        let mut members = Vec::new();
        if self.skip_byte(b'}') {
            return Ok(Value::from_pairs(members));
        }
        loop {
            self.skip_space();
            if self.next_byte() != Some(b'"') {
                return Err(self.describe_fault("lacks the name of a member"));
            }
            let name = self.read_string()?;
            if !self.skip_byte(b':') {
                return Err(self.describe_fault("lacks a colon"));
            }
            members.push((name, self.read_value(depth + 1)?));
            if self.skip_byte(b'}') {
                return Ok(Value::from_pairs(members));
            }
            if !self.skip_byte(b',') {
                return Err(self.describe_fault("lacks a comma or the end of an object"));
            }
        }
    }

    fn read_array(&mut self, depth: usize) -> Result<Value, String> {
        self.at += 1;
        let mut items = Vec::new();
        if self.skip_byte(b']') {
            return Ok(Value::from(items));
        }
        loop {
            items.push(self.read_value(depth + 1)?);
            if self.skip_byte(b']') {
                return Ok(Value::from(items));
            }
            if !self.skip_byte(b',') {
                return Err(self.describe_fault("lacks a comma or the end of an array"));
            }
        }
    }

    /// A string, of which serde_json reads the escapes.
    fn read_string(&mut self) -> Result<String, String> {
        let rest = &self.text.as_bytes()[self.at + 1..];
        let mut end = 0;
        loop {
            let found = memchr::memchr2(b'"', b'\\', &rest[end..]);
            let Some(found) = found else {
                return Err(self.describe_fault("ends within a string"));
            };
            end += found;
            if rest[end] == b'"' {
                break;
            }
            end = (end + 2).min(rest.len()); // the escaped character may be a quote
        }
        let quoted = &self.text[self.at..self.at + end + 2];
        let text =
            serde_json::from_str(quoted).map_err(|_| self.describe_fault("has a malformed string"));
        self.at += end + 2;
        text
    }

    fn read_number(&mut self) -> Result<Value, String> {
        let rest = &self.text[self.at..];
        let is_part = |c: char| matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E');
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let digits = &rest[..end];
        let is_json = serde_json::from_str::<IgnoredAny>(digits).is_ok();
        if !is_json {
            return Err(self.describe_fault("has a malformed number"));
        }
        if digits.contains(['.', 'e', 'E']) {
            // Rust rounds to the nearest float, as Python does; serde_json's may be the next one.
            let number = digits.parse::<f64>().unwrap_or(f64::INFINITY);
            if number.is_infinite() {
                return Err(self.describe_fault("has a number beyond 1.8e308"));
            }
            self.at += end;
            return Ok(Value::from(number));
        }
        self.at += end;
        if let Ok(small) = digits.parse::<i64>() {
            return Ok(Value::from(small));
        }
        Ok(match digits.parse::<i128>() {
            Ok(large) => Value::from(large),
            Err(_) => Value::from_object(LongInteger(digits.to_owned())),
        })
    }

    fn read_word(&mut self) -> Result<Value, String> {
        let words = [
            ("true", Value::from(true)),
            ("false", Value::from(false)),
            ("null", Value::from(())),
        ];
        for (word, value) in words {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.describe_fault("lacks a value"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::python_text::{json_text, python_str};
    use super::*;

    #[test]
    fn integers_are_exact_and_floats_are_pythons() {
        let long = "9".repeat(60);
        let longest = "9".repeat(4000);
        for (json, printed) in [
            ("18446744073709551616", "18446744073709551616"),
            ("-9223372036854775809", "-9223372036854775809"),
            (long.as_str(), long.as_str()),
            (longest.as_str(), longest.as_str()),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1e3", "1000.0"),
            ("12345678901234567890.0", "1.2345678901234567e+19"),
        ] {
            let value = read_json(json).unwrap();
            assert_eq!(json_text(&value).unwrap(), printed);
            assert_eq!(python_str(&value), printed);
        }
    }

    #[test]
    fn malformed_json_is_refused() {
        for text in [
            "",
            "{",
            "[1",
            "[1,]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "\"a",
            "\"\\",
            "\"\\\"",
            "01",
            "1.",
            "--1",
            "nul",
            "1 2",
            "\"\u{1}\"",
            "\"\\ud800\"",
            "+1",
            "1e400",
            "[1}",
            "NaN",
        ] {
            assert!(read_json(text).is_err(), "{text:?}");
            assert!(serde_json::from_str::<Value>(text).is_err(), "{text:?}");
        }
        let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(read_json(&deep(MAX_DEPTH)).is_ok());
        let refused = read_json(&deep(MAX_DEPTH + 2)).unwrap_err();
        assert_eq!(refused, "JSON is nested more than 256 deep (byte 257)");
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(serde_json::Value::from),
            any::<i64>().prop_map(serde_json::Value::from),
            any::<i32>().prop_map(|whole| serde_json::Value::from(f64::from(whole) / 8.0)),
            any::<String>().prop_map(serde_json::Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(serde_json::Value::from),
                proptest::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(serde_json::Value::from_iter),
            ]
        })
    }

    proptest! {
        /// A float's shortest digits, and digits beyond those, are read as that float.
        #[test]
        fn floats_are_the_nearest(value in any::<f64>().prop_filter("a number", |value| value.is_finite())) {
            for text in [format!("{value:?}"), format!("{value:.20e}")] {
                let read = read_json(&text).unwrap();
                prop_assert_eq!(f64::try_from(read).unwrap().to_bits(), value.to_bits());
            }
        }

        /// Where numbers fit into 64 bits, and floats have few digits, serde_json reads the same.
        #[test]
        fn values_are_serde_jsons(value in any_json(), is_pretty in any::<bool>()) {
            let text = if is_pretty {
                serde_json::to_string_pretty(&value).unwrap()
            } else {
                value.to_string()
            };
            let expected: Value = serde_json::from_str(&text).unwrap();
            let read = read_json(&text).unwrap();
            prop_assert_eq!(json_text(&read).unwrap(), json_text(&expected).unwrap());
        }

        #[test]
        fn no_text_panics(text in r#"[\[\]{}",:\\0-9eE.+tfn u-]{0,40}"#) {
            let is_read = read_json(&text).is_ok();
            let is_json = serde_json::from_str::<IgnoredAny>(&text).is_ok();
            prop_assert!(is_json || !is_read);
            let is_value = serde_json::from_str::<Value>(&text).is_ok();
            prop_assert!(is_read || !is_value);
        }
    }
}
