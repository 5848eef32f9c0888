//! Calls written as Python calls: Llama 3.2 and 4, OLMo 3.
//!
//! * [`expression_scanner`]: the end of an argument in a growing text;
//! * [`expression_syntax`]: what Python reads as an expression;
//! * [`call_arguments`]: arguments to JSON;
//! * [`call_list`]: what begins a call, and what stands between calls;
//! * [`quote_repair`]: calls with strings whose quotes are not escaped;
//! * [`pythonic_reader`]: the reader.

pub mod call_arguments;
pub mod call_list;
pub mod expression_scanner;
pub mod expression_syntax;
pub mod pythonic_reader;
pub mod quote_repair;
