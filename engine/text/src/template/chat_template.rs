//! A compiled chat template, and the text that it makes of messages.
//!
//! Trimming, helpers and variables are those of transformers' `apply_chat_template`; golden files
//! rendered by transformers hold it to them. The template is data from the internet: it gets no
//! loader, and a render ends when its fuel does.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use jiff::Zoned;
use jiff::fmt::strtime::BrokenDownTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
};

use super::caps::TemplateCaps;
use super::continued_message::{cut_at_mark, mark_end};
use super::messages::{MessageContent, normalize_messages, object};
use super::probe::probe_template;
use super::python_builtins::add_python_builtins;
use super::python_text::python_str;
use super::user_text_guard::UserTextGuard;
use crate::refusal::{RefusalCode, TextRefusal};

const NAME: &str = "chat";
/// Instructions of one render: a conversation of 10 000 messages takes a few hundred thousand.
const FUEL: u64 = 20_000_000;
/// Instructions of one probe of a template: a conversation of three messages takes a few hundred.
const PROBE_FUEL: u64 = 500_000;

/// Begin of a refusal by a template that uses what is missing here, or meets an unexpected shape.
const FAILS: &str = "the chat template fails on these messages";

/// Tells the time for `strftime_now`.
pub type LocalTime = fn() -> Zoned;

/// A compiled template, or the reason why there is none: completions still work, so that the error
/// belongs to chat requests.
pub struct ChatTemplate {
    compiled: Result<Environment<'static>, String>,
    special_tokens: BTreeMap<String, String>,
    caps: TemplateCaps,
    warning: Option<String>,
    guard: UserTextGuard,
}

/// Options of one render.
#[derive(Debug, Default, Clone)]
pub struct RenderOptions {
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
    /// More variables: `chat_template_kwargs`, tools, documents. They go before the special tokens
    /// of the same name.
    pub variables: Vec<(String, Value)>,
}

impl ChatTemplate {
    /// Compile `source`; `None`: the checkpoint has no template. `special_tokens`: bos_token,
    /// eos_token and so on, which templates read as variables. Cost: renders some twenty short
    /// conversations.
    pub fn new(
        source: Option<&str>,
        special_tokens: BTreeMap<String, String>,
        local_time: LocalTime,
    ) -> Self {
        let missing = || "the model has no chat template".to_owned();
        let compiled = source.ok_or_else(missing).and_then(|source| {
            compile_template(source, local_time)
                .map_err(|err| format!("the model's chat template does not compile ({err})"))
        });
        let mut template = Self {
            compiled,
            special_tokens,
            caps: TemplateCaps::default(),
            warning: None,
            guard: UserTextGuard::default(),
        };
        if template.defect().is_none() {
            template.caps =
                probe_template(&|messages, tools| template.render_probe(messages, tools));
            template.warning = template.plain_failure();
        }
        if let Ok(environment) = &mut template.compiled {
            environment.set_fuel(Some(FUEL));
        }
        template
    }

    /// The same template, whose texts have the control tokens of `guard` only where the template
    /// itself writes them.
    pub fn with_guard(mut self, guard: UserTextGuard) -> Self {
        self.guard = guard;
        self
    }

    /// Guard of the texts that are not the template's.
    pub fn guard(&self) -> &UserTextGuard {
        &self.guard
    }

    /// Reason why no conversation can be rendered; `None`: it can.
    pub fn defect(&self) -> Option<&str> {
        self.compiled.as_ref().err().map(String::as_str)
    }

    /// Reason why the template fails on a plain conversation, with the line: it uses what is
    /// missing here. `None`: it renders one, refuses it in its own words, or there is no template.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Form in which the template takes messages.
    pub fn caps(&self) -> &TemplateCaps {
        &self.caps
    }

    /// The `messages` of a body, checked, in the form that the template takes.
    pub fn normalize(&self, messages: &Value) -> Result<Vec<Value>, TextRefusal> {
        normalize_messages(messages, &self.caps)
    }

    /// Text of a conversation without other options than tools; `None`: the template fails on it.
    fn render_probe(&self, messages: Vec<Value>, tools: Option<Value>) -> Option<String> {
        let tools = tools.map(|tools| ("tools".to_owned(), tools));
        let options = RenderOptions {
            variables: tools.into_iter().collect(),
            ..RenderOptions::default()
        };
        self.render(messages, options).ok()
    }

    fn plain_failure(&self) -> Option<String> {
        let words = MessageContent::from_text("Hi");
        let content = words.fit(self.caps.user).into_value();
        let message = object([("role", Value::from("user")), ("content", content)]);
        let refusal = self.render(vec![message], RenderOptions::default()).err()?;
        let problem = refusal.message.strip_prefix(FAILS)?;
        Some(format!(
            "the chat template fails on a plain conversation{problem}"
        ))
    }

    /// Text of normalized messages, escaped by the guard. The template's own message is in the
    /// refusal.
    pub fn render(
        &self,
        mut messages: Vec<Value>,
        options: RenderOptions,
    ) -> Result<String, TextRefusal> {
        let environment = self
            .compiled
            .as_ref()
            .map_err(|defect| no_template(defect))?;
        if options.continue_final_message {
            mark_end(&mut messages)?;
        }
        let escape = |value| self.guard.escape_value(value);
        let messages: Vec<Value> = messages.into_iter().map(escape).collect();
        let given_variables = options.variables.into_iter();
        let given_variables = given_variables.map(|(name, value)| (name, escape(value)));
        let absent = ["tools", "documents"].map(|name| (name.to_owned(), Value::from(())));
        let special = self.special_tokens.iter();
        let special = special.map(|(name, text)| (name.clone(), Value::from(text.as_str())));
        let given = [
            ("messages", Value::from(messages)),
            (
                "add_generation_prompt",
                Value::from(options.add_generation_prompt),
            ),
        ];
        let given = given.map(|(name, value)| (name.to_owned(), value));
        let variables = absent
            .into_iter()
            .chain(special)
            .chain(given_variables)
            .chain(given);
        let variables = Value::from_pairs(variables);
        let text = render_guarded(environment, variables).map_err(|err| failed_render(&err))?;
        if options.continue_final_message {
            return cut_at_mark(&text);
        }
        Ok(text)
    }
}

/// A template may meet an assertion of the library (minijinja 3.0 on `""[::-1]`), which ends this
/// render and nothing more.
fn render_guarded(environment: &Environment<'_>, variables: Value) -> Result<String, Error> {
    let template = environment.get_template(NAME)?;
    let render = AssertUnwindSafe(|| template.render(variables));
    catch_unwind(render).unwrap_or_else(|_| {
        let problem = "the template engine meets a defect of its own";
        Err(Error::new(ErrorKind::InvalidOperation, problem))
    })
}

fn no_template(defect: &str) -> TextRefusal {
    let message =
        format!("{defect}; use /v1/completions, or start the engine with --chat-template FILE");
    TextRefusal::new(RefusalCode::UnsupportedParameter, message, "messages")
}

fn failed_render(err: &Error) -> TextRefusal {
    let raised = err.source().and_then(|source| source.downcast_ref());
    let message = match raised {
        Some(RaisedByTemplate(text)) => format!("the chat template refuses these messages: {text}"),
        None => format!("{FAILS}: {err}"),
    };
    TextRefusal::invalid("messages", message)
}

/// Text that a template gave to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedByTemplate(String);

fn raise_exception(text: String) -> Result<Value, Error> {
    let err = Error::new(ErrorKind::InvalidOperation, text.clone());
    Err(err.with_source(RaisedByTemplate(text)))
}

/// An environment with the template, and with fuel for probes.
fn compile_template(source: &str, local_time: LocalTime) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    environment.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    add_python_builtins(&mut environment);
    environment.set_fuel(Some(PROBE_FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: String| {
        format_time(&format, &local_time())
    });
    environment.set_formatter(print_value);
    environment.add_template_owned(NAME, without_generation_tags(source))?;
    Ok(environment)
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

fn format_time(format: &str, time: &Zoned) -> Result<Value, Error> {
    let text = BrokenDownTime::from(time).to_string(format);
    text.map(Value::from).map_err(|err| {
        let text = format!("strftime_now({format:?}): {err}");
        Error::new(ErrorKind::InvalidOperation, text)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Half past noon of the second day of an era.
    fn noon() -> Zoned {
        "1970-01-02T12:30[UTC]".parse().unwrap()
    }

    fn render(source: &str, value: &str) -> Result<String, String> {
        let template = ChatTemplate::new(Some(source), BTreeMap::new(), noon);
        let value: Value = serde_json::from_str(value).unwrap();
        let options = RenderOptions {
            variables: vec![("x".to_owned(), value)],
            ..RenderOptions::default()
        };
        let rendered = template.render(Vec::new(), options);
        rendered.map_err(|refusal| refusal.message)
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
    }

    #[test]
    fn assertion_of_the_template_engine_ends_the_render() {
        let failed = render("{{ ''[::-1] }}", "1").unwrap_err();
        assert!(failed.contains("a defect of its own"), "{failed}");
    }

    #[test]
    fn template_that_fails_on_a_plain_conversation_is_reported_with_its_line() {
        let warning = |source| {
            ChatTemplate::new(Some(source), BTreeMap::new(), noon)
                .warning()
                .map(str::to_owned)
        };
        assert_eq!(warning("{{ messages[0].content }}"), None);
        assert_eq!(
            warning("{{ raise_exception('two messages, please') }}"),
            None
        );
        let found = warning("first\n{{ messages.swap() }}").unwrap();
        assert!(
            found.starts_with("the chat template fails on a plain conversation: unknown method")
                && found.contains("chat:2"),
            "{found}"
        );
    }

    #[test]
    fn strftime_now_is_the_callers_time() {
        let text = render("{{ strftime_now('%d %b %Y|%Y-%m-%d|%-d, %B %H:%M') }}", "1").unwrap();
        assert_eq!(text, "02 Jan 1970|1970-01-02|2, January 12:30");
    }

    #[test]
    fn missing_and_broken_templates_are_refused_with_the_remedy() {
        let none = ChatTemplate::new(None, BTreeMap::new(), noon);
        let refusal = none
            .render(Vec::new(), RenderOptions::default())
            .unwrap_err();
        let remedy = "use /v1/completions, or start the engine with --chat-template FILE";
        assert_eq!(
            refusal.message,
            format!("the model has no chat template; {remedy}")
        );
        assert_eq!(refusal.code, RefusalCode::UnsupportedParameter);
        let broken = render("{% for %}", "1").unwrap_err();
        assert!(
            broken.starts_with("the model's chat template does not compile (")
                && broken.ends_with(remedy),
            "{broken}"
        );
    }

    #[test]
    fn refusal_of_a_template_is_its_own_sentence() {
        assert_eq!(
            render("{{ raise_exception('roles must alternate') }}", "1").unwrap_err(),
            "the chat template refuses these messages: roles must alternate"
        );
        let failed = render("{{ x.y.z }}", "{}").unwrap_err();
        assert!(
            failed.starts_with("the chat template fails on these messages: undefined value"),
            "{failed}"
        );
    }
}
