//! gpt-oss: messages in channels, as OpenAI's harmony format has them.
//!
//! * [`message_header`]: channel and recipient of a message;
//! * [`harmony_reader`]: messages to reasoning, content and calls.

pub mod harmony_reader;
pub mod message_header;
