//! Tools that an answer may call, and calls of others.

use std::ops::Deref;
use std::sync::Arc;

use super::reader::ToolSignature;

/// Longest name of a forwarded call, as of a tool in a request [bytes].
const MAX_NAME_BYTES: usize = 128;

/// Treatment of calls of tools that the request does not offer. The names are values of
/// `--unknown-tool-calls`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum UnknownToolCalls {
    /// Their text is content: an answer has calls of offered tools alone.
    #[default]
    Text,
    /// They are calls, as in vLLM: the client tells the model that there is no such tool.
    Forward,
}

/// Tools of a request.
#[derive(Debug, Clone)]
pub struct CallableTools {
    signatures: Arc<[ToolSignature]>,
    unknown_calls: UnknownToolCalls,
}

/// Tool that a call names.
#[derive(Debug, Clone)]
pub enum CalledTool {
    Offered {
        signatures: Arc<[ToolSignature]>,
        place: usize,
    },
    /// Tool of a forwarded call: its arguments have no schema.
    Unknown(Arc<ToolSignature>),
}

impl CallableTools {
    pub fn new(signatures: Arc<[ToolSignature]>, unknown_calls: UnknownToolCalls) -> Self {
        Self {
            signatures,
            unknown_calls,
        }
    }

    /// The tool of this name; `None`: a call of it is content.
    pub fn find(&self, name: &str) -> Option<CalledTool> {
        let mut signatures = self.signatures.iter();
        if let Some(place) = signatures.position(|tool| tool.name == name) {
            let signatures = self.signatures.clone();
            return Some(CalledTool::Offered { signatures, place });
        }
        self.forwards(name).then(|| {
            let name = name.to_owned();
            let parameters = serde_json::Value::Object(serde_json::Map::new());
            CalledTool::Unknown(Arc::new(ToolSignature { name, parameters }))
        })
    }

    /// A request without tools has no calls: the reader of gpt-oss reads its answer too. Clients
    /// refuse names that no tool could have.
    fn forwards(&self, name: &str) -> bool {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        self.unknown_calls == UnknownToolCalls::Forward
            && !self.signatures.is_empty()
            && (1..=MAX_NAME_BYTES).contains(&name.len())
            && name.bytes().all(is_name)
    }
}

impl From<Arc<[ToolSignature]>> for CallableTools {
    fn from(signatures: Arc<[ToolSignature]>) -> Self {
        Self::new(signatures, UnknownToolCalls::default())
    }
}

impl Deref for CalledTool {
    type Target = ToolSignature;

    fn deref(&self) -> &ToolSignature {
        match self {
            Self::Offered { signatures, place } => &signatures[*place],
            Self::Unknown(signature) => signature,
        }
    }
}
