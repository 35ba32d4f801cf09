//! Where a measurement is taken, for its records.

use report::Environment;
use tch::Device;

/// The device (`cpu` or the GPU's name), libtorch's version, the machine, and the implementations that
/// [`runtime::processor`] chose.
pub(crate) fn of(device: Device) -> anyhow::Result<Environment> {
    let name = if device.is_cuda() { runtime::device::name(device)? } else { "cpu".to_owned() };
    let implementations = Some(runtime::processor::choices()?.to_string());
    Ok(Environment { implementations, ..Environment::detect(&name, Some(runtime::torch_version())) })
}
