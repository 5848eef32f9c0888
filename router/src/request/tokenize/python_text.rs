//! Texts of values as Python writes them: chat templates print numbers, lists and objects of tool
//! calls, and were tried with Python's `str`.

use minijinja::Value;
use minijinja::value::ValueKind;

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
pub fn float_repr(value: f64) -> String {
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
fn string_repr(text: &str) -> String {
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
