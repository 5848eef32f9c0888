//! Tests, filters and methods that templates use as Jinja and Python have them, where minijinja and
//! its `pycompat` have none or another.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

use super::python_text::{python_str, tojson};

pub fn add_python_builtins(environment: &mut Environment<'_>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("callable", |_: &Value| false);
    environment.add_filter("length", count_items);
    environment.add_filter("count", count_items);
    environment.add_filter("int", to_integer);
    environment.add_filter("float", to_float);
    environment.add_filter("escape", escape_markup);
    environment.add_filter("e", escape_markup);
    environment.add_filter("string", |value: &Value| python_str(value));
    environment.add_filter("tojson", tojson);
    environment.set_unknown_method_callback(call_method);
}

/// `is iterable`. To minijinja null is iterable, and templates then ask for its length.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `is sequence`: whatever has a length and an index.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String};
    matches!(value.kind(), Map | Seq | String) || value.is_undefined()
}

/// `length`: 0 of what is undefined.
fn count_items(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// `int`: the default, or 0, of what is no number.
fn to_integer(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = options.get("default")?;
    let fallback = default.clone().or(named);
    let number = filters::int(state, value, default, base, options);
    Ok(number.unwrap_or_else(|_| fallback.unwrap_or(Value::from(0))))
}

/// `float`: the default, or 0.0, of what is no number.
fn to_float(
    state: &State,
    value: &Value,
    default: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = options.get("default")?;
    let fallback = default.clone().or(named);
    let number = filters::float(state, value, default, options);
    Ok(number.unwrap_or_else(|_| fallback.unwrap_or(Value::from(0.0))))
}

/// `escape`, with markupsafe's entities.
fn escape_markup(value: &Value) -> String {
    let mut out = String::new();
    for c in python_str(value).chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '\'' => out += "&#39;",
            '"' => out += "&#34;",
            _ => out.push(c),
        }
    }
    out
}

fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let called = match value.kind() {
        ValueKind::String => string_method(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq => list_method(value, method, args)?,
        _ => None,
    };
    let is_copied = called.is_none() && method == "copy" && args.is_empty();
    if is_copied && matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(value.clone());
    }
    match called {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Methods of `str`; `None`: another one.
fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let result = match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let halves = text.split_once(separator);
            list_of(halves.map_or([text, "", ""], |(head, tail)| [head, separator, tail]))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let halves = text.rsplit_once(separator);
            list_of(halves.map_or(["", "", text], |(head, tail)| [head, separator, tail]))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<usize>) = from_args(args)?;
            let most = most.map_or(usize::MAX, |most| most + 1);
            let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
            parts.reverse();
            list_of(parts)
        }
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let found = text
                .find(wanted)
                .ok_or_else(|| not_found("substring not found"))?;
            Value::from(text[..found].chars().count())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => text.split_at(text.len() - digits.len()),
                None => ("", text),
            };
            let zeros = width.saturating_sub(text.chars().count());
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "ljust" => {
            let (width,): (usize,) = from_args(args)?;
            Value::from(format!("{text:<width$}"))
        }
        "rjust" => {
            let (width,): (usize,) = from_args(args)?;
            Value::from(format!("{text:>width$}"))
        }
        "casefold" => Value::from(text.to_lowercase()),
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// Methods of `list`; `None`: another one.
fn list_method(list: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if method != "index" {
        return Ok(None);
    }
    let (wanted,): (Value,) = from_args(args)?;
    let found = list.try_iter()?.position(|item| item == wanted);
    let index = found.ok_or_else(|| not_found("the value is not in the list"))?;
    Ok(Some(Value::from(index)))
}

fn list_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    texts.into_iter().map(Value::from).collect()
}

fn not_found(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn evaluate(expression: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        add_python_builtins(&mut environment);
        let value = environment.compile_expression(expression)?.eval(())?;
        Ok(python_str(&value))
    }

    /// Results of jinja2 3.1 for the same expressions.
    #[test]
    fn expressions_have_jinjas_results() {
        for (expression, result) in [
            ("none is iterable", "False"),
            (
                "{} is iterable and 'a' is iterable and [] is iterable",
                "True",
            ),
            ("3 is iterable", "False"),
            (
                "'a' is sequence and {} is sequence and [] is sequence",
                "True",
            ),
            ("none is sequence or 1 is sequence", "False"),
            ("'a' is callable", "False"),
            ("missing | length", "0"),
            ("[1, 2] | count", "2"),
            ("'x' | int", "0"),
            ("'x' | int(7)", "7"),
            ("'0x1f' | int(0, 16)", "31"),
            ("[] | int(default=5)", "5"),
            ("'1.5' | float", "1.5"),
            ("'x' | float", "0.0"),
            ("'x' | float(2.5)", "2.5"),
            ("'<a b=\"c\">&\\'' | e", "&lt;a b=&#34;c&#34;&gt;&amp;&#39;"),
            ("'a-b-c'.rsplit('-', 1)", "['a-b', 'c']"),
            ("'a-b-c'.rsplit('-')", "['a', 'b', 'c']"),
            ("'a-b-c'.partition('-')[2]", "b-c"),
            ("'a-b-c'.rpartition('-')[0]", "a-b"),
            (
                "'abc'.partition('-')[0] ~ 'abc'.rpartition('-')[2]",
                "abcabc",
            ),
            ("'abc'.removeprefix('a').removesuffix('c')", "b"),
            ("'abc'.removeprefix('b')", "abc"),
            ("'é-b'.index('b')", "2"),
            ("['x', 'y'].index('y')", "1"),
            ("'-7'.zfill(4) ~ 'é'.zfill(3)", "-00700é"),
            ("'é'.ljust(3) ~ 'é'.rjust(3)", "é    é"),
            ("{'a': [1]}.copy() ~ [1].copy()", "{'a': [1]}[1]"),
            ("'A'.casefold() ~ 'a'.upper()", "aA"),
        ] {
            assert_eq!(evaluate(expression).unwrap(), result, "{expression}");
        }
        for expression in [
            "none | length",
            "'a'.index('b')",
            "[1].index(2)",
            "'a'.encode()",
        ] {
            assert!(evaluate(expression).is_err(), "{expression}");
        }
    }
}
