//! Normalization of SentencePiece: replacements by longest match, blanks, dummy prefix.

use super::piece_trie::PieceTrie;

/// Stands for a blank in pieces.
pub const BLANK: &str = "\u{2581}";

/// Replacements of a model (`precompiled_charsmap`): a Darts-clone double array over the replaced
/// texts, whose values are offsets into the replacements, each of which ends with NUL.
#[derive(Debug)]
struct CharsMap {
    units: Vec<u32>,
    replacements: String,
}

impl CharsMap {
    /// `Err`: what is wrong with the bytes.
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let (size, behind) = bytes.split_first_chunk().ok_or("it ends in its length")?;
        let size = u32::from_le_bytes(*size) as usize;
        let is_whole = size.is_multiple_of(size_of::<u32>()) && size <= behind.len();
        if !is_whole || size == 0 {
            return Err(format!("its trie has {size} of {} bytes", behind.len()));
        }
        let (units, replacements) = behind.split_at(size);
        let replacements = String::from_utf8(replacements.to_vec());
        let (units, _) = units.as_chunks();
        Ok(Self {
            units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(),
            replacements: replacements.map_err(|err| format!("a replacement: {err}"))?,
        })
    }

    /// Length of the longest text that `text` begins with and that is replaced, and the
    /// replacement.
    fn longest_prefix(&self, text: &[u8]) -> Option<(usize, &str)> {
        let mut longest = None;
        let mut node = offset_of(self.units[0]);
        for (index, byte) in text.iter().enumerate() {
            node ^= usize::from(*byte);
            let Some(unit) = self.units.get(node).copied() else {
                break;
            };
            if unit & LABEL_MASK != u32::from(*byte) {
                break;
            }
            node ^= offset_of(unit);
            if unit & HAS_LEAF != 0 {
                let leaf = self.units.get(node).copied();
                longest = leaf.map(|leaf| (index + 1, leaf & VALUE_MASK));
            }
        }
        let (len, start) = longest?;
        let replacement = self.replacements.get(start as usize..)?;
        Some((len, replacement.split('\0').next()?))
    }
}

/// Bits of a unit of the double array, as Darts-clone 0.32 lays them out.
const HAS_LEAF: u32 = 1 << 8;
const VALUE_MASK: u32 = (1 << 31) - 1;
const LABEL_MASK: u32 = (1 << 31) | 0xff;

fn offset_of(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

/// Settings of `normalizer_spec` that change texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlankRules {
    /// Blanks at both ends are dropped, and all but one of those that follow each other.
    pub remove_extra: bool,
    /// Blanks become [`BLANK`].
    pub escape: bool,
}

/// See the module.
#[derive(Debug)]
pub struct PieceNormalizer {
    chars_map: Option<CharsMap>,
    /// Stand in a text as they are.
    user_defined: PieceTrie,
    blanks: BlankRules,
}

impl PieceNormalizer {
    /// `chars_map`: bytes of `precompiled_charsmap`; empty: nothing is replaced.
    pub fn new(
        chars_map: &[u8],
        user_defined: PieceTrie,
        blanks: BlankRules,
    ) -> Result<Self, String> {
        let chars_map = match chars_map {
            [] => None,
            bytes => Some(CharsMap::read(bytes)?),
        };
        Ok(Self {
            chars_map,
            user_defined,
            blanks,
        })
    }

    /// Pieces that stand in a text as they are.
    pub fn user_defined(&self) -> &PieceTrie {
        &self.user_defined
    }

    /// `has_dummy_prefix`: a blank is put before a text that is not empty.
    pub fn normalize(&self, text: &str, has_dummy_prefix: bool) -> String {
        let mut rest = text;
        if self.blanks.remove_extra {
            while let (" ", behind) = self.split_first(rest) {
                rest = behind;
            }
        }
        let mut out = String::with_capacity(text.len() + text.len() / 4 + BLANK.len());
        if rest.is_empty() {
            return out;
        }
        if has_dummy_prefix {
            out.push_str(self.blank());
        }
        let mut is_behind_blank = self.blanks.remove_extra;
        while !rest.is_empty() {
            let (mut part, behind) = self.split_first(rest);
            if is_behind_blank {
                part = part.trim_start_matches(' ');
            }
            if !part.is_empty() {
                self.push_escaped(part, &mut out);
                is_behind_blank = self.blanks.remove_extra && part.ends_with(' ');
            }
            rest = behind;
        }
        while self.blanks.remove_extra && out.ends_with(self.blank()) {
            out.truncate(out.len() - self.blank().len());
        }
        out
    }

    fn blank(&self) -> &'static str {
        if self.blanks.escape { BLANK } else { " " }
    }

    fn push_escaped(&self, part: &str, out: &mut String) {
        for (index, between) in part.split(' ').enumerate() {
            if index > 0 {
                out.push_str(self.blank());
            }
            out.push_str(between);
        }
    }

    /// The normalized text of the first character, or of the longest replaced or user-defined text,
    /// and what stands behind it.
    fn split_first<'a>(&'a self, text: &'a str) -> (&'a str, &'a str) {
        if let Some(len) = self.user_defined.longest_prefix(text.as_bytes()) {
            return text.split_at(len);
        }
        let replaced = self.chars_map.as_ref();
        if let Some((len, replacement)) =
            replaced.and_then(|map| map.longest_prefix(text.as_bytes()))
            && let Some(behind) = text.get(len..)
        {
            return (replacement, behind);
        }
        let len = text.chars().next().map_or(0, char::len_utf8);
        text.split_at(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_replacements_are_refused() {
        let longer_trie = [8, 0, 0, 0, 1, 2, 3, 4];
        let half_a_unit = [2, 0, 0, 0, 1, 2];
        let no_utf8 = [4, 0, 0, 0, 1, 2, 3, 4, 0xff];
        for bytes in [[1, 2].as_slice(), &longer_trie, &half_a_unit, &no_utf8] {
            assert!(CharsMap::read(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn trie_that_leads_out_of_itself_replaces_nothing() {
        let mut bytes = vec![4, 0, 0, 0];
        bytes.extend(u32::MAX.to_le_bytes());
        bytes.extend(b"a\0");
        let map = CharsMap::read(&bytes).map(|map| map.longest_prefix(b"abc").is_none());
        assert_eq!(map, Ok(true));
    }
}
