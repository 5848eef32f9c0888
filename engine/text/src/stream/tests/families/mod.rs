//! Readers of tool calls against fixtures, against themselves on text that is cut otherwise, and
//! against writers of the formats.

mod cutting;
mod feeding;
mod fixtures;
mod harmony;
mod new_format;
mod peers;
mod promptness;
mod round_trips;
mod unknown_calls;
mod writers;
