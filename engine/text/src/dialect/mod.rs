//! How each HTTP API says it.

mod response_id;
pub mod write;

pub use response_id::{id_spellings, plain_id, response_id};
