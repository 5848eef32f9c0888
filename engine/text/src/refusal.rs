//! Refusals of a request's text, in the words that clients read.

/// Stable codes of the refusals of this crate, as docs/protocol.md lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum RefusalCode {
    InvalidValue,
    InvalidJson,
    MissingField,
    UnsupportedParameter,
    /// More prompt than the context holds.
    ContextLengthExceeded,
    /// The fault is not the request's.
    InternalError,
}

impl RefusalCode {
    /// HTTP status of the error.
    pub fn status(self) -> u16 {
        match self {
            RefusalCode::InternalError => 500,
            _ => 400,
        }
    }
}

/// Refusal of a request's text, for its client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TextRefusal {
    pub code: RefusalCode,
    /// Sentence that says what happened and what to do.
    pub message: String,
    /// Member of the body that is at fault.
    pub param: String,
}

impl TextRefusal {
    pub fn new(code: RefusalCode, message: String, param: impl Into<String>) -> Self {
        Self {
            code,
            message,
            param: param.into(),
        }
    }

    /// The value of `param` is of a wrong type or out of bounds.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(RefusalCode::InvalidValue, message.into(), param)
    }
}
