//! Workers of other makes.

mod compat;
mod foreign_answers;
mod foreign_apis;
