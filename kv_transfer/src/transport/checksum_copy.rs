//! Page hash, and copy with the hash taken on the way.
//!
//! The hash is XXH3-64 (seed 0) over the page. Its inner loop is one multiply per 64 bytes, so
//! hashing while copying costs next no time where memory bandwidth is the limit. The copy uses
//! non-temporal stores: the destination is not read first, and neither process's cache is filled
//! with pages that are not used soon.
//!
//! Pages of more than 240 bytes and a multiple of 64 take the vector path (AVX-512 or AVX2, chosen
//! once at run time); any other shape is copied plainly and hashed by the `xxhash-rust` crate, with
//! which the tests compare, too.

use std::sync::OnceLock;

use xxhash_rust::xxh3::xxh3_64;

use crate::pool::{SumKind, weighted_sum};

/// XXH3's default secret.
static SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
static INIT: [u64; 8] = [
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
];

const STRIPE: usize = 64;
const BLOCK: usize = 1024;
/// Where the secret is read for a stripe of a block, for the scramble after a block, for the very
/// last stripe, for the merge.
const SECRET_SCRAMBLE: usize = 128;
const SECRET_LAST: usize = 121;
const SECRET_MERGE: usize = 11;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashKernel {
    Avx512,
    Avx2,
    Portable,
}

/// Kernel for this CPU.
pub fn hash_kernel() -> HashKernel {
    static KERNEL: OnceLock<HashKernel> = OnceLock::new();
    *KERNEL.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return HashKernel::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return HashKernel::Avx2;
            }
        }
        HashKernel::Portable
    })
}

/// Hash of `len` bytes at `src`.
///
/// # Safety
/// `src` is readable for `len` bytes. If another thread or process writes them meanwhile the result
/// is the hash of no particular content; callers detect that by the page's generation.
pub unsafe fn hash_page(src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise; the kernels below are only chosen when the CPU has them.
    unsafe { hash_with(hash_kernel(), src, len) }
}

/// Copy `len` bytes and return the hash of the bytes read.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, they do not overlap, and no other thread
/// accesses `dst` until this returns. As to `src`, see `hash_page`.
pub unsafe fn copy_hash(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { copy_hash_with(hash_kernel(), dst, src, len) }
}

/// Copies pages between two blocks of them, a (source, target) pair each, and returns the hashes of
/// the bytes read.
///
/// # Safety
/// The pages exist in their blocks, and no page of `dst` is a target twice. For each page as
/// `copy_hash`.
pub unsafe fn copy_hash_pages(
    dst: *mut u8,
    src: *const u8,
    page_bytes: usize,
    pages: &[(usize, usize)],
) -> Vec<u64> {
    pages
        .iter()
        .map(|&(source, target)| {
            // SAFETY: the caller's promise.
            unsafe {
                let from = src.add(source * page_bytes);
                copy_hash(dst.add(target * page_bytes), from, page_bytes)
            }
        })
        .collect()
}

/// As `hash_page`, by the announcer's kind of checksum.
///
/// # Safety
/// As `hash_page`.
pub unsafe fn hash_by(kind: SumKind, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            SumKind::Xxh3 => hash_page(src, len),
            SumKind::Weighted => weighted_sum(std::slice::from_raw_parts(src, len)),
        }
    }
}

/// As `copy_hash`, by the announcer's kind of checksum.
///
/// # Safety
/// As `copy_hash`.
pub unsafe fn copy_hash_by(kind: SumKind, dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise. The sum is taken of our copy, which no other thread writes.
    unsafe {
        match kind {
            SumKind::Xxh3 => copy_hash(dst, src, len),
            SumKind::Weighted => {
                std::ptr::copy_nonoverlapping(src, dst, len);
                weighted_sum(std::slice::from_raw_parts(dst, len))
            }
        }
    }
}

unsafe fn hash_with(kernel: HashKernel, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise; without COPY dst is not used.
    match unsafe { by_vectors::<false>(kernel, std::ptr::null_mut(), src, len) } {
        Some(sum) => sum,
        // SAFETY: src is readable for len bytes; see `hash_page` about concurrent writers.
        None => xxh3_64(unsafe { std::slice::from_raw_parts(src, len) }),
    }
}

unsafe fn copy_hash_with(kernel: HashKernel, dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    if let Some(sum) = unsafe { by_vectors::<true>(kernel, dst, src, len) } {
        return sum;
    }
    // SAFETY: the caller's promise. The hash is taken of our copy, which no other thread writes.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, len);
        xxh3_64(std::slice::from_raw_parts(dst, len))
    }
}

/// The vector path, if the kernel, the length and (with COPY) the destination's alignment allow it.
///
/// # Safety
/// As `hash_page`; with COPY as `copy_hash`. `kernel` was detected on this CPU.
unsafe fn by_vectors<const COPY: bool>(
    kernel: HashKernel,
    dst: *mut u8,
    src: *const u8,
    len: usize,
) -> Option<u64> {
    if len <= 240 || !len.is_multiple_of(STRIPE) || (COPY && !dst.addr().is_multiple_of(STRIPE)) {
        return None;
    }
    // SAFETY: the shape was just checked; the rest is the caller's promise.
    let acc = unsafe {
        match kernel {
            #[cfg(target_arch = "x86_64")]
            HashKernel::Avx512 => x86::avx512::<COPY>(dst, src, len),
            #[cfg(target_arch = "x86_64")]
            HashKernel::Avx2 => x86::avx2::<COPY>(dst, src, len),
            _ => return None,
        }
    };
    Some(merge_lanes(acc, len))
}

fn secret_u64(at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&SECRET[at..at + 8]);
    u64::from_le_bytes(word)
}

fn merge_lanes(acc: [u64; 8], len: usize) -> u64 {
    let mut sum = (len as u64).wrapping_mul(PRIME64_1);
    for (i, pair) in acc.chunks_exact(2).enumerate() {
        let offset = SECRET_MERGE + 16 * i;
        let wide =
            u128::from(pair[0] ^ secret_u64(offset)) * u128::from(pair[1] ^ secret_u64(offset + 8));
        sum = sum.wrapping_add(wide as u64 ^ (wide >> 64) as u64);
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(0x1656_6791_9E37_79F9);
    sum ^ (sum >> 32)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, INIT, PRIME32_1, SECRET, SECRET_LAST, SECRET_SCRAMBLE, STRIPE};

    /// How far ahead of the loads to prefetch [bytes]. The hash's instructions shorten the CPU's
    /// own look ahead: copy with hash reached 0.87 of the plain copy at 1024, 0.92 at 2048 and
    /// 4096, 0.90 at 8192 (64 KiB pages, AVX-512, thread CPU time, n = 30).
    const AHEAD: usize = 2048;

    /// # Safety
    /// `src` readable for `len`; with COPY `dst` writable for `len` and 64-byte aligned; `len` >
    /// 240 and a multiple of 64.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512<const COPY: bool>(dst: *mut u8, src: *const u8, len: usize) -> [u64; 8] {
        // SAFETY: every offset below is < len rounded to stripes, and secret offsets are ≤ 128 of
        // 192 bytes.
        unsafe {
            let key = |at: usize| _mm512_loadu_si512(SECRET.as_ptr().add(at).cast());
            let stripe = |acc: __m512i, at: usize, secret: usize| {
                let data = _mm512_loadu_si512(src.add(at).cast());
                _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at + AHEAD).cast());
                if COPY {
                    _mm512_stream_si512(dst.add(at).cast(), data);
                }
                let mixed = _mm512_xor_si512(data, key(secret));
                let product = _mm512_mul_epu32(mixed, _mm512_srli_epi64::<32>(mixed));
                _mm512_add_epi64(
                    _mm512_add_epi64(acc, product),
                    _mm512_shuffle_epi32::<0x4E>(data),
                )
            };
            let prime = _mm512_set1_epi64(PRIME32_1 as i64);
            let mut acc = _mm512_loadu_si512(INIT.as_ptr().cast());
            let blocks = (len - 1) / BLOCK;
            for block in 0..blocks {
                for i in 0..BLOCK / STRIPE {
                    acc = stripe(acc, block * BLOCK + i * STRIPE, i * 8);
                }
                let shifted = _mm512_xor_si512(
                    _mm512_xor_si512(acc, _mm512_srli_epi64::<47>(acc)),
                    key(SECRET_SCRAMBLE),
                );
                let low = _mm512_mul_epu32(shifted, prime);
                let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(shifted), prime);
                acc = _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high));
            }
            let stripes = (len - blocks * BLOCK) / STRIPE;
            for i in 0..stripes - 1 {
                acc = stripe(acc, blocks * BLOCK + i * STRIPE, i * 8);
            }
            acc = stripe(acc, len - STRIPE, SECRET_LAST);
            if COPY {
                _mm_sfence();
            }
            let mut out = [0u64; 8];
            _mm512_storeu_si512(out.as_mut_ptr().cast(), acc);
            out
        }
    }

    /// # Safety
    /// As `avx512`.
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2<const COPY: bool>(dst: *mut u8, src: *const u8, len: usize) -> [u64; 8] {
        // SAFETY: as in `avx512`, with two half stripes.
        unsafe {
            let key = |at: usize| _mm256_loadu_si256(SECRET.as_ptr().add(at).cast());
            let half = |acc: __m256i, at: usize, secret: usize| {
                let data = _mm256_loadu_si256(src.add(at).cast());
                if COPY {
                    _mm256_stream_si256(dst.add(at).cast(), data);
                }
                let mixed = _mm256_xor_si256(data, key(secret));
                let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
                _mm256_add_epi64(
                    _mm256_add_epi64(acc, product),
                    _mm256_shuffle_epi32::<0x4E>(data),
                )
            };
            let stripe = |acc: [__m256i; 2], at: usize, secret: usize| {
                _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at + AHEAD).cast());
                [half(acc[0], at, secret), half(acc[1], at + 32, secret + 32)]
            };
            let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
            let scramble = |acc: __m256i, secret: usize| {
                let shifted = _mm256_xor_si256(
                    _mm256_xor_si256(acc, _mm256_srli_epi64::<47>(acc)),
                    key(secret),
                );
                let low = _mm256_mul_epu32(shifted, prime);
                let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(shifted), prime);
                _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
            };
            let init = |i: usize| _mm256_loadu_si256(INIT.as_ptr().add(i).cast());
            let mut acc = [init(0), init(4)];
            let blocks = (len - 1) / BLOCK;
            for block in 0..blocks {
                for i in 0..BLOCK / STRIPE {
                    acc = stripe(acc, block * BLOCK + i * STRIPE, i * 8);
                }
                acc = [
                    scramble(acc[0], SECRET_SCRAMBLE),
                    scramble(acc[1], SECRET_SCRAMBLE + 32),
                ];
            }
            let stripes = (len - blocks * BLOCK) / STRIPE;
            for i in 0..stripes - 1 {
                acc = stripe(acc, blocks * BLOCK + i * STRIPE, i * 8);
            }
            acc = stripe(acc, len - STRIPE, SECRET_LAST);
            if COPY {
                _mm_sfence();
            }
            let mut out = [0u64; 8];
            _mm256_storeu_si256(out.as_mut_ptr().cast(), acc[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(4).cast(), acc[1]);
            out
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Aligned([u8; 9000]);

    fn kernels() -> Vec<HashKernel> {
        let mut all = vec![HashKernel::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(is_x86_feature_detected!("avx2").then_some(HashKernel::Avx2));
            all.extend(is_x86_feature_detected!("avx512f").then_some(HashKernel::Avx512));
        }
        all
    }

    #[test]
    fn every_kernel_gives_xxh3_and_copies_exactly_the_page() {
        let mut src = Aligned([0; 9000]);
        let mut word = 1u64;
        for byte in &mut src.0 {
            word = word
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            *byte = (word >> 56) as u8;
        }
        for len in [
            64, 72, 240, 256, 320, 960, 1024, 1088, 2048, 4096, 4160, 8192, 8896,
        ] {
            let expected = xxh3_64(&src.0[..len]);
            for kernel in kernels() {
                let mut dst = Aligned([0xEE; 9000]);
                // SAFETY: both arrays have 9000 bytes and are ours.
                let (hashed, copied) = unsafe {
                    (
                        hash_with(kernel, src.0.as_ptr(), len),
                        copy_hash_with(kernel, dst.0.as_mut_ptr(), src.0.as_ptr(), len),
                    )
                };
                assert_eq!(
                    (hashed, copied),
                    (expected, expected),
                    "{kernel:?}, {len} bytes"
                );
                assert_eq!(dst.0[..len], src.0[..len], "{kernel:?}, {len} bytes");
                assert!(
                    dst.0[len..].iter().all(|&b| b == 0xEE),
                    "{kernel:?} writes beyond {len} bytes"
                );
            }
        }
    }

    #[test]
    fn pages_go_where_they_are_sent_with_the_hash_of_what_was_read() {
        let src: Vec<u8> = (0..320u32).map(|i| ((i * 31) >> 2) as u8).collect();
        let mut dst = vec![0xEE; 256];
        // SAFETY: 5 pages are read and 4 can be written, 64 bytes each.
        let hashes =
            unsafe { copy_hash_pages(dst.as_mut_ptr(), src.as_ptr(), 64, &[(4, 1), (0, 3)]) };
        assert_eq!(hashes, [xxh3_64(&src[256..]), xxh3_64(&src[..64])]);
        assert_eq!((&dst[64..128], &dst[192..]), (&src[256..], &src[..64]));
        assert!(dst[..64].iter().chain(&dst[128..192]).all(|&b| b == 0xEE));
    }
}
