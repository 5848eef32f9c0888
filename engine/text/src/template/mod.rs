//! Chat messages to the text of a prompt, with the checkpoint's own Jinja template.
//!
//! 1. [`ChatTemplate::new`] compiles the template and probes which forms of messages it takes
//!    ([`TemplateCaps`]);
//! 2. [`ChatTemplate::normalize`] checks the messages of a request and puts them into that form;
//! 3. [`ChatTemplate::render`] makes the text, which holds the BOS token where the template wants
//!    one: it is tokenized without special tokens.
//!
//! * `chat_template`: helpers, filters and variables as transformers' `apply_chat_template` has
//!   them;
//! * `messages`: the wire format, and what templates expect instead;
//! * `caps`, `probe`: the capabilities of a template and how they are found;
//! * `continued_message`: where the text of a message to be continued ends;
//! * `json_value`, `python_text`: values as Python reads and prints them;
//! * `python_builtins`: tests, filters and methods as Jinja and Python have them;
//! * `user_text_guard`: control tokens in the texts of users.

mod caps;
mod chat_template;
mod continued_message;
mod json_value;
mod messages;
mod probe;
mod python_builtins;
mod python_text;
mod user_text_guard;

pub use caps::{ArgumentsFormat, ContentFormat, EmptyContent, TemplateCaps};
pub use chat_template::{ChatTemplate, LocalTime, RenderOptions};
pub(crate) use continued_message::is_python_space;
pub use json_value::{members_of, read_json};
pub use messages::object;
pub use python_text::json_text;
pub use user_text_guard::UserTextGuard;
