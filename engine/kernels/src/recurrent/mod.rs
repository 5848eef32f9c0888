//! Layers that keep a state of one size per sequence, however long it is: a short causal
//! convolution ([`conv`]) and the delta rule ([`delta`]).
//!
//! A state lives in a slot and is written in place. Tokens of a row are computed one after the
//! other in both, so a row may end after any token: a prompt in chunks, a prompt in one piece and
//! tokens one by one give the same bits.
//!
//! The delta rule has a form that computes 64 tokens at a time by products of matrices. It is not
//! used here: with keys and values of 128 elements it takes 90,000 multiply-adds per token and
//! head where the rule itself takes 49,000, more yet where each row of a state decays by itself, and
//! the rule's state of some columns stays in the first-level cache over all tokens of a row.

pub mod conv;
pub mod delta;

/// Rows of a step, or parts of them: the tokens of row r are `[starts[r], ends[r])`, and its state
/// is in slot `slots[r]`.
#[derive(Clone, Copy, Debug)]
pub struct StateRows<'a> {
    pub starts: &'a [i32],
    /// As many.
    pub ends: &'a [i32],
    /// As many.
    pub slots: &'a [i32],
}

/// An index vector that would lead out of the tokens or the states.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StateRowsError {
    #[error(
        "row {row} has tokens {start} to {end}: rows are not empty, follow each other, and end within {tokens}"
    )]
    Tokens {
        row: usize,
        start: i32,
        end: i32,
        tokens: usize,
    },
    #[error("row {row} has slot {slot}; there are slots 0 to {last}, each for one row", last = .num_slots - 1)]
    Slot {
        row: usize,
        slot: i32,
        num_slots: usize,
    },
}

impl StateRows<'_> {
    /// Every index leads into `tokens` tokens and `num_slots` states, and no two rows share any of
    /// them. The vectors are equally long.
    pub fn check(&self, tokens: usize, num_slots: usize) -> Result<(), StateRowsError> {
        let mut is_taken = vec![false; num_slots];
        let mut before = 0;
        for row in 0..self.len() {
            let start = self.starts[row];
            let end = self.ends[row];
            if start < before || end <= start || end as usize > tokens {
                return Err(StateRowsError::Tokens {
                    row,
                    start,
                    end,
                    tokens,
                });
            }
            before = end;
            let slot = self.slots[row];
            let place = usize::try_from(slot).ok();
            match place.and_then(|i| is_taken.get_mut(i)) {
                Some(taken) if !*taken => *taken = true,
                _ => {
                    return Err(StateRowsError::Slot {
                        row,
                        slot,
                        num_slots,
                    });
                }
            }
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.slots.len()
    }

    fn tokens(&self, row: usize) -> std::ops::Range<usize> {
        self.starts[row] as usize..self.ends[row] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_index_is_named() {
        let rows = StateRows {
            starts: &[0, 2],
            ends: &[1, 4],
            slots: &[2, 0],
        };
        assert_eq!(rows.check(4, 3), Ok(()));
        for (starts, ends, row) in [
            ([0, 2], [1, 5], 1),
            ([0, 0], [1, 4], 1),
            ([0, 2], [1, 2], 1),
            ([-1, 2], [1, 4], 0),
        ] {
            let wrong = StateRows {
                starts: &starts,
                ends: &ends,
                ..rows
            };
            let error = StateRowsError::Tokens {
                row,
                start: starts[row],
                end: ends[row],
                tokens: 4,
            };
            assert_eq!(wrong.check(4, 3), Err(error));
        }
        for (slots, row, slot) in [([2, 3], 1, 3), ([2, -1], 1, -1), ([1, 1], 1, 1)] {
            let wrong = StateRows {
                slots: &slots,
                ..rows
            };
            let error = StateRowsError::Slot {
                row,
                slot,
                num_slots: 3,
            };
            assert_eq!(wrong.check(4, 3), Err(error));
        }
    }
}
