//! Training time from FLOPs, and utilization from time.
//!
//! ```text
//! seconds = FLOPs / (peak · MFU · devices)           MFU = FLOPs / (seconds · peak · devices)
//! FLOPs of a training ≈ 6·N·D                        N parameters, D tokens
//! ```
//!
//! Model FLOPs utilization (MFU, Chowdhery et al., arXiv:2204.02311) counts the FLOPs that the model needs, not those
//! that the hardware does: recomputation lowers it. 0.5 is good.
//!
//! ```
//! use accounting::{hardware, training_time::{Run, six_n_d}};
//!
//! // How long does it take to train 70B parameters on 15T tokens on 1024 H100?
//! let flops = six_n_d(70_000_000_000, 15_000_000_000_000)?;
//! let run = Run { flops, peak: hardware::find("h100")?.bf16, utilization: 0.5, devices: 1024 };
//! assert_eq!(format!("{:.2}", run.days()?), "143.93");
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::exact::{positive, wide_product};
use crate::{Dtype, Error};

/// Seconds of a day.
pub const SECONDS_PER_DAY: f64 = 86_400.0;

/// Returns `6·N·D`, the FLOPs of training `parameters` on `tokens`.
pub fn six_n_d(parameters: u64, tokens: u64) -> Result<u128, Error> {
    positive("the number of parameters", parameters)?;
    positive("the number of tokens", tokens)?;
    wide_product("6·N·D", &[6, parameters, tokens])
}

/// A training run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// FLOPs of the whole training.
    pub flops: u128,
    /// Peak FLOP/s of one device.
    pub peak: f64,
    /// Model FLOPs utilization, above 0 and at most 1.
    pub utilization: f64,
    /// Devices.
    pub devices: u64,
}

impl Run {
    /// Returns the run's seconds.
    pub fn seconds(&self) -> Result<f64, Error> {
        check_rate(self.peak)?;
        if !(self.utilization > 0.0 && self.utilization <= 1.0) {
            return Err(Error::OutOfRange {
                what: "the model FLOPs utilization",
                given: self.utilization,
                range: "0 (excluded) to 1",
                remedy: "give the fraction of the peak FLOP/s that is reached, for example 0.4",
            });
        }
        positive("the number of devices", self.devices)?;
        Ok(self.flops as f64 / (self.peak * self.utilization * self.devices as f64))
    }

    /// Returns the run's days.
    pub fn days(&self) -> Result<f64, Error> {
        Ok(self.seconds()? / SECONDS_PER_DAY)
    }
}

/// Returns the maximum FLOPs of `devices` of `peak` FLOP/s in `seconds`.
pub fn promised_flops(peak: f64, devices: u64, seconds: f64) -> Result<f64, Error> {
    check_rate(peak)?;
    positive("the number of devices", devices)?;
    check_seconds(seconds)?;
    Ok(peak * devices as f64 * seconds)
}

/// Returns the model FLOPs utilization of a measured step. If it is above 1, the FLOPs or the peak are wrong (for
/// example a peak with sparsity, or a product in another format).
pub fn utilization(flops: u128, seconds: f64, peak: f64, devices: u64) -> Result<f64, Error> {
    Ok(flops as f64 / promised_flops(peak, devices, seconds)?)
}

/// Returns the number of parameters of the largest model that fits `devices` of `memory` bytes at
/// `bytes_per_parameter`, if everything is divided evenly and nothing else counts.
pub fn naive_largest_model(devices: u64, memory: u64, bytes_per_parameter: f64) -> Result<u64, Error> {
    positive("the number of devices", devices)?;
    positive("the memory of a device", memory)?;
    if !(bytes_per_parameter > 0.0 && bytes_per_parameter.is_finite()) {
        return Err(Error::OutOfRange {
            what: "bytes per parameter",
            given: bytes_per_parameter,
            range: "numbers above 0",
            remedy: "give for example 16, AdamW in fp32",
        });
    }
    Ok((crate::exact::product("memory of all devices", &[devices, memory])? as f64 / bytes_per_parameter)
        as u64)
}

/// Returns the peak rate of `hardware` for products in `dtype`; `None` if it is unknown.
pub fn peak_of(hardware: &crate::hardware::Hardware, dtype: Dtype) -> Option<f64> {
    match dtype {
        Dtype::Fp32 => Some(hardware.fp32),
        Dtype::Bf16 if !hardware.has_bf16() => None,
        Dtype::Bf16 | Dtype::Fp16 => Some(hardware.bf16),
        _ => None,
    }
}

fn check_rate(peak: f64) -> Result<(), Error> {
    if peak > 0.0 && peak.is_finite() {
        return Ok(());
    }
    Err(Error::OutOfRange {
        what: "the peak FLOP/s of a device",
        given: peak,
        range: "numbers above 0",
        remedy: "give its dense rate, for example 989.5e12 for H100 in bf16",
    })
}

fn check_seconds(seconds: f64) -> Result<(), Error> {
    if seconds > 0.0 && seconds.is_finite() {
        return Ok(());
    }
    Err(Error::OutOfRange {
        what: "the time in seconds",
        given: seconds,
        range: "numbers above 0",
        remedy: "give the seconds that the step took",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder_flops::{Recomputation, Workload, step};
    use crate::memory::optimizer::Optimizer;
    use crate::memory::recipe::Recipe;
    use crate::{hardware, presets};

    /// The motivating questions of the lecture.
    #[test]
    fn motivating_questions() {
        let h100 = hardware::find("h100").unwrap();
        let flops = six_n_d(70_000_000_000, 15_000_000_000_000).unwrap();
        assert_eq!(flops, 6_300_000_000_000_000_000_000_000);
        let run = Run { flops, peak: h100.bf16, utilization: 0.5, devices: 1024 };
        assert!((run.days().unwrap() - 143.927).abs() < 1e-3);
        let bytes = Recipe::FP32.bytes_per_parameter(Optimizer::AdamW);
        assert_eq!(naive_largest_model(8, h100.memory, bytes).unwrap(), 40_000_000_000);
    }

    /// CS336, assignment 1: GPT-2 XL for 400 000 steps of 1024 sequences on one A100 in fp32 at half of its peak.
    #[test]
    fn gpt2_xl_on_one_a100() {
        let work = Workload { batch: 1024, sequence: 1024 };
        let model = presets::find("cs336-xl").unwrap();
        let one = step(&model, work, &Recomputation::default()).unwrap().model().unwrap().dense;
        let a100 = hardware::find("a100").unwrap();
        let run = Run { flops: one * 400_000, peak: a100.fp32, utilization: 0.5, devices: 1 };
        assert_eq!(format!("{:.1}", run.days().unwrap()), "6583.6");
    }

    #[test]
    fn the_peak_is_that_of_the_dtype() {
        let t4 = hardware::find("t4").unwrap();
        let peaks = [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16].map(|dtype| peak_of(&t4, dtype));
        assert_eq!(peaks, [Some(8.1e12), Some(65e12), None]);
    }

    #[test]
    fn utilization_is_the_inverse_of_time() {
        let run = Run { flops: 1 << 60, peak: 1e15, utilization: 0.25, devices: 3 };
        let back = utilization(run.flops, run.seconds().unwrap(), run.peak, run.devices).unwrap();
        assert!((back - 0.25).abs() < 1e-15);
    }

    #[test]
    fn invalid_values_are_refused() {
        let run = Run { flops: 1, peak: 1e12, utilization: 0.5, devices: 1 };
        for utilization in [0.0, -0.1, 1.0001, f64::NAN, f64::INFINITY] {
            let error = Run { utilization, ..run }.days().unwrap_err().to_string();
            assert!(error.starts_with("the model FLOPs utilization is "), "{error}");
        }
        assert!(Run { devices: 0, ..run }.days().is_err());
        assert!(Run { peak: 0.0, ..run }.days().is_err());
        assert!(utilization(1, 0.0, 1e12, 1).is_err());
        assert!(naive_largest_model(8, 0, 16.0).is_err());
        assert!(six_n_d(0, 1).is_err());
    }
}
