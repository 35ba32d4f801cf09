//! Devices by flag, and the names of devices.

use std::ffi::c_int;

use tch::Device;

use super::cuda;
use crate::error::{Error, Result};
use crate::sys::device as sys;

/// The device of `auto`, and why it is this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The device.
    pub device: Device,
    /// Why, in a few words: `NVIDIA H100`, `no NVIDIA driver is visible`.
    pub reason: String,
}

/// Returns the first GPU if it computes, else the CPU.
///
/// Call it as [`select`]: before the first backward pass.
///
/// # Errors
/// None on a machine without an NVIDIA driver; those of libtorch if it cannot start CUDA at all count as reasons for the CPU.
pub fn choose() -> Result<Choice> {
    let cpu = |reason: String| Ok(Choice { device: Device::Cpu, reason });
    match cuda::unusable() {
        Ok(Some(reason)) => return cpu(reason),
        Err(error) => return cpu(format!("CUDA does not start: {error}")),
        Ok(None) => {}
    }
    let device = Device::Cuda(0);
    match computes(device) {
        Ok(()) => Ok(Choice { device, reason: name(device)? }),
        Err(error) => cpu(format!("{} does not compute: {error}", flag(device))),
    }
}

/// Runs a small product on a device: a driver may show a GPU that this libtorch has no kernels for, or whose memory others hold.
fn computes(device: Device) -> Result<()> {
    let one = tch::Tensor::f_ones([8, 8], (tch::Kind::Float, device))?;
    let sum = f64::try_from(one.f_matmul(&one)?.f_sum(tch::Kind::Float)?)?;
    match sum {
        512.0 => Ok(()),
        sum => Err(Error::invalid("device", format!("a sum of 512 ones is {sum}"))),
    }
}

/// Returns the device that a flag names: `cpu`, `cuda` (the first one) or `cuda:N`; `auto` is that of [`choose`].
///
/// Call it at the start of a program that may use CUDA, before the first backward pass: libtorch counts devices once.
///
/// # Errors
/// Another word, an index that does not exist, CUDA on a machine without it: each names the flag, the available devices
/// and the remedy.
///
/// ```
/// use runtime::device;
///
/// assert_eq!(device::select("cpu")?, tch::Device::Cpu);
/// let error = device::select("gpu").unwrap_err();
/// assert!(error.to_string().starts_with(r#"device: "gpu" is not a device"#));
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn select(flag: &str) -> Result<Device> {
    let index = match flag {
        "cpu" => return Ok(Device::Cpu),
        "auto" => return Ok(choose()?.device),
        "cuda" => 0,
        _ => match flag.strip_prefix("cuda:").map(parse_index) {
            Some(Some(index)) => index,
            Some(None) => {
                let reason = format!("{flag:?} has no device index after the colon; {}", choices()?);
                return Err(Error::invalid("device", reason));
            }
            None => {
                return Err(Error::invalid("device", format!("{flag:?} is not a device; {}", choices()?)));
            }
        },
    };
    cuda::require(index)?;
    Ok(Device::Cuda(index))
}

/// Parses digits alone: `usize::from_str` accepts a sign as well.
fn parse_index(text: &str) -> Option<usize> {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn choices() -> Result<String> {
    let there = match cuda::count()? {
        0 => "cpu and no CUDA device".to_owned(),
        devices => format!("cpu, {}", list(devices)),
    };
    Ok(format!("expected auto, cpu, cuda or cuda:N with N from 0, and this machine has {there}"))
}

/// `cuda:0, cuda:1, …`
pub(super) fn list(devices: usize) -> String {
    let words: Vec<String> = (0..devices).map(|index| format!("cuda:{index}")).collect();
    words.join(", ")
}

/// Returns the number of CUDA devices; loads libtorch's CUDA library if an NVIDIA driver is visible.
///
/// # Errors
/// Errors of libtorch if it cannot start CUDA.
pub fn cuda_count() -> Result<usize> {
    cuda::count()
}

/// Returns the flag of this device: `cpu`, `cuda:0`.
pub fn flag(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda(index) => format!("cuda:{index}"),
        Device::Mps => "mps".into(),
        Device::Vulkan => "vulkan".into(),
    }
}

/// Returns the product name of the device: the GPU's from its driver (or `CUDA device N`), the processor's from the
/// kernel (or `CPU`).
///
/// # Errors
/// A device that does not exist.
pub fn name(device: Device) -> Result<String> {
    match checked(device)? {
        None => Ok(processor_name().unwrap_or_else(|| "CPU".into())),
        Some(index) => Ok(sys::cuda_driver_name(index).unwrap_or_else(|| format!("CUDA device {index}"))),
    }
}

/// Returns the version of the NVIDIA driver: its release (`580.95.05`) or, where the system does not show it, the newest CUDA that it
/// supports (`CUDA 13.0`); `None` without a driver.
pub fn driver_version() -> Option<String> {
    let release = std::fs::read_to_string("/sys/module/nvidia/version").ok();
    driver_text(release.as_deref(), sys::cuda_driver_version)
}

fn driver_text(release: Option<&str>, newest_cuda: impl FnOnce() -> Option<c_int>) -> Option<String> {
    match release.map(str::trim).filter(|release| !release.is_empty()) {
        Some(release) => Some(release.to_owned()),
        None => newest_cuda().map(|version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
    }
}

fn processor_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_owned())
}

/// Returns the index of an existing CUDA device; `None` for the CPU. It loads libtorch's CUDA library first: with `tch::Cuda`, libtorch
/// would decide permanently that there is no CUDA.
///
/// # Errors
/// A device that does not exist, or is of another kind.
pub fn checked(device: Device) -> Result<Option<c_int>> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(index) => {
            cuda::require(index)?;
            Ok(Some(c_int::try_from(index).map_err(|_| Error::invalid("device", "index out of range"))?))
        }
        Device::Mps | Device::Vulkan => Err(Error::Unavailable {
            what: flag(device),
            reason: "streams, events and memory figures exist for cpu and cuda".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_has_a_release_or_its_newest_cuda() {
        let text = |release, cuda: Option<c_int>| driver_text(release, || cuda);
        assert_eq!(text(Some("580.95.05\n"), None).as_deref(), Some("580.95.05"));
        assert_eq!(text(None, Some(13_000)).as_deref(), Some("CUDA 13.0"));
        assert_eq!(text(Some("\n"), Some(12_080)).as_deref(), Some("CUDA 12.8"));
        assert_eq!(text(None, None), None);
    }
}
