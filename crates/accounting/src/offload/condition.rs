//! The smallest number of tokens whose compute hides loading.
//!
//! Loading a layer of P parameters of s bytes over a link of B bytes per second takes `s·P/B` seconds. With T tokens (without
//! attention's core) its forward takes `2·P·T` FLOPs, its backward `4·P·T`, and with recomputation `6·P·T`; a frozen layer has
//! no weight gradients, and its backward with recomputation takes `4·P·T`. At F FLOP/s, as measured:
//!
//! ```text
//! s·P/B ≤ 2·P·T/F    T_forward  ≥ s/2 · F/B         bf16:  F/B
//! s·P/B ≤ 6·P·T/F    T_backward ≥ s/6 · F/B                F/(3·B)
//! s·P/B ≤ 4·P·T/F    T_frozen   ≥ s/4 · F/B                F/(2·B)
//! ```
//!
//! If a fraction ρ of the layers is resident, evenly interleaved, it computes while others load: `(1 - ρ)` times the tokens. P
//! cancels: the condition depends on machine and number format, not on the model. T are the tokens of one pass over the layers:
//! gradient accumulation does not help unless each layer runs all micro-batches while it is loaded. Gradients in the weights'
//! dtype are copied the other way and need no more than the loads if the link is as fast in both directions.
//!
//! The rates of [`GPUS`] are those of real trainings: about 0.55 to 0.75 of the dense bf16 peak in [`hardware`](crate::hardware). [`gpu`]
//! assumes 0.55 of it for the other devices there. Products in fp32 use no tensor cores, because TF32 is off by default in libtorch, and
//! are assumed to reach 0.7 of the fp32 peak: 47 TFLOP/s on an H100, against 550 in bf16. (On an H200 the fused loss of 2048 tokens and a
//! vocabulary of 151,936 reached 0.74 of it: 1.67 TFLOP in 33.6 ms, `reports/h200`.) A x16 slot reaches about 25 GB/s with PCIe generation
//! 4 and 50 GB/s with generation 5 from pinned memory, of 32 and 64 by the specification (PCI-SIG). A collective over NVLink reaches about
//! 80 % of the link's rate in one direction: 300 GB/s on an A100, 450 GB/s on an H100, 150 GB/s on a V100, 900 GB/s on a B200 (NVIDIA's
//! data sheets), and 448 GB/s over Infinity Fabric on an MI300X (AMD's).

use crate::hardware::{self, Hardware};
use crate::{Dtype, Error};

/// Bytes per second that a link of PCIe 3.0 × 16 reaches.
pub const GEN3: f64 = 12.5e9;

/// Bytes per second that a link of PCIe 4.0 × 16 reaches.
pub const GEN4: f64 = 25e9;

/// Bytes per second that a link of PCIe 5.0 × 16 reaches.
pub const GEN5: f64 = 50e9;

/// The share of its dense bf16 peak that a training is assumed to reach on a GPU without a measured rate.
const ASSUMED_SHARE: f64 = 0.55;

/// The share of a GPU's fp32 peak that products are assumed to reach.
const FP32_SHARE: f64 = 0.7;

/// A GPU with the rate that trainings reach on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// The name for [`gpu`].
    pub name: &'static str,
    /// The name in [`hardware`].
    hardware: &'static str,
    /// FLOP/s reached in bf16 (fp16 on GPUs without bf16).
    pub flops: f64,
    /// Bytes per second that a PCIe link of its generation reaches.
    pub link: f64,
    /// Bytes per second that a collective over NVLink or Infinity Fabric reaches; `None` for a GPU with PCIe alone.
    pub nvlink: Option<f64>,
}

/// Common GPUs with the rates of real trainings.
pub const GPUS: [Gpu; 5] = [
    Gpu { name: "3090", hardware: "rtx3090", flops: 40e12, link: GEN4, nvlink: None },
    Gpu { name: "4090", hardware: "rtx4090", flops: 120e12, link: GEN4, nvlink: None },
    Gpu { name: "a100", hardware: "a100", flops: 200e12, link: GEN4, nvlink: Some(230e9) },
    Gpu { name: "h100", hardware: "h100", flops: 550e12, link: GEN5, nvlink: Some(380e9) },
    Gpu { name: "h200", hardware: "h200", flops: 550e12, link: GEN5, nvlink: Some(380e9) },
];

impl Gpu {
    /// Returns the bytes per second of a collective between GPUs of one machine: over NVLink, else over PCIe.
    pub fn between_gpus(&self) -> f64 {
        self.nvlink.unwrap_or(self.link)
    }

    /// Returns the FLOP/s that matrix products of fp32 or bf16 operands reach.
    ///
    /// # Errors
    /// Another dtype; bf16 on a GPU without it.
    pub fn products(&self, dtype: Dtype) -> Result<f64, Error> {
        let sheet = self.data_sheet()?;
        match dtype {
            Dtype::Fp32 => Ok(sheet.fp32 * FP32_SHARE),
            Dtype::Bf16 if sheet.has_bf16() => Ok(self.flops),
            _ => Err(Error::Shape {
                what: format!("{} ({}) has no products in {dtype}", self.name, sheet.title),
                remedy: "plan for float32, or for another GPU".into(),
            }),
        }
    }

    /// Returns the data-sheet figures.
    ///
    /// # Errors
    /// Never for the GPUs of [`GPUS`] and [`gpu`].
    pub fn data_sheet(&self) -> Result<Hardware, Error> {
        hardware::find(self.hardware)
    }
}

/// Returns the GPU of a name in [`hardware`], ignoring case; `4090` is `rtx4090`.
///
/// # Errors
/// A name that [`hardware::find`] does not know.
pub fn gpu(name: &str) -> Result<Gpu, Error> {
    let known = GPUS.into_iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name));
    let sheet = match known {
        Some(gpu) => return Ok(gpu),
        None => hardware::find(name)?,
    };
    if let Some(gpu) = GPUS.into_iter().find(|gpu| gpu.hardware == sheet.name) {
        return Ok(gpu);
    }
    let (link, nvlink) = match sheet.name {
        "b200" => (GEN5, Some(720e9)),
        "mi300x" => (GEN5, Some(360e9)),
        "a100-40gb" => (GEN4, Some(230e9)),
        "v100" => (GEN3, Some(120e9)),
        _ => (GEN3, None),
    };
    Ok(Gpu { name: sheet.name, hardware: sheet.name, flops: sheet.bf16 * ASSUMED_SHARE, link, nvlink })
}

/// A pass over the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The forward.
    Forward,
    /// The backward with recomputation, of layers that are trained.
    Backward,
    /// The backward with recomputation, of frozen layers.
    FrozenBackward,
}

impl Direction {
    /// All passes.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::FrozenBackward];

    /// Returns the FLOPs per parameter and token.
    pub const fn flops(self) -> f64 {
        match self {
            Self::Forward => 2.0,
            Self::Backward => 6.0,
            Self::FrozenBackward => 4.0,
        }
    }

    /// Returns a short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::FrozenBackward => "backward, frozen",
        }
    }
}

/// A machine and a number format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Condition {
    /// F: FLOP/s reached.
    pub flops: f64,
    /// B: bytes per second of the link.
    pub link: f64,
    /// s: bytes of a parameter; 2 for bf16, 1 for int8.
    pub bytes_per_parameter: f64,
    /// ρ: the share of layers that is resident, 0 to 1.
    pub resident_share: f64,
}

/// Returns the smallest number of tokens of a pass whose loads are hidden by compute.
///
/// # Errors
/// A rate or a parameter's bytes that are not positive, a share outside 0 to 1.
///
/// ```
/// use accounting::offload::{Condition, Direction, GEN4, gpu, least_tokens};
///
/// let flops = gpu("4090")?.flops;
/// let bf16 = Condition { flops, link: GEN4, bytes_per_parameter: 2.0, resident_share: 0.0 };
/// assert_eq!(least_tokens(&bf16, Direction::Forward)?, 4800);
/// assert_eq!(least_tokens(&bf16, Direction::Backward)?, 1600);
/// assert_eq!(least_tokens(&Condition { resident_share: 0.5, ..bf16 }, Direction::Forward)?, 2400);
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn least_tokens(condition: &Condition, direction: Direction) -> Result<u64, Error> {
    let Condition { flops, link, bytes_per_parameter, resident_share } = *condition;
    for rate in [flops, link, bytes_per_parameter] {
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(Error::OutOfRange {
                what: "a rate",
                given: rate,
                range: "the positive numbers",
                remedy: "give FLOP/s, bytes per second and bytes of a parameter",
            });
        }
    }
    if !(0.0..=1.0).contains(&resident_share) {
        return Err(Error::OutOfRange {
            what: "the resident share",
            given: resident_share,
            range: "0 to 1",
            remedy: "give resident layers by all layers",
        });
    }
    let tokens = (1.0 - resident_share) * bytes_per_parameter / direction.flops() * flops / link;
    // Do not round up a whole number that floating-point error put slightly above itself.
    Ok((tokens * (1.0 - 1e-12)).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published with the GPUs' rates: forward and backward at 25 GB/s, then at 50 GB/s, rounded.
    #[test]
    fn the_table_of_gpus_matches_published_values() {
        let table = [
            ("3090", GEN4, 1600, 533),
            ("3090", GEN5, 800, 267),
            ("4090", GEN4, 4800, 1600),
            ("4090", GEN5, 2400, 800),
            ("A100", GEN4, 8000, 2667),
            ("h100", GEN4, 22000, 7333),
            ("h100", GEN5, 11000, 3667),
            ("h200", GEN5, 11000, 3667),
        ];
        for (name, link, forward, backward) in table {
            let flops = gpu(name).unwrap().flops;
            let condition = Condition { flops, link, bytes_per_parameter: 2.0, resident_share: 0.0 };
            let least = |direction| least_tokens(&condition, direction).unwrap();
            assert_eq!(least(Direction::Forward), forward, "{name}");
            // The published ones are rounded to the nearest, which may be one token too few.
            assert!([backward, backward + 1].contains(&least(Direction::Backward)), "{name}");
            assert_eq!(least(Direction::Backward), forward.div_ceil(3), "{name}");
            assert_eq!(least(Direction::FrozenBackward), forward / 2, "{name}");
        }
    }

    #[test]
    fn a_gpus_reached_rate_is_below_its_data_sheet() {
        for gpu in GPUS {
            let sheet = gpu.data_sheet().unwrap();
            assert!((0.5..0.8).contains(&(gpu.flops / sheet.bf16)), "{}", gpu.name);
        }
        assert_eq!(gpu("RTX4090").unwrap().name, "4090");
        assert!(gpu("5090").unwrap_err().to_string().contains("known are: b200, h200"));
    }

    /// The peaks are those of NVIDIA's data sheets without TF32: an H100 is 15 times slower in fp32 than in bf16, an RTX 4090 twice.
    #[test]
    fn products_in_fp32_have_their_own_rate() {
        for (name, fp32) in
            [("h100", 0.7 * 67.5e12), ("a100", 0.7 * 19.5e12), ("4090", 0.7 * 82.6e12), ("t4", 0.7 * 8.1e12)]
        {
            let rate = gpu(name).unwrap().products(Dtype::Fp32).unwrap();
            assert!((rate / fp32 - 1.0).abs() < 1e-12, "{name}: {rate}");
        }
        let h100 = gpu("h100").unwrap();
        assert_eq!(h100.products(Dtype::Bf16).unwrap(), h100.flops);
        for (name, title) in [("t4", "NVIDIA T4 16 GB"), ("v100", "NVIDIA V100 SXM2 32 GB")] {
            let error = gpu(name).unwrap().products(Dtype::Bf16).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} ({title}")) && error.contains("float32"), "{error}");
        }
    }

    #[test]
    fn every_device_of_the_list_is_planned_for() {
        for sheet in hardware::ALL {
            let gpu = gpu(sheet.name).unwrap();
            assert_eq!(gpu.data_sheet().unwrap(), sheet);
            assert!((0.5..0.8).contains(&(gpu.flops / sheet.bf16)), "{}", sheet.name);
            assert!(gpu.link < gpu.nvlink.unwrap_or(f64::INFINITY), "{}", sheet.name);
        }
        // A data sheet's figures are found by both names.
        assert_eq!(hardware::find("4090").unwrap().name, "rtx4090");
    }

    #[test]
    fn invalid_values_are_refused() {
        let condition =
            |flops, share| Condition { flops, link: 1.0, bytes_per_parameter: 2.0, resident_share: share };
        assert!(least_tokens(&condition(0.0, 0.0), Direction::Forward).is_err());
        assert!(least_tokens(&condition(f64::NAN, 0.0), Direction::Forward).is_err());
        assert!(least_tokens(&condition(1.0, 1.5), Direction::Forward).is_err());
        assert_eq!(least_tokens(&condition(1e12, 1.0), Direction::Forward).unwrap(), 0);
    }
}
