//! Portable level: eight lanes in an array.

use super::{Simd, SimdKernel};

#[derive(Clone, Copy)]
pub struct Scalar;

const N: usize = 8;
type F = [f32; N];
type I = [u32; N];

/// Fused where the target has it; a call into libm per lane would be fifty times slower than the
/// two roundings.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

#[inline(always)]
fn map<const M: usize, A: Copy, B>(a: [A; M], f: impl Fn(A) -> B) -> [B; M] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip<const M: usize, A: Copy, B: Copy, C>(a: [A; M], b: [B; M], f: impl Fn(A, B) -> C) -> [C; M] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    type F = F;
    type I = I;
    const LANES: usize = N;
    const TILE_ROWS: usize = 3;
    const TILE_VECS: usize = 2;
    const TALL_ROWS: usize = 3;
    const TALL_VECS: usize = 2;

    unsafe fn enter<K: SimdKernel>(kernel: K) {
        kernel.run::<Self>();
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        p.cast::<F>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: F) {
        p.cast::<F>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| mul_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn pow2(n: F) -> F {
        map(n, |x| f32::from_bits(((x as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn select_lt(a: F, b: F, x: F, y: F) -> F {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    unsafe fn keep_range(v: F, base: i32, lo: i32, hi: i32) -> F {
        std::array::from_fn(|i| {
            if (lo..hi).contains(&(base + i as i32)) {
                v[i]
            } else {
                f32::NEG_INFINITY
            }
        })
    }
    #[inline(always)]
    unsafe fn reduce_max(v: F) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn splat_u32(x: u32) -> I {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load_u32(p: *const u32) -> I {
        p.cast::<I>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store_u32(p: *mut u32, v: I) {
        p.cast::<I>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn bits(v: F) -> I {
        map(v, f32::to_bits)
    }
    #[inline(always)]
    unsafe fn from_bits(v: I) -> F {
        map(v, f32::from_bits)
    }
    #[inline(always)]
    unsafe fn and(a: I, b: I) -> I {
        zip(a, b, |x, y| x & y)
    }
    #[inline(always)]
    unsafe fn or(a: I, b: I) -> I {
        zip(a, b, |x, y| x | y)
    }
    #[inline(always)]
    unsafe fn add_u32(a: I, b: I) -> I {
        zip(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn shl4(a: I) -> I {
        map(a, |x| x << 4)
    }
    #[inline(always)]
    unsafe fn shl16(a: I) -> I {
        map(a, |x| x << 16)
    }
    #[inline(always)]
    unsafe fn shr4(a: I) -> I {
        map(a, |x| x >> 4)
    }
    #[inline(always)]
    unsafe fn look_up(table: *const f32, i: I) -> F {
        map(i, |x| table.add(x as usize % 16).read())
    }
    #[inline(always)]
    unsafe fn shr16(a: I) -> I {
        map(a, |x| x >> 16)
    }
    #[inline(always)]
    unsafe fn load_u16(p: *const u16) -> I {
        map(p.cast::<[u16; N]>().read_unaligned(), u32::from)
    }
    #[inline(always)]
    unsafe fn store_u16(p: *mut u16, v: I) {
        p.cast::<[u16; N]>().write_unaligned(map(v, |x| x as u16));
    }
    #[inline(always)]
    unsafe fn transpose(
        rows: *const *const u32,
        offset: usize,
        cols: usize,
        dst: *mut u32,
        dst_stride: usize,
    ) {
        for r in 0..N {
            let row = (*rows.add(r)).add(offset);
            for c in 0..cols {
                dst.add(c * dst_stride + r)
                    .write(row.add(c).read_unaligned());
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
}
