//! Python literals to JSON, read by a tokenizer of our own: no expression is evaluated.

use super::json_text::push_string;

/// Deepest nesting that is read: each level takes stack.
const MAX_DEPTH: usize = 64;

/// JSON text of a Python literal, written as `json.dumps(…, ensure_ascii=False)` writes it. `None`:
/// the text is none. Also reads `true`, `false` and `null`, which models mix in; tuples and sets
/// become arrays, keys that are no strings become their text. Of a key that is given twice, the
/// last value counts, as in Python. Numbers that are infinite in Python are none.
pub fn python_literal_to_json(text: &str) -> Option<String> {
    let mut reader = LiteralReader { rest: text.trim() };
    let mut out = String::new();
    reader.read_value(0, &mut out)?;
    reader.skip_space();
    reader.rest.is_empty().then_some(out)
}

/// Members of a Python dict whose keys are strings: JSON texts of their keys and values. `None`:
/// the text is no such dict.
pub fn python_dict_members(text: &str) -> Option<Vec<(String, String)>> {
    let mut reader = LiteralReader { rest: text.trim() };
    if !reader.rest.starts_with('{') {
        return None;
    }
    let BraceItems { members, items } = reader.read_brace_items(0)?;
    reader.skip_space();
    let is_dict = items.is_empty() && reader.rest.is_empty();
    let has_text_keys = members.iter().all(|member| member.key.starts_with('"'));
    let pairs = members.into_iter().map(|member| (member.key, member.value));
    (is_dict && has_text_keys).then(|| pairs.collect())
}

/// Member of a dict, as JSON texts.
struct DictMember {
    key: String,
    value: String,
}

/// Contents of a dict or a set.
#[derive(Default)]
struct BraceItems {
    members: Vec<DictMember>,
    items: Vec<String>,
}

struct LiteralReader<'a> {
    rest: &'a str,
}

impl LiteralReader<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn read_char(&mut self, expected: char) -> Option<()> {
        self.skip_space();
        self.rest = self.rest.strip_prefix(expected)?;
        Some(())
    }

    fn read_value(&mut self, depth: usize, out: &mut String) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.skip_space();
        match self.rest.chars().next()? {
            '[' => self.read_items(depth, '[', ']', out),
            '(' => self.read_items(depth, '(', ')', out),
            '{' => self.read_braces(depth, out),
            _ if self.is_at_string() => self.read_strings(out),
            '0'..='9' | '.' | '-' | '+' => self.read_number(out),
            _ => self.read_constant(out),
        }
    }

    /// Reads a list, a tuple, or a value in parentheses.
    fn read_items(
        &mut self,
        depth: usize,
        open: char,
        close: char,
        out: &mut String,
    ) -> Option<()> {
        self.read_char(open)?;
        let mut items = Vec::new();
        let mut has_comma = false;
        while self.read_char(close).is_none() {
            let is_behind_comma = items.is_empty() || has_comma;
            if !is_behind_comma {
                return None;
            }
            let mut item = String::new();
            self.read_value(depth + 1, &mut item)?;
            items.push(item);
            has_comma = self.read_char(',').is_some();
        }
        let is_parenthesized = open == '(' && items.len() == 1 && !has_comma;
        if is_parenthesized {
            out.push_str(&items[0]);
        } else {
            push_array(out, &items);
        }
        Some(())
    }

    /// Reads a dict or a set.
    fn read_braces(&mut self, depth: usize, out: &mut String) -> Option<()> {
        let BraceItems { members, items } = self.read_brace_items(depth)?;
        match (members.is_empty(), items.is_empty()) {
            (_, true) => {
                out.push('{');
                for (place, member) in members.iter().enumerate() {
                    let lead = if place > 0 { ", " } else { "" };
                    let key = object_key(&member.key);
                    out.push_str(&format!("{lead}{key}: {}", member.value));
                }
                out.push('}');
                Some(())
            }
            (true, false) => {
                push_array(out, &items);
                Some(())
            }
            (false, false) => None,
        }
    }

    fn read_brace_items(&mut self, depth: usize) -> Option<BraceItems> {
        self.read_char('{')?;
        let mut found = BraceItems::default();
        let mut has_comma = true;
        while self.read_char('}').is_none() {
            if !has_comma {
                return None;
            }
            let mut item = String::new();
            self.read_value(depth + 1, &mut item)?;
            if self.read_char(':').is_none() {
                found.items.push(item);
            } else {
                let is_key = !item.starts_with(['[', '{']);
                let mut value = String::new();
                self.read_value(depth + 1, &mut value)?;
                set_member(&mut found.members, is_key.then_some(item)?, value);
            }
            has_comma = self.read_char(',').is_some();
        }
        Some(found)
    }

    fn is_at_string(&self) -> bool {
        string_prefix(self.rest).is_some()
    }

    /// Reads a string, or several beside each other, which are one.
    fn read_strings(&mut self, out: &mut String) -> Option<()> {
        let mut text = String::new();
        while let Some(prefix) = string_prefix(self.rest) {
            let form = StringForm {
                is_raw: prefix.contains(['r', 'R']),
                is_formatted: prefix.contains(['f', 'F']),
            };
            self.rest = &self.rest[prefix.len()..];
            self.read_quoted(form, &mut text)?;
            self.skip_space();
        }
        push_string(out, &text);
        Some(())
    }

    fn read_quoted(&mut self, form: StringForm, text: &mut String) -> Option<()> {
        let quote = opening_quote(self.rest)?;
        self.rest = &self.rest[quote.len()..];
        while let Some(character) = self.rest.chars().next() {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                self.rest = rest;
                return Some(());
            }
            self.rest = &self.rest[character.len_utf8()..];
            if form.is_formatted && matches!(character, '{' | '}') {
                // One brace begins an expression, two are a brace.
                self.rest = self.rest.strip_prefix(character)?;
                text.push(character);
            } else if character != '\\' {
                text.push(character);
            } else if form.is_raw {
                text.push('\\');
                let escaped = self.rest.chars().next()?;
                self.rest = &self.rest[escaped.len_utf8()..];
                text.push(escaped);
            } else {
                self.read_escape(text)?;
            }
        }
        None
    }

    /// Reads the rest of an escape, behind its backslash.
    fn read_escape(&mut self, text: &mut String) -> Option<()> {
        let escape = self.rest.chars().next()?;
        if let '0'..='7' = escape {
            let digits = leading_digits(self.rest, 8, 3);
            let code = u32::from_str_radix(digits, 8).ok()?;
            self.rest = &self.rest[digits.len()..];
            text.push(char::from_u32(code)?);
            return Some(());
        }
        self.rest = &self.rest[escape.len_utf8()..];
        match escape {
            '\n' => {}
            '\\' | '\'' | '"' => text.push(escape),
            'a' => text.push('\u{7}'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            'n' => text.push('\n'),
            'r' => text.push('\r'),
            't' => text.push('\t'),
            'v' => text.push('\u{b}'),
            'x' => text.push(char::from_u32(self.read_hex(2)?)?),
            'u' => text.push(self.read_utf16()?),
            'U' => text.push(char::from_u32(self.read_hex(8)?)?),
            other => {
                text.push('\\');
                text.push(other);
            }
        }
        Some(())
    }

    fn read_hex(&mut self, len: usize) -> Option<u32> {
        let digits = leading_digits(self.rest, 16, len);
        if digits.len() < len {
            return None;
        }
        self.rest = &self.rest[len..];
        u32::from_str_radix(digits, 16).ok()
    }

    /// Reads the rest of `\uXXXX`. Two halves of a surrogate pair are one character, as in JSON;
    /// one half alone, which no text can hold, is U+FFFD.
    fn read_utf16(&mut self) -> Option<char> {
        let unit = self.read_hex(4)?;
        if !(0xd800..0xdc00).contains(&unit) {
            return Some(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
        let Some(second_half) = self.rest.strip_prefix("\\u") else {
            return Some(char::REPLACEMENT_CHARACTER);
        };
        let digits = leading_digits(second_half, 16, 4);
        let low = u32::from_str_radix(digits, 16).unwrap_or_default();
        if digits.len() < 4 || !(0xdc00..0xe000).contains(&low) {
            return Some(char::REPLACEMENT_CHARACTER);
        }
        self.rest = &second_half[4..];
        char::from_u32(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00))
    }

    fn read_number(&mut self, out: &mut String) -> Option<()> {
        let unsigned = self.rest.trim_start_matches(['+', '-', ' ']);
        let signs = &self.rest[..self.rest.len() - unsigned.len()];
        let end = number_bytes(unsigned);
        let digits = unsigned[..end].replace('_', "");
        self.rest = &unsigned[end..];
        let number = json_number(&digits)?;
        let is_negative = signs.matches('-').count() % 2 == 1;
        if is_negative {
            out.push('-');
        }
        out.push_str(&number);
        Some(())
    }

    fn read_constant(&mut self, out: &mut String) -> Option<()> {
        let end = self
            .rest
            .find(|character: char| !character.is_alphanumeric() && character != '_');
        let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        let value = match name {
            "None" | "null" => "null",
            "True" | "true" => "true",
            "False" | "false" => "false",
            _ => return None,
        };
        out.push_str(value);
        self.rest = rest;
        Some(())
    }
}

fn push_array(out: &mut String, items: &[String]) {
    out.push('[');
    out.push_str(&items.join(", "));
    out.push(']');
}

/// Sets the member of a key to its last value, as Python does.
fn set_member(members: &mut Vec<DictMember>, key: String, value: String) {
    let same_key = |member: &DictMember| object_key(&member.key) == object_key(&key);
    match members.iter().position(same_key) {
        Some(place) => members[place].value = value,
        None => members.push(DictMember { key, value }),
    }
}

/// Key of an object for the JSON text of a key.
fn object_key(key: &str) -> String {
    if key.starts_with('"') {
        key.to_owned()
    } else {
        format!("\"{key}\"")
    }
}

/// How the prefix of a string changes its text.
#[derive(Clone, Copy)]
struct StringForm {
    /// A backslash is text.
    is_raw: bool,
    /// Braces hold expressions.
    is_formatted: bool,
}

/// Prefixes of strings, in lower case. Strings of bytes are none.
const STRING_PREFIXES: [&str; 6] = ["", "r", "u", "f", "rf", "fr"];

/// Prefix letters of the string that the text begins with, `None` if it begins with no string.
fn string_prefix(text: &str) -> Option<&str> {
    let letters = text.bytes().take_while(u8::is_ascii_alphabetic);
    let (prefix, quoted) = text.split_at(letters.take(3).count());
    let mut prefixes = STRING_PREFIXES.iter();
    let is_string =
        quoted.starts_with(['\'', '"']) && prefixes.any(|known| known.eq_ignore_ascii_case(prefix));
    is_string.then_some(prefix)
}

/// Quote with which the text begins: one, or three.
fn opening_quote(text: &str) -> Option<&str> {
    let quotes = ["\"\"\"", "'''", "\"", "'"];
    quotes
        .into_iter()
        .find(|quote| text.starts_with(quote))
        .map(|quote| &text[..quote.len()])
}

/// At most `max` digits with which the text begins.
fn leading_digits(text: &str, radix: u32, max: usize) -> &str {
    let end = text
        .find(|character: char| !character.is_digit(radix))
        .unwrap_or(text.len());
    &text[..end.min(max)]
}

/// Bytes of the number with which the text begins, roughly: all that a number can hold.
fn number_bytes(text: &str) -> usize {
    let is_hex = text.starts_with("0x") || text.starts_with("0X");
    let mut previous = ' ';
    for (index, character) in text.char_indices() {
        let is_exponent_sign =
            matches!(character, '+' | '-') && matches!(previous, 'e' | 'E') && !is_hex;
        let is_digit = character.is_ascii_alphanumeric() || matches!(character, '.' | '_');
        if !is_digit && !is_exponent_sign {
            return index;
        }
        previous = character;
    }
    text.len()
}

/// JSON number for the digits of a Python number. Decimal digits stay as they are.
fn json_number(digits: &str) -> Option<String> {
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = digits.to_ascii_lowercase().strip_prefix(prefix) {
            return u64::from_str_radix(rest, radix)
                .ok()
                .map(|number| number.to_string());
        }
    }
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(place) => digits.split_at(place),
        None => (digits, ""),
    };
    let number = match mantissa.split_once('.') {
        Some(("", "")) => return None,
        Some(("", fraction)) => format!("0.{fraction}{exponent}"),
        Some((whole, "")) => format!("{whole}.0{exponent}"),
        _ => digits.to_owned(),
    };
    let is_number = serde_json::from_str::<serde_json::Number>(&number).is_ok();
    let is_finite = number.parse::<f64>().is_ok_and(f64::is_finite);
    let is_integer = !number.contains(['.', 'e', 'E']);
    (is_number && (is_integer || is_finite)).then_some(number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic fails the test")]
mod tests {
    use super::*;

    /// Literals, and what Python's `json.dumps(ast.literal_eval(…), ensure_ascii=False)` prints.
    #[test]
    fn literals_are_written_as_python_writes_them() {
        let cases = [
            ("'it''s'", r#""its""#),
            (r#"'a\'b"c'"#, r#""a'b\"c""#),
            (r"'\x41\101\u00e9\U0001F600\n'", "\"AA\u{e9}\u{1f600}\\n\""),
            (r"r'\d\''", r#""\\d\\'""#),
            ("'''two\nlines'''", r#""two\nlines""#),
            ("[1, 2.5, -3, +4, 1e5, 1_000]", "[1, 2.5, -3, 4, 1e5, 1000]"),
            ("(1,)", "[1]"),
            ("(1)", "1"),
            ("()", "[]"),
            ("{}", "{}"),
            (
                "{'a': None, 1: (True, False)}",
                r#"{"a": null, "1": [true, false]}"#,
            ),
            ("{1, 2}", "[1, 2]"),
            ("{'a': 1, 'b': 2, 'a': [3]}", r#"{"a": [3], "b": 2}"#),
            ("{1: 'a', '1': 'b'}", r#"{"1": "b"}"#),
            ("f'a' F\"{{b}}\"", r#""a{b}""#),
            ("rf'\\d{{2}}'", r#""\\d{2}""#),
            ("{True: 1}", r#"{"true": 1}"#),
            ("[[], {'b': []},]", r#"[[], {"b": []}]"#),
            ("0x1F", "31"),
            (".5", "0.5"),
            ("1.", "1.0"),
            ("12345678901234567890123", "12345678901234567890123"),
            ("true", "true"),
            ("null", "null"),
        ];
        for (literal, json) in cases {
            assert_eq!(
                python_literal_to_json(literal).as_deref(),
                Some(json),
                "{literal}"
            );
        }
    }

    #[test]
    fn expressions_are_no_literals() {
        let texts = [
            "",
            "x",
            "f()",
            "1 + 2",
            "[1 2]",
            "{'a': 1, 2}",
            "'open",
            "007",
            "[007]",
            "1e999",
            "f'{x}'",
            "f'}'",
            "bf'x'",
            "1j",
            "b'x'",
            "[,]",
            "__import__('os')",
            "'a' 1",
            "{[1]: 2}",
            "nan",
            "Truex",
            "--",
            ".",
        ];
        for text in texts {
            assert_eq!(python_literal_to_json(text), None, "{text}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        let deep = "[".repeat(100_000);
        assert_eq!(python_literal_to_json(&deep), None);
    }
}
