//! Stored number types and how a product step reads them.
//!
//! Matrices are held in 32-bit *units* along the reduction: one f32, or two consecutive bf16. So
//! transposing, packing and tiling are the same code for both. The left operand's unit may take
//! more words (`X_WORDS`), so that work which does not depend on the right one is done once, when
//! it is packed.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers are valid for what is read or written"
)]

use crate::simd::Simd;

/// Storage type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// Elements of a unit.
    pub(crate) fn per_unit(self) -> usize {
        4 / self.bytes()
    }
}

/// bf16 nearest to `x`, ties to even; NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fc0;
    }
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[inline(always)]
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// # Safety
/// For all functions: the CPU supports `S`; pointers are valid for the elements named.
pub trait ElementType: Copy + Send + Sync + 'static {
    /// As stored in tensors.
    type T: Copy + Send + Sync;
    /// A right-hand vector made ready for several steps.
    type W<S: Simd>: Copy;
    /// Elements in one unit.
    const PER_UNIT: usize;
    /// Words of one packed left-hand unit: one per phase.
    const X_WORDS: usize;
    /// Multiply-adds that one unit takes, done for all accumulators before the next: half the
    /// registers for `W`.
    const PHASES: usize;
    /// True if its steps need the bf16 dot product: see [`crate::simd::SimdKernel::DOT`].
    const DOT: bool = false;

    fn to_f32(x: Self::T) -> f32;
    fn from_f32(x: f32) -> Self::T;
    /// LANES elements.
    unsafe fn load<S: Simd>(p: *const Self::T) -> S::F;
    unsafe fn store<S: Simd>(p: *mut Self::T, v: S::F);
    /// The value `store` would leave.
    unsafe fn round<S: Simd>(v: S::F) -> S::F;

    unsafe fn prepare<S: Simd>(w: S::I, phase: usize) -> Self::W<S>;
    /// acc + the products of one phase; `x` points at the unit's X_WORDS words.
    unsafe fn step<S: Simd>(acc: S::F, x: *const u32, w: Self::W<S>, phase: usize) -> S::F;
    /// Pack `n` elements into left-hand units, ceil(n / PER_UNIT) * X_WORDS words.
    unsafe fn pack_x<S: Simd>(src: *const Self::T, n: usize, dst: *mut u32);
    /// Store LANES probabilities, already rounded by `round`, as left-hand units starting at
    /// element `at` of `row`.
    unsafe fn store_x<S: Simd>(row: *mut u32, at: usize, v: S::F);
    /// LANES right-hand units of element d of rows `a` (and `b`, where a unit spans two rows).
    unsafe fn pair_rows<S: Simd>(a: *const Self::T, b: *const Self::T) -> S::I;
    fn pair(a: Self::T, b: Self::T) -> u32;
}

#[derive(Clone, Copy)]
pub struct F32;

impl ElementType for F32 {
    type T = f32;
    type W<S: Simd> = S::F;
    const PER_UNIT: usize = 1;
    const X_WORDS: usize = 1;
    const PHASES: usize = 1;

    #[inline(always)]
    fn to_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F {
        S::load(p)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f32, v: S::F) {
        S::store(p, v);
    }
    #[inline(always)]
    unsafe fn round<S: Simd>(v: S::F) -> S::F {
        v
    }
    #[inline(always)]
    unsafe fn prepare<S: Simd>(w: S::I, _phase: usize) -> S::F {
        S::from_bits(w)
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(acc: S::F, x: *const u32, w: S::F, _phase: usize) -> S::F {
        S::fma(S::splat(x.cast::<f32>().read()), w, acc)
    }
    #[inline(always)]
    unsafe fn pack_x<S: Simd>(src: *const f32, n: usize, dst: *mut u32) {
        std::ptr::copy_nonoverlapping(src.cast::<u32>(), dst, n);
    }
    #[inline(always)]
    unsafe fn store_x<S: Simd>(row: *mut u32, at: usize, v: S::F) {
        S::store(row.cast::<f32>().add(at), v);
    }
    #[inline(always)]
    unsafe fn pair_rows<S: Simd>(a: *const f32, _b: *const f32) -> S::I {
        S::load_u32(a.cast())
    }
    #[inline(always)]
    fn pair(a: f32, _b: f32) -> u32 {
        a.to_bits()
    }
}

macro_rules! bf16_storage {
    () => {
        type T = u16;
        const PER_UNIT: usize = 2;

        #[inline(always)]
        fn to_f32(x: u16) -> f32 {
            from_bf16(x)
        }
        #[inline(always)]
        fn from_f32(x: f32) -> u16 {
            to_bf16(x)
        }
        #[inline(always)]
        unsafe fn load<S: Simd>(p: *const u16) -> S::F {
            S::from_bits(S::shl16(S::load_u16(p)))
        }
        #[inline(always)]
        unsafe fn store<S: Simd>(p: *mut u16, v: S::F) {
            S::store_u16(p, S::shr16(S::bits(Self::round::<S>(v))));
        }
        #[inline(always)]
        unsafe fn round<S: Simd>(v: S::F) -> S::F {
            let bits = S::bits(v);
            let odd = S::and(S::shr16(bits), S::splat_u32(1));
            let up = S::add_u32(bits, S::add_u32(odd, S::splat_u32(0x7fff)));
            let rounded = S::from_bits(S::and(up, S::splat_u32(0xffff_0000)));
            // Infinity and NaN take the second value: rounding up would carry a NaN's bits into the
            // sign.
            let kept = S::from_bits(S::and(bits, S::splat_u32(0xffff_0000)));
            S::select_lt(v, S::splat(f32::INFINITY), rounded, kept)
        }
        #[inline(always)]
        unsafe fn pair_rows<S: Simd>(a: *const u16, b: *const u16) -> S::I {
            S::or(S::load_u16(a), S::shl16(S::load_u16(b)))
        }
        #[inline(always)]
        fn pair(a: u16, b: u16) -> u32 {
            u32::from(a) | u32::from(b) << 16
        }
    };
}

/// bf16 widened to f32 and multiplied there: the left operand when it is packed, the right one once
/// per tile step.
#[derive(Clone, Copy)]
pub struct Bf16;

impl ElementType for Bf16 {
    bf16_storage!();
    type W<S: Simd> = S::F;
    const X_WORDS: usize = 2;
    const PHASES: usize = 2;

    // The odd element first: the order of the dot product instruction.
    #[inline(always)]
    unsafe fn prepare<S: Simd>(w: S::I, phase: usize) -> S::F {
        S::from_bits(if phase == 0 {
            S::and(w, S::splat_u32(0xffff_0000))
        } else {
            S::shl16(w)
        })
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(acc: S::F, x: *const u32, w: S::F, phase: usize) -> S::F {
        S::fma(S::splat(x.cast::<f32>().add(1 - phase).read()), w, acc)
    }
    #[inline(always)]
    unsafe fn pack_x<S: Simd>(src: *const u16, n: usize, dst: *mut u32) {
        let dst = dst.cast::<f32>();
        let whole = n - n % S::LANES;
        let mut i = 0;
        while i < whole {
            S::store(dst.add(i), Self::load::<S>(src.add(i)));
            i += S::LANES;
        }
        while i < n {
            dst.add(i).write(from_bf16(src.add(i).read()));
            i += 1;
        }
        if n % 2 == 1 {
            dst.add(n).write(0.0);
        }
    }
    #[inline(always)]
    unsafe fn store_x<S: Simd>(row: *mut u32, at: usize, v: S::F) {
        S::store(row.cast::<f32>().add(at), v);
    }
}

/// bf16 pairs through the dot product instruction.
#[derive(Clone, Copy)]
pub struct Bf16Dot;

impl ElementType for Bf16Dot {
    bf16_storage!();
    type W<S: Simd> = S::I;
    const X_WORDS: usize = 1;
    const PHASES: usize = 1;
    const DOT: bool = true;

    #[inline(always)]
    unsafe fn prepare<S: Simd>(w: S::I, _phase: usize) -> S::I {
        w
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(acc: S::F, x: *const u32, w: S::I, _phase: usize) -> S::F {
        S::dot2(acc, S::splat_u32(x.read()), w)
    }
    #[inline(always)]
    unsafe fn pack_x<S: Simd>(src: *const u16, n: usize, dst: *mut u32) {
        std::ptr::copy_nonoverlapping(src, dst.cast::<u16>(), n);
        if n % 2 == 1 {
            dst.cast::<u16>().add(n).write(0);
        }
    }
    #[inline(always)]
    unsafe fn store_x<S: Simd>(row: *mut u32, at: usize, v: S::F) {
        Self::store::<S>(row.cast::<u16>().add(at), v);
    }
}

/// Load `n` <= LANES elements, the rest zero.
///
/// # Safety
/// As [`ElementType::load`], for `n` elements.
#[inline(always)]
pub unsafe fn load_part<S: Simd, E: ElementType>(p: *const E::T, n: usize) -> S::F {
    if n >= S::LANES {
        return E::load::<S>(p);
    }
    let mut lanes = [0.0_f32; 16];
    for (i, lane) in lanes.iter_mut().enumerate().take(n) {
        *lane = E::to_f32(p.add(i).read());
    }
    S::load(lanes.as_ptr())
}

/// Store the first `n` <= LANES elements.
///
/// # Safety
/// As [`ElementType::store`], for `n` elements.
#[inline(always)]
pub unsafe fn store_part<S: Simd, E: ElementType>(p: *mut E::T, v: S::F, n: usize) {
    if n >= S::LANES {
        return E::store::<S>(p, v);
    }
    let mut lanes = [0.0_f32; 16];
    S::store(lanes.as_mut_ptr(), v);
    for (i, lane) in lanes.iter().enumerate().take(n) {
        p.add(i).write(E::from_f32(*lane));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{SimdKernel, dispatch};

    struct RoundAll<'a>(&'a [f32], &'a mut Vec<u16>);

    impl SimdKernel for RoundAll<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.0.chunks(S::LANES) {
                let mut out = [0_u16; 16];
                store_part::<S, Bf16>(
                    out.as_mut_ptr(),
                    load_part::<S, F32>(chunk.as_ptr(), chunk.len()),
                    chunk.len(),
                );
                self.1.extend(&out[..chunk.len()]);
            }
        }
    }

    #[test]
    fn rounding_to_bf16_is_to_nearest_even_on_every_level() {
        let mut values = vec![
            0.0,
            -0.0,
            1.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN,
            1e-40,
        ];
        values.extend((0..4000_u32).map(|i| f32::from_bits(0x3f80_0000 + i * 977)));
        values.extend((0..4000_u32).map(|i| f32::from_bits(0xc000_8000 + i * 0x8000)));
        let expected: Vec<u16> = values.iter().map(|&x| to_bf16(x)).collect();
        for isa in Isa::available() {
            let mut got = Vec::new();
            // SAFETY: the level is available; the slices are valid.
            unsafe { dispatch(isa, RoundAll(&values, &mut got)) };
            assert_eq!(got, expected, "{isa:?}");
        }
    }

    #[test]
    fn nan_stays_nan_on_every_level() {
        let values = [
            f32::NAN,
            f32::from_bits(0x7fff_ffff),
            f32::from_bits(0xffff_ffff),
        ];
        for isa in Isa::available() {
            let mut got = Vec::new();
            // SAFETY: as above.
            unsafe { dispatch(isa, RoundAll(&values, &mut got)) };
            assert!(
                got.iter().all(|&x| from_bf16(x).is_nan()),
                "{isa:?}: {got:x?}"
            );
        }
    }
}
