//! The tensors file: safetensors with PyTorch's metadata, in the order of the format's own library.

use std::cmp::Reverse;
use std::path::Path;

use models::tensors_file::{Content, LazyTensor};
use tch::Kind;

use crate::error::{Error, Result};

/// The dtypes in the order of the format's library, wide ones last.
const DTYPES: [Kind; 4] = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];

/// Orders the tensors: wide dtypes first, each sorted by name.
pub(crate) fn content<'a>(path: &Path, mut tensors: Vec<LazyTensor<'a>>) -> Result<Content<'a>> {
    let place = |kind: Kind| DTYPES.iter().position(|known| *known == kind);
    if let Some(tensor) = tensors.iter().find(|tensor| place(tensor.kind()).is_none()) {
        let reason = format!("`{}` is {:?}; expected a floating dtype", tensor.name(), tensor.kind());
        return Err(Error::file(path, reason));
    }
    tensors.sort_by_key(|tensor| (Reverse(place(tensor.kind())), tensor.name().to_owned()));
    Ok(Content::new(tensors, &[("format", "pt")]))
}
