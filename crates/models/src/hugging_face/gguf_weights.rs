//! The weights of a folder whose weights stay in a GGUF file: decoded by rows into the model's tensors.

use std::path::Path;

use gguf::{FileTensor, ModelFile, TensorType};
use tch::{Kind, Tensor};

use super::PREFIX;
use crate::error::{Error, Result};

/// Values that are decoded at once.
const PIECE: u64 = 1 << 20;

/// An open file.
#[derive(Debug)]
pub(crate) struct GgufWeights {
    file: ModelFile,
}

impl GgufWeights {
    /// Opens the file that a folder names; `None` for a folder that names none.
    pub(super) fn open(folder: &Path) -> Result<Option<Self>> {
        let file = gguf::folder::open(folder).map_err(other)?;
        Ok(file.map(|file| Self { file }))
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &ModelFile {
        &self.file
    }

    /// The dtype of the model: that of the file's matrices if all have one, else that which holds the values of blocks, bf16.
    pub(super) fn kind(&self) -> Kind {
        let matrices = || self.file.tensors().iter().filter(|tensor| tensor.shape.len() == 2);
        let all = |kind: TensorType| matrices().all(|tensor| tensor.kind == kind);
        if all(TensorType::F32) {
            Kind::Float
        } else if all(TensorType::F16) {
            Kind::Half
        } else {
            Kind::BFloat16
        }
    }

    /// The model's names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.file.tensors().iter().map(|tensor| tensor.name.strip_prefix(PREFIX).unwrap_or(&tensor.name))
    }

    /// Finds a tensor by the model's name.
    pub(super) fn tensor(&self, name: &str) -> Option<&FileTensor> {
        self.file.tensor(&super::tensor_name(name))
    }

    pub(super) fn shape(&self, name: &str) -> Option<Vec<i64>> {
        let shape = &self.tensor(name)?.shape;
        Some(shape.iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect())
    }

    /// Decodes a tensor into one of its shape, of any dtype and device, and releases the file's pages.
    pub(super) fn copy(&self, name: &str, target: &Tensor) -> Result<()> {
        let path = self.file.path();
        let tensor = self.tensor(name).ok_or_else(|| Error::file(path, format!("`{name}` is missing")))?;
        let (shape, expected) = (self.shape(name).unwrap_or_default(), target.size());
        if shape != expected {
            return Err(Error::file(path, format!("`{name}` is {shape:?}; expected {expected:?}")));
        }
        let _no_grad = tch::no_grad_guard();
        let (rows, columns) = match tensor.shape[..] {
            [rows, columns] | [rows, 1, columns] => (rows, columns),
            _ => (1, target.numel() as u64),
        };
        let target = target.f_view([rows as i64, columns as i64])?;
        let step = (PIECE / columns.max(1)).max(1);
        let mut values = Vec::new();
        for start in (0..rows).step_by(step as usize) {
            let end = rows.min(start + step);
            values.clear();
            self.file.rows(tensor, start..end, &mut values).map_err(other)?;
            let piece = Tensor::f_from_slice(&values)?.f_view([-1, columns as i64])?;
            target.f_narrow(0, start as i64, (end - start) as i64)?.f_copy_(&piece)?;
        }
        self.file.forget(tensor).map_err(other)
    }
}

fn other(error: gguf::Error) -> Error {
    Error::Other(error.into())
}
