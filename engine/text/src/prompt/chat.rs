//! Members of a chat body that decide its prompt.
//!
//! The router and the front of an engine read them here, so that both make the same text of a body.

use minijinja::Value;
use serde::Deserialize;
use serde::de::value::Error as FieldError;
use serde::de::{Deserializer, Error as _, IgnoredAny, Visitor};
use serde_json::value::RawValue;

use crate::refusal::{RefusalCode, TextRefusal};
use crate::template::{ChatTemplate, RenderOptions, members_of, object, read_json};

/// Values of `reasoning_effort`. Templates read the word; `none` switches the reasoning off.
pub const REASONING_EFFORTS: [&str; 7] =
    ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
const NO_EFFORT: &str = "none";
/// Variables with which templates switch reasoning on and off (Qwen3, DeepSeek-V3.1).
const REASONING_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// Values of `thinking.type`, and what they make of the switches.
const THINKING_TYPES: [(&str, Option<bool>); 3] = [
    ("enabled", Some(true)),
    ("disabled", Some(false)),
    ("adaptive", None),
];

/// See the module. Members that are null are absent.
#[derive(Deserialize)]
pub struct ChatPrompt<'a> {
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    /// Older name of `tools`: a list of functions.
    #[serde(borrow)]
    functions: Option<&'a RawValue>,
    #[serde(borrow)]
    documents: Option<&'a RawValue>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
    reasoning_effort: Option<String>,
    reasoning: Option<ReasoningOptions>,
    thinking: Option<ThinkingOptions>,
    enable_thinking: Option<bool>,
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template: Option<IgnoredAny>,
}

/// `reasoning`, as /v1/responses has it.
#[derive(Deserialize)]
struct ReasoningOptions {
    effort: Option<String>,
    enabled: Option<bool>,
}

/// `thinking`, as Anthropic's API has it.
#[derive(Deserialize)]
struct ThinkingOptions {
    r#type: Option<String>,
}

/// Names of the members of a chat body that decide its prompt: the fields of [`ChatPrompt`].
pub fn chat_member_names() -> &'static [&'static str] {
    let mut names: &[&str] = &[];
    // It reads no value: it stops as soon as it has the names.
    let _ = ChatPrompt::deserialize(FieldNames(&mut names));
    names
}

/// Keeps the names of a struct's fields, instead of reading their values.
struct FieldNames<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = FieldError;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, FieldError> {
        *self.0 = fields;
        Err(FieldError::custom("names of fields alone are read"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, FieldError> {
        Err(FieldError::custom("names of fields alone are read"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Variables that a body states, the first of a name counts.
type Variables = Vec<(String, Value)>;

impl<'a> ChatPrompt<'a> {
    /// `json`: the body, or an object with those of its members that this struct has.
    pub fn read(json: &'a [u8]) -> Result<Self, TextRefusal> {
        serde_json::from_slice(json)
            .map_err(|err| TextRefusal::invalid("", format!("the body cannot be read: {err}")))
    }

    pub fn add_special_tokens(&self) -> bool {
        self.add_special_tokens.unwrap_or(false)
    }

    /// The body brings a template of its own.
    pub fn has_template(&self) -> bool {
        self.chat_template.is_some()
    }

    /// The text that `template` makes of the members.
    pub fn render(&self, template: &ChatTemplate) -> Result<String, TextRefusal> {
        let messages = self.normalize(template)?;
        let continues = self.continue_final_message.unwrap_or(false);
        let options = RenderOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!continues),
            continue_final_message: continues,
            variables: self.variables(template)?,
        };
        if options.add_generation_prompt && continues {
            let param = "continue_final_message";
            let message = format!("{param} and add_generation_prompt exclude each other");
            return Err(TextRefusal::invalid(param, message));
        }
        template.render(messages, options)
    }

    /// Refuses what `render` would refuse before it renders.
    pub fn check(&self, template: &ChatTemplate) -> Result<(), TextRefusal> {
        self.normalize(template)?;
        self.variables(template)?;
        Ok(())
    }

    /// The messages in the form that `template` takes.
    pub fn normalize(&self, template: &ChatTemplate) -> Result<Vec<Value>, TextRefusal> {
        let messages = match self.messages {
            Some(json) => read_member("messages", json)?,
            None => Value::from(()),
        };
        template.normalize(&messages)
    }

    fn variables(&self, template: &ChatTemplate) -> Result<Variables, TextRefusal> {
        let mut variables = Variables::new();
        let given = self.chat_template_kwargs.map(|json| {
            let name = "chat_template_kwargs";
            let value = read_member(name, json)?;
            members_of(&value)
                .ok_or_else(|| TextRefusal::invalid(name, format!("{name} must be an object")))
        });
        variables.extend(given.transpose()?.unwrap_or_default());
        let mut set_default = |name: &str, value: Value| {
            if !variables.iter().any(|(known, _)| known == name) {
                variables.push((name.to_owned(), value));
            }
        };
        if let Some(tools) = self.tools()? {
            if !template.caps().renders_tools {
                return Err(tools_without_effect());
            }
            set_default("tools", tools);
        }
        if let Some(json) = self.documents {
            set_default("documents", read_member("documents", json)?);
        }
        let effort = self.effort()?;
        if let Some(effort) = effort {
            set_default("reasoning_effort", Value::from(effort));
        }
        if let Some(is_on) = self.enable_thinking {
            set_default(REASONING_SWITCHES[0], Value::from(is_on));
        }
        let of_effort = effort.map(|effort| effort != NO_EFFORT);
        let reasons = match self.thinking_type()? {
            Some(is_on) => Some(is_on),
            None => self.reasoning.as_ref().and_then(|given| given.enabled),
        };
        if let Some(is_on) = reasons.or(of_effort) {
            for name in REASONING_SWITCHES {
                set_default(name, Value::from(is_on));
            }
        }
        Ok(variables)
    }

    /// The client's tools; `None`: there is none.
    fn tools(&self) -> Result<Option<Value>, TextRefusal> {
        if let Some(json) = self.tools {
            let tools = read_member("tools", json)?;
            return Ok(Some(tools).filter(|tools| tools.len() != Some(0)));
        }
        let Some(json) = self.functions else {
            return Ok(None);
        };
        let functions = read_member("functions", json)?;
        let functions = functions.try_iter().map_err(|_| {
            TextRefusal::invalid("functions", "functions must be an array of functions")
        })?;
        let as_tool =
            |function| object([("type", Value::from("function")), ("function", function)]);
        let tools: Vec<Value> = functions.map(as_tool).collect();
        Ok(Some(tools)
            .filter(|tools| !tools.is_empty())
            .map(Value::from))
    }

    fn effort(&self) -> Result<Option<&str>, TextRefusal> {
        let in_reasoning = self.reasoning.as_ref().and_then(|r| r.effort.as_deref());
        let (name, effort) = match self.reasoning_effort.as_deref() {
            Some(effort) => ("reasoning_effort", effort),
            None => match in_reasoning {
                Some(effort) => ("reasoning.effort", effort),
                None => return Ok(None),
            },
        };
        if !REASONING_EFFORTS.contains(&effort) {
            let known = REASONING_EFFORTS.join(", ");
            return Err(TextRefusal::invalid(
                name,
                format!("{name} must be one of {known}"),
            ));
        }
        Ok(Some(effort))
    }

    /// Reasoning by `thinking.type`; `None`: the field leaves it open.
    fn thinking_type(&self) -> Result<Option<bool>, TextRefusal> {
        let given = self
            .thinking
            .as_ref()
            .and_then(|given| given.r#type.as_deref());
        let Some(given) = given else {
            return Ok(None);
        };
        let known = THINKING_TYPES.iter().find(|(name, _)| *name == given);
        let (_, is_on) = known.ok_or_else(|| {
            let message = "thinking.type must be enabled, disabled or adaptive";
            TextRefusal::invalid("thinking.type", message)
        })?;
        Ok(*is_on)
    }
}

fn read_member(name: &str, json: &RawValue) -> Result<Value, TextRefusal> {
    read_json(json.get())
        .map_err(|err| TextRefusal::invalid(name, format!("{name} cannot be read: {err}")))
}

fn tools_without_effect() -> TextRefusal {
    let message = "the model's chat template does not render tools; leave them out, or start the engine with a \
                   --chat-template FILE that does";
    TextRefusal::new(
        RefusalCode::UnsupportedParameter,
        message.to_owned(),
        "tools",
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::Zoned;

    use super::*;

    const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}{{ m.content }}|\
                            {% endfor %}{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }}";

    fn render_with(template: &str, members: &str) -> Result<String, TextRefusal> {
        let template = ChatTemplate::new(Some(template), BTreeMap::new(), Zoned::default);
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "Hi"}}]{members}}}"#);
        ChatPrompt::read(body.as_bytes())?.render(&template)
    }

    #[test]
    fn tools_reach_the_template_as_the_client_wrote_them() {
        let text = render_with(
            TEMPLATE,
            r#", "tools": [{"b": 1, "a": {"z": 2, "y": [3.0]}}]"#,
        );
        assert_eq!(
            text.unwrap(),
            r#"[{"b": 1, "a": {"z": 2, "y": [3.0]}}]|Hi|,,"#
        );
        let functions = render_with(TEMPLATE, r#", "functions": [{"name": "f"}]"#);
        let tools = render_with(
            TEMPLATE,
            r#", "tools": [{"type": "function", "function": {"name": "f"}}]"#,
        );
        assert_eq!(functions.unwrap(), tools.unwrap());
        for absent in [
            r#", "tools": []"#,
            r#", "tools": null"#,
            r#", "functions": []"#,
        ] {
            assert_eq!(render_with(TEMPLATE, absent).unwrap(), "Hi|,,");
        }
    }

    #[test]
    fn tools_that_the_template_drops_are_refused() {
        let members = r#", "tools": [{"type": "function", "function": {"name": "f"}}]"#;
        let refusal = render_with("{{ messages[0].content }}", members).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::UnsupportedParameter);
        assert_eq!(refusal.param, "tools");
    }

    #[test]
    fn fields_of_reasoning_become_variables() {
        for (members, expected) in [
            (r#""reasoning_effort": "low""#, "low,True,True"),
            (r#""reasoning_effort": "none""#, "none,False,False"),
            (r#""reasoning": {"effort": "high"}"#, "high,True,True"),
            (r#""reasoning": {"enabled": false}"#, ",False,False"),
            (r#""thinking": {"type": "disabled"}"#, ",False,False"),
            (
                r#""thinking": {"type": "enabled", "budget_tokens": 9}"#,
                ",True,True",
            ),
            (r#""thinking": {"type": "adaptive"}"#, ",,"),
            (r#""enable_thinking": false"#, ",False,"),
            (
                r#""reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}"#,
                "none,True,False",
            ),
            (
                r#""chat_template_kwargs": {"reasoning_effort": "odd"}"#,
                "odd,,",
            ),
        ] {
            let text = render_with(TEMPLATE, &format!(", {members}")).unwrap();
            assert_eq!(text, format!("Hi|{expected}"), "{members}");
        }
    }

    #[test]
    fn malformed_members_are_named() {
        for (members, param) in [
            (r#""reasoning_effort": "huge""#, "reasoning_effort"),
            (r#""reasoning": {"effort": "huge"}"#, "reasoning.effort"),
            (r#""thinking": {"type": "sometimes"}"#, "thinking.type"),
            (r#""chat_template_kwargs": []"#, "chat_template_kwargs"),
            (r#""functions": 3"#, "functions"),
        ] {
            let refusal = render_with(TEMPLATE, &format!(", {members}")).unwrap_err();
            assert_eq!(
                (refusal.code, refusal.param.as_str()),
                (RefusalCode::InvalidValue, param)
            );
        }
    }
}
