//! Named tensors in a safetensors file.
//!
//! A file is written under a temporary name, synced and renamed, so that a reader sees the old one or the new one whole. It is
//! read through a mapping: each tensor's bytes are copied once, from the file's pages into the tensor.

use std::cmp::Reverse;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use runtime::mapped::MappedFile;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// Writes tensors of any device, contiguous or not, one at a time: beside them, memory for the largest is needed. Those of
/// wide dtypes come first, as the format wants it, so that every one lies at a multiple of its element's size.
///
/// # Errors
/// As [`io::ErrorKind::InvalidInput`]: a dtype that the format lacks (complex numbers, quantised), a name that comes twice or
/// that the format keeps for itself. Those of `out` and of libtorch.
pub fn write_to(out: &mut dyn Write, tensors: &[(String, Tensor)]) -> io::Result<()> {
    let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    let width = |tensor: &Tensor| tensor.kind().elt_size_in_bytes();
    let mut order: Vec<&(String, Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| Reverse(width(tensor)));
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, tensor) in &order {
        let Some(dtype) = dtype_of(tensor.kind()) else {
            return refuse(format!(
                "`{name}` is {:?}, which the format lacks; convert it first",
                tensor.kind()
            ));
        };
        let start = end;
        end += tensor.numel() * width(tensor);
        let entry = json!({ "dtype": dtype, "shape": tensor.size(), "data_offsets": [start, end] });
        if name == "__metadata__" || header.insert(name.clone(), entry).is_some() {
            return refuse(format!(
                "two tensors are called `{name}`, or the format keeps that name for itself"
            ));
        }
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)?;
    let mut bytes = Vec::new();
    for (_, tensor) in order {
        let numel = tensor.numel();
        bytes.resize(numel * width(tensor), 0);
        if numel > 0 {
            let host = tensor.f_detach().and_then(|t| t.f_to_device(Device::Cpu)?.f_contiguous());
            host.and_then(|host| host.f_copy_data_u8(&mut bytes, numel)).map_err(io::Error::other)?;
        }
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Writes a file whole or not at all.
///
/// # Errors
/// Those of [`write_to`], with the path; a folder that is not there or full.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".partial");
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        let mut file = BufWriter::new(File::create(&temporary)?);
        write_to(&mut file, tensors)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
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
        let tensor = match values {
            [] => Tensor::f_zeros(&shape, (kind, device))?,
            values => Tensor::f_from_data_size(values, &shape, kind)?.f_to_device(device)?,
        };
        tensors.push((name, tensor));
    }
    Ok(tensors)
}

fn file_error(path: &Path, reason: String) -> Error {
    Error::File { path: path.to_owned(), reason }
}

const DTYPES: [(Kind, Dtype); 10] = [
    (Kind::Float, Dtype::F32),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Half, Dtype::F16),
    (Kind::Double, Dtype::F64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

fn dtype_of(kind: Kind) -> Option<Dtype> {
    DTYPES.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(_, known)| *known == dtype).map(|(kind, _)| *kind)
}
