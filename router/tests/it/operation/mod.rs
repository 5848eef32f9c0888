//! The program: its start and end, its docs, and what it shows to operators.

mod docs;
mod explain;
mod file_kinds;
mod process;
mod shutdown;
mod trace;
mod ui;
