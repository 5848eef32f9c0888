//! Weights that stay quantized in memory: codes of 4 or 8 bits.
//!
//! ```text
//! y[n] = sum over runs r of scale[n][r] *
//!        sum over columns k of r of (code[n][k] - zero[n][r]) * x[k]
//! ```
//!
//! A run is some columns side by side that share a group ([`runs`]). Codes less their zeros are
//! exact in f32 and in bf16, so nothing is rounded before it is multiplied: a run's sum is one
//! chain of fused multiply-adds from zero, and one more adds it, times its scale, to the sum of the
//! runs before it. Where groups change every few columns (GPTQ's reordered ones), a number is code
//! less zero times scale in f32 instead, rounded once to the type of the product, and the product
//! has the bits that it would have with the same numbers packed at load. The groups alone decide
//! which.
//!
//! Up to a tile's rows are multiplied by numbers that are decoded in registers ([`few_rows`]); more
//! of them share a tile of a panel, decoded into scratch memory in the order of
//! [`super::PackedWeight`]. The chains are the same.
//!
//! Codes lie in 16-bit words, 2 or 4 columns of a row in each; in a panel, for each step of so many
//! columns, the words of its rows side by side. FP4 codes are looked up, and their scales, powers
//! of two, kept as bf16: 4.5 bits for each number.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shape"
)]

use super::{PANEL, TILE_UNITS, WeightShape};
use crate::elem::{Bf16, Dtype, ElementType, F32, to_bf16};
use crate::isa;
use crate::memory::AlignedWords;
use crate::pool;
use crate::simd::{Simd, SimdKernel, dispatch};

mod codes;
mod few_rows;
mod runs;
mod scaled;

pub use codes::CodeType;
pub(super) use codes::MAX_PER_WORD;
use codes::{Bytes, Codes, Fp4Nibbles, Fp8Bytes, Nibbles};
pub(super) use few_rows::RowProducts;
pub(super) use runs::ColumnRun;
use runs::ColumnRuns;

/// Codes' words between use and prefetch: 4 KiB, as in a product with numbers.
const AHEAD: usize = 2048;

/// A matrix to be packed; all pointers are to contiguous memory.
#[derive(Clone, Copy, Debug)]
pub struct CodedMatrix {
    pub code_type: CodeType,
    /// `[outputs, inputs]`, a byte per code.
    pub codes: *const u8,
    pub groups: usize,
    /// `[outputs, groups]`
    pub scales: *const f32,
    /// `[outputs, groups]`, or null: `zero` for all. `code_type` takes each.
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
    zero: f32,
    /// By column, padded to whole words.
    group_of: Vec<u32>,
    runs: ColumnRuns,
}

impl QuantizedWeight {
    /// Re-order `from`, of which nothing is kept. `shape.dtype` is the type of the product.
    ///
    /// # Safety
    /// The pointers of `from` cover the shape; groups of columns are below `from.groups`; the type
    /// of codes takes the zeros.
    pub unsafe fn pack(shape: WeightShape, from: &CodedMatrix) -> QuantizedWeight {
        let per_word = from.code_type.per_word();
        let row_words = shape.inputs.div_ceil(per_word);
        let panels = shape.panels();
        let codes = AlignedWords::new((panels * row_words * PANEL).div_ceil(2));
        let groups = std::slice::from_raw_parts(from.group_of, shape.inputs);
        let mut group_of = vec![0; row_words * per_word];
        group_of[..shape.inputs].copy_from_slice(groups);
        let panel_places = from.groups * PANEL;
        let packed = QuantizedWeight {
            shape,
            code_type: from.code_type,
            groups: from.groups,
            codes,
            scales: AlignedWords::new(
                panels * panel_places * from.code_type.scale_bytes() / size_of::<u32>(),
            ),
            zeros: (!from.zeros.is_null()).then(|| AlignedWords::new(panels * panel_places)),
            zero: from.zero,
            group_of,
            runs: ColumnRuns::find(groups, shape.dtype.per_unit(), per_word),
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
                    packed.pack_places(|at| from.zeros.add(at).read(), zeros, panel);
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

    /// Runs that units [from, from + units) are made of. Both ends are multiples of a tile's units,
    /// or the second is the end of the row, whose last run ends with a word where runs are long.
    pub(super) fn runs_within(&self, from: usize, units: usize) -> &[ColumnRun] {
        self.runs.within(from, units)
    }

    /// Whether sums of runs are multiplied by scales; else numbers are.
    pub(super) fn scales_sums(&self) -> bool {
        self.runs.are_long()
    }

    /// Scales of a run in f32, for the rows of a panel.
    ///
    /// # Safety
    /// `spare` has room for a panel's.
    #[inline(always)]
    pub(super) unsafe fn run_scales<S: Simd>(
        &self,
        panel: usize,
        run: &ColumnRun,
        spare: *mut f32,
    ) -> *const f32 {
        let place = (panel * self.groups + run.group) * PANEL;
        let scales = self.scales.as_ptr().cast_const();
        if self.code_type != CodeType::Fp4 {
            return scales.add(place).cast();
        }
        for lane in (0..PANEL).step_by(S::LANES) {
            let converted = Fp4Nibbles::scales::<S>(scales, place + lane);
            S::store(spare.add(lane), converted);
        }
        spare
    }

    /// What a tile holds for units [from, from + units) of a panel, in the order of a packed
    /// weight: exact numbers where sums are multiplied by scales, else numbers times their scales.
    ///
    /// # Safety
    /// `from` begins a tile; `tile` has room for the units, rounded up to 4 of them.
    #[inline(always)]
    pub(super) unsafe fn decode<S: Simd, E: ElementType>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        tile: *mut u32,
    ) {
        if !self.scales_sums() {
            return self.decode_scaled::<S, E>(panel, from, units, tile);
        }
        for run in self.runs_within(from, units) {
            let to = tile.add((run.first - from) * PANEL);
            match self.code_type {
                CodeType::Int4 => self.decode_run::<S, E, Nibbles>(panel, run, to),
                CodeType::Int8 => self.decode_run::<S, E, Bytes>(panel, run, to),
                CodeType::Fp8 => self.decode_run::<S, E, Fp8Bytes>(panel, run, to),
                CodeType::Fp4 => self.decode_run::<S, E, Fp4Nibbles>(panel, run, to),
            }
        }
    }

    #[inline(always)]
    unsafe fn decode_run<S: Simd, E: ElementType, C: Codes>(
        &self,
        panel: usize,
        run: &ColumnRun,
        tile: *mut u32,
    ) {
        let codes = self.run_codes::<E, C>(panel, run);
        let words = run.units * E::PER_UNIT / C::PER_WORD;
        for lane in (0..PANEL).step_by(S::LANES) {
            let zero = self.run_zeros::<S>(panel, run, lane);
            for word in 0..words {
                let at = codes.add(word * PANEL + lane);
                if lane == 0 {
                    prefetch_codes::<S>(at);
                }
                let word_codes = S::load_u16(at);
                let number = |i| C::number::<S>(word_codes, i, zero);
                let to = tile.add(word * C::PER_WORD / E::PER_UNIT * PANEL + lane);
                for unit in 0..C::PER_WORD / E::PER_UNIT {
                    let bits = if E::PER_UNIT == 1 {
                        S::bits(number(unit))
                    } else {
                        pair_exact::<S>(number(2 * unit), number(2 * unit + 1))
                    };
                    S::store_u32(to.add(unit * PANEL), bits);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn run_codes<E: ElementType, C: Codes>(
        &self,
        panel: usize,
        run: &ColumnRun,
    ) -> *const u16 {
        let first_word = run.first * E::PER_UNIT / C::PER_WORD;
        self.panel_codes(panel).add(first_word * PANEL)
    }

    /// Zeros of a run for the rows of a panel from `lane` on.
    #[inline(always)]
    unsafe fn run_zeros<S: Simd>(&self, panel: usize, run: &ColumnRun, lane: usize) -> S::F {
        match &self.zeros {
            Some(zeros) => {
                let place = (panel * self.groups + run.group) * PANEL + lane;
                S::load(zeros.as_ptr().cast::<f32>().add(place))
            }
            None => S::splat(self.zero),
        }
    }
}

/// Two numbers that are exact in bf16, the first one in the low half.
#[inline(always)]
unsafe fn pair_exact<S: Simd>(low: S::F, high: S::F) -> S::I {
    S::or(
        S::shr16(S::bits(low)),
        S::and(S::bits(high), S::splat_u32(0xffff_0000)),
    )
}

/// Ask for the words that follow those of a step.
#[inline(always)]
unsafe fn prefetch_codes<S: Simd>(codes: *const u16) {
    S::prefetch(codes.wrapping_add(AHEAD).cast());
    S::prefetch(codes.wrapping_add(AHEAD + PANEL / 2).cast());
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
            .decode_scaled::<S, E>(self.panel, self.from, self.units, self.tile);
    }
}
