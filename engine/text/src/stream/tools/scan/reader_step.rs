//! The outcome of one step of a reader's state machine.

/// The state after a step.
pub enum ReaderStep<S> {
    /// The reader can make another step.
    Continue(S),
    /// The held lexemes do not decide what comes next.
    Wait(S),
}

impl<S> ReaderStep<S> {
    /// Makes this the reader's state. Returns true if the reader can make another step.
    pub fn enter(self, reader_state: &mut S) -> bool {
        let (state, can_continue) = match self {
            Self::Continue(state) => (state, true),
            Self::Wait(state) => (state, false),
        };
        *reader_state = state;
        can_continue
    }
}
