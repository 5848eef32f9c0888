//! baton-router: HTTP router in front of prefill and decode nodes.

/// Parse `argv` (program name first), run the router until it is told to stop, return the exit code.
pub fn run(argv: Vec<String>) -> i32 {
    let _ = argv;
    0
}
