//! The index vectors of a step, checked once: what the kernels then follow without looking.

/// R rows and their T tokens; see baton.layers.attention.base for the meaning of each vector.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// R + 1, from 0 to T.
    pub qo_indptr: &'a [i32],
    /// R
    pub kv_lens: &'a [i32],
    /// R + 1
    pub page_indptr: &'a [i32],
    pub page_indices: &'a [i32],
    /// T; negative: padding, not stored.
    pub slot_mapping: &'a [i64],
}

/// An index vector that would lead out of the pool or of another vector.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RowsError {
    #[error("qo_indptr must rise by at least 1 per row from 0 to {tokens}; entry {at} is {value}")]
    Queries {
        at: usize,
        value: i32,
        tokens: usize,
    },
    #[error("row {row} has {tokens} new tokens but only {kv_len} in KV")]
    KvLen {
        row: usize,
        tokens: i32,
        kv_len: i32,
    },
    #[error("page_indptr must rise from 0 to {pages}; entry {at} is {value}")]
    PageTable { at: usize, value: i32, pages: usize },
    #[error("row {row} has {pages} pages of {page_size}, too few for {kv_len} tokens")]
    TooFewPages {
        row: usize,
        pages: i32,
        page_size: usize,
        kv_len: i32,
    },
    #[error("page_indices[{at}] is {page}; the pool has pages 0 to {last}", last = .num_pages - 1)]
    Page {
        at: usize,
        page: i32,
        num_pages: usize,
    },
    #[error("slot_mapping[{at}] is {slot}; the pool has {slots} slots")]
    Slot { at: usize, slot: i64, slots: usize },
}

impl SequenceRows<'_> {
    /// Call `f(slot, run)` for each stretch of slots of one page that holds positions of `row`
    /// within [at, at + n), in order.
    #[inline(always)]
    pub(crate) fn each_run(
        &self,
        row: usize,
        page_size: usize,
        at: usize,
        n: usize,
        mut f: impl FnMut(usize, usize),
    ) {
        let first_page = self.page_indptr[row] as usize;
        let mut page = at / page_size;
        let mut place = at % page_size;
        let mut left = n;
        while left > 0 {
            let run = left.min(page_size - place);
            let id = self.page_indices[first_page + page] as usize;
            f(id * page_size + place, run);
            left -= run;
            page += 1;
            place = 0;
        }
    }

    /// Every index leads into a pool of `num_pages` pages of `page_size` slots. Lengths of the
    /// vectors are the caller's.
    pub fn check(&self, num_pages: usize, page_size: usize) -> Result<(), RowsError> {
        let tokens = self.slot_mapping.len();
        let pages = self.page_indices.len();
        if let Some(at) = first_fault(self.qo_indptr, 1, tokens) {
            return Err(RowsError::Queries {
                at,
                value: self.qo_indptr[at],
                tokens,
            });
        }
        if let Some(at) = first_fault(self.page_indptr, 0, pages) {
            return Err(RowsError::PageTable {
                at,
                value: self.page_indptr[at],
                pages,
            });
        }
        for (row, &kv_len) in self.kv_lens.iter().enumerate() {
            let tokens = self.qo_indptr[row + 1] - self.qo_indptr[row];
            if kv_len < tokens {
                return Err(RowsError::KvLen {
                    row,
                    tokens,
                    kv_len,
                });
            }
            let pages = self.page_indptr[row + 1] - self.page_indptr[row];
            if (pages as usize) < (kv_len as usize).div_ceil(page_size) {
                return Err(RowsError::TooFewPages {
                    row,
                    pages,
                    page_size,
                    kv_len,
                });
            }
        }
        let outside = |page: i32| usize::try_from(page).map_or(true, |page| page >= num_pages);
        if let Some(at) = self.page_indices.iter().position(|&page| outside(page)) {
            return Err(RowsError::Page {
                at,
                page: self.page_indices[at],
                num_pages,
            });
        }
        let slots = num_pages * page_size;
        if let Some(at) = self
            .slot_mapping
            .iter()
            .position(|&slot| slot >= slots as i64)
        {
            return Err(RowsError::Slot {
                at,
                slot: self.slot_mapping[at],
                slots,
            });
        }
        Ok(())
    }
}

/// Where `ends` fails to start at 0, to rise by at least `step`, or to end at `total`.
fn first_fault(ends: &[i32], step: i32, total: usize) -> Option<usize> {
    if ends[0] != 0 {
        return Some(0);
    }
    let falls = ends
        .windows(2)
        .position(|w| w[1] < w[0].saturating_add(step))
        .map(|i| i + 1);
    falls.or_else(|| (ends[ends.len() - 1] as usize != total).then_some(ends.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: SequenceRows = SequenceRows {
        qo_indptr: &[0, 1, 4],
        kv_lens: &[5, 3],
        page_indptr: &[0, 2, 3],
        page_indices: &[7, 0, 3],
        slot_mapping: &[0, 12, 13, -1],
    };

    #[test]
    fn good_rows_pass() {
        assert_eq!(GOOD.check(8, 4), Ok(()));
        let none = SequenceRows {
            qo_indptr: &[0],
            kv_lens: &[],
            page_indptr: &[0],
            page_indices: &[],
            slot_mapping: &[],
        };
        assert_eq!(none.check(8, 4), Ok(()));
    }

    #[test]
    fn each_wrong_index_is_named() {
        use RowsError as E;
        let wrong = |rows: SequenceRows| rows.check(8, 4).expect_err("wrong rows");
        assert_eq!(
            wrong(SequenceRows {
                qo_indptr: &[0, 0, 4],
                ..GOOD
            }),
            E::Queries {
                at: 1,
                value: 0,
                tokens: 4
            }
        );
        assert_eq!(
            wrong(SequenceRows {
                qo_indptr: &[0, 1, 5],
                ..GOOD
            }),
            E::Queries {
                at: 2,
                value: 5,
                tokens: 4
            }
        );
        assert_eq!(
            wrong(SequenceRows {
                kv_lens: &[5, 2],
                ..GOOD
            }),
            E::KvLen {
                row: 1,
                tokens: 3,
                kv_len: 2
            }
        );
        assert_eq!(
            wrong(SequenceRows {
                page_indptr: &[0, 4, 3],
                ..GOOD
            }),
            E::PageTable {
                at: 2,
                value: 3,
                pages: 3
            }
        );
        let too_few = E::TooFewPages {
            row: 0,
            pages: 2,
            page_size: 4,
            kv_len: 9,
        };
        assert_eq!(
            wrong(SequenceRows {
                kv_lens: &[9, 3],
                ..GOOD
            }),
            too_few
        );
        assert_eq!(
            wrong(SequenceRows {
                page_indices: &[7, -1, 3],
                ..GOOD
            }),
            E::Page {
                at: 1,
                page: -1,
                num_pages: 8
            }
        );
        assert_eq!(
            wrong(SequenceRows {
                page_indices: &[7, 8, 3],
                ..GOOD
            }),
            E::Page {
                at: 1,
                page: 8,
                num_pages: 8
            }
        );
        assert_eq!(
            wrong(SequenceRows {
                slot_mapping: &[0, 1, 2, 32],
                ..GOOD
            }),
            E::Slot {
                at: 3,
                slot: 32,
                slots: 32
            }
        );
        assert!(
            wrong(SequenceRows {
                page_indices: &[7, 8, 3],
                ..GOOD
            })
            .to_string()
            .contains("pages 0 to 7")
        );
    }
}
