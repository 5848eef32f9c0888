//! x86-64-v4: sixteen lanes, thirty-two registers; the two levels differ in `dot2` and `pair_bf16` alone.

use std::arch::x86_64::*;

use super::{Simd, SimdKernel};

#[derive(Clone, Copy)]
pub struct Avx512;

/// With the bf16 dot product instruction.
#[derive(Clone, Copy)]
pub struct Avx512Bf16;

/// Sixteen rows of sixteen words become columns: 4x4 blocks by shuffles within 128-bit lanes, then
/// whole lanes. The lanes are gathered by the loads, which run on ports the shuffles do not need.
#[inline(always)]
unsafe fn transpose16(
    rows: *const *const u32,
    offset: usize,
    cols: usize,
    dst: *mut u32,
    dst_stride: usize,
) {
    let mut r = [_mm512_setzero_ps(); 16];
    if cols == 16 {
        for i in 0..4 {
            for quarter in 0..4 {
                // Lane l of r[4 * quarter + i] is words 4 * quarter .. of row 4 * l + i.
                let at = |l: usize| {
                    (*rows.add(4 * l + i))
                        .add(offset + 4 * quarter)
                        .cast::<f32>()
                };
                let v = _mm512_castps128_ps512(_mm_loadu_ps(at(0)));
                let v = _mm512_insertf32x4::<1>(v, _mm_loadu_ps(at(1)));
                let v = _mm512_insertf32x4::<2>(v, _mm_loadu_ps(at(2)));
                r[4 * quarter + i] = _mm512_insertf32x4::<3>(v, _mm_loadu_ps(at(3)));
            }
        }
    } else {
        let mut spare = [[0_u32; 16]; 16];
        for (i, row) in spare.iter_mut().enumerate() {
            // As bytes: a row of bf16 may start at an odd one.
            let from = (*rows.add(i)).cast::<u8>().wrapping_add(4 * offset);
            std::ptr::copy_nonoverlapping(from, row.as_mut_ptr().cast(), 4 * cols);
        }
        for i in 0..4 {
            for quarter in 0..4 {
                let at = |l: usize| spare[4 * l + i].as_ptr().add(4 * quarter).cast::<f32>();
                let v = _mm512_castps128_ps512(_mm_loadu_ps(at(0)));
                let v = _mm512_insertf32x4::<1>(v, _mm_loadu_ps(at(1)));
                let v = _mm512_insertf32x4::<2>(v, _mm_loadu_ps(at(2)));
                r[4 * quarter + i] = _mm512_insertf32x4::<3>(v, _mm_loadu_ps(at(3)));
            }
        }
    }
    for quarter in 0..4 {
        let r0 = r[4 * quarter];
        let r1 = r[4 * quarter + 1];
        let r2 = r[4 * quarter + 2];
        let r3 = r[4 * quarter + 3];
        let a0 = _mm512_unpacklo_ps(r0, r1);
        let a1 = _mm512_unpackhi_ps(r0, r1);
        let a2 = _mm512_unpacklo_ps(r2, r3);
        let a3 = _mm512_unpackhi_ps(r2, r3);
        let columns = [
            _mm512_shuffle_ps::<0x44>(a0, a2),
            _mm512_shuffle_ps::<0xee>(a0, a2),
            _mm512_shuffle_ps::<0x44>(a1, a3),
            _mm512_shuffle_ps::<0xee>(a1, a3),
        ];
        for (i, column) in columns.iter().enumerate() {
            if 4 * quarter + i < cols {
                _mm512_storeu_ps(dst.add((4 * quarter + i) * dst_stride).cast(), *column);
            }
        }
    }
}

macro_rules! level {
    ($name:ident, $features:literal $(, $only:item)*) => {
        impl Simd for $name {
            type F = __m512;
            type I = __m512i;
            const LANES: usize = 16;
            // 6 x 4 accumulators, 4 of w, 1 broadcast: 29 of 32 registers.
            const TILE_ROWS: usize = 6;
            const TILE_VECS: usize = 4;
            const TALL_ROWS: usize = 12;
            const TALL_VECS: usize = 2;

            #[target_feature(enable = $features)]
            unsafe fn enter<K: SimdKernel>(kernel: K) {
                kernel.run::<Self>();
            }

            one_intrinsic_each! {
                __m512, __m512i;
                splat: _mm512_set1_ps, add: _mm512_add_ps, sub: _mm512_sub_ps,
                mul: _mm512_mul_ps, div: _mm512_div_ps, max: _mm512_max_ps,
                fma: _mm512_fmadd_ps, bits: _mm512_castps_si512, from_bits: _mm512_castsi512_ps,
                and: _mm512_and_si512, or: _mm512_or_si512, add_u32: _mm512_add_epi32,
                load: _mm512_loadu_ps
            }

            #[inline(always)]
            unsafe fn store(p: *mut f32, v: __m512) {
                _mm512_storeu_ps(p, v);
            }
            #[inline(always)]
            unsafe fn round(a: __m512) -> __m512 {
                _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
            }
            #[inline(always)]
            unsafe fn pow2(n: __m512) -> __m512 {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
            #[inline(always)]
            unsafe fn select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
                _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
            }
            #[inline(always)]
            unsafe fn keep_range(v: __m512, base: i32, lo: i32, hi: i32) -> __m512 {
                let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let index = _mm512_add_epi32(iota, _mm512_set1_epi32(base));
                let inside = _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(hi));
                let keep = _mm512_mask_cmpge_epi32_mask(inside, index, _mm512_set1_epi32(lo));
                _mm512_mask_blend_ps(keep, _mm512_set1_ps(f32::NEG_INFINITY), v)
            }
            #[inline(always)]
            unsafe fn reduce_max(v: __m512) -> f32 {
                _mm512_reduce_max_ps(v)
            }
            #[inline(always)]
            unsafe fn splat_u32(x: u32) -> __m512i {
                _mm512_set1_epi32(x as i32)
            }
            #[inline(always)]
            unsafe fn load_u32(p: *const u32) -> __m512i {
                _mm512_loadu_si512(p.cast())
            }
            #[inline(always)]
            unsafe fn store_u32(p: *mut u32, v: __m512i) {
                _mm512_storeu_si512(p.cast(), v);
            }
            #[inline(always)]
            unsafe fn shl4(a: __m512i) -> __m512i {
                _mm512_slli_epi32::<4>(a)
            }
            #[inline(always)]
            unsafe fn shl16(a: __m512i) -> __m512i {
                _mm512_slli_epi32::<16>(a)
            }
            #[inline(always)]
            unsafe fn shr4(a: __m512i) -> __m512i {
                _mm512_srli_epi32::<4>(a)
            }
            #[inline(always)]
            unsafe fn look_up(table: *const f32, i: __m512i) -> __m512 {
                _mm512_permutexvar_ps(i, _mm512_loadu_ps(table))
            }
            #[inline(always)]
            unsafe fn shr16(a: __m512i) -> __m512i {
                _mm512_srli_epi32::<16>(a)
            }
            #[inline(always)]
            unsafe fn load_u16(p: *const u16) -> __m512i {
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))
            }
            #[inline(always)]
            unsafe fn store_u16(p: *mut u16, v: __m512i) {
                _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(v));
            }
            #[inline(always)]
            unsafe fn transpose(
                rows: *const *const u32,
                offset: usize,
                cols: usize,
                dst: *mut u32,
                stride: usize,
            ) {
                transpose16(rows, offset, cols, dst, stride);
            }
            #[inline(always)]
            unsafe fn prefetch(p: *const u8) {
                _mm_prefetch::<_MM_HINT_T0>(p.cast());
            }
            $($only)*
        }
    };
}

level!(Avx512, "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl");
level!(
    Avx512Bf16,
    "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16",
    #[inline(always)]
    unsafe fn dot2(acc: __m512, x: __m512i, w: __m512i) -> __m512 {
        // SAFETY: both types are 512 plain bits.
        let x = std::mem::transmute::<__m512i, __m512bh>(x);
        let w = std::mem::transmute::<__m512i, __m512bh>(w);
        _mm512_dpbf16_ps(acc, x, w)
    },
    // Numbers that are subnormal become 0, as `dot2` takes them.
    #[inline(always)]
    unsafe fn pair_bf16(low: __m512, high: __m512) -> __m512i {
        // SAFETY: both types are 512 plain bits.
        let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        let order = _mm512_load_si512(INTERLEAVED.0.as_ptr().cast());
        _mm512_permutexvar_epi16(order, halves)
    }
);

#[repr(align(64))]
struct Words([u16; 32]);

/// Words of the lower half at even places, of the upper one at odd places.
static INTERLEAVED: Words = {
    let mut order = [0; 32];
    let mut place = 0;
    while place < 32 {
        order[place] = (place / 2 + place % 2 * 16) as u16;
        place += 1;
    }
    Words(order)
};
