//! Format of an answer, as both APIs state it.

use super::members::{JsonMembers, ObjectText, missing, unsupported};
use super::{ChatBody, ParamName};
use crate::refusal::TextRefusal;

/// Name of a schema that has none.
const DEFAULT_NAME: &str = "output";

impl ChatBody {
    /// Adds `response_format`.
    pub(super) fn set_format(&mut self, format: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let kind = format.require_text("type")?;
        match kind.as_str() {
            "text" => {}
            "json_object" => self
                .members
                .push("response_format", r#"{"type":"json_object"}"#),
            "json_schema" => self.set_schema(format)?,
            _ => {
                let problem = format!("is {kind:?}; use text, json_object or json_schema");
                return Err(unsupported(&format.path("type"), &problem));
            }
        }
        Ok(())
    }

    fn set_schema(&mut self, format: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let Some(schema) = format.get("schema") else {
            return Err(missing(&format.path("schema")));
        };
        let mut json_schema = ObjectText::default();
        match format.get("name") {
            Some(name) => json_schema.push("name", name.get()),
            None => json_schema.push_text("name", DEFAULT_NAME),
        }
        json_schema.copy("description", format);
        json_schema.push("schema", schema.get());
        json_schema.copy("strict", format);
        let mut wrapper = ObjectText::default();
        wrapper.push_text("type", "json_schema");
        wrapper.push("json_schema", &json_schema.finish());
        self.members.push("response_format", &wrapper.finish());
        let chat = "response_format.json_schema";
        self.names
            .push(ParamName::new("response_format", format.place()));
        self.names.push(ParamName::new(chat, format.place()));
        for name in ["name", "description", "schema", "strict"] {
            let chat = format!("{chat}.{name}");
            self.names.push(ParamName::new(chat, format.path(name)));
        }
        Ok(())
    }
}
