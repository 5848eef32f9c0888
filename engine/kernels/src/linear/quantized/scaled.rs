//! Numbers times their scales, rounded: for matrices whose groups change every few columns, and for
//! rows as numbers.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shape"
)]

use super::{Bytes, CodeType, Codes, Fp4Nibbles, Fp8Bytes, Nibbles, QuantizedWeight};
use super::{RowProducts, prefetch_codes};
use crate::elem::ElementType;
use crate::linear::PANEL;
use crate::simd::Simd;

/// Vectors of a panel, at most.
const MOST_VECTORS: usize = 8;

impl QuantizedWeight {
    /// Numbers times their scales, rounded, of units [from, from + units) of a panel, in the order
    /// of a packed weight.
    ///
    /// # Safety
    /// `from` begins a word; `tile` has room for the units, rounded up to 4 of them.
    #[inline(always)]
    pub(super) unsafe fn decode_scaled<S: Simd, E: ElementType>(
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
        self.clear_column_behind::<E>(from, units, tile);
    }

    /// The column behind the last one is 0, as in a packed weight.
    #[inline(always)]
    unsafe fn clear_column_behind<E: ElementType>(
        &self,
        from: usize,
        units: usize,
        tile: *mut u32,
    ) {
        if E::PER_UNIT == 2 && self.shape.inputs % 2 == 1 && from + units == self.shape.units() {
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
        for word in 0..words {
            prefetch_codes::<S>(self.panel_codes(panel).add((first + word) * PANEL));
            for lane in (0..PANEL).step_by(S::LANES) {
                let numbers = self.scaled_numbers::<S, C>(panel, first + word, lane);
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

    /// Numbers times scales of a word's columns, for the rows of a panel from `lane` on; those
    /// behind the word's are 0.
    #[inline(always)]
    unsafe fn scaled_numbers<S: Simd, C: Codes>(
        &self,
        panel: usize,
        word: usize,
        lane: usize,
    ) -> [S::F; 4] {
        let mut places = [panel * self.groups * PANEL + lane; 4];
        for (i, place) in places.iter_mut().enumerate().take(C::PER_WORD) {
            *place += *self.group_of.get_unchecked(word * C::PER_WORD + i) as usize * PANEL;
        }
        let zeros = match &self.zeros {
            Some(zeros) => places.map(|place| S::load(zeros.as_ptr().cast::<f32>().add(place))),
            None => [S::splat(self.zero); 4],
        };
        let codes = S::load_u16(self.panel_codes(panel).add(word * PANEL + lane));
        let scales = self.scales.as_ptr().cast_const();
        let mut numbers = [S::splat(0.0); 4];
        for (i, number) in numbers.iter_mut().enumerate().take(C::PER_WORD) {
            let difference = C::number::<S>(codes, i, zeros[i]);
            *number = S::mul(difference, C::scales::<S>(scales, places[i]));
        }
        numbers
    }

    /// Products of one row with units [from, from + units) of a panel, added up in registers: the
    /// bits are those of decoding the units first, which pays only where other rows share them.
    /// Not for products by the dot product instruction.
    ///
    /// # Safety
    /// `from` begins a word; x covers the units.
    #[inline(always)]
    pub(crate) unsafe fn add_scaled_row<S: Simd, E: ElementType>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        row: RowProducts,
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
        row: RowProducts,
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
        let mut x = row.x.cast::<f32>();
        for word in first..first + whole {
            self.add_scaled_word::<S, E, C>(panel, word, C::PER_WORD, x, &mut sums);
            x = x.add(C::PER_WORD);
        }
        let rest = columns % C::PER_WORD;
        if rest > 0 {
            self.add_scaled_word::<S, E, C>(panel, first + whole, rest, x, &mut sums);
        }
        for (v, sum) in sums.iter().enumerate().take(vectors) {
            S::store(row.out.add(v * S::LANES), *sum);
        }
    }

    /// Add the products of the first `columns` columns of a word of each of the panel's rows.
    #[inline(always)]
    unsafe fn add_scaled_word<S: Simd, E: ElementType, C: Codes>(
        &self,
        panel: usize,
        word: usize,
        columns: usize,
        x: *const f32,
        sums: &mut [S::F; MOST_VECTORS],
    ) {
        prefetch_codes::<S>(self.panel_codes(panel).add(word * PANEL));
        for (v, sum) in sums.iter_mut().enumerate().take(PANEL / S::LANES) {
            let numbers = self.scaled_numbers::<S, C>(panel, word, v * S::LANES);
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
