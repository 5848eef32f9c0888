//! One step of a reader's state machine.

/// State after a step, and whether another step can be made.
pub enum ReaderStep<S> {
    Continue(S),
    /// The held lexemes do not decide what comes next.
    Wait(S),
}
