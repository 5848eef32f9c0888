//! Texts of values as Python writes them (`str` and `json.dumps`): chat templates print numbers,
//! lists and objects of tool calls, and were tried in Python.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::json_value::{LongInteger, MAX_DEPTH};

/// Python's `str(value)`. Strings are themselves.
pub fn python_str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => python_repr(value),
    }
}

fn python_repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => string_repr(value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_repr)
        }
        ValueKind::Seq => {
            let items = value.try_iter().into_iter().flatten();
            let items: Vec<String> = items.map(|item| python_repr(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let members = keys.map(|key| {
                let member = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", python_repr(&key), python_repr(&member))
            });
            format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// Python's `repr` of a float: the shortest digits that read back the same, in scientific form
/// below 1e-4 and from 1e16 on.
fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    // Rust's, but for the sign and the two digits of the exponent.
    let text = format!("{value:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    let (sign, size) = exponent
        .strip_prefix('-')
        .map_or(('+', exponent), |size| ('-', size));
    format!("{digits}e{sign}{size:0>2}")
}

/// Python's `repr` of a string: in single quotes, unless it holds only such ones itself.
pub fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\\' => out += "\\\\",
            _ if c == quote => out.extend(['\\', c]),
            _ if is_printable(c) => out.push(c),
            _ => out += &escaped(c),
        }
    }
    out.push(quote);
    out
}

/// Python's `str.isprintable`, apart from rare format characters and code points without a
/// character.
fn is_printable(c: char) -> bool {
    let is_format = matches!(
        c,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    let is_private = matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_format || is_private)
}

fn escaped(c: char) -> String {
    match u32::from(c) {
        code @ 0..=0xff => format!("\\x{code:02x}"),
        code @ 0x100..=0xffff => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`.
pub fn json_text(value: &Value) -> Result<String, Error> {
    let mut writer = JsonWriter::default();
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Python's `json.dumps` with `ensure_ascii=False`: Jinja's own filter would escape HTML
/// characters.
pub fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let mut writer = JsonWriter {
        ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        ..JsonWriter::default()
    };
    match separators.as_deref() {
        None => {}
        Some([item, key]) => (writer.item, writer.key) = (item.clone(), key.clone()),
        Some(_) => return Err(unfit("separators must be two strings")),
    }
    options.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn unfit(text: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {text}"))
}

struct JsonWriter {
    out: String,
    ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    item: String,
    key: String,
}

impl Default for JsonWriter {
    fn default() -> Self {
        Self {
            out: String::new(),
            ascii: false,
            sort_keys: false,
            indent: None,
            item: ", ".to_owned(),
            key: ": ".to_owned(),
        }
    }
}

impl JsonWriter {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(unfit("nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out += "null",
            ValueKind::Bool => self.out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number if value.is_integer() => self.out += &value.to_string(),
            ValueKind::Number => self.out += &json_float(f64::try_from(value.clone())?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', items.len(), depth, |writer, at| {
                    writer.value(&items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.list('{', '}', keys.len(), depth, |writer, at| {
                    let key = &keys[at];
                    writer.string(key.as_str().ok_or_else(|| unfit("a key is no string"))?);
                    writer.out += &writer.key;
                    writer.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            ValueKind::Plain if value.downcast_object_ref::<LongInteger>().is_some() => {
                self.out += &value.to_string();
            }
            other => return Err(unfit(&format!("cannot print {other}"))),
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        len: usize,
        depth: usize,
        mut write: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for at in 0..len {
            if at > 0 {
                self.out += &self.item;
            }
            self.line(depth + 1);
            write(self, at)?;
        }
        if len > 0 {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        // serde_json's escapes are Python's.
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii {
            self.out += &quoted;
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                self.out.push(c); // DEL is ASCII to Python
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                self.out += &format!("\\u{unit:04x}");
            }
        }
    }
}

fn json_float(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    float_repr(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Output of Python's str(json.loads(…)) for the same values.
    #[test]
    fn text_is_pythons_str() {
        for (json, expected) in [
            ("1.5", "1.5"),
            ("1e20", "1e+20"),
            ("1e15", "1000000000000000.0"),
            ("0.00001", "1e-05"),
            ("true", "True"),
            ("null", "None"),
            (r#""it's""#, "it's"),
            (
                r#"["it's", "a\"'", "\u0001\u00a0é\u200b😀\\", 1.0]"#,
                r#"["it's", 'a"\'', '\x01\xa0é\u200b😀\\', 1.0]"#,
            ),
            (
                r#"{"b": {"a": [false]}, "a": {}}"#,
                "{'b': {'a': [False]}, 'a': {}}",
            ),
        ] {
            let value: Value = serde_json::from_str(json).unwrap();
            assert_eq!(python_str(&value), expected, "{json}");
        }
    }
}
