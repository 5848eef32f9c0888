//! The translation of each API.

use super::{TranslatedRequest, messages, responses};
use crate::dialect::Dialect;
use crate::refusal::{RefusalCode, TextRefusal};

/// API of the requests that translations make.
pub const TRANSLATED: Dialect = Dialect::Chat;

/// Makes a chat request of the body of another API.
pub type ChatTranslation = fn(&str) -> Result<TranslatedRequest, TextRefusal>;

/// The translation of an API's requests; `None`: its prompts are no conversations of its own form.
pub fn chat_translation(dialect: Dialect) -> Option<ChatTranslation> {
    match dialect {
        Dialect::Responses => Some(responses::to_chat),
        Dialect::Messages => Some(messages::to_chat),
        Dialect::Chat | Dialect::Completions | Dialect::Generate => None,
    }
}

/// True if requests of the API can be chat requests.
pub fn is_translatable(dialect: Dialect) -> bool {
    chat_translation(dialect).is_some()
}

/// The body as a chat request; `None`: the API has no translation.
pub fn translate_body(
    dialect: Dialect,
    body: &[u8],
) -> Option<Result<TranslatedRequest, TextRefusal>> {
    let to_chat = chat_translation(dialect)?;
    Some(read_utf8(body).and_then(to_chat))
}

/// The body as text.
pub fn read_utf8(body: &[u8]) -> Result<&str, TextRefusal> {
    std::str::from_utf8(body).map_err(|err| {
        let message = format!("the body is not UTF-8: {err}");
        TextRefusal::new(RefusalCode::InvalidJson, message, "")
    })
}
