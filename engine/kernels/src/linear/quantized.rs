//! Weights that stay quantized in memory: codes of 4 or 8 bits, numbers only per tile.
//!
//! ```text
//! W[n][k] = (code[n][k] - zero[n][g]) * scale[n][g]        g = group_of[k]
//! ```
//!
//! in f32, then rounded once to the type of the product. A tile of a panel is decoded into scratch
//! memory in the order of [`super::PackedWeight`], and multiplied like one: the product has the
//! bits that it would have with the same numbers packed at load. Many rows share a decoded tile;
//! one row pays for decoding, and reads a half or a quarter of the memory.
//!
//! Codes lie in 16-bit words, 2 or 4 columns of a row in each; in a panel, for each step of so many
//! columns, the words of its rows side by side. An integer becomes a number without shifts: in the
//! mantissa of a power of two whose last place has the weight of the code's lowest bit. FP4 codes
//! are looked up, and their scales, powers of two, kept as bf16: 4.5 bits for each number.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shape"
)]

use super::{PANEL, WeightShape};
use crate::elem::{Bf16, Dtype, ElementType, F32, to_bf16};
use crate::isa;
use crate::memory::AlignedWords;
use crate::pool;
use crate::simd::{Simd, SimdKernel, dispatch};

/// Codes' words between use and prefetch: 4 KiB, as in a product with numbers.
const AHEAD: usize = 2048;

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
    const fn per_word(self) -> usize {
        match self {
            CodeType::Int4 | CodeType::Fp4 => 4,
            CodeType::Int8 | CodeType::Fp8 => 2,
        }
    }

    /// Bytes of a scale in memory.
    const fn scale_bytes(self) -> usize {
        match self {
            CodeType::Fp4 => 2,
            CodeType::Int4 | CodeType::Int8 | CodeType::Fp8 => 4,
        }
    }
}

/// A matrix to be packed; all pointers are to contiguous memory.
#[derive(Clone, Copy, Debug)]
pub struct CodedMatrix {
    pub code_type: CodeType,
    /// `[outputs, inputs]`, a byte per code.
    pub codes: *const u8,
    pub groups: usize,
    /// `[outputs, groups]`
    pub scales: *const f32,
    /// `[outputs, groups]`, or null: `zero` for all.
    pub zeros: *const f32,
    pub zero: f32,
    /// `[inputs]`, each below `groups`.
    pub group_of: *const u32,
}

// SAFETY: items only read it; the caller of `pack` vouches for it.
unsafe impl Sync for CodedMatrix {}

/// A quantized weight matrix in packed order. Owns its memory.
#[derive(Debug)]
pub struct QuantizedWeight {
    shape: WeightShape,
    code_type: CodeType,
    groups: usize,
    /// u16 `[panels, words of a row, PANEL]`
    codes: AlignedWords,
    /// f32 or bf16 `[panels, groups, PANEL]`
    scales: AlignedWords,
    /// f32, as `scales`; None: `zero` for all.
    zeros: Option<AlignedWords>,
    /// 0 where each group has its own.
    zero: f32,
    /// By column, padded to whole words.
    group_of: Vec<u32>,
}

impl QuantizedWeight {
    /// Re-order `from`, of which nothing is kept. `shape.dtype` is the type of the product.
    ///
    /// # Safety
    /// The pointers of `from` cover the shape; groups of columns are below `from.groups`.
    pub unsafe fn pack(shape: WeightShape, from: &CodedMatrix) -> QuantizedWeight {
        let per_word = from.code_type.per_word();
        let row_words = shape.inputs.div_ceil(per_word);
        let panels = shape.panels();
        let codes = AlignedWords::new((panels * row_words * PANEL).div_ceil(2));
        let mut group_of = vec![0; row_words * per_word];
        group_of[..shape.inputs]
            .copy_from_slice(std::slice::from_raw_parts(from.group_of, shape.inputs));
        let panel_places = from.groups * PANEL;
        let has_common_zero = from.zeros.is_null() && is_common_zero(from.code_type, from.zero);
        let packed = QuantizedWeight {
            shape,
            code_type: from.code_type,
            groups: from.groups,
            codes,
            scales: AlignedWords::new(
                panels * panel_places * from.code_type.scale_bytes() / size_of::<u32>(),
            ),
            zeros: (!has_common_zero).then(|| AlignedWords::new(panels * panel_places)),
            zero: if has_common_zero { from.zero } else { 0.0 },
            group_of,
        };
        pool::for_each(panels, &|panel| {
            // SAFETY: passed on; each panel has its own part of the memory.
            unsafe {
                packed.pack_codes(from, panel);
                let scale_of = |at| from.scales.add(at).read();
                if from.code_type == CodeType::Fp4 {
                    packed.pack_places(|at| to_bf16(scale_of(at)), &packed.scales, panel);
                } else {
                    packed.pack_places(scale_of, &packed.scales, panel);
                }
                if let Some(zeros) = &packed.zeros {
                    let zero_of = |at| {
                        if from.zeros.is_null() {
                            from.zero
                        } else {
                            from.zeros.add(at).read()
                        }
                    };
                    packed.pack_places(zero_of, zeros, panel);
                }
            }
        });
        packed
    }

    unsafe fn pack_codes(&self, from: &CodedMatrix, panel: usize) {
        let per_word = self.code_type.per_word();
        let bits = 16 / per_word;
        let row_words = self.row_words();
        let to = self.panel_codes(panel).cast_mut();
        for lane in 0..PANEL {
            let row = panel * PANEL + lane;
            for word in 0..row_words {
                let mut packed = 0;
                let columns = per_word.min(self.shape.inputs - word * per_word);
                if row < self.shape.outputs {
                    let at = from.codes.add(row * self.shape.inputs + word * per_word);
                    for i in 0..columns {
                        packed |= u16::from(at.add(i).read()) << (bits * i);
                    }
                }
                to.add(word * PANEL + lane).write(packed);
            }
        }
    }

    /// Scales or zeros of a panel, lanes side by side; 0 for rows that there are not.
    unsafe fn pack_places<T: Default>(
        &self,
        from: impl Fn(usize) -> T,
        to: &AlignedWords,
        panel: usize,
    ) {
        let to = to.as_ptr().cast::<T>().add(panel * self.groups * PANEL);
        for lane in 0..PANEL {
            let row = panel * PANEL + lane;
            for group in 0..self.groups {
                let value = if row < self.shape.outputs {
                    from(row * self.groups + group)
                } else {
                    T::default()
                };
                to.add(group * PANEL + lane).write(value);
            }
        }
    }

    pub fn shape(&self) -> WeightShape {
        self.shape
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.shape.panels() * self.panel_bytes() + self.group_of.len() * 4
    }

    /// Bytes of a panel's codes, scales and zeros.
    pub(super) fn panel_bytes(&self) -> usize {
        let places = self.groups * PANEL;
        let codes = self.row_words() * PANEL * 2;
        let zeros = if self.zeros.is_some() { places * 4 } else { 0 };
        codes + places * self.code_type.scale_bytes() + zeros
    }

    fn row_words(&self) -> usize {
        self.shape.inputs.div_ceil(self.code_type.per_word())
    }

    fn panel_codes(&self, panel: usize) -> *const u16 {
        let at = self.codes.as_ptr().cast::<u16>();
        at.wrapping_add(panel * self.row_words() * PANEL)
    }

    /// Write rows `ids` as numbers to `out` (`[ids, inputs]`, type of the product). For tests and
    /// for tokens of a step.
    ///
    /// # Safety
    /// Each id is in [0, outputs); `out` covers the ids.
    pub unsafe fn rows(&self, ids: &[i64], out: *mut u8) {
        match self.shape.dtype {
            Dtype::F32 => self.rows_as::<F32>(ids, out),
            Dtype::Bf16 => self.rows_as::<Bf16>(ids, out),
        }
    }

    unsafe fn rows_as<E: ElementType>(&self, ids: &[i64], out: *mut u8) {
        let units = self.shape.units();
        let mut tile = vec![0_u32; (units.next_multiple_of(4)) * PANEL];
        let row_bytes = self.shape.inputs * self.shape.dtype.bytes();
        for (t, &id) in ids.iter().enumerate() {
            let id = id as usize;
            let decode = DecodeTile::<E> {
                weight: self,
                panel: id / PANEL,
                from: 0,
                units,
                tile: tile.as_mut_ptr(),
                elem: std::marker::PhantomData,
            };
            dispatch(isa::current(), decode);
            let to = out.add(t * row_bytes);
            for u in 0..units {
                let unit = tile[u * PANEL + id % PANEL].to_le_bytes();
                let count = unit.len().min(row_bytes - 4 * u);
                std::ptr::copy_nonoverlapping(unit.as_ptr(), to.add(4 * u), count);
            }
        }
    }

    /// Numbers of units [from, from + units) of a panel, in the order of a packed weight.
    ///
    /// # Safety
    /// `from` begins a word; `tile` has room for the units, rounded up to 4 of them.
    #[inline(always)]
    pub(super) unsafe fn decode<S: Simd, E: ElementType>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        tile: *mut u32,
    ) {
        match self.code_type {
            CodeType::Int4 => self.decode_codes::<S, E, Nibbles>(panel, from, units, tile),
            CodeType::Int8 => self.decode_codes::<S, E, Bytes>(panel, from, units, tile),
            CodeType::Fp8 => self.decode_codes::<S, E, Fp8Bytes>(panel, from, units, tile),
            CodeType::Fp4 => self.decode_codes::<S, E, Fp4Nibbles>(panel, from, units, tile),
        }
        if E::PER_UNIT == 2 && self.shape.inputs % 2 == 1 && from + units == self.shape.units() {
            // The column behind the last one is 0, as in a packed weight.
            for lane in 0..PANEL {
                let last = tile.add((units - 1) * PANEL + lane);
                last.write(last.read() & 0xffff);
            }
        }
    }

    #[inline(always)]
    unsafe fn decode_codes<S: Simd, E: ElementType, C: Codes>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        tile: *mut u32,
    ) {
        let first = from * E::PER_UNIT / C::PER_WORD;
        let words = (units * E::PER_UNIT).div_ceil(C::PER_WORD);
        let codes = self.panel_codes(panel).add(first * PANEL);
        let places = panel * self.groups * PANEL;
        let scales = self.scales.as_ptr().cast_const();
        let zeros = self
            .zeros
            .as_ref()
            .map(|zeros| zeros.as_ptr().cast::<f32>().add(places).cast_const());
        for word in 0..words {
            let column = (first + word) * C::PER_WORD;
            S::prefetch(codes.wrapping_add(word * PANEL + AHEAD).cast());
            S::prefetch(codes.wrapping_add(word * PANEL + AHEAD + PANEL / 2).cast());
            let mut group_at = [0; 4];
            for (i, at) in group_at.iter_mut().enumerate().take(C::PER_WORD) {
                *at = *self.group_of.get_unchecked(column + i) as usize * PANEL;
            }
            for lane in (0..PANEL).step_by(S::LANES) {
                let word_codes = S::load_u16(codes.add(word * PANEL + lane));
                let mut numbers = C::differences::<S>(word_codes, self.zero);
                for i in 0..C::PER_WORD {
                    let at = group_at[i] + lane;
                    if let Some(zeros) = zeros {
                        numbers[i] = S::sub(numbers[i], S::load(zeros.add(at)));
                    }
                    let scale = C::scales::<S>(scales, places + at);
                    numbers[i] = S::mul(numbers[i], scale);
                }
                let to = tile.add(word * C::PER_WORD / E::PER_UNIT * PANEL + lane);
                if E::PER_UNIT == 1 {
                    for (i, number) in numbers.iter().enumerate().take(C::PER_WORD) {
                        S::store_u32(to.add(i * PANEL), S::bits(*number));
                    }
                } else {
                    for i in 0..C::PER_WORD / 2 {
                        let unit = S::pair_bf16(numbers[2 * i], numbers[2 * i + 1]);
                        S::store_u32(to.add(i * PANEL), unit);
                    }
                }
            }
        }
    }
}

/// One row of x for [`QuantizedWeight::add_row`].
pub(super) struct RowProduct {
    /// Its units, packed.
    pub x: *const u32,
    /// `PANEL` sums in f32.
    pub out: *mut f32,
    /// Start from what `out` holds, else from zero.
    pub add: bool,
}

/// Vectors of a panel, at most.
const MOST_VECTORS: usize = 8;

impl QuantizedWeight {
    /// Products of one row with units [from, from + units) of a panel, added up in registers: the
    /// bits are those of decoding the units first, which pays only where other rows share them.
    /// Not for products by the dot product instruction.
    ///
    /// # Safety
    /// `from` begins a word; x covers the units.
    #[inline(always)]
    pub(super) unsafe fn add_row<S: Simd, E: ElementType>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        row: RowProduct,
    ) {
        match self.code_type {
            CodeType::Int4 => self.add_row_of::<S, E, Nibbles>(panel, from, units, row),
            CodeType::Int8 => self.add_row_of::<S, E, Bytes>(panel, from, units, row),
            CodeType::Fp8 => self.add_row_of::<S, E, Fp8Bytes>(panel, from, units, row),
            CodeType::Fp4 => self.add_row_of::<S, E, Fp4Nibbles>(panel, from, units, row),
        }
    }

    #[inline(always)]
    unsafe fn add_row_of<S: Simd, E: ElementType, C: Codes>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        row: RowProduct,
    ) {
        let vectors = PANEL / S::LANES;
        let mut sums = [S::splat(0.0); MOST_VECTORS];
        if row.add {
            for (v, sum) in sums.iter_mut().enumerate().take(vectors) {
                *sum = S::load(row.out.add(v * S::LANES));
            }
        }
        let columns = units * E::PER_UNIT;
        let first = from * E::PER_UNIT / C::PER_WORD;
        let whole = columns / C::PER_WORD;
        for word in 0..whole {
            let x = row.x.add(word * C::PER_WORD / E::PER_UNIT * E::X_WORDS);
            self.add_word::<S, E, C>(panel, first + word, C::PER_WORD, x, &mut sums);
        }
        if !columns.is_multiple_of(C::PER_WORD) {
            let x = row.x.add(whole * C::PER_WORD / E::PER_UNIT * E::X_WORDS);
            self.add_word::<S, E, C>(panel, first + whole, columns % C::PER_WORD, x, &mut sums);
        }
        for (v, sum) in sums.iter().enumerate().take(vectors) {
            S::store(row.out.add(v * S::LANES), *sum);
        }
    }

    /// Add the products of the first `columns` columns of a word of each of the panel's rows.
    #[inline(always)]
    unsafe fn add_word<S: Simd, E: ElementType, C: Codes>(
        &self,
        panel: usize,
        word: usize,
        columns: usize,
        x: *const u32,
        sums: &mut [S::F; MOST_VECTORS],
    ) {
        let codes = self.panel_codes(panel).add(word * PANEL);
        S::prefetch(codes.wrapping_add(AHEAD).cast());
        S::prefetch(codes.wrapping_add(AHEAD + PANEL / 2).cast());
        let places = panel * self.groups * PANEL;
        let scales = self.scales.as_ptr().cast_const();
        let zeros = self
            .zeros
            .as_ref()
            .map(|zeros| zeros.as_ptr().cast::<f32>().cast_const());
        let mut group_at = [places; 4];
        for (i, at) in group_at.iter_mut().enumerate().take(C::PER_WORD) {
            *at += *self.group_of.get_unchecked(word * C::PER_WORD + i) as usize * PANEL;
        }
        let x = x.cast::<f32>();
        for (v, sum) in sums.iter_mut().enumerate().take(PANEL / S::LANES) {
            let lane = v * S::LANES;
            let mut numbers = C::differences::<S>(S::load_u16(codes.add(lane)), self.zero);
            for i in 0..C::PER_WORD {
                let at = group_at[i] + lane;
                if let Some(zeros) = zeros {
                    numbers[i] = S::sub(numbers[i], S::load(zeros.add(at)));
                }
                numbers[i] = S::mul(numbers[i], C::scales::<S>(scales, at));
            }
            if E::PER_UNIT == 1 {
                for (i, number) in numbers.iter().enumerate().take(columns) {
                    *sum = S::fma(S::splat(x.add(i).read()), *number, *sum);
                }
            } else {
                // The odd column first, as in a packed weight.
                for i in (0..columns).step_by(2) {
                    let odd = round_finite::<S>(numbers[i + 1]);
                    *sum = S::fma(S::splat(x.add(i + 1).read()), odd, *sum);
                    let even = round_finite::<S>(numbers[i]);
                    *sum = S::fma(S::splat(x.add(i).read()), even, *sum);
                }
            }
        }
    }
}

/// A finite number rounded to bf16, as `pair_bf16` rounds it.
#[inline(always)]
unsafe fn round_finite<S: Simd>(v: S::F) -> S::F {
    let bits = S::bits(v);
    let odd = S::and(S::shr16(bits), S::splat_u32(1));
    let up = S::add_u32(bits, S::add_u32(odd, S::splat_u32(0x7fff)));
    S::from_bits(S::and(up, S::splat_u32(0xffff_0000)))
}

struct DecodeTile<'a, E: ElementType> {
    weight: &'a QuantizedWeight,
    panel: usize,
    from: usize,
    units: usize,
    tile: *mut u32,
    elem: std::marker::PhantomData<E>,
}

impl<E: ElementType> SimdKernel for DecodeTile<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        self.weight
            .decode::<S, E>(self.panel, self.from, self.units, self.tile);
    }
}

/// How numbers come out of a word.
///
/// # Safety
/// The CPU supports `S`.
trait Codes {
    /// Columns in a word.
    const PER_WORD: usize;
    /// Codes of a word, lowest first, less `zero`; those behind `PER_WORD` are 0. `zero` is one
    /// that `is_common_zero` takes.
    unsafe fn differences<S: Simd>(word: S::I, zero: f32) -> [S::F; 4];
    /// Scales from number `at` on; `scales` has enough.
    #[inline(always)]
    unsafe fn scales<S: Simd>(scales: *const u32, at: usize) -> S::F {
        S::load(scales.cast::<f32>().add(at))
    }
}

/// Whether every code's difference to `zero` is exact in one subtraction, with the code in the
/// mantissa of a power of two.
fn is_common_zero(code_type: CodeType, zero: f32) -> bool {
    match code_type {
        CodeType::Fp8 | CodeType::Fp4 => zero == 0.0,
        CodeType::Int4 | CodeType::Int8 => zero.fract() == 0.0 && (0.0..256.0).contains(&zero),
    }
}

/// An unsigned code whose lowest bit is bit `place`, less `zero`.
#[inline(always)]
unsafe fn code_difference<S: Simd>(word: S::I, mask: u32, place: u32, zero: f32) -> S::F {
    let power = (127 + 23 - place) << 23;
    let in_mantissa = S::or(
        S::and(word, S::splat_u32(mask << place)),
        S::splat_u32(power),
    );
    S::sub(
        S::from_bits(in_mantissa),
        S::splat(f32::from_bits(power) + zero),
    )
}

struct Nibbles;

impl Codes for Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn differences<S: Simd>(word: S::I, zero: f32) -> [S::F; 4] {
        [
            code_difference::<S>(word, 0xf, 0, zero),
            code_difference::<S>(word, 0xf, 4, zero),
            code_difference::<S>(word, 0xf, 8, zero),
            code_difference::<S>(word, 0xf, 12, zero),
        ]
    }
}

struct Bytes;

impl Codes for Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn differences<S: Simd>(word: S::I, zero: f32) -> [S::F; 4] {
        let none = S::splat(0.0);
        [
            code_difference::<S>(word, 0xff, 0, zero),
            code_difference::<S>(word, 0xff, 8, zero),
            none,
            none,
        ]
    }
}

struct Fp8Bytes;

impl Codes for Fp8Bytes {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn differences<S: Simd>(word: S::I, _zero: f32) -> [S::F; 4] {
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

struct Fp4Nibbles;

static FP4_NUMBERS: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

impl Codes for Fp4Nibbles {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn differences<S: Simd>(word: S::I, _zero: f32) -> [S::F; 4] {
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
