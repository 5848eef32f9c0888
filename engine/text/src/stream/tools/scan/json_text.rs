//! JSON texts that readers write themselves, as Python's `json.dumps(…, ensure_ascii=False)` does.

/// Appends the characters of a JSON string, without its quotes.
pub fn push_string_body(out: &mut String, text: &str) {
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..'\u{20}' => out.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => out.push(character),
        }
    }
}

/// Appends a JSON string.
pub fn push_string(out: &mut String, text: &str) {
    out.push('"');
    push_string_body(out, text);
    out.push('"');
}

/// JSON string with this text.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    push_string(&mut out, text);
    out
}
