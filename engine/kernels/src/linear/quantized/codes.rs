//! Types of codes, and how exact numbers come out of a word of them.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the vectors read"
)]

use crate::simd::Simd;

/// Columns of a row whose codes share a word, at most.
pub(crate) const MAX_PER_WORD: usize = 4;

/// Meaning of a code's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// Unsigned, 0 to 15.
    Int4,
    /// Unsigned, 0 to 255.
    Int8,
    /// e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
    Fp8,
    /// e2m1: a sign, 2 bits of exponent with bias 1, 1 of mantissa; finite. Scales must be exact in
    /// bf16.
    Fp4,
}

impl CodeType {
    /// Columns whose codes share a word.
    pub(super) const fn per_word(self) -> usize {
        match self {
            CodeType::Int4 | CodeType::Fp4 => 4,
            CodeType::Int8 | CodeType::Fp8 => 2,
        }
    }

    /// Bytes of a scale in memory.
    pub(super) const fn scale_bytes(self) -> usize {
        match self {
            CodeType::Fp4 => 2,
            CodeType::Int4 | CodeType::Int8 | CodeType::Fp8 => 4,
        }
    }

    /// Whether codes with this zero point have exact differences to it: a whole number in [0, 256)
    /// for integers, and none for floats.
    pub fn takes_zero(self, zero: f32) -> bool {
        match self {
            CodeType::Fp8 | CodeType::Fp4 => zero == 0.0,
            CodeType::Int4 | CodeType::Int8 => zero.fract() == 0.0 && (0.0..256.0).contains(&zero),
        }
    }
}

/// How numbers come out of a word.
///
/// # Safety
/// The CPU supports `S`.
pub(super) trait Codes {
    /// Columns in a word.
    const PER_WORD: usize;
    /// Numbers of column `i` of words, the lowest one first: codes less `zero`, exact.
    /// [`CodeType::takes_zero`] holds for it. Meant for an `i` that is known where it is compiled.
    unsafe fn number<S: Simd>(words: S::I, i: usize, zero: S::F) -> S::F;
    /// Scales from number `at` on; `scales` has enough.
    #[inline(always)]
    unsafe fn scales<S: Simd>(scales: *const u32, at: usize) -> S::F {
        S::load(scales.cast::<f32>().add(at))
    }
}

/// Unsigned codes whose lowest bit is bit `place`, less `zero`. No shift: a code is put into the
/// mantissa of a power of two whose last place has the weight of the code's lowest bit.
#[inline(always)]
unsafe fn code_difference<S: Simd>(words: S::I, mask: u32, place: usize, zero: S::F) -> S::F {
    let power = (127 + 23 - place as u32) << 23;
    let in_mantissa = S::or(
        S::and(words, S::splat_u32(mask << place)),
        S::splat_u32(power),
    );
    let offset = S::add(S::splat(f32::from_bits(power)), zero);
    S::sub(S::from_bits(in_mantissa), offset)
}

pub(super) struct Nibbles;

impl Codes for Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn number<S: Simd>(words: S::I, i: usize, zero: S::F) -> S::F {
        code_difference::<S>(words, 0xf, 4 * i, zero)
    }
}

pub(super) struct Bytes;

impl Codes for Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn number<S: Simd>(words: S::I, i: usize, zero: S::F) -> S::F {
        code_difference::<S>(words, 0xff, 8 * i, zero)
    }
}

pub(super) struct Fp8Bytes;

impl Codes for Fp8Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn number<S: Simd>(words: S::I, i: usize, _zero: S::F) -> S::F {
        // Exponent and mantissa to bits 20 to 26, the sign to bit 31.
        let by_16 = S::shl16(words);
        if i == 0 {
            let by_20 = S::shl4(by_16);
            fp8_number::<S>(by_20, S::shl4(by_20))
        } else {
            fp8_number::<S>(S::shl4(S::shl4(S::shl4(words))), by_16)
        }
    }
}

pub(super) struct Fp4Nibbles;

static FP4_NUMBERS: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

impl Codes for Fp4Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn number<S: Simd>(words: S::I, i: usize, _zero: S::F) -> S::F {
        let mut lowest = words;
        for _ in 0..i {
            lowest = S::shr4(lowest);
        }
        S::look_up(FP4_NUMBERS.as_ptr(), lowest)
    }

    #[inline(always)]
    unsafe fn scales<S: Simd>(scales: *const u32, at: usize) -> S::F {
        S::from_bits(S::shl16(S::load_u16(scales.cast::<u16>().add(at))))
    }
}

/// Args: words whose bits 20 to 26 are exponent and mantissa, and whose bit 31 is the sign.
#[inline(always)]
unsafe fn fp8_number<S: Simd>(magnitude: S::I, sign: S::I) -> S::F {
    let bits = S::or(
        S::and(magnitude, S::splat_u32(0x07f0_0000)),
        S::and(sign, S::splat_u32(0x8000_0000)),
    );
    // The exponent's bias is 7, and f32's 127.
    S::mul(
        S::from_bits(bits),
        S::splat(f32::from_bits((127 + 120) << 23)),
    )
}
