//! The choice among CPU implementations: made by the processor, printable, and configurable.
//!
//! | choice | values | default | variable |
//! |---|---|---|---|
//! | [`simd`]: vector instructions of the kernels and products in Rust | `avx512`, `avx2`, `neon`, `scalar` | the widest available | `FRUGAL_SIMD` |
//! | [`multiplies_low_precision`]: the dtypes of libtorch's own products; operands of others are cast up, and the result is rounded once | `native` (both), `bf16`, `fp16`, `fp32` (none) | see there | `FRUGAL_LOW_PRECISION` |
//!
//! The variables are read once. They test the implementations of other machines: `cargo xtask test` runs the tests that depend on
//! products once for each. Results of two choices differ by rounding; each is deterministic.
//!
//! Measured, one thread, GFLOP/s, 512–4096 rows of a transformer's products:
//!
//! | processor | fp32, `gemm` crate | fp32, MKL | bf16, libtorch's own | fp16, libtorch's own |
//! |---|---|---|---|---|
//! | Intel Xeon with AVX-512 bf16 and fp16, without AMX | 143–161 | 148–163 | 73–85 | 145–157 |
//! | AMD Zen 4 (two threads) | 190–224 | 192–205 | 391–438 | 2 |
//! | AMD EPYC, later (two threads) | 320–505 | 134–225 | 710–1000 | 4–54 |
//! | Intel Xeon with AMX tiles of bf16 | 110–170 | 150–160 | 410–1120 | |
//!
//! So bf16 uses the processor's instructions on AMD or with AMX tiles, fp16 only with AMX tiles of fp16. Products of bf16 into fp32, which
//! libtorch does not have, are this crate's ([`multiplies_into_fp32`]): 730–990 on the later AMD processor, 370–780 with AMX tiles from
//! 512 rows on.

use std::fmt;
use std::sync::OnceLock;

use runtime::device::graph::operators_only;
use runtime::{Error, Result};
use tch::{Device, Kind};

/// Vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// Only those that every processor of the architecture has.
    Scalar,
    /// AVX2, FMA, F16C, BMI1 and BMI2.
    Avx2,
    /// AVX-512 F, BW, CD, DQ, VL.
    Avx512,
    /// ARM NEON.
    Neon,
}

impl Simd {
    const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon];

    fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Returns whether this processor has them.
    pub fn is_there(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Self::Scalar => true,
            Self::Avx2 => pulp::x86::V3::try_new().is_some() && is_x86_feature_detected!("f16c"),
            Self::Avx512 => Self::Avx2.is_there() && pulp::x86::V4::try_new().is_some(),
            Self::Neon => false,
        };
        #[cfg(not(target_arch = "x86_64"))]
        match self {
            Self::Scalar => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// The choices of this process. Displays as `avx512, bf16 in fp32, fp16 in fp32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Vector instructions of the kernels in Rust.
    pub simd: Simd,
    /// Whether to use libtorch's own bf16 products.
    pub native_bf16: bool,
    /// Whether to use libtorch's own fp16 products.
    pub native_f16: bool,
}

impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let products = |native| if native { "native" } else { "in fp32" };
        let (bf16, f16) = (products(self.native_bf16), products(self.native_f16));
        write!(f, "{}, bf16 {bf16}, fp16 {f16}", self.simd.name())
    }
}

/// Returns the choices of this process.
///
/// # Errors
/// `FRUGAL_SIMD` or `FRUGAL_LOW_PRECISION` has an unknown value, or one that this processor does not support. Products then return
/// an error; other kernels ignore the variables.
pub fn choices() -> Result<Choices> {
    decided().1.clone().map_err(|reason| Error::invalid("processor", reason))
}

/// Returns the vector instructions of the kernels in Rust.
pub fn simd() -> Simd {
    decided().0.simd
}

/// Returns whether this crate's own code computes tensors on `device`: on the CPU, unless this thread leaves all to libtorch's operators
/// ([`operators_only`]).
pub(crate) fn computes_on(device: Device) -> bool {
    device == Device::Cpu && !operators_only()
}

/// Returns whether libtorch's own products of `kind` run at full speed on this processor. For bf16: with AMX tiles, or with AVX-512
/// instructions on a processor not by Intel (Intel's run at half the rate of fp32). For fp16: with AMX tiles. Wider dtypes always
/// do.
pub fn multiplies_low_precision(kind: Kind) -> bool {
    let choices = decided().0;
    match kind {
        Kind::BFloat16 => choices.native_bf16,
        Kind::Half => choices.native_f16,
        _ => true,
    }
}

/// Returns whether products of `kind` into fp32 ([`mm_into`](crate::matmul::mm_into)) are faster than those of fp32: for bf16 where
/// [`multiplies_low_precision`], with `avx512`, on a processor that has AMX tiles, or AVX-512's instruction for pairs of bf16 at more than
/// the rate of fp32.
pub fn multiplies_into_fp32(kind: Kind) -> bool {
    kind == Kind::BFloat16 && bf16_instructions().is_some()
}

/// The instructions of products of bf16 into fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "other architectures have neither"))]
pub(crate) enum Bf16Instructions {
    /// AVX-512's for pairs. On Intel's processors they have half the rate of fp32.
    Pairs,
    /// AMX's for tiles.
    Tiles,
}

/// Returns the instructions of products of bf16 into fp32; `None` where those of fp32 are as fast.
pub(crate) fn bf16_instructions() -> Option<Bf16Instructions> {
    static CHOSEN: OnceLock<Option<Bf16Instructions>> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let choices = decided().0;
        if !choices.native_bf16 || choices.simd != Simd::Avx512 {
            return None;
        }
        #[cfg(target_arch = "x86_64")]
        if crate::simd::tiles().0 {
            return crate::amx::is_there().then_some(Bf16Instructions::Tiles);
        } else if is_x86_feature_detected!("avx512bf16") {
            return Some(Bf16Instructions::Pairs);
        }
        None
    })
}

/// Returns the choices, and the result of [`choices`].
fn decided() -> &'static (Choices, std::result::Result<Choices, String>) {
    static DECIDED: OnceLock<(Choices, std::result::Result<Choices, String>)> = OnceLock::new();
    DECIDED.get_or_init(|| {
        let read = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (simd, low) = (read("FRUGAL_SIMD"), read("FRUGAL_LOW_PRECISION"));
        let best = best();
        let result = forced(best, simd.as_deref(), low.as_deref());
        (result.as_ref().copied().unwrap_or(best), result)
    })
}

/// Returns the best choices for the processor.
fn best() -> Choices {
    let simd = [Simd::Avx512, Simd::Avx2, Simd::Neon].into_iter().find(|simd| simd.is_there());
    let simd = simd.unwrap_or(Simd::Scalar);
    #[cfg(target_arch = "x86_64")]
    let (native_bf16, native_f16) = {
        let (bf16_tiles, f16_tiles) = crate::simd::tiles();
        (bf16_tiles || is_x86_feature_detected!("avx512bf16") && !crate::simd::is_intel(), f16_tiles)
    };
    #[cfg(not(target_arch = "x86_64"))]
    let (native_bf16, native_f16) = (false, false);
    Choices { simd, native_bf16, native_f16 }
}

/// Applies the variables to `best`.
fn forced(
    best: Choices,
    simd: Option<&str>,
    low_precision: Option<&str>,
) -> std::result::Result<Choices, String> {
    let mut choices = best;
    if let Some(name) = simd {
        let there = Simd::ALL.into_iter().filter(|simd| simd.is_there());
        choices.simd = there.clone().find(|simd| simd.name() == name).ok_or_else(|| {
            let there: Vec<&str> = there.map(Simd::name).collect();
            format!("FRUGAL_SIMD is `{name}`; this processor has {}", there.join(", "))
        })?;
    }
    if let Some(name) = low_precision {
        (choices.native_bf16, choices.native_f16) = match name {
            "native" => (true, true),
            "bf16" => (true, false),
            "fp16" => (false, true),
            "fp32" => (false, false),
            other => {
                let reason = "expected `native`, `bf16`, `fp16` or `fp32`";
                return Err(format!("FRUGAL_LOW_PRECISION is `{other}`; {reason}"));
            }
        };
    }
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_choice_applies_or_is_refused_by_name() {
        let best = Choices { simd: Simd::Scalar, native_bf16: false, native_f16: true };
        let chosen = |simd, low| match forced(best, simd, low) {
            Ok(choices) => choices.to_string(),
            Err(reason) => reason,
        };
        assert_eq!(chosen(None, None), "scalar, bf16 in fp32, fp16 native");
        assert_eq!(chosen(Some("scalar"), Some("native")), "scalar, bf16 native, fp16 native");
        assert_eq!(chosen(None, Some("fp32")), "scalar, bf16 in fp32, fp16 in fp32");
        assert_eq!(chosen(None, Some("bf16")), "scalar, bf16 native, fp16 in fp32");
        assert_eq!(
            chosen(None, Some("fp8")),
            "FRUGAL_LOW_PRECISION is `fp8`; expected `native`, `bf16`, `fp16` or `fp32`"
        );
        let refused = chosen(Some("mmx"), None);
        assert!(refused.starts_with("FRUGAL_SIMD is `mmx`; this processor has scalar"), "{refused}");
        for simd in Simd::ALL {
            let chosen = chosen(Some(simd.name()), None);
            assert_eq!(chosen.starts_with(&format!("{},", simd.name())), simd.is_there(), "{chosen}");
        }
    }

    /// A choice by a variable applies to this process.
    #[test]
    fn the_process_uses_the_choices_of_its_variables() {
        let chosen = choices().unwrap();
        if let Ok(name) = std::env::var("FRUGAL_SIMD") {
            assert_eq!(chosen.simd.name(), name);
        }
        match std::env::var("FRUGAL_LOW_PRECISION").as_deref() {
            Ok("bf16") => assert!(chosen.native_bf16 && !chosen.native_f16),
            Ok("fp32") => assert!(!chosen.native_bf16 && !chosen.native_f16),
            Ok(other) => assert_eq!((chosen.native_bf16, chosen.native_f16), (other != "fp16", true)),
            _ => assert_eq!((chosen.native_bf16, chosen.native_f16), (best().native_bf16, best().native_f16)),
        }
    }
}
