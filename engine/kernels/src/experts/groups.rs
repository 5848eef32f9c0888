//! A step's choices sorted by expert.

use std::ops::Range;

use crate::linear::ITEM_ROWS;

/// Rows of one expert that lie side by side: those of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct RowCut {
    expert: u32,
    first: u32,
    rows: u32,
}

const CUT_WORDS: usize = size_of::<RowCut>() / 4;

impl RowCut {
    /// Place among the held experts.
    pub fn expert(self) -> usize {
        self.expert as usize
    }

    pub fn first(self) -> usize {
        self.first as usize
    }

    pub fn rows(self) -> usize {
        self.rows as usize
    }
}

/// Choices as rows: those of a held expert side by side, in the order of the choices.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertGroups<'a> {
    rows: usize,
    /// By choice. Choices of experts that are not held come behind all rows.
    row_of: &'a [u32],
    /// By row.
    choice_of: &'a [u32],
    cuts: &'a [RowCut],
}

impl<'a> ExpertGroups<'a> {
    /// 32-bit words of memory for so many choices and experts.
    pub fn words(choices: usize, experts: usize) -> usize {
        2 * choices + experts + 1 + CUT_WORDS * max_cuts(choices, experts)
    }

    /// Sort `chosen`, numbers of experts of which this process holds `held`.
    ///
    /// # Safety
    /// `memory` has `words(chosen.len(), held.len())` words, which nothing else uses during 'a.
    pub unsafe fn sort(chosen: &[i64], held: Range<usize>, memory: *mut u32) -> ExpertGroups<'a> {
        let choices = chosen.len();
        let experts = held.len();
        // SAFETY: the caller's promise; scratch memory is initialized, and any word is a u32.
        let (row_of, choice_of, ends, cuts) = unsafe {
            let row_of = std::slice::from_raw_parts_mut(memory, choices);
            let choice_of = std::slice::from_raw_parts_mut(memory.add(choices), choices);
            let ends_at = memory.add(2 * choices);
            let ends = std::slice::from_raw_parts_mut(ends_at, experts + 1);
            let cuts_at = ends_at.add(experts + 1).cast::<RowCut>();
            let cuts = std::slice::from_raw_parts_mut(cuts_at, max_cuts(choices, experts));
            (row_of, choice_of, ends, cuts)
        };
        // The last group is that of experts elsewhere.
        let group_of = |expert: i64| {
            let expert = expert as usize;
            if held.contains(&expert) {
                expert - held.start
            } else {
                experts
            }
        };
        ends.fill(0);
        for &expert in chosen {
            ends[group_of(expert)] += 1;
        }
        let mut first = 0;
        let mut num_cuts = 0;
        for (expert, end) in ends.iter_mut().enumerate() {
            let rows = *end as usize;
            // Where the group's next row goes: its end, when all are sorted.
            *end = first as u32;
            if expert < experts {
                for cut in cut_rows(expert, first, rows) {
                    cuts[num_cuts] = cut;
                    num_cuts += 1;
                }
            }
            first += rows;
        }
        for (choice, &expert) in chosen.iter().enumerate() {
            let next = &mut ends[group_of(expert)];
            row_of[choice] = *next;
            choice_of[*next as usize] = choice as u32;
            *next += 1;
        }
        let rows = match experts {
            0 => 0,
            _ => ends[experts - 1] as usize,
        };
        ExpertGroups {
            rows,
            row_of,
            choice_of: &choice_of[..rows],
            cuts: &cuts[..num_cuts],
        }
    }

    /// Rows of all held experts.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Every row once, those of an expert in cuts of even shares.
    pub fn cuts(&self) -> &'a [RowCut] {
        self.cuts
    }

    /// The choice that is row `row`.
    pub fn choice_of(&self, row: usize) -> usize {
        self.choice_of[row] as usize
    }

    /// The row of a choice; None: its expert is not held.
    #[inline(always)]
    pub fn row_of(&self, choice: usize) -> Option<usize> {
        let row = self.row_of[choice] as usize;
        (row < self.rows).then_some(row)
    }
}

fn max_cuts(choices: usize, experts: usize) -> usize {
    choices.min(experts + choices / ITEM_ROWS)
}

fn cut_rows(expert: usize, first: usize, rows: usize) -> impl Iterator<Item = RowCut> {
    let count = rows.div_ceil(ITEM_ROWS);
    (0..count).map(move |i| {
        let start = i * rows / count;
        let end = (i + 1) * rows / count;
        RowCut {
            expert: expert as u32,
            first: (first + start) as u32,
            rows: (end - start) as u32,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_an_expert_lie_side_by_side_in_their_order() {
        let chosen = [7, 2, 3, 2, 9, 3, 2];
        let mut memory = vec![u32::MAX; ExpertGroups::words(7, 3)];
        // SAFETY: the memory is as large as asked for.
        let groups = unsafe { ExpertGroups::sort(&chosen, 2..5, memory.as_mut_ptr()) };
        assert_eq!(groups.rows(), 5);
        let choices: Vec<usize> = (0..5).map(|row| groups.choice_of(row)).collect();
        assert_eq!(choices, [1, 3, 6, 2, 5]);
        let rows: Vec<Option<usize>> = (0..7).map(|choice| groups.row_of(choice)).collect();
        let expected = [None, Some(0), Some(3), Some(1), None, Some(4), Some(2)];
        assert_eq!(rows, expected);
        let cuts: Vec<_> = groups
            .cuts()
            .iter()
            .map(|cut| (cut.expert(), cut.first(), cut.rows()))
            .collect();
        assert_eq!(cuts, [(0, 0, 3), (1, 3, 2)]);
    }

    #[test]
    fn every_row_is_in_one_cut_whose_size_is_bounded() {
        for (choices, experts) in [(1, 1), (192, 1), (193, 1), (1000, 1), (1000, 3), (5, 900)] {
            let chosen: Vec<i64> = (0..choices).map(|i| ((i * i) % experts) as i64).collect();
            let mut memory = vec![0; ExpertGroups::words(choices, experts)];
            // SAFETY: as above.
            let groups = unsafe { ExpertGroups::sort(&chosen, 0..experts, memory.as_mut_ptr()) };
            let mut next = 0;
            for cut in groups.cuts() {
                assert_eq!(cut.first(), next, "{choices} choices of {experts}");
                assert!((1..=ITEM_ROWS).contains(&cut.rows()));
                for row in next..next + cut.rows() {
                    assert_eq!(chosen[groups.choice_of(row)], cut.expert() as i64);
                }
                next += cut.rows();
            }
            assert_eq!(next, choices);
        }
    }

    #[test]
    fn process_without_chosen_experts_has_no_rows() {
        let mut memory = vec![0; ExpertGroups::words(2, 4)];
        // SAFETY: as above.
        let groups = unsafe { ExpertGroups::sort(&[0, 9], 2..6, memory.as_mut_ptr()) };
        assert_eq!((groups.rows(), groups.cuts().len()), (0, 0));
    }
}
