//! Types of codes, and how exact numbers come out of a word of them.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the vectors read"
)]

use crate::simd::Simd;

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
    /// Numbers of a word's columns, lowest first: codes less the zero of their column, exact. Those
    /// behind `PER_WORD` are 0. [`CodeType::takes_zero`] holds for every zero.
    unsafe fn numbers<S: Simd>(word: S::I, zeros: [S::F; 4]) -> [S::F; 4];
    /// Scales from number `at` on; `scales` has enough.
    #[inline(always)]
    unsafe fn scales<S: Simd>(scales: *const u32, at: usize) -> S::F {
        S::load(scales.cast::<f32>().add(at))
    }
}

/// An unsigned code whose lowest bit is bit `place`, less `zero`. No shift: the code is put into the
/// mantissa of a power of two whose last place has the weight of the code's lowest bit.
#[inline(always)]
unsafe fn code_difference<S: Simd>(word: S::I, mask: u32, place: u32, zero: S::F) -> S::F {
    let power = (127 + 23 - place) << 23;
    let in_mantissa = S::or(
        S::and(word, S::splat_u32(mask << place)),
        S::splat_u32(power),
    );
    let offset = S::add(S::splat(f32::from_bits(power)), zero);
    S::sub(S::from_bits(in_mantissa), offset)
}

pub(super) struct Nibbles;

impl Codes for Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn numbers<S: Simd>(word: S::I, zeros: [S::F; 4]) -> [S::F; 4] {
        [
            code_difference::<S>(word, 0xf, 0, zeros[0]),
            code_difference::<S>(word, 0xf, 4, zeros[1]),
            code_difference::<S>(word, 0xf, 8, zeros[2]),
            code_difference::<S>(word, 0xf, 12, zeros[3]),
        ]
    }
}

pub(super) struct Bytes;

impl Codes for Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn numbers<S: Simd>(word: S::I, zeros: [S::F; 4]) -> [S::F; 4] {
        let none = S::splat(0.0);
        [
            code_difference::<S>(word, 0xff, 0, zeros[0]),
            code_difference::<S>(word, 0xff, 8, zeros[1]),
            none,
            none,
        ]
    }
}

pub(super) struct Fp8Bytes;

impl Codes for Fp8Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn numbers<S: Simd>(word: S::I, _zeros: [S::F; 4]) -> [S::F; 4] {
        let by_12 = S::shl4(S::shl4(S::shl4(word)));
        let by_16 = S::shl16(word);
        let by_20 = S::shl4(by_16);
        let none = S::splat(0.0);
        [
            fp8_number::<S>(by_20, S::shl4(by_20)),
            fp8_number::<S>(by_12, by_16),
            none,
            none,
        ]
    }
}

pub(super) struct Fp4Nibbles;

static FP4_NUMBERS: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

impl Codes for Fp4Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn numbers<S: Simd>(word: S::I, _zeros: [S::F; 4]) -> [S::F; 4] {
        let table = FP4_NUMBERS.as_ptr();
        let by_4 = S::shr4(word);
        let by_8 = S::shr4(by_4);
        let by_12 = S::shr4(by_8);
        [
            S::look_up(table, word),
            S::look_up(table, by_4),
            S::look_up(table, by_8),
            S::look_up(table, by_12),
        ]
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
