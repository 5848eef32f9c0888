//! Exponentials on vectors, and what is made of them.
#![allow(unsafe_op_in_unsafe_fn, reason = "the CPU has level S")]

use crate::simd::Simd;

pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln(2) in two parts, of which the first one's multiples by whole numbers up to 2^15 are exact
/// (Cephes).
const LN_2_PARTS: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// 2^x for x <= 0 (and up to 127), relative error below 2e-7; exactly 1 at 0 and exactly 0 below
/// -126 and at -inf.
///
/// # Safety
/// The CPU supports `S`.
#[inline(always)]
pub unsafe fn exp2<S: Simd>(x: S::F) -> S::F {
    // NaN survives: select_lt keeps y when the comparison fails, max(NaN, c) below is avoided by
    // clamping last.
    let clamped = S::select_lt(x, S::splat(-126.0), S::splat(-126.0), x);
    let n = S::round(clamped);
    let y = scaled_power::<S>(S::sub(clamped, n), n);
    S::select_lt(x, S::splat(-126.0), S::splat(0.0), y)
}

/// e^x for x <= 0 (and up to 88), relative error below 2e-7; exactly 1 at 0 and exactly 0 where
/// 2^-126 is above it.
///
/// # Safety
/// The CPU supports `S`.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    let power = S::mul(x, S::splat(LOG2_E));
    let least = S::splat(-126.0);
    // As in `exp2`. The fraction is taken of x, because the power is rounded already.
    let n = S::round(S::select_lt(power, least, least, power));
    let mut rest = x;
    for part in LN_2_PARTS {
        rest = S::sub(rest, S::mul(n, S::splat(part)));
    }
    let fraction = S::mul(rest, S::splat(LOG2_E));
    S::select_lt(power, least, S::splat(0.0), scaled_power::<S>(fraction, n))
}

/// 2^(f + n) of f in [-0.5, 0.5] and an integral n in [-126, 127].
#[inline(always)]
unsafe fn scaled_power<S: Simd>(f: S::F, n: S::F) -> S::F {
    // Minimax polynomial of 2^f on [-0.5, 0.5] with a constant of exactly 1 (coefficients as in
    // Cephes' exp2f).
    let mut p = S::splat(1.535_336_2e-4);
    for c in [
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_8e-1,
        std::f32::consts::LN_2,
        1.0,
    ] {
        p = S::fma(p, f, S::splat(c));
    }
    S::mul(p, S::pow2(n))
}

/// tanh(x), absolute error below 3e-7.
///
/// # Safety
/// The CPU supports `S`.
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::F) -> S::F {
    // (1 - e) / (1 + e) of e = e^-2x, held below 2^126: the quotient is -1 long before.
    let power = S::max(S::splat(-126.0), S::mul(x, S::splat(2.0 * LOG2_E)));
    let e = exp2::<S>(S::sub(S::splat(0.0), power));
    let one = S::splat(1.0);
    S::div(S::sub(one, e), S::add(one, e))
}

/// ln(1 + e^x), error below 3e-7 of the larger of it and 1.
///
/// # Safety
/// The CPU supports `S`.
#[inline(always)]
pub unsafe fn softplus<S: Simd>(x: S::F) -> S::F {
    // max(x, 0) + ln(1 + t) of t = e^-|x|, which cannot overflow.
    let zero = S::splat(0.0);
    let distance = S::max(x, S::sub(zero, x));
    let t = exp2::<S>(S::mul(distance, S::splat(-LOG2_E)));
    // ln(1 + t) = 2 artanh(s) of s = t / (2 + t) <= 1/3, by its power series.
    let s = S::div(t, S::add(t, S::splat(2.0)));
    let square = S::mul(s, s);
    let mut series = S::splat(1.0 / 15.0);
    for divisor in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = S::fma(series, square, S::splat(1.0 / divisor));
    }
    S::fma(S::add(s, s), series, S::max(x, zero))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{SimdKernel, dispatch};

    struct Exp2<'a>(&'a mut [f32]);

    impl SimdKernel for Exp2<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                S::store(chunk.as_mut_ptr(), exp2::<S>(S::load(chunk.as_ptr())));
            }
        }
    }

    struct Exp<'a>(&'a mut [f32]);

    impl SimdKernel for Exp<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                S::store(chunk.as_mut_ptr(), exp::<S>(S::load(chunk.as_ptr())));
            }
        }
    }

    struct Tanh<'a>(&'a mut [f32]);

    impl SimdKernel for Tanh<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                S::store(chunk.as_mut_ptr(), tanh::<S>(S::load(chunk.as_ptr())));
            }
        }
    }

    struct Softplus<'a>(&'a mut [f32]);

    impl SimdKernel for Softplus<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                S::store(chunk.as_mut_ptr(), softplus::<S>(S::load(chunk.as_ptr())));
            }
        }
    }

    #[test]
    fn softplus_is_close_to_f64_and_exact_far_out() {
        let mut inputs: Vec<f32> = (0..4096).map(|i| (i as f32 - 2048.0) * 0.013).collect();
        inputs[..4].copy_from_slice(&[f32::MAX, f32::MIN, 400.0, -400.0]);
        for isa in Isa::available() {
            let mut got = inputs.clone();
            // SAFETY: the level is available.
            unsafe { dispatch(isa, Softplus(&mut got)) };
            assert_eq!(&got[..4], &[f32::MAX, 0.0, 400.0, 0.0], "{isa:?}");
            for (x, y) in inputs.iter().zip(&got).skip(4) {
                let want = f64::from(*x).exp().ln_1p();
                assert!(
                    (f64::from(*y) - want).abs() <= 3e-7 * want.max(1.0),
                    "{isa:?}: softplus {x} = {y}, not {want}"
                );
            }
        }
    }

    #[test]
    fn exp_is_close_to_f64_and_exact_at_its_ends() {
        let mut inputs: Vec<f32> = (0..16384).map(|i| -(i as f32) * 0.00531).collect();
        inputs[1..6].copy_from_slice(&[-0.0, f32::NEG_INFINITY, f32::MIN, -87.4, f32::NAN]);
        for isa in Isa::available() {
            let mut got = inputs.clone();
            // SAFETY: the level is available.
            unsafe { dispatch(isa, Exp(&mut got)) };
            assert_eq!(&got[..5], &[1.0, 1.0, 0.0, 0.0, 0.0], "{isa:?}");
            assert!(got[5].is_nan(), "{isa:?}");
            for (x, y) in inputs.iter().zip(&got).skip(6) {
                let want = f64::from(*x).exp();
                assert!(
                    (f64::from(*y) - want).abs() <= 2e-7 * want,
                    "{isa:?}: e^{x} = {y}, not {want}"
                );
            }
        }
    }

    #[test]
    fn tanh_is_close_to_f64_and_exact_far_out() {
        let mut inputs: Vec<f32> = (0..4096).map(|i| (i as f32 - 2048.0) * 0.011).collect();
        inputs[..4].copy_from_slice(&[f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY]);
        for isa in Isa::available() {
            let mut got = inputs.clone();
            // SAFETY: the level is available.
            unsafe { dispatch(isa, Tanh(&mut got)) };
            assert_eq!(&got[..4], &[1.0, -1.0, 1.0, -1.0], "{isa:?}");
            for (x, y) in inputs.iter().zip(&got) {
                let want = f64::from(*x).tanh();
                assert!(
                    (f64::from(*y) - want).abs() <= 3e-7,
                    "{isa:?}: tanh {x} = {y}, not {want}"
                );
            }
        }
    }

    #[test]
    fn exp2_is_close_to_f64_and_exact_at_its_ends() {
        let inputs: Vec<f32> = (0..16384).map(|i| -(i as f32) * 0.0091).collect();
        for isa in Isa::available() {
            let mut got = inputs.clone();
            // SAFETY: the level is available.
            unsafe { dispatch(isa, Exp2(&mut got)) };
            for (x, y) in inputs.iter().zip(&got) {
                let want = if *x < -126.0 {
                    0.0
                } else {
                    f64::from(*x).exp2()
                };
                assert!(
                    (f64::from(*y) - want).abs() <= 2e-7 * want,
                    "{isa:?}: 2^{x} = {y}, not {want}"
                );
            }
            let mut ends = [
                0.0,
                -0.0,
                f32::NEG_INFINITY,
                -126.5,
                -1.0,
                -2.0,
                f32::NAN,
                -126.0,
            ]
            .repeat(2);
            // SAFETY: as above.
            unsafe { dispatch(isa, Exp2(&mut ends)) };
            assert_eq!(&ends[..6], &[1.0, 1.0, 0.0, 0.0, 0.5, 0.25], "{isa:?}");
            assert!(
                ends[6].is_nan() && ends[7] == f32::MIN_POSITIVE,
                "{isa:?}: {ends:?}"
            );
        }
    }
}
