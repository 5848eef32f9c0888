//! Chat messages to the text of a prompt, with the checkpoint's own Jinja template.
//!
//! Trimming, helpers and variables are those of transformers' `apply_chat_template` and so of our
//! engines; golden files rendered by transformers hold both to it. The template is data from the
//! internet: it gets no loader, and a render ends when its fuel does.

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
};
use minijinja_contrib::pycompat;

use super::messages::TemplateCaps;
use super::python_text::{python_str, tojson};
use super::template_probe::probe_template;

const NAME: &str = "chat";
/// Instructions of one render: a conversation of 10 000 messages takes a few hundred thousand.
const FUEL: u64 = 20_000_000;
/// Instructions of one probe of a template: a conversation of three messages takes a few hundred.
const PROBE_FUEL: u64 = 500_000;

pub struct ChatTemplate {
    env: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    /// Form in which the template takes messages.
    pub caps: TemplateCaps,
}

impl ChatTemplate {
    /// `special_tokens`: bos_token, eos_token and so on, which templates read as variables. Cost:
    /// renders some twenty short conversations.
    pub fn compile(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let mut env = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(pycompat::unknown_method_callback);
        env.set_fuel(Some(PROBE_FUEL));
        env.add_function("raise_exception", |text: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, text))
        });
        env.add_function("strftime_now", strftime_now);
        env.add_filter("tojson", tojson);
        env.add_filter("string", |value: &Value| python_str(value));
        env.set_formatter(print_value);
        env.add_template_owned(NAME, without_generation_tags(source))?;
        let mut template = Self {
            env,
            special_tokens,
            caps: TemplateCaps::default(),
        };
        template.caps = probe_template(&|messages| template.render_probe(messages));
        template.env.set_fuel(Some(FUEL));
        Ok(template)
    }

    /// Text of a conversation without tools or options; `None`: the template fails on it.
    fn render_probe(&self, messages: Vec<Value>) -> Option<String> {
        let variables = [
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("messages", Value::from(messages)),
            ("add_generation_prompt", Value::from(false)),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value));
        self.render(variables.to_vec()).ok()
    }

    /// `variables` go before the special tokens of the same name.
    pub fn render(&self, variables: Vec<(String, Value)>) -> Result<String, Error> {
        let special = self.special_tokens.iter();
        let special = special.map(|(name, text)| (name.clone(), Value::from(text.as_str())));
        self.env
            .get_template(NAME)?
            .render(Value::from_pairs(special.chain(variables)))
    }
}

/// Print the value of `{{ … }}` as Python does.
fn print_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    let is_container = matches!(value.kind(), ValueKind::Seq | ValueKind::Map);
    if is_float || is_container {
        return out.write_str(&python_str(value)).map_err(Error::from);
    }
    escape_formatter(out, state, value)
}

/// `{% generation %}` marks the assistant's turn for training; a prompt ignores it. `{% if true %}`
/// keeps the whitespace control of the tag.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out += before;
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, behind) = tag.split_at(end);
        let inside = tag[2..].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match inside {
            "generation" => out += &tag.replace("generation", "if true"),
            "endgeneration" => out += &tag.replace("endgeneration", "endif"),
            _ => out += tag,
        }
        rest = behind;
    }
    out + rest
}

fn strftime_now(format: String) -> Result<Value, Error> {
    let text = jiff::fmt::strtime::BrokenDownTime::from(&jiff::Zoned::now()).to_string(&format);
    text.map(Value::from).map_err(|err| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {err}"),
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn render(source: &str, value: &str) -> Result<String, String> {
        let template =
            ChatTemplate::compile(source, BTreeMap::new()).map_err(|err| err.to_string())?;
        let value: Value = serde_json::from_str(value).unwrap();
        let rendered = template.render(vec![("x".to_owned(), value)]);
        rendered.map_err(|err| err.to_string())
    }

    /// Output of Python's json.dumps for the same values.
    #[test]
    fn tojson_is_json_dumps() {
        let value = r#"{"b":[1,-2.50,1e20,1e-5,123456789012345680.0,0.0001,true,null,[],{}],"a":"<é\u007f\n\u0001😀'\">"}"#;
        assert_eq!(
            render("{{ x|tojson }}", value).unwrap(),
            "{\"b\": [1, -2.5, 1e+20, 1e-05, 1.2345678901234568e+17, 0.0001, true, null, [], {}], \"a\": \"<é\u{7f}\\n\\u0001😀'\\\">\"}"
        );
        assert_eq!(
            render(
                "{{ x|tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
                r#"{"b":1,"a":"é😀"}"#
            )
            .unwrap(),
            r#"{"a":"\u00e9\ud83d\ude00","b":1}"#
        );
        assert_eq!(
            render("{{ x|tojson(indent=2) }}", r#"{"b":[1,{}],"a":{"c":2}}"#).unwrap(),
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": {\n    \"c\": 2\n  }\n}"
        );
        assert!(render("{{ y|tojson }}", "1").is_err());
    }

    #[test]
    fn generation_tags_are_passed_over_with_their_whitespace_control() {
        let source = "a\n  {%- generation -%}\n b {{ x }}{%+ if x %}!{% endif %}\n{% endgeneration %}\nc {% raw %}{% x";
        assert!(render(source, "1").is_err()); // an open tag stays an error
        let source = "a\n  {%- generation -%}\n b {{ x }}\n{% endgeneration %}\nc";
        assert_eq!(render(source, "1").unwrap(), "ab 1\nc");
    }

    #[test]
    fn template_cannot_run_for_ever_nor_read_files() {
        let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}";
        assert!(render(endless, "1").unwrap_err().contains("fuel"));
        assert!(render("{% include 'other' %}", "1").is_err());
        assert!(
            render("{{ raise_exception('roles must alternate') }}", "1")
                .unwrap_err()
                .contains("roles must alternate")
        );
    }

    #[test]
    fn strftime_now_is_todays_date() {
        let text = render("{{ strftime_now('%d %b %Y|%Y-%m-%d') }}", "1").unwrap();
        let (long, short) = text.split_once('|').unwrap();
        assert_eq!((long.len(), short.len()), (11, 10));
        assert!(long.ends_with(&short[..4]), "{text}");
    }
}
