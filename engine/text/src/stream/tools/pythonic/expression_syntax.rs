//! Expressions of Python, recognized: operands with operators between them.

use std::str::Chars;

/// Keywords between two operands.
const BINARY_KEYWORDS: &[&str] = &["and", "or", "in", "is", "if", "else", "for"];
/// Keywords in front of an operand.
const UNARY_KEYWORDS: &[&str] = &["not", "await"];
const LONG_OPERATORS: &[&str] = &["**", "//", "<<", ">>", "<=", ">=", "==", "!="];
const OPERATORS: &str = "+-*/%@&|^<>.";
const UNARY_OPERATORS: &str = "+-~*";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SyntaxPlace {
    /// An operand must follow.
    Operator,
    /// An operand or the end of brackets may follow.
    Separator,
    Operand,
    /// Strings beside each other are one.
    String,
}

/// True if Python reads the text as an expression. Its value is not computed, and names need not
/// exist. Lambdas and assignments are not known.
pub fn is_expression(text: &str) -> bool {
    let mut reader = ExpressionReader {
        rest: text.trim(),
        place: SyntaxPlace::Operator,
        brackets: Vec::new(),
    };
    while !reader.rest.is_empty() {
        if reader.read_token().is_none() {
            return false;
        }
        reader.rest = reader.rest.trim_start();
    }
    reader.brackets.is_empty() && reader.is_behind_operand()
}

struct ExpressionReader<'a> {
    rest: &'a str,
    place: SyntaxPlace,
    /// Ends of the brackets that are open.
    brackets: Vec<char>,
}

impl ExpressionReader<'_> {
    fn is_behind_operand(&self) -> bool {
        matches!(self.place, SyntaxPlace::Operand | SyntaxPlace::String)
    }

    /// `None`: the token cannot stand here.
    fn read_token(&mut self) -> Option<()> {
        let first = self.rest.chars().next()?;
        if let Some(end) = string_end(self.rest) {
            return self.read_string(end);
        }
        if first.is_alphanumeric() || first == '_' {
            return self.read_word();
        }
        let closing = match first {
            '(' => Some(')'),
            '[' => Some(']'),
            '{' => Some('}'),
            _ => None,
        };
        if let Some(closing) = closing {
            // Behind an operand it is a call or an index.
            self.brackets.push(closing);
            self.read_as(first.len_utf8(), SyntaxPlace::Separator);
            return Some(());
        }
        if self.brackets.last() == Some(&first) {
            let may_end = self.place != SyntaxPlace::Operator;
            self.brackets.pop();
            self.read_as(first.len_utf8(), SyntaxPlace::Operand);
            return may_end.then_some(());
        }
        self.read_operator(first)
    }

    fn read_as(&mut self, bytes: usize, place: SyntaxPlace) {
        self.rest = &self.rest[bytes..];
        self.place = place;
    }

    fn read_string(&mut self, end: usize) -> Option<()> {
        let may_begin = self.place != SyntaxPlace::Operand;
        self.read_as(end, SyntaxPlace::String);
        may_begin.then_some(())
    }

    fn read_word(&mut self) -> Option<()> {
        let is_word_char = |letter: char| letter.is_alphanumeric() || letter == '_';
        let behind = self.rest.trim_start_matches(is_word_char);
        let word = &self.rest[..self.rest.len() - behind.len()];
        let is_behind_operand = self.is_behind_operand();
        if is_behind_operand && word == "not" {
            let behind_space = behind.trim_start();
            self.read_as(self.rest.len() - behind_space.len(), SyntaxPlace::Operand);
            return behind_space.starts_with("in").then_some(());
        }
        let is_binary = BINARY_KEYWORDS.contains(&word);
        let is_unary = UNARY_KEYWORDS.contains(&word);
        let may_stand = if is_behind_operand {
            is_binary
        } else {
            is_unary || (!is_binary && is_operand(word))
        };
        let place = if is_binary || is_unary {
            SyntaxPlace::Operator
        } else {
            SyntaxPlace::Operand
        };
        self.read_as(word.len(), place);
        may_stand.then_some(())
    }

    fn read_operator(&mut self, first: char) -> Option<()> {
        let is_separator = matches!(first, ',' | ':') && !self.brackets.is_empty();
        let is_behind_operand = self.is_behind_operand();
        let long = LONG_OPERATORS
            .iter()
            .find(|operator| self.rest.starts_with(**operator));
        let bytes = long.map_or(first.len_utf8(), |operator| operator.len());
        let is_keyword_argument = first == '=' && long.is_none() && !self.brackets.is_empty();
        let is_binary = long.is_some() || OPERATORS.contains(first) || is_keyword_argument;
        let is_unary = UNARY_OPERATORS.contains(first);
        let may_stand = if is_behind_operand {
            is_separator || is_binary
        } else {
            // The decimal point of `.5`, and the colon of `x[:2]`.
            is_unary || first == '.' || (first == ':' && is_separator)
        };
        let place = if is_separator {
            SyntaxPlace::Separator
        } else {
            SyntaxPlace::Operator
        };
        self.read_as(bytes, place);
        may_stand.then_some(())
    }
}

/// True for names and numbers.
fn is_operand(word: &str) -> bool {
    if !word.starts_with(|first: char| first.is_ascii_digit()) {
        return true;
    }
    let digits = word.replace('_', "").to_ascii_lowercase();
    let has_base = |prefix: &str, base: u32| {
        let body = digits.strip_prefix(prefix);
        body.is_some_and(|body| !body.is_empty() && body.chars().all(|digit| digit.is_digit(base)))
    };
    let is_decimal = digits.trim_end_matches('j').parse::<f64>().is_ok();
    is_decimal || has_base("0x", 16) || has_base("0o", 8) || has_base("0b", 2)
}

/// Length of the string at the begin of the text, with its prefix. `None`: there is none, or it
/// does not end.
fn string_end(text: &str) -> Option<usize> {
    let behind = text.trim_start_matches(['r', 'R', 'b', 'B', 'u', 'U', 'f', 'F']);
    let quote = behind
        .chars()
        .next()
        .filter(|first| "'\"".contains(*first))?;
    let long: String = std::iter::repeat_n(quote, 3).collect();
    let closing = if behind.starts_with(&long) {
        long
    } else {
        quote.to_string()
    };
    let prefix_bytes = text.len() - behind.len();
    let mut letters = behind[closing.len()..].chars();
    while !letters.as_str().starts_with(&closing) {
        read_letter(&mut letters)?;
    }
    let rest_bytes = letters.as_str().len() - closing.len();
    (prefix_bytes <= 2).then_some(text.len() - rest_bytes)
}

/// Reads a letter of a string, with the one behind a backslash.
fn read_letter(letters: &mut Chars<'_>) -> Option<()> {
    if letters.next()? == '\\' {
        letters.next()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts that `ast.parse(text, mode="eval")` of Python accepts.
    const EXPRESSIONS: &[&str] = &[
        "'a' + 'b'",
        "'a'+'b'",
        "'a' 'b'",
        "'%s' % x",
        "'a' if x else 'b'",
        "'a' not in 'b'",
        "'a' is not 'b'",
        "not 'a'",
        "'a'.join(['b', 'c'])",
        "'a'[0]",
        "'a'[1:]",
        "'a'[:2]",
        "f('a', x='b')",
        "f(*'a', **{'b': 'c'})",
        "{'k': 'a' + 'b'}",
        "('a', 'b',)",
        "()",
        "-1 * 'a'",
        "'a' * 0x1F",
        "'a' * 1e5",
        "'a' * .5",
        "'a' == 'b' != 'c'",
        "r'a' + f\"{x}\"",
        "'''a'b''' + 'c'",
        "'a\\'b' + 'c'",
        "\"grep \"-r\" .\"",
        "[c for c in 'ab' if c]",
    ];
    /// Texts that it refuses.
    const OTHER_TEXTS: &[&str] = &[
        "",
        "'sed -n '360",
        "'sed -n '1",
        "'sed -n '1,9p' f'",
        "\"grep \"foo\" log.txt\"",
        "'it's'",
        "'it's so'",
        "'a' +",
        "+",
        "'a' || 'b'",
        "'a' $ 'b'",
        "'a' + 'b",
        "'a' 9p",
        "9p",
        "('a'",
        "'a')",
        "['a' + ]",
        "'a' x",
        "x 'a'",
        "abc'a'",
        "'a', 'b' x",
        "'a'; 'b'",
        "\"echo \"$x\" > f\"",
    ];

    #[test]
    fn expressions_are_those_that_python_reads() {
        for text in EXPRESSIONS {
            assert!(is_expression(text), "{text}");
        }
        for text in OTHER_TEXTS {
            assert!(!is_expression(text), "{text}");
        }
    }
}
