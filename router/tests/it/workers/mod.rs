//! Workers: where they come from, what they report, and how they leave.

mod admin;
mod discovery;
mod draining;
mod hung;
mod incarnations;
mod loads;
mod refusals;
mod verbs;
