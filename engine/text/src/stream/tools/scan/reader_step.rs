//! The outcome of one step of a reader's state machine.

/// The state after a step.
pub enum ReaderStep<S> {
    /// The reader can make another step.
    Continue(S),
    /// The held lexemes do not decide what comes next.
    Wait(S),
}
