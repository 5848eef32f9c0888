//! Columns side by side that share a group, cut where a tile ends.

use super::{MAX_PER_WORD, TILE_UNITS};

/// Columns of a run, on average, from which on multiplying its sum pays.
const LONG: usize = 16;

/// Some units of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnRun {
    /// Its first unit in a row.
    pub first: usize,
    /// Whole words of codes where runs are long: x is 0 behind the end of a row.
    pub units: usize,
    /// The group of its columns, where runs are long.
    pub group: usize,
}

/// The runs of a matrix's rows.
#[derive(Debug)]
pub(super) struct ColumnRuns {
    runs: Vec<ColumnRun>,
    /// Number of each tile's first run, and their count.
    first_of_tile: Vec<usize>,
    are_long: bool,
}

impl ColumnRuns {
    /// Args: `group_of`: by column. `per_unit`, `per_word`: columns of a unit and of a word of
    /// codes.
    pub fn find(group_of: &[u32], per_unit: usize, per_word: usize) -> ColumnRuns {
        let starts: Vec<usize> = (1..group_of.len())
            .filter(|&column| group_of[column] != group_of[column - 1])
            .collect();
        let is_aligned = starts
            .iter()
            .all(|start| start.is_multiple_of(MAX_PER_WORD));
        let are_long = is_aligned && starts.len() * LONG <= group_of.len();
        let tile_columns = TILE_UNITS * per_unit;
        let mut found = ColumnRuns {
            runs: Vec::new(),
            first_of_tile: Vec::new(),
            are_long,
        };
        for (column, &group) in group_of.iter().enumerate() {
            let begins_tile = column.is_multiple_of(tile_columns);
            if begins_tile {
                found.first_of_tile.push(found.runs.len());
            }
            if begins_tile || are_long && group != group_of[column - 1] {
                found.runs.push(ColumnRun {
                    first: column / per_unit,
                    units: 0,
                    group: group as usize,
                });
            }
            if let Some(last) = found.runs.last_mut() {
                let end = if are_long {
                    (column + 1).next_multiple_of(per_word)
                } else {
                    column + 1
                };
                last.units = end.div_ceil(per_unit) - last.first;
            }
        }
        found.first_of_tile.push(found.runs.len());
        found
    }

    /// Whether each run is of one group; else a tile is one run, of any groups.
    pub fn are_long(&self) -> bool {
        self.are_long
    }

    /// Runs of whole tiles, of which the last one may be the row's end.
    pub fn within(&self, from: usize, units: usize) -> &[ColumnRun] {
        let first = self.first_of_tile[from / TILE_UNITS];
        let end = self.first_of_tile[(from + units).div_ceil(TILE_UNITS)];
        &self.runs[first..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(group_of: &[u32], per_unit: usize) -> (Vec<(usize, usize)>, bool) {
        let found = ColumnRuns::find(group_of, per_unit, 4);
        let units = group_of.len().div_ceil(per_unit);
        let runs = found.within(0, units);
        let described = runs.iter().map(|run| (run.units, run.group)).collect();
        (described, found.are_long())
    }

    #[test]
    fn run_ends_with_its_group_and_with_its_tile() {
        let by_64: Vec<u32> = (0..200).map(|column| column / 96).collect();
        let expected = vec![(48, 0), (16, 1), (32, 1), (4, 2)];
        assert_eq!(lengths(&by_64, 2), (expected, true));
        let expected = vec![(64, 0), (32, 0), (32, 1), (64, 1), (8, 2)];
        assert_eq!(lengths(&by_64, 1), (expected, true));
        assert_eq!(lengths(&[0; 129], 2), (vec![(64, 0), (2, 0)], true));
    }

    #[test]
    fn groups_in_pieces_or_between_words_are_no_runs() {
        let in_turn: Vec<u32> = (0..64).map(|column| column % 2).collect();
        assert!(!lengths(&in_turn, 1).1);
        let between_words: Vec<u32> = (0..64).map(|column| column / 33).collect();
        assert!(!lengths(&between_words, 1).1);
        let small: Vec<u32> = (0..64).map(|column| column / 8).collect();
        assert!(!lengths(&small, 1).1);
    }

    #[test]
    fn runs_of_a_tile_are_found_by_its_units() {
        let found = ColumnRuns::find(&[0; 300], 1, 2);
        let firsts: Vec<usize> = found.within(64, 128).iter().map(|run| run.first).collect();
        assert_eq!(firsts, [64, 128]);
        assert_eq!(found.within(256, 44).len(), 1);
    }
}
