//! K and V as FP8 codes: e4m3 has a sign, 4 bits of exponent with bias 7 and 3 of mantissa, no
//! infinities, and one NaN of each sign.
//!
//! A number x becomes the code of x / scale, rounded to nearest with ties to even; what exceeds
//! the largest code becomes the largest code. The numbers of codes are exact in f32 and bf16, so
//! attention computes with them as they are, and multiplies scores by the scale of K and results
//! by the scale of V.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the counts given"
)]

use crate::elem::{ElementType, load_part, store_part};
use crate::simd::{SUM_LANES, Simd};

/// What the numbers of a layer's codes are multiplied by. Positive and finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    pub key: f32,
    pub value: f32,
}

const SIGN: u32 = 0x80;
const LARGEST_CODE: u32 = 0x7e;
const NAN_CODE: u32 = 0x7f;
/// Code of the smallest number whose exponent is not that of 0.
const FIRST_NORMAL_CODE: u32 = 0x08;
const FIRST_NORMAL: f32 = 1.0 / 64.0;
/// Numbers below `FIRST_NORMAL` are multiples of it.
const SMALLEST: f32 = 1.0 / 512.0;
/// A power of two whose last place is `SMALLEST`.
const SMALLEST_IN_LAST_PLACE: f32 = 16384.0;
/// Bits of f32's mantissa that a code does not have.
const SPARE_BITS: u32 = 20;
/// Difference of the exponents' biases, in f32's place.
const BIAS: u32 = (127 - 7) << 23;

/// The code of x, written without branches, so that loops over it become vectors.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & SIGN;
    let magnitude = bits & 0x7fff_ffff;
    let small = (f32::from_bits(magnitude) + SMALLEST_IN_LAST_PLACE)
        .to_bits()
        .wrapping_sub(SMALLEST_IN_LAST_PLACE.to_bits());
    let odd = (magnitude >> SPARE_BITS) & 1;
    let rounded = magnitude + ((1 << (SPARE_BITS - 1)) - 1) + odd;
    let normal = rounded.wrapping_sub(BIAS) >> SPARE_BITS;
    let code = if magnitude < FIRST_NORMAL.to_bits() {
        small
    } else {
        normal.min(LARGEST_CODE)
    };
    let code = if magnitude > f32::INFINITY.to_bits() {
        NAN_CODE
    } else {
        code
    };
    (sign | code) as u8
}

/// The number of a code.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    let code = u32::from(code);
    let sign = (code & SIGN) << 24;
    let magnitude = code & !SIGN;
    let small = (magnitude as f32 * SMALLEST).to_bits();
    let normal = (magnitude << SPARE_BITS) + BIAS;
    let bits = if magnitude < FIRST_NORMAL_CODE {
        small
    } else {
        normal
    };
    let bits = if magnitude == NAN_CODE {
        f32::NAN.to_bits()
    } else {
        bits
    };
    f32::from_bits(bits | sign)
}

/// Write the codes of `count` numbers over `scale`.
#[inline(always)]
pub(super) unsafe fn encode_row<S: Simd, E: ElementType>(
    from: *const E::T,
    count: usize,
    scale: f32,
    to: *mut u8,
) {
    let scale = S::splat(scale);
    let mut quotients = [0.0_f32; SUM_LANES];
    let mut codes = [0_u8; SUM_LANES];
    let mut done = 0;
    while done < count {
        let left = SUM_LANES.min(count - done);
        for lane in (0..left).step_by(S::LANES) {
            let numbers = load_part::<S, E>(from.add(done + lane), left - lane);
            S::store(quotients.as_mut_ptr().add(lane), S::div(numbers, scale));
        }
        for (code, quotient) in codes.iter_mut().zip(&quotients) {
            *code = encode(*quotient);
        }
        copy_codes(codes.as_ptr(), to.add(done), left);
        done += left;
    }
}

/// Write the numbers of `count` codes.
#[inline(always)]
pub(super) unsafe fn decode_row<S: Simd, E: ElementType>(
    from: *const u8,
    count: usize,
    to: *mut E::T,
) {
    let mut codes = [0_u8; SUM_LANES];
    let mut numbers = [0.0_f32; SUM_LANES];
    let mut done = 0;
    while done < count {
        let left = SUM_LANES.min(count - done);
        copy_codes(from.add(done), codes.as_mut_ptr(), left);
        for (number, code) in numbers.iter_mut().zip(&codes) {
            *number = decode(*code);
        }
        for lane in (0..left).step_by(S::LANES) {
            let part = S::load(numbers.as_ptr().add(lane));
            store_part::<S, E>(to.add(done + lane), part, left - lane);
        }
        done += left;
    }
}

/// Whole vectors, the usual case, move in one instruction instead of a call.
#[inline(always)]
unsafe fn copy_codes(from: *const u8, to: *mut u8, count: usize) {
    if count == SUM_LANES {
        let whole = from.cast::<[u8; SUM_LANES]>().read();
        to.cast::<[u8; SUM_LANES]>().write(whole);
    } else {
        std::ptr::copy_nonoverlapping(from, to, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::noise;
    use crate::elem::{F32, from_bf16, to_bf16};
    use crate::isa::Isa;
    use crate::simd::{SimdKernel, dispatch};

    /// The number that a code means, by the definition of e4m3.
    fn defined(code: u8) -> f64 {
        let exponent = i32::from(code >> 3 & 15);
        let mantissa = f64::from(code & 7);
        let size = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2.0_f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2.0_f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    #[test]
    fn every_code_has_its_number_which_bf16_holds_exactly() {
        for code in 0..=u8::MAX {
            let number = decode(code);
            assert_eq!(number.is_nan(), defined(code).is_nan(), "{code:#x}");
            if !number.is_nan() {
                assert_eq!(f64::from(number).to_bits(), defined(code).to_bits());
                assert_eq!(from_bf16(to_bf16(number)).to_bits(), number.to_bits());
                assert_eq!(encode(number), code);
            }
        }
    }

    #[test]
    fn numbers_become_the_nearest_code_and_ties_the_even_one() {
        let codes: Vec<u8> = (0..0x7f).collect();
        let mut numbers: Vec<f32> = noise(20_000, 3).iter().map(|x| x * 500.0).collect();
        numbers.extend(noise(20_000, 4).iter().map(|x| x * 0.02));
        numbers.extend(
            codes
                .windows(2)
                .map(|w| (decode(w[0]) + decode(w[1])) / 2.0),
        );
        for x in numbers {
            let code = encode(x) & 0x7f;
            let distance = |c: u8| (defined(c) - f64::from(x.abs())).abs();
            let least = codes.iter().map(|&c| distance(c)).fold(f64::MAX, f64::min);
            let nearest: Vec<u8> = codes
                .iter()
                .copied()
                .filter(|&c| distance(c) == least)
                .collect();
            assert!(nearest.contains(&code), "{x}: {code:#x}");
            assert!(
                nearest.len() == 1 || code.is_multiple_of(2),
                "{x}: {code:#x}"
            );
            assert_eq!(encode(x) >> 7 == 1, x.is_sign_negative());
        }
    }

    #[test]
    fn what_exceeds_the_largest_number_becomes_it_and_nan_stays_nan() {
        for x in [448.0, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(decode(encode(x)), 448.0);
            assert_eq!(decode(encode(-x)), -448.0);
        }
        for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
            assert!(decode(encode(nan)).is_nan());
        }
        for zero in [0.0, 1e-40, 0.0009] {
            assert_eq!((encode(zero), encode(-zero)), (0, 0x80));
        }
    }

    struct ThereAndBack<'a> {
        from: &'a [f32],
        scale: f32,
        codes: &'a mut [u8],
        back: &'a mut [f32],
    }

    impl SimdKernel for ThereAndBack<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            let count = self.from.len();
            encode_row::<S, F32>(
                self.from.as_ptr(),
                count,
                self.scale,
                self.codes.as_mut_ptr(),
            );
            decode_row::<S, F32>(self.codes.as_ptr(), count, self.back.as_mut_ptr());
        }
    }

    #[test]
    fn rows_of_every_length_and_level_are_coded_like_single_numbers() {
        for isa in Isa::available() {
            for count in [1, 7, 8, 15, 16, 17, 40, 80, 256] {
                let from = noise(count, count as u64);
                let expected: Vec<u8> = from.iter().map(|x| encode(x / 0.03)).collect();
                let mut codes = vec![0; count];
                let mut back = vec![0.0; count];
                let rows = ThereAndBack {
                    from: &from,
                    scale: 0.03,
                    codes: &mut codes,
                    back: &mut back,
                };
                // SAFETY: the level is available; all slices have `count` elements.
                unsafe { dispatch(isa, rows) };
                assert_eq!(codes, expected, "{isa:?}");
                assert!(codes.iter().zip(&back).all(|(c, b)| decode(*c) == *b));
            }
        }
    }
}
