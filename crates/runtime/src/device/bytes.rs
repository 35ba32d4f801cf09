//! Memory of a device and of this process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::choice::checked;
use super::control_group::{ControlGroup, control_group};
use crate::error::{Error, Result};
use crate::sys::device as sys;

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can still be allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// Resident memory of the process, in bytes. It includes memory of libtorch and other libraries, so it checks figures
/// that count tensors alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Now (`VmRSS`).
    pub current: u64,
    /// The maximum since the process started (`VmHWM`), or since [`reset_resident_peak`].
    pub peak: u64,
    /// The part of [`current`](Self::current) that no file holds (`RssAnon` and `RssShmem`).
    pub anonymous: u64,
    /// The part of [`current`](Self::current) that is pages of mapped files (`RssFile`): programs, libraries, weights. The kernel drops
    /// and reads them again as memory gets short.
    pub file: u64,
}

/// Returns the free and total bytes of the device: on CUDA those of the driver, where memory cached by libtorch's
/// allocator is not free; on the CPU those of the kernel, or the control group's limit if that is less.
///
/// # Errors
/// A device that does not exist; a `/proc` that cannot be read.
pub fn memory_info(device: Device) -> Result<MemoryInfo> {
    if let Some(index) = checked(device)? {
        let (free, total) = sys::cuda_memory(index)?;
        return Ok(MemoryInfo { free, total });
    }
    let (path, text) = read("/proc/meminfo")?;
    let machine = MemoryInfo {
        free: kibibytes(&path, &text, "MemAvailable:")?,
        total: kibibytes(&path, &text, "MemTotal:")?,
    };
    Ok(control_group()?.map_or(machine, |group| within(machine, group)))
}

/// Returns the bytes of the device that CUDA's libraries keep for the process's matrix products: a workspace for each thread that
/// computes them, which in training are the caller's and the autograd engine's (32 MiB each on Hopper, unless
/// `CUBLAS_WORKSPACE_CONFIG` says otherwise). The first call creates them; it must come before any other product. 0 on the CPU.
///
/// It is measured, because `at::cuda::getChosenWorkspaceSize` is in `libtorch_cuda` alone and the shim is built against what every
/// libtorch has. All predictions and budgets of a device's bytes use this function.
///
/// # Errors
/// A device that does not exist, or without that memory.
pub fn product_workspaces(device: Device) -> Result<u64> {
    static KNOWN: Mutex<Option<HashMap<i32, u64>>> = Mutex::new(None);
    let Some(index) = checked(device)? else { return Ok(0) };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(&bytes) = known.get(&index) {
        return Ok(bytes);
    }
    let before = crate::memory::live_bytes(device)?;
    {
        let x = Tensor::f_ones([64, 64], (Kind::Float, device))?.f_set_requires_grad(true)?;
        let product = x.f_mm(&x)?.f_sum(Kind::Float)?;
        drop(crate::autograd::grad(&[&product], &[None], &[&x], crate::autograd::Keep::default())?);
    }
    let bytes = crate::memory::live_bytes(device)?.saturating_sub(before);
    known.insert(index, bytes);
    Ok(bytes)
}

/// Returns the process's resident memory.
///
/// # Errors
/// A `/proc` that cannot be read.
pub fn resident_memory() -> Result<ResidentMemory> {
    let (path, text) = read("/proc/self/status")?;
    let current = kibibytes(&path, &text, "VmRSS:")?;
    let value = |key: &str| kibibytes(&path, &text, key);
    Ok(ResidentMemory {
        current,
        // The kernel counts pages in batches, so its high-water mark can be below its current count.
        peak: value("VmHWM:")?.max(current),
        anonymous: value("RssAnon:")? + value("RssShmem:")?,
        file: value("RssFile:")?,
    })
}

/// Resets [`ResidentMemory::peak`] to the current resident memory, to measure the peak of the work that follows.
///
/// # Errors
/// A kernel without `/proc/self/clear_refs`.
pub fn reset_resident_peak() -> Result<()> {
    let path = PathBuf::from("/proc/self/clear_refs");
    std::fs::write(&path, "5").map_err(|cause| Error::Io { path, cause })
}

fn read(path: &str) -> Result<(PathBuf, String)> {
    let path = PathBuf::from(path);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(cause) => Err(Error::Io { path, cause }),
    }
}

/// Parses the bytes of a line such as `VmRSS:    2084 kB`.
fn kibibytes(path: &Path, text: &str, key: &str) -> Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    let number = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    number.map(|number| number * 1024).ok_or_else(|| {
        let cause = std::io::Error::new(std::io::ErrorKind::InvalidData, format!("no {key} N kB in it"));
        Error::Io { path: path.to_owned(), cause }
    })
}

/// Restricts the machine's memory to a control group's limit.
fn within(machine: MemoryInfo, ControlGroup { limit, used }: ControlGroup) -> MemoryInfo {
    MemoryInfo { free: machine.free.min(limit.saturating_sub(used)), total: machine.total.min(limit) }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn the_lower_limit_of_machine_and_group_applies() {
        let machine = MemoryInfo { free: 70, total: 100 };
        let of = |limit, used| within(machine, ControlGroup { limit, used });
        assert_eq!(of(50, 10), MemoryInfo { free: 40, total: 50 });
        assert_eq!(of(u64::MAX, 10), machine);
        assert_eq!(of(50, 60), MemoryInfo { free: 0, total: 50 });
    }

    #[test]
    fn a_status_file_without_the_line_is_an_error() {
        let path = Path::new("/proc/self/status");
        assert_eq!(kibibytes(path, "VmPeak:\t 1 kB\nVmRSS:\t    2084 kB\n", "VmRSS:").unwrap(), 2084 * 1024);
        let error = kibibytes(path, "VmRSS:\t x kB\n", "VmRSS:").unwrap_err();
        expect!["/proc/self/status: no VmRSS: N kB in it"].assert_eq(&error.to_string());
    }
}
