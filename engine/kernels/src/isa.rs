//! Which instructions the kernels use: found once per process, capped by `BATON_CPU_ISA`.
//!
//! 1. [`Isa::best`] asks the CPU.
//! 2. [`current`] applies the cap and remembers the answer.
//! 3. Every public kernel runs on it.
//!
//! Tests call the kernels' `*_on` forms with each of [`Isa::available`].

use std::sync::OnceLock;

/// An instruction level. Later ones include the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Portable Rust, eight lanes that the compiler may vectorize.
    Scalar,
    /// x86-64-v3: AVX2 and FMA.
    Avx2,
    /// x86-64-v4: AVX-512 F, BW, DQ and VL; bf16 is widened to f32.
    Avx512,
    /// Also the bf16 dot product. On Intel parts without AMX in use it has a quarter of the FMA's
    /// issue rate (measured on Emerald Rapids: 1.6 against 7.0 G/s), so it is the default on AMD
    /// only, where it doubles the bf16 rate.
    Avx512Bf16,
}

/// `BATON_CPU_ISA` holds something else than a level's name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("BATON_CPU_ISA={0}: use scalar, avx2, avx512 or avx512_bf16, or leave it unset")]
pub struct UnknownIsa(String);

impl Isa {
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Every level this CPU can run, least first.
    pub fn available() -> Vec<Isa> {
        [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16]
            .into_iter()
            .filter(|isa| isa.runs_here())
            .collect()
    }

    /// The fastest level here.
    pub fn best() -> Isa {
        if Isa::Avx512Bf16.runs_here() && is_amd() {
            return Isa::Avx512Bf16;
        }
        [Isa::Avx512, Isa::Avx2]
            .into_iter()
            .find(|isa| isa.runs_here())
            .unwrap_or(Isa::Scalar)
    }

    /// `best()` lowered to the level called `cap`; "avx512_bf16" also raises an Intel CPU that has
    /// it.
    pub fn capped(cap: Option<&str>) -> Result<Isa, UnknownIsa> {
        let Some(cap) = cap.filter(|s| !s.is_empty()) else {
            return Ok(Isa::best());
        };
        let levels = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];
        let cap = levels
            .into_iter()
            .find(|isa| isa.name() == cap)
            .ok_or_else(|| UnknownIsa(cap.to_owned()))?;
        Ok(if cap.runs_here() {
            cap
        } else {
            Isa::best().min(cap)
        })
    }

    #[cfg(target_arch = "x86_64")]
    pub fn runs_here(self) -> bool {
        let v3 = || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let v4 = || {
            v3() && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => v3(),
            Isa::Avx512 => v4(),
            Isa::Avx512Bf16 => v4() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn runs_here(self) -> bool {
        self == Isa::Scalar
    }
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    // "AuthenticAMD", or Hygon's licensed "HygonGenuine".
    (id.ebx == 0x6874_7541 && id.edx == 0x6974_6e65) || id.ebx == 0x6f67_7948
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

static CURRENT: OnceLock<Result<Isa, UnknownIsa>> = OnceLock::new();

/// The level this process uses; the first call reads `BATON_CPU_ISA`.
pub fn try_current() -> Result<Isa, &'static UnknownIsa> {
    CURRENT
        .get_or_init(|| Isa::capped(std::env::var("BATON_CPU_ISA").ok().as_deref()))
        .as_ref()
        .copied()
}

/// Like [`try_current`], and the best level when the variable is wrong, which baton.layers.ops_cpu
/// refuses at import.
pub fn current() -> Isa {
    try_current().unwrap_or_else(|_| Isa::best())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_always_runs_and_best_is_available() {
        assert_eq!(Isa::available()[0], Isa::Scalar);
        assert!(Isa::available().contains(&Isa::best()));
    }

    #[test]
    fn cap_lowers_and_a_wrong_name_is_refused() {
        assert_eq!(Isa::capped(Some("scalar")), Ok(Isa::Scalar));
        assert_eq!(Isa::capped(Some("")), Ok(Isa::best()));
        assert!(Isa::capped(Some("avx512")).is_ok_and(|isa| isa <= Isa::Avx512));
        assert!(Isa::capped(Some("sse9")).is_err_and(|e| e.to_string().contains("sse9")));
    }
}
