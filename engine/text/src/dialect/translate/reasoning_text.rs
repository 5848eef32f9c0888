//! Reasoning that passes through the client as an opaque text: `encrypted_content` of a response's
//! reasoning item, `signature` of a message's thinking block.
//!
//! The text is encoded, not encrypted: it is the client's own answer.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Begin of every such text.
pub const PREFIX: &str = "baton1:";

pub fn encode_reasoning(text: &str) -> String {
    format!("{PREFIX}{}", STANDARD.encode(text))
}

/// Text of the reasoning; `None`: another server made it, or it is empty.
pub fn decode_reasoning(opaque: &str) -> Option<String> {
    let bytes = STANDARD.decode(opaque.strip_prefix(PREFIX)?).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_and_texts_of_other_servers_are_passed_over() {
        let text = "first é\nsecond";
        assert_eq!(
            decode_reasoning(&encode_reasoning(text)).as_deref(),
            Some(text)
        );
        for other in ["", "gAAAAAB", "baton1:", "baton1:%%", "baton1:/w=="] {
            assert_eq!(decode_reasoning(other), None, "{other}");
        }
    }
}
