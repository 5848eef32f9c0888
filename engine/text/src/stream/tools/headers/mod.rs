//! Families that write a call as a header between markers and a JSON object.
//!
//! * [`header_reader`]: the reader of all families;
//! * [`deepseek_v3`], [`kimi_k2`], [`mistral_v13`]: their headers.

pub mod deepseek_v3;
pub mod header_reader;
pub mod kimi_k2;
pub mod mistral_v13;
