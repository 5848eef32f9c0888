//! Page checksums: their kinds, and a cache.

use std::sync::LazyLock;

use parking_lot::Mutex;

/// Kind of a pool's checksums; HELLO carries it, and both sides of a pair use the announcer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SumKind {
    /// XXH3-64: pools in host memory.
    Xxh3,
    /// `weighted`: pools on a device, where it is two operations of any tensor library.
    Weighted,
}

impl SumKind {
    pub fn as_str(self) -> &'static str {
        match self {
            SumKind::Xxh3 => "xxh3",
            SumKind::Weighted => "weighted",
        }
    }

    /// An empty name, of older peers, is XXH3.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "" | "xxh3" => Some(SumKind::Xxh3),
            "weighted" => Some(SumKind::Weighted),
            _ => None,
        }
    }
}

/// Sum over the page's 32-bit words (little endian, signed) of word i times weight i, modulo 2^64.
///
/// A weight is splitmix64's i-th output from state 0 with its lowest bit set. Any fixed difference
/// of two pages goes unnoticed for at most one in 2^33 choices of weights; a single wrong word, or
/// two words exchanged, never does by more than that.
pub fn weighted_sum(page: &[u8]) -> u64 {
    let (words, remainder) = page.as_chunks::<4>();
    assert!(remainder.is_empty(), "pages are multiples of 8 bytes");
    let mut sum = 0u64;
    let mut first = 0;
    for part in words.chunks(WEIGHTS.len()) {
        if first == 0 {
            for (word, weight) in part.iter().zip(WEIGHTS.iter()) {
                sum = sum.wrapping_add(multiply_word(*word, *weight));
            }
        } else {
            for (i, word) in part.iter().enumerate() {
                sum = sum.wrapping_add(multiply_word(*word, word_weight((first + i) as u64)));
            }
        }
        first += part.len();
    }
    sum
}

/// Weights of the first 256 KiB of a page; later ones are computed each time.
static WEIGHTS: LazyLock<Vec<u64>> = LazyLock::new(|| (0..65_536).map(word_weight).collect());

fn multiply_word(word: [u8; 4], weight: u64) -> u64 {
    (i64::from(i32::from_le_bytes(word)) as u64).wrapping_mul(weight)
}

fn word_weight(i: u64) -> u64 {
    let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) | 1
}

/// Checksums by (page, generation): a shared prefix is hashed once, however many requests announce
/// it. One per page, 16 bytes each.
pub struct SumCache(Mutex<Vec<(u64, u64)>>);

impl SumCache {
    /// No real generation announced for a transfer is u64::MAX (it is odd), so fresh entries never
    /// match.
    pub fn new(num_pages: usize) -> Self {
        Self(Mutex::new(vec![(u64::MAX, 0); num_pages]))
    }

    pub fn get(&self, page: u32, generation: u64) -> Option<u64> {
        let (cached_generation, sum) = self.0.lock()[page as usize];
        (cached_generation == generation).then_some(sum)
    }

    pub fn put(&self, page: u32, generation: u64, sum: u64) {
        self.0.lock()[page as usize] = (generation, sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + (i >> 8)) as u8).collect()
    }

    #[test]
    fn weighted_has_known_values() {
        // The first outputs of splitmix64 from state 0 (its authors' test vector), lowest bit set.
        let known = [
            0xe220_a839_7b1d_cdaf,
            0x6e78_9e6a_a1b9_65f5,
            0x06c4_5d18_8009_454f,
        ];
        assert_eq!([word_weight(0), word_weight(1), word_weight(2)], known);
        assert_eq!(
            weighted_sum(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
            known[0].wrapping_sub(known[1])
        );
        let naive = |page: &[u8]| {
            page.as_chunks::<4>()
                .0
                .iter()
                .zip(0..)
                .fold(0u64, |sum, (word, i)| {
                    sum.wrapping_add(multiply_word(*word, word_weight(i)))
                })
        };
        for len in [64, 4096, 262_144, 262_152, 600_000] {
            assert_eq!(weighted_sum(&page(len)), naive(&page(len)), "{len} bytes");
        }
    }

    #[test]
    fn weighted_sees_flips_of_any_bits_and_exchanged_words() {
        let good = page(1024);
        let sum = weighted_sum(&good);
        for bit in 0..1024 * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(weighted_sum(&bad), sum, "bit {bit}");
            // with another top bit: a sum with weights of 64-bit words would miss it
            bad[(bit / 8 + 512) % 1024] ^= 0x80;
            assert_ne!(weighted_sum(&bad), sum, "bit {bit} and another");
        }
        let mut bad = good.clone();
        bad.copy_within(4..8, 0);
        bad[4..8].copy_from_slice(&good[..4]);
        assert_ne!(weighted_sum(&bad), sum);
    }
}
