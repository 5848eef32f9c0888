//! Vectors of f32 with one interface over the instruction levels.
//!
//! A kernel is written once as a [`SimdKernel`] generic over [`Simd`]; [`dispatch`] enters it
//! through a function compiled for the level. Everything called from there must be
//! `#[inline(always)]`, or enter again: only then do the intrinsics inline and the compiler may use
//! the level's registers.
//!
//! Operations of the levels `Avx2` and up give the same bits lane by lane (all are IEEE operations
//! in the same order), so a kernel that fixes the order of its sums gives the same result on all of
//! them. `Scalar` rounds products separately on CPUs without FMA.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has the level, pointers are valid for LANES elements"
)]

/// Operations that are one intrinsic at each x86 level.
#[cfg(target_arch = "x86_64")]
macro_rules! one_intrinsic_each {
    (
        $f:ty, $i:ty;
        splat: $splat:ident, add: $add:ident, sub: $sub:ident, mul: $mul:ident,
        div: $div:ident, max: $max:ident, fma: $fma:ident, bits: $bits:ident,
        from_bits: $from_bits:ident, and: $and:ident, or: $or:ident, add_u32: $add_u32:ident,
        load: $load:ident
    ) => {
        #[inline(always)]
        unsafe fn splat(x: f32) -> $f {
            $splat(x)
        }
        #[inline(always)]
        unsafe fn add(a: $f, b: $f) -> $f {
            $add(a, b)
        }
        #[inline(always)]
        unsafe fn sub(a: $f, b: $f) -> $f {
            $sub(a, b)
        }
        #[inline(always)]
        unsafe fn mul(a: $f, b: $f) -> $f {
            $mul(a, b)
        }
        #[inline(always)]
        unsafe fn div(a: $f, b: $f) -> $f {
            $div(a, b)
        }
        #[inline(always)]
        unsafe fn max(a: $f, b: $f) -> $f {
            $max(a, b)
        }
        #[inline(always)]
        unsafe fn fma(a: $f, b: $f, c: $f) -> $f {
            $fma(a, b, c)
        }
        #[inline(always)]
        unsafe fn bits(v: $f) -> $i {
            $bits(v)
        }
        #[inline(always)]
        unsafe fn from_bits(v: $i) -> $f {
            $from_bits(v)
        }
        #[inline(always)]
        unsafe fn and(a: $i, b: $i) -> $i {
            $and(a, b)
        }
        #[inline(always)]
        unsafe fn or(a: $i, b: $i) -> $i {
            $or(a, b)
        }
        #[inline(always)]
        unsafe fn add_u32(a: $i, b: $i) -> $i {
            $add_u32(a, b)
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> $f {
            $load(p)
        }
    };
}
mod scalar;
pub use scalar::Scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub use {
    avx2::Avx2,
    avx512::{Avx512, Avx512Bf16},
};

use crate::isa::Isa;

/// Lanes over which every sum is spread before its final fixed tree, whatever the width of the
/// registers.
pub const SUM_LANES: usize = 16;

/// # Safety
/// For all functions: the CPU supports the level; pointers are valid for `LANES` elements (no
/// alignment needed).
pub trait Simd: Copy + Send + Sync + 'static {
    type F: Copy;
    type I: Copy;
    /// f32 lanes of a register: divides [`SUM_LANES`].
    const LANES: usize;
    /// Accumulator registers a tile may use: rows x vectors.
    const TILE_ROWS: usize;
    const TILE_VECS: usize;
    /// The same for many rows: more rows, fewer vectors.
    const TALL_ROWS: usize;
    const TALL_VECS: usize;

    /// Run `kernel` inside a function compiled for this level.
    unsafe fn enter<K: SimdKernel>(kernel: K);

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// Round to the nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// 2^n of an integral n in [-126, 127].
    unsafe fn pow2(n: Self::F) -> Self::F;
    /// x where a < b, else y (also for NaN).
    unsafe fn select_lt(a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// Lane i of v where lo <= base + i < hi, else -inf.
    unsafe fn keep_range(v: Self::F, base: i32, lo: i32, hi: i32) -> Self::F;
    unsafe fn reduce_max(v: Self::F) -> f32;

    unsafe fn splat_u32(x: u32) -> Self::I;
    unsafe fn load_u32(p: *const u32) -> Self::I;
    unsafe fn store_u32(p: *mut u32, v: Self::I);
    unsafe fn bits(v: Self::F) -> Self::I;
    unsafe fn from_bits(v: Self::I) -> Self::F;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn add_u32(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn shl4(a: Self::I) -> Self::I;
    unsafe fn shl16(a: Self::I) -> Self::I;
    unsafe fn shr4(a: Self::I) -> Self::I;
    unsafe fn shr16(a: Self::I) -> Self::I;
    /// Entry `i % 16` of the 16 at `table`, for each lane i.
    unsafe fn look_up(table: *const f32, i: Self::I) -> Self::F;
    /// LANES u16, zero-extended.
    unsafe fn load_u16(p: *const u16) -> Self::I;
    /// The low halves of the lanes.
    unsafe fn store_u16(p: *mut u16, v: Self::I);
    /// Two finite numbers rounded to bf16, ties to even, the first one in the low half.
    #[inline(always)]
    unsafe fn pair_bf16(low: Self::F, high: Self::F) -> Self::I {
        let rounded = |v| {
            let bits = Self::bits(v);
            let odd = Self::and(Self::shr16(bits), Self::splat_u32(1));
            Self::add_u32(bits, Self::add_u32(odd, Self::splat_u32(0x7fff)))
        };
        Self::or(
            Self::shr16(rounded(low)),
            Self::and(rounded(high), Self::splat_u32(0xffff_0000)),
        )
    }
    /// acc + x1 * w1 + x0 * w0 of bf16 pairs, high half first; at the level that has the
    /// instruction.
    unsafe fn dot2(_acc: Self::F, _x: Self::I, _w: Self::I) -> Self::F {
        unreachable!("a kernel with dot2 says so in DOT")
    }

    /// Write the first `cols` (1..=LANES) words of LANES rows as columns:
    /// `dst[c * dst_stride + r] = rows[r][c]`.
    unsafe fn transpose(
        rows: *const *const u32,
        offset: usize,
        cols: usize,
        dst: *mut u32,
        dst_stride: usize,
    );

    /// Prefetch the cache line at `p`; never faults.
    unsafe fn prefetch(p: *const u8);
}

/// Work that is compiled once per level.
pub trait SimdKernel {
    /// True for kernels that use `dot2`: they are compiled only for the level that has it. For all
    /// others that level is `Avx512`.
    const DOT: bool = false;

    /// # Safety
    /// The CPU supports `S`; the kernel documents its other requirements.
    unsafe fn run<S: Simd>(self);
}

/// Run `kernel` on `isa`.
///
/// # Safety
/// `isa.runs_here()`, and the kernel's own requirements.
pub unsafe fn dispatch<K: SimdKernel>(isa: Isa, kernel: K) {
    debug_assert!(isa.runs_here(), "{isa:?} is not available on this CPU");
    #[cfg(target_arch = "x86_64")]
    if K::DOT {
        assert!(isa == Isa::Avx512Bf16, "{isa:?} has no bf16 dot product");
        return Avx512Bf16::enter(kernel);
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Avx2::enter(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => Avx512::enter(kernel),
        _ => Scalar::enter(kernel),
    }
}

/// Sum of SUM_LANES partial sums in a fixed tree.
#[inline(always)]
pub fn tree_sum(lanes: &[f32; SUM_LANES]) -> f32 {
    let mut s = *lanes;
    let mut width = SUM_LANES / 2;
    while width > 0 {
        for i in 0..width {
            s[i] += s[i + width];
        }
        width /= 2;
    }
    s[0]
}
