//! Named tensors in a safetensors file.
//!
//! A file is written under a temporary name, synced and renamed, so that a reader sees the old one or the new one whole. It is
//! read through a mapping: each tensor's bytes are copied once, from the file's pages into the tensor.

use std::borrow::Cow;
use std::fs::File;
use std::path::{Path, PathBuf};

use runtime::mapped::MappedFile;
use safetensors::{Dtype, SafeTensors, View};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// The bytes of a safetensors file that holds these tensors, in their order of size class and name as the format wants it.
/// Tensors of any device, contiguous or not.
///
/// # Errors
/// A dtype that the format lacks (complex halves, quantised), a name that comes twice.
pub fn to_bytes(tensors: &[(String, Tensor)]) -> Result<Vec<u8>> {
    let mut views = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        views.push((name, Bytes::of(name, tensor)?));
    }
    safetensors::serialize(views, None)
        .map_err(|cause| Error::Config { what: "safetensors", reason: cause.to_string() })
}

/// Writes a file whole or not at all.
///
/// # Errors
/// As [`to_bytes`]; a folder that is not there or full, with the path.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let bytes = to_bytes(tensors)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        use std::io::Write;
        let mut file = File::create(&temporary)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        // The new name is on the disk when its folder is.
        File::open(path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")))?
            .sync_all()
    })();
    written.map_err(|cause| {
        let _ = std::fs::remove_file(&temporary);
        file_error(path, format!("cannot be written: {cause}"))
    })
}

/// Reads all tensors of a file onto `device`, in the file's order.
///
/// # Errors
/// A missing, truncated or foreign file, with its path and what is wrong; a dtype that libtorch lacks.
pub fn read(path: &Path, device: Device) -> Result<Vec<(String, Tensor)>> {
    let mapped = MappedFile::open(path)?;
    from_bytes(&mapped, device).map_err(|error| match error {
        Error::Config { reason, .. } => file_error(path, reason),
        other => other,
    })
}

/// Reads tensors from the bytes of a file.
///
/// # Errors
/// Truncated or foreign bytes; a dtype that libtorch lacks.
pub fn from_bytes(bytes: &[u8], device: Device) -> Result<Vec<(String, Tensor)>> {
    let what = "safetensors";
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|cause| Error::Config {
        what,
        reason: format!("not a whole safetensors file ({cause}); copy or download it again"),
    })?;
    let data = &bytes[8 + header..];
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let kind = kind_of(info.dtype).ok_or_else(|| Error::Config {
            what,
            reason: format!("`{name}` is {:?}, which libtorch has no dtype for", info.dtype),
        })?;
        let Some(values) = data.get(info.data_offsets.0..info.data_offsets.1) else {
            let reason = format!("`{name}` ends beyond the file; it is truncated, copy or download it again");
            return Err(Error::Config { what, reason });
        };
        let shape: Vec<i64> = info.shape.iter().map(|&size| size as i64).collect();
        tensors.push((name, Tensor::f_from_data_size(values, &shape, kind)?.f_to_device(device)?));
    }
    Ok(tensors)
}

fn file_error(path: &Path, reason: String) -> Error {
    Error::File { path: path.to_owned(), reason }
}

/// A tensor on its way into a file.
struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    tensor: Tensor,
    bytes: usize,
}

impl Bytes {
    fn of(name: &str, tensor: &Tensor) -> Result<Self> {
        let dtype = dtype_of(tensor.kind()).ok_or_else(|| Error::Config {
            what: "safetensors",
            reason: format!("`{name}` is {:?}, which the format lacks; convert it first", tensor.kind()),
        })?;
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let shape = tensor.size().iter().map(|&size| size as usize).collect();
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        Ok(Self { dtype, shape, tensor, bytes })
    }
}

impl View for Bytes {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.bytes];
        self.tensor.copy_data_u8(&mut bytes, self.tensor.numel());
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes
    }
}

const DTYPES: [(Kind, Dtype); 9] = [
    (Kind::Float, Dtype::F32),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Half, Dtype::F16),
    (Kind::Double, Dtype::F64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

fn dtype_of(kind: Kind) -> Option<Dtype> {
    DTYPES.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(_, known)| *known == dtype).map(|(kind, _)| *kind)
}
