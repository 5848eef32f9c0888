//! Families that write a call as tags, and each parameter as raw text between tags.
//!
//! * [`argument_writer`]: raw values to JSON arguments;
//! * [`tag_reader`]: the reader of all families;
//! * [`qwen3_coder`], [`glm`], [`deepseek_v32`]: their tags.

pub mod argument_writer;
pub mod deepseek_v32;
pub mod glm;
pub mod qwen3_coder;
pub mod tag_reader;
