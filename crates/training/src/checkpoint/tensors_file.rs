//! Named tensors as safetensors: eight bytes with the header's length, a JSON header, the tensors' bytes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use runtime::mapped::MappedFile;
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

const DTYPES: [(Kind, Dtype, &str); 10] = [
    (Kind::Float, Dtype::F32, "F32"),
    (Kind::Double, Dtype::F64, "F64"),
    (Kind::Half, Dtype::F16, "F16"),
    (Kind::BFloat16, Dtype::BF16, "BF16"),
    (Kind::Int64, Dtype::I64, "I64"),
    (Kind::Int, Dtype::I32, "I32"),
    (Kind::Int16, Dtype::I16, "I16"),
    (Kind::Int8, Dtype::I8, "I8"),
    (Kind::Uint8, Dtype::U8, "U8"),
    (Kind::Bool, Dtype::BOOL, "BOOL"),
];

/// Writes tensors of any device and layout, one at a time: beside them, memory for the largest is needed.
///
/// # Errors
/// A dtype that safetensors does not have, as [`io::ErrorKind::InvalidInput`]; those of `out` and of libtorch.
pub fn write_tensors(out: &mut dyn Write, tensors: &[(String, Tensor)]) -> io::Result<()> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, tensor) in tensors {
        let kind = tensor.kind();
        let (_, _, dtype) = DTYPES.iter().find(|(known, ..)| *known == kind).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("`{name}` is {kind:?}, which safetensors does not have"),
            )
        })?;
        let start = end;
        end += tensor.numel() * kind.elt_size_in_bytes();
        let entry = json!({ "dtype": dtype, "shape": tensor.size(), "data_offsets": [start, end] });
        if header.insert(name.clone(), entry).is_some() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("two tensors are called `{name}`"),
            ));
        }
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)?;
    let mut bytes = Vec::new();
    for (_, tensor) in tensors {
        let numel = tensor.numel();
        bytes.resize(numel * tensor.kind().elt_size_in_bytes(), 0);
        if numel > 0 {
            let host = tensor.f_detach().and_then(|t| t.f_to_device(Device::Cpu)?.f_contiguous());
            host.and_then(|host| host.f_copy_data_u8(&mut bytes, numel)).map_err(io::Error::other)?;
        }
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Reads what [`write_tensors`], or any writer of the format, wrote; onto the CPU, by name.
///
/// # Errors
/// [`Error::File`] for a file that is truncated or something else; those of the system.
pub fn read_tensors(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let file = MappedFile::open(path)?;
    let views = SafeTensors::deserialize(&file)
        .map_err(|cause| Error::file(path, format!("not a whole safetensors file: {cause}")))?;
    let mut tensors = Vec::new();
    for (name, view) in views.tensors() {
        let known = DTYPES.iter().find(|(_, dtype, _)| *dtype == view.dtype());
        let (kind, ..) = *known.ok_or_else(|| {
            Error::file(path, format!("`{name}` is {:?}; expected a dtype that tensors have", view.dtype()))
        })?;
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        let tensor = match view.data() {
            [] => Tensor::f_zeros(&shape, (kind, Device::Cpu))?,
            data => Tensor::f_from_data_size(data, &shape, kind)?,
        };
        tensors.push((name, tensor));
    }
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(tensors)
}

/// Puts tensors in the place of those of the same names, on whatever device these are.
///
/// # Errors
/// [`Error::State`] with all names that are missing, not known, or of another shape or dtype; nothing is changed then.
pub fn overwrite<'a>(
    targets: impl IntoIterator<Item = (String, &'a Tensor)>,
    tensors: &[(String, Tensor)],
    from: &str,
) -> Result<()> {
    let mut given: BTreeMap<&str, &Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let (mut missing, mut mismatched, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
    for (name, target) in targets {
        match given.remove(name.as_str()) {
            None => missing.push(name),
            Some(tensor) if tensor.size() != target.size() || tensor.kind() != target.kind() => {
                let of = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
                mismatched.push(format!("{name} ({}, expected {})", of(tensor), of(target)));
            }
            Some(tensor) => pairs.push((target, tensor)),
        }
    }
    let unexpected: Vec<String> = given.into_keys().map(str::to_owned).collect();
    if !(missing.is_empty() && unexpected.is_empty() && mismatched.is_empty()) {
        return Err(Error::State { from: from.into(), into: "the model", missing, unexpected, mismatched });
    }
    let _no_grad = tch::no_grad_guard();
    for (target, tensor) in pairs {
        target.f_detach()?.f_copy_(tensor)?;
    }
    Ok(())
}
