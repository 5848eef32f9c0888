//! x86-64-v3: eight lanes, sixteen registers.

use std::arch::x86_64::*;

use super::{Simd, SimdKernel};

#[derive(Clone, Copy)]
pub struct Avx2;

impl Simd for Avx2 {
    type F = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    // 6 x 2 accumulators, 2 of w, 1 broadcast: 15 of 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECS: usize = 2;
    const TALL_ROWS: usize = 6;
    const TALL_VECS: usize = 2;

    #[target_feature(enable = "avx2,fma")]
    unsafe fn enter<K: SimdKernel>(kernel: K) {
        kernel.run::<Self>();
    }

    one_intrinsic_each! {
        __m256, __m256i;
        splat: _mm256_set1_ps, add: _mm256_add_ps, sub: _mm256_sub_ps,
        mul: _mm256_mul_ps, div: _mm256_div_ps, max: _mm256_max_ps,
        fma: _mm256_fmadd_ps, bits: _mm256_castps_si256, from_bits: _mm256_castsi256_ps,
        and: _mm256_and_si256, or: _mm256_or_si256, add_u32: _mm256_add_epi32,
        load: _mm256_loadu_ps
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        _mm256_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn pow2(n: __m256) -> __m256 {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    unsafe fn keep_range(v: __m256, base: i32, lo: i32, hi: i32) -> __m256 {
        let index = _mm256_add_epi32(
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
            _mm256_set1_epi32(base),
        );
        let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), index);
        let inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), index);
        let keep = _mm256_andnot_si256(below, inside);
        _mm256_blendv_ps(
            _mm256_set1_ps(f32::NEG_INFINITY),
            v,
            _mm256_castsi256_ps(keep),
        )
    }
    #[inline(always)]
    unsafe fn reduce_max(v: __m256) -> f32 {
        let h = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)))
    }
    #[inline(always)]
    unsafe fn splat_u32(x: u32) -> __m256i {
        _mm256_set1_epi32(x as i32)
    }
    #[inline(always)]
    unsafe fn load_u32(p: *const u32) -> __m256i {
        _mm256_loadu_si256(p.cast())
    }
    #[inline(always)]
    unsafe fn store_u32(p: *mut u32, v: __m256i) {
        _mm256_storeu_si256(p.cast(), v);
    }
    #[inline(always)]
    unsafe fn shl4(a: __m256i) -> __m256i {
        _mm256_slli_epi32::<4>(a)
    }
    #[inline(always)]
    unsafe fn shl16(a: __m256i) -> __m256i {
        _mm256_slli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn shr4(a: __m256i) -> __m256i {
        _mm256_srli_epi32::<4>(a)
    }
    #[inline(always)]
    unsafe fn look_up(table: *const f32, i: __m256i) -> __m256 {
        // The permutation takes the low 3 bits of an index, the blend its 4th one as a sign.
        let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
        let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.add(8)), i);
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i)))
    }
    #[inline(always)]
    unsafe fn shr16(a: __m256i) -> __m256i {
        _mm256_srli_epi32::<16>(a)
    }
    #[inline(always)]
    unsafe fn load_u16(p: *const u16) -> __m256i {
        _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_u16(p: *mut u16, v: __m256i) {
        let v = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
        let packed = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        _mm_storeu_si128(p.cast(), packed);
    }
    #[inline(always)]
    unsafe fn transpose(
        rows: *const *const u32,
        offset: usize,
        cols: usize,
        dst: *mut u32,
        dst_stride: usize,
    ) {
        let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(cols as i32), index);
        let mut r = [_mm256_setzero_ps(); 8];
        for (i, v) in r.iter_mut().enumerate() {
            *v = _mm256_castsi256_ps(_mm256_maskload_epi32(
                (*rows.add(i)).add(offset).cast(),
                mask,
            ));
        }
        let mut a = [_mm256_setzero_ps(); 8];
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        let mut b = [_mm256_setzero_ps(); 8];
        for half in 0..2 {
            let x0 = a[4 * half];
            let x1 = a[4 * half + 1];
            let x2 = a[4 * half + 2];
            let x3 = a[4 * half + 3];
            b[4 * half] = _mm256_shuffle_ps::<0x44>(x0, x2);
            b[4 * half + 1] = _mm256_shuffle_ps::<0xee>(x0, x2);
            b[4 * half + 2] = _mm256_shuffle_ps::<0x44>(x1, x3);
            b[4 * half + 3] = _mm256_shuffle_ps::<0xee>(x1, x3);
        }
        let mut out = [_mm256_setzero_ps(); 8];
        for i in 0..4 {
            out[i] = _mm256_permute2f128_ps::<0x20>(b[i], b[i + 4]);
            out[i + 4] = _mm256_permute2f128_ps::<0x31>(b[i], b[i + 4]);
        }
        for (c, v) in out.iter().enumerate().take(cols) {
            _mm256_storeu_ps(dst.add(c * dst_stride).cast(), *v);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
}
