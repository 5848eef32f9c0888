//! JSON values, appended to a buffer.

use std::io::Write;

/// Escapes by byte: 0 stands for itself, `u` for the long form, others follow a backslash.
const ESCAPES: [u8; 256] = escapes();

const fn escapes() -> [u8; 256] {
    let mut table = [0; 256];
    let mut control = 0;
    while control < 0x20 {
        table[control] = b'u';
        control += 1;
    }
    table[0x08] = b'b';
    table[0x09] = b't';
    table[0x0a] = b'n';
    table[0x0c] = b'f';
    table[0x0d] = b'r';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table
}

/// Appends a string in quotes (RFC 8259 §7: only what must be escaped is).
pub fn push_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut plain_from = 0;
    for (at, byte) in bytes.iter().enumerate() {
        let escape = ESCAPES[usize::from(*byte)];
        if escape == 0 {
            continue;
        }
        out.extend_from_slice(&bytes[plain_from..at]);
        plain_from = at + 1;
        if escape == b'u' {
            const DIGITS: &[u8; 16] = b"0123456789abcdef";
            let high = DIGITS[usize::from(byte >> 4)];
            let low = DIGITS[usize::from(byte & 15)];
            out.extend_from_slice(&[b'\\', b'u', b'0', b'0', high, low]);
        } else {
            out.extend_from_slice(&[b'\\', escape]);
        }
    }
    out.extend_from_slice(&bytes[plain_from..]);
    out.push(b'"');
}

/// Appends a member of an object, with a comma in front.
pub fn push_text_member(out: &mut Vec<u8>, name: &str, text: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
    push_text(out, text);
}

/// Appends a whole number.
pub fn push_number(out: &mut Vec<u8>, value: u64) {
    let mut digits = [0; 20];
    let mut begin = digits.len();
    let mut rest = value;
    loop {
        begin -= 1;
        digits[begin] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[begin..]);
}

/// Appends a number with the shortest digits that read back as the same; `null` for one that JSON
/// lacks.
pub fn push_float(out: &mut Vec<u8>, value: f64) {
    match serde_json::Number::from_f64(value) {
        Some(number) => write!(out, "{number}").expect("writing to a Vec cannot fail"),
        None => out.extend_from_slice(b"null"),
    }
}

/// Appends `[…]` with one element per item.
pub fn push_array<T>(
    out: &mut Vec<u8>,
    items: impl IntoIterator<Item = T>,
    push_item: impl FnMut(&mut Vec<u8>, T),
) {
    out.push(b'[');
    push_joined(out, items, push_item);
    out.push(b']');
}

/// Appends one element per item, with commas between them.
pub fn push_joined<T>(
    out: &mut Vec<u8>,
    items: impl IntoIterator<Item = T>,
    mut push_item: impl FnMut(&mut Vec<u8>, T),
) {
    for (place, item) in items.into_iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        push_item(out, item);
    }
}

/// Appends an array of token ids.
pub fn push_ids(out: &mut Vec<u8>, ids: &[u32]) {
    push_array(out, ids, |out, id| push_number(out, u64::from(*id)));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn texts_are_those_of_serde_json(text in "[\\PC\u{0}-\u{1f}\"\\\\]{0,40}") {
            let mut out = Vec::new();
            push_text(&mut out, &text);
            prop_assert_eq!(String::from_utf8(out).unwrap(), serde_json::to_string(&text).unwrap());
        }

        #[test]
        fn numbers_are_those_of_serde_json(whole: u64, float: f64, ids: Vec<u32>) {
            let mut out = Vec::new();
            push_number(&mut out, whole);
            out.push(b' ');
            push_float(&mut out, float);
            out.push(b' ');
            push_ids(&mut out, &ids);
            let expected = format!(
                "{} {} {}",
                serde_json::to_string(&whole).unwrap(),
                serde_json::to_string(&float).unwrap(),
                serde_json::to_string(&ids).unwrap()
            );
            prop_assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn numbers_that_json_lacks_are_null() {
        let mut out = Vec::new();
        push_float(&mut out, f64::NAN);
        assert_eq!(out, b"null");
    }
}
