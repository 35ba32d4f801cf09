//! The environment of a measurement, for its records.

use report::Environment;
use tch::Device;

use anyhow::Result;

/// Returns the device (`cpu` or the GPU's name), libtorch's version, the machine, and the implementations that
/// [`kernels::processor`] chose.
///
/// # Errors
/// A device that does not exist.
pub(crate) fn detect(device: Device) -> Result<Environment> {
    let name = if device.is_cuda() { runtime::device::name(device)? } else { "cpu".to_owned() };
    let implementations = Some(kernels::processor::choices()?.to_string());
    Ok(Environment { implementations, ..Environment::detect(&name, Some(runtime::torch_version())) })
}
