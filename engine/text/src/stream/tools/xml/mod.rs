//! Families that write a call as tags, and each parameter as raw text between tags.
//!
//! * [`schema_types`]: types that a tool's schema gives its parameters;
//! * [`argument_writer`]: raw values to JSON arguments;
//! * [`tag_reader`]: the reader of all families;
//! * [`qwen3_coder`], [`glm`], [`deepseek_v32`]: their tags.

pub mod argument_writer;
pub mod deepseek_v32;
pub mod glm;
pub mod qwen3_coder;
pub mod schema_types;
pub mod tag_reader;
