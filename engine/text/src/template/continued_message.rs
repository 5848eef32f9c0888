//! End of a message that is to be continued (`continue_final_message`), found in the rendered text
//! as transformers finds it.

use minijinja::Value;

use super::messages::JsonObject;
use crate::refusal::TextRefusal;

const PARAM: &str = "continue_final_message";
/// Appended to the last text of the last message. Private-use characters: no client text holds
/// them by accident.
const MARK: &str = "\u{e000}baton-continues-here\u{e000}";

/// Append the mark and a space to the last text of the last message. A template that trims its
/// messages takes the space away, and so tells that it trims.
pub fn mark_end(messages: &mut [Value]) -> Result<(), TextRefusal> {
    let last = messages.last_mut();
    let marked = last.as_deref().and_then(with_mark);
    match (last, marked) {
        (Some(last), Some(marked)) => {
            *last = marked;
            Ok(())
        }
        _ => Err(TextRefusal::invalid(
            PARAM,
            format!("{PARAM} needs a last message with text to continue"),
        )),
    }
}

/// `message` with the mark behind its last text; `None`: it has no text.
fn with_mark(message: &Value) -> Option<Value> {
    let content = message.get_attr("content").ok()?;
    if content.as_str().is_some() {
        return with_marked_text(message, "content");
    }
    let mut parts: Vec<Value> = content.try_iter().ok()?.collect();
    let last = parts.last_mut()?;
    *last = with_marked_text(last, "text")?;
    let mut members = JsonObject::read(message)?;
    members.set("content", Value::from(parts));
    Some(members.into_value())
}

/// `object` with the mark behind its member `name`, which is a string.
fn with_marked_text(object: &Value, name: &str) -> Option<Value> {
    let mut members = JsonObject::read(object)?;
    let text = format!("{}{MARK} ", members.text(name)?);
    members.set(name, Value::from(text));
    Some(members.into_value())
}

/// `text` up to the mark, without the space before it where the template trims.
pub fn cut_at_mark(text: &str) -> Result<String, TextRefusal> {
    let at = text.rfind(MARK).ok_or_else(|| {
        let message =
            "the chat template drops the end of the last message, so it cannot be continued";
        TextRefusal::invalid(PARAM, message)
    })?;
    let kept = &text[..at];
    let is_trimmed = !text[at + MARK.len()..].starts_with(' ');
    Ok(if is_trimmed {
        kept.trim_end_matches(is_python_space).to_owned()
    } else {
        kept.to_owned()
    })
}

/// Characters that Python's `str.rstrip` takes away, and counts as white space elsewhere.
pub fn is_python_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}
