//! This crate's CUDA kernels: CUDA C++ text beside each operation (`.cuh`) that NVRTC compiles for the device at its first use, launched on
//! libtorch's current stream.
//!
//! The build needs nothing of CUDA. At run time NVRTC comes with torch's CUDA packages; without it, or without a driver that loads
//! its code (CUDA 12 or newer), libtorch's operators compute instead, which is reported once. `FRUGAL_CUDA_KERNELS=off` selects the
//! operators.
//!
//! Machine code is cached in `FRUGAL_CACHE` (or the user's cache folder), by a digest of all its inputs. The first use of a kernel
//! during the capture of a graph is an error, because a capture cannot load code: run the step once before. `FRUGAL_CUDA_CHECK=1`
//! waits after each launch, so that an error names its kernel.

pub(crate) mod cache;
mod driver;
mod library;
pub(crate) mod nvrtc;
pub(crate) mod table;

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

pub(crate) use driver::Argument;
use driver::{Driver, Loaded};
use runtime::device::CudaStream;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::operands::{self, Rows};

const NAME: &str = "CUDA kernel";
/// The header that every text includes.
pub(crate) const PRELUDE: (&str, &str) = ("prelude.cuh", include_str!("cuda/prelude.cuh"));

/// The source of some kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source(pub(crate) &'static str);

/// Returns whether kernels can be compiled and launched on this device. On CUDA, the reason why not is printed once on
/// standard error.
pub(crate) fn are_ready(device: Device) -> bool {
    static REPORTED: Once = Once::new();
    if !device.is_cuda() || is_off() {
        return false;
    }
    let reason = missing().map(str::to_owned).or_else(|| too_old(device));
    if let Some(reason) = &reason {
        REPORTED.call_once(|| {
            eprintln!(
                "runtime: our CUDA kernels are not available, libtorch's operators compute instead: {reason}"
            );
        });
    }
    reason.is_none()
}

/// Returns why a GPU cannot run the kernels, which use instructions of compute capability 8.0 (bf16, a maximum that propagates
/// NaN).
fn too_old(device: Device) -> Option<String> {
    const OLDEST: (c_int, c_int) = (8, 0);
    let Device::Cuda(index) = device else { return None };
    let device = driver::load().ok().zip(c_int::try_from(index).ok());
    match device.map(|(driver, index)| capability(driver, index)) {
        Some(Ok(capability)) if capability >= OLDEST => None,
        Some(Ok((major, minor))) => {
            Some(format!("the GPU has compute capability {major}.{minor}, and they need 8.0"))
        }
        Some(Err(error)) => Some(error.to_string()),
        None => Some("there is no such device".into()),
    }
}

/// Returns the compute capability of a device, cached.
fn capability(driver: &Driver, device: c_int) -> Result<(c_int, c_int)> {
    static KNOWN: Mutex<Vec<(c_int, (c_int, c_int))>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&(_, capability)) = known.iter().find(|(known, _)| *known == device) {
        return Ok(capability);
    }
    let capability = driver.capability(device)?;
    known.push((device, capability));
    Ok(capability)
}

/// Returns whether everything that kernels need exists, whatever the device: for planning.
pub(crate) fn are_found() -> bool {
    !is_off() && missing().is_none()
}

fn missing() -> Option<&'static str> {
    nvrtc::load().err().or_else(|| driver::load().err())
}

fn is_off() -> bool {
    static OFF: OnceLock<bool> = OnceLock::new();
    *OFF.get_or_init(|| std::env::var_os("FRUGAL_CUDA_KERNELS").is_some_and(|choice| choice == "off"))
}

/// As [`launch_with`], without dynamic shared memory.
pub(crate) fn launch(
    source: Source,
    expression: &str,
    device: Device,
    (blocks, threads): (i64, u32),
    arguments: &[Argument],
) -> Result<()> {
    launch_with(source, expression, device, (blocks, threads, 0), arguments)
}

/// Queues the kernel `expression` of a source on the current stream of `device`, with the given blocks, threads per block and bytes
/// of dynamic shared memory, at most [`shared_memory`].
///
/// The arguments must match its signature and point to device memory as large as the kernel reads and writes: the functions of the
/// modules below ensure that.
pub(crate) fn launch_with(
    source: Source,
    expression: &str,
    device: Device,
    grid: (i64, u32, u32),
    arguments: &[Argument],
) -> Result<()> {
    let Device::Cuda(index) = device else {
        return Err(Error::invalid(NAME, format!("{expression} on {device:?}; expected a CUDA device")));
    };
    let index = c_int::try_from(index).map_err(|_| Error::invalid(NAME, "a device index out of range"))?;
    let blocks = u32::try_from(grid.0).ok().filter(|blocks| *blocks <= i32::MAX as u32).ok_or_else(|| {
        Error::invalid(NAME, format!("{expression} with {} blocks; at most 2³¹ − 1", grid.0))
    })?;
    let driver = driver::load().map_err(unavailable)?;
    let stream = CudaStream::current(index)?;
    driver.make_current(stream)?;
    let kernel = loaded(source, expression, index, stream)?;
    if grid.2 > DEFAULT_SHARED {
        driver.allow_shared(kernel, index, grid.2)?;
    }
    let queued = driver.launch(kernel, (blocks, grid.1, grid.2), arguments, stream);
    let queued = queued.and_then(|()| if checks() { driver.synchronize(stream) } else { Ok(()) });
    queued.map_err(|error| error.context(expression))
}

/// Bytes of dynamic shared memory that a block has without opting in, beside some that the kernel declares.
const DEFAULT_SHARED: u32 = 47 << 10;

/// Returns the maximum bytes of shared memory of a block.
pub(crate) fn shared_memory(device: Device) -> Result<c_int> {
    static KNOWN: Mutex<Vec<(c_int, c_int)>> = Mutex::new(Vec::new());
    let Device::Cuda(index) = device else { return Ok(0) };
    let index = c_int::try_from(index).map_err(|_| Error::invalid(NAME, "a device index out of range"))?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&(_, bytes)) = known.iter().find(|(known, _)| *known == index) {
        return Ok(bytes);
    }
    let bytes = driver::load().map_err(unavailable)?.shared_memory(index)?;
    known.push((index, bytes));
    Ok(bytes)
}

fn checks() -> bool {
    static CHECKS: OnceLock<bool> = OnceLock::new();
    *CHECKS.get_or_init(|| std::env::var_os("FRUGAL_CUDA_CHECK").is_some_and(|value| value == "1"))
}

/// Returns whether the current stream of a device is being captured into a graph; false without a driver.
pub(crate) fn is_capturing(device: Device) -> Result<bool> {
    let (Device::Cuda(index), Ok(driver)) = (device, driver::load()) else { return Ok(false) };
    let index = c_int::try_from(index).map_err(|_| Error::invalid(NAME, "a device index out of range"))?;
    driver.is_capturing(CudaStream::current(index)?)
}

/// Returns the kernel, compiled and loaded if necessary.
fn loaded(source: Source, expression: &str, device: c_int, stream: CudaStream) -> Result<Loaded> {
    type Known = HashMap<(c_int, c_int), HashMap<String, Loaded>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let driver = driver::load().map_err(unavailable)?;
    let capability = capability(driver, device)?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = known.get_or_insert_default().entry(capability).or_default();
    if let Some(kernel) = kernels.get(expression) {
        return Ok(*kernel);
    }
    if driver.is_capturing(stream)? {
        return Err(Error::invalid(
            NAME,
            format!(
                "{expression} is used first while a graph is captured, which can load no code; run the step once before"
            ),
        ));
    }
    let compiled = compiled(source, expression, capability)?;
    let kernel = driver.kernel(&compiled.cubin, &compiled.name)?;
    kernels.insert(expression.to_owned(), kernel);
    Ok(kernel)
}

/// Returns the compiled kernel, from the cache or by NVRTC.
fn compiled(source: Source, expression: &str, capability: (c_int, c_int)) -> Result<nvrtc::Compiled> {
    let nvrtc = nvrtc::load().map_err(unavailable)?;
    let options = options(capability);
    let key =
        cache::key(&[source.0, PRELUDE.1, expression, &options.join(" "), &format!("{:?}", nvrtc.version())]);
    if let Some(compiled) = cache::read(&key) {
        return Ok(compiled);
    }
    let made = nvrtc
        .compile(source.0, &[PRELUDE], expression, &options)
        .map_err(|log| Error::invalid(NAME, format!("{expression} does not compile: {log}")))?;
    cache::write(&key, &made);
    Ok(made)
}

pub(crate) fn options((major, minor): (c_int, c_int)) -> Vec<String> {
    vec![format!("--gpu-architecture=sm_{major}{minor}"), "-std=c++17".into()]
}

fn unavailable(reason: &str) -> Error {
    Error::Unavailable { what: "a CUDA kernel".into(), reason: reason.to_owned() }
}

/// Returns the C++ type of a dtype that the kernels support.
pub(crate) fn type_of(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("float"),
        Kind::BFloat16 => Some("bf16"),
        Kind::Half => Some("f16"),
        _ => None,
    }
}

/// Returns how many numbers a thread loads at once: 16 bytes of the narrowest dtype if every address and stride allows it, else
/// one.
pub(crate) fn width(kinds: &[Kind], tensors: &[&Tensor], multiples: &[i64]) -> i64 {
    let bytes = kinds.iter().map(|kind| kind.elt_size_in_bytes()).min().unwrap_or(4) as i64;
    let wide = 16 / bytes;
    let fits = tensors.iter().all(|tensor| (tensor.data_ptr() as usize).is_multiple_of(16))
        && multiples.iter().all(|number| number % wide == 0);
    if fits { wide } else { 1 }
}

/// A matrix for the kernels: dense rows with a stride.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) rows: i64,
    pub(crate) columns: i64,
    pub(crate) stride: i64,
}

/// Views a dense-rowed tensor `[rows, columns]` of this dtype and device.
pub(crate) fn matrix(
    operation: &'static str,
    name: &'static str,
    tensor: &Tensor,
    options: (Kind, Device),
) -> Result<Matrix> {
    let Rows { rows, columns, row_stride, .. } = operands::rows(operation, name, tensor, options)?;
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    Ok(Matrix { rows: number(rows), columns: number(columns), stride: number(row_stride) })
}

/// Refuses a tensor, if there is one, that is not contiguous or not of this shape, dtype and device.
pub(crate) fn expect<'a>(
    operation: &'static str,
    name: &'static str,
    tensor: impl Into<Option<&'a Tensor>>,
    size: &[i64],
    options: (Kind, Device),
) -> Result<()> {
    let tensor = tensor.into();
    tensor.map_or(Ok(()), |tensor| operands::check_contiguous(operation, name, tensor, size, options))
}

pub(crate) fn pointer(tensor: &Tensor) -> Argument {
    Argument::Pointer(tensor.data_ptr() as u64)
}

pub(crate) fn optional(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or(Argument::Pointer(0), pointer)
}

/// Converts a size to `int`, checked.
pub(crate) fn int(operation: &'static str, name: &str, number: i64) -> Result<Argument> {
    let narrow = i32::try_from(number).map_err(|_| {
        Error::invalid(operation, format!("{name} is {number}; the CUDA kernel takes at most 2³¹ − 1"))
    })?;
    Ok(Argument::I32(narrow))
}

pub(crate) fn float(number: f64) -> Argument {
    Argument::F32(number as f32)
}
