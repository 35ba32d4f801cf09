//! The tensors file: safetensors with PyTorch's metadata, in the order of the format's own library.

use std::cmp::Reverse;
use std::path::Path;

use runtime::atomic_write;
use serde_json::{Map, json};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// The dtypes in the order of the format's library, wide ones last.
const DTYPES: [(Kind, &str); 4] =
    [(Kind::Half, "F16"), (Kind::BFloat16, "BF16"), (Kind::Float, "F32"), (Kind::Double, "F64")];

/// Writes the file: wide dtypes first, each sorted by name.
pub(crate) fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let refuse = |reason: String| Error::File { path: path.to_owned(), reason };
    let bytes = encoded(tensors).map_err(refuse)?;
    atomic_write::file(path, |out| out.write_all(&bytes))
        .map_err(|cause| refuse(format!("cannot be written: {cause}")))
}

fn encoded(tensors: &[(String, Tensor)]) -> std::result::Result<Vec<u8>, String> {
    let place = |kind: Kind| DTYPES.iter().position(|(known, _)| *known == kind);
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(name, tensor)| (Reverse(place(tensor.kind())), name.clone()));
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut data = Vec::new();
    for (name, tensor) in order {
        let Some(dtype) = place(tensor.kind()).map(|place| DTYPES[place].1) else {
            return Err(format!("`{name}` is {:?}; expected a floating dtype", tensor.kind()));
        };
        let (start, numel) = (data.len(), tensor.numel());
        data.resize(start + numel * tensor.kind().elt_size_in_bytes(), 0);
        if numel > 0 {
            let host = tensor.f_to_device(Device::Cpu).and_then(|host| host.f_contiguous());
            host.and_then(|host| host.f_copy_data_u8(&mut data[start..], numel))
                .map_err(|cause| format!("`{name}`: {cause}"))?;
        }
        let entry = json!({ "dtype": dtype, "shape": tensor.size(), "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let mut text = serde_json::to_vec(&header).map_err(|cause| cause.to_string())?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text, &data].concat())
}
