//! Answers that have no translation.

use crate::dialect::write::ErrorObject;

/// Reason why a server's answer cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableAnswer {
    /// The server's own error.
    #[error("{}", .0.message)]
    Failed(ErrorObject),
    #[error("sent something that is no chat answer: {detail}")]
    NoChatAnswer { detail: String },
    #[error("ended its answer with finish_reason {reason}")]
    Aborted { reason: String },
    #[error("ended its answer without a finish_reason")]
    Unfinished,
    #[error("sent pieces of tool calls that cannot be put in order: {detail}")]
    MixedCalls { detail: String },
    #[error("sent a message of the role {role}")]
    ForeignRole { role: String },
}

impl UnreadableAnswer {
    /// Error for the client.
    pub fn to_error(&self) -> ErrorObject {
        match self {
            Self::Failed(error) => error.clone(),
            _ => ErrorObject {
                message: format!("the worker {self}; send the request again"),
                kind: "server_error".to_owned(),
                code: "upstream_error".to_owned(),
                param: None,
            },
        }
    }
}
