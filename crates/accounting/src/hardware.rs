//! Data-sheet figures of devices: dense matrix products, memory, bandwidth.
//!
//! **Sparsity.** NVIDIA's headline figures since Ampere are "with sparsity": they include the skipped FLOPs of a matrix
//! in which two of four entries are zero. H100 is advertised with 1979 TFLOP/s in bf16; a dense product reaches at most
//! half, 989.5. All figures here are dense. For GeForce they are the rate with fp32 accumulation, half of that with
//! fp16 accumulation.
//!
//! Memory is in the data sheet's gigabytes (10⁹ bytes); a little of it is unavailable to programs.
//!
//! Sources: data sheets of V100, A100, H100, H200, DGX B200 (NVIDIA; for H100 in fp32 the lecture's 67.5 TFLOP/s, which
//! the data sheet rounds to 67), Ada and Ampere GA102 architecture papers (RTX 4090, RTX 3090), T4, and the MI300X data
//! sheet (AMD).

use crate::Error;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hardware {
    /// The name for [`find`].
    pub name: &'static str,
    /// The full name.
    pub title: &'static str,
    /// FLOP/s of dense products in bf16 (fp16 on devices without bf16).
    pub bf16: f64,
    /// FLOP/s in fp32, without tf32.
    pub fp32: f64,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes per second of memory bandwidth.
    pub bandwidth: f64,
}

impl Hardware {
    /// Returns whether it multiplies in bf16: NVIDIA's GPUs do since Ampere.
    pub fn has_bf16(&self) -> bool {
        !matches!(self.name, "v100" | "t4")
    }
}

/// All known devices.
pub const ALL: [Hardware; 10] = [
    Hardware {
        name: "b200",
        title: "NVIDIA B200 SXM 180 GB",
        bf16: 2250e12,
        fp32: 75e12,
        memory: 180_000_000_000,
        bandwidth: 8.0e12,
    },
    Hardware {
        name: "h200",
        title: "NVIDIA H200 SXM 141 GB",
        bf16: 989.5e12,
        fp32: 67.5e12,
        memory: 141_000_000_000,
        bandwidth: 4.8e12,
    },
    Hardware {
        name: "h100",
        title: "NVIDIA H100 SXM 80 GB",
        bf16: 989.5e12,
        fp32: 67.5e12,
        memory: 80_000_000_000,
        bandwidth: 3.35e12,
    },
    Hardware {
        name: "mi300x",
        title: "AMD MI300X 192 GB",
        bf16: 1307.4e12,
        fp32: 163.4e12,
        memory: 192_000_000_000,
        bandwidth: 5.3e12,
    },
    Hardware {
        name: "a100",
        title: "NVIDIA A100 SXM 80 GB",
        bf16: 312e12,
        fp32: 19.5e12,
        memory: 80_000_000_000,
        bandwidth: 2.039e12,
    },
    Hardware {
        name: "a100-40gb",
        title: "NVIDIA A100 SXM 40 GB",
        bf16: 312e12,
        fp32: 19.5e12,
        memory: 40_000_000_000,
        bandwidth: 1.555e12,
    },
    Hardware {
        name: "v100",
        title: "NVIDIA V100 SXM2 32 GB (fp16)",
        bf16: 125e12,
        fp32: 15.7e12,
        memory: 32_000_000_000,
        bandwidth: 0.9e12,
    },
    Hardware {
        name: "rtx4090",
        title: "NVIDIA RTX 4090 24 GB",
        bf16: 165.2e12,
        fp32: 82.6e12,
        memory: 24_000_000_000,
        bandwidth: 1.008e12,
    },
    Hardware {
        name: "rtx3090",
        title: "NVIDIA RTX 3090 24 GB",
        bf16: 71e12,
        fp32: 35.6e12,
        memory: 24_000_000_000,
        bandwidth: 0.936e12,
    },
    Hardware {
        name: "t4",
        title: "NVIDIA T4 16 GB (fp16)",
        bf16: 65e12,
        fp32: 8.1e12,
        memory: 16_000_000_000,
        bandwidth: 0.32e12,
    },
];

/// The advertised rate of H100 in bf16, with sparsity: twice that of dense products.
pub const H100_BF16_WITH_SPARSITY: f64 = 1979e12;

/// Returns the device of a name, ignoring case; `4090` is `rtx4090`.
///
/// # Errors
/// A name that is unknown, with those that are known.
pub fn find(name: &str) -> Result<Hardware, Error> {
    let lower = name.to_ascii_lowercase();
    ALL.into_iter()
        .find(|hardware| hardware.name == lower || hardware.name.strip_prefix("rtx") == Some(&lower))
        .ok_or_else(|| Error::unknown("hardware", name, ALL.map(|hardware| hardware.name)))
}
