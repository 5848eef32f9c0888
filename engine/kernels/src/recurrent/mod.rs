//! Layers that keep a state of one size per sequence, however long it is: a short causal
//! convolution ([`conv`]) and the gated delta rule ([`delta`]).
//!
//! A state lives in a slot and is written in place. Tokens of a row are computed one after the
//! other in both, so a row may end after any token: a prompt in chunks, a prompt in one piece and
//! tokens one by one give the same bits.
//!
//! The delta rule has a form that computes 64 tokens at a time by products of matrices. It is not
//! used here: with keys and values of 128 elements it takes 90,000 multiply-adds per token and
//! head where the rule itself takes 49,000, and the rule's state of some columns stays in the
//! first-level cache over all tokens of a row.

pub mod conv;
pub mod delta;

/// Rows of a step: the tokens of row r are `[qo_indptr[r], qo_indptr[r + 1])`, and its state is in
/// slot `slots[r]`.
#[derive(Clone, Copy, Debug)]
pub struct StateRows<'a> {
    /// R + 1, from 0 to T.
    pub qo_indptr: &'a [i32],
    /// R
    pub slots: &'a [i32],
}

/// An index vector that would lead out of the tokens or the states.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StateRowsError {
    #[error("qo_indptr must rise by at least 1 per row from 0 to {tokens}; entry {at} is {value}")]
    Tokens {
        at: usize,
        value: i32,
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
    /// Every index leads into `tokens` tokens and `num_slots` states, and no two rows share one.
    /// There is one slot per row, and one end more.
    pub fn check(&self, tokens: usize, num_slots: usize) -> Result<(), StateRowsError> {
        if let Some(at) = crate::rows::first_fault(self.qo_indptr, 1, tokens) {
            return Err(StateRowsError::Tokens {
                at,
                value: self.qo_indptr[at],
                tokens,
            });
        }
        let mut is_taken = vec![false; num_slots];
        for (row, &slot) in self.slots.iter().enumerate() {
            let place = usize::try_from(slot).ok().and_then(|i| is_taken.get_mut(i));
            match place {
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

    /// First token of a row, and the token behind its last one.
    fn tokens(&self, row: usize) -> std::ops::Range<usize> {
        self.qo_indptr[row] as usize..self.qo_indptr[row + 1] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_index_is_named() {
        let rows = StateRows {
            qo_indptr: &[0, 1, 4],
            slots: &[2, 0],
        };
        assert_eq!(rows.check(4, 3), Ok(()));
        let tokens = StateRowsError::Tokens {
            at: 2,
            value: 4,
            tokens: 5,
        };
        assert_eq!(rows.check(5, 3), Err(tokens));
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
