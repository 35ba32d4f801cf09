//! The format of a model's weights, as a prediction needs it.

use accounting::memory::quantized::StoredBytes;
use accounting::memory::recipe::Recipe;
use kernels::quantized::blocks;
use models::hugging_face::Folder;
use tch::Kind;

use crate::error::Result;

/// The dtype of a model's weights, and where its matrices stay in the blocks of a GGUF file, their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightFormat {
    /// The dtype; [`blocks::KIND`] for the blocks of a GGUF file.
    pub kind: Kind,
    /// The bytes of the matrices in such blocks; `None` for another dtype, or where they are not known.
    pub stored: Option<StoredBytes>,
}

impl From<Kind> for WeightFormat {
    fn from(kind: Kind) -> Self {
        Self { kind, stored: None }
    }
}

impl WeightFormat {
    /// Returns the format of a folder's model that is loaded in `kind`.
    ///
    /// # Errors
    /// Blocks that products do not read; more bytes than 64 bits count.
    pub fn of(folder: &Folder, kind: Kind) -> Result<Self> {
        if kind != blocks::KIND {
            return Ok(kind.into());
        }
        let matrices = folder.matrix_bytes()?;
        let named = |matrices: Vec<(String, u64)>| {
            StoredBytes::new(matrices.iter().map(|(name, bytes)| (name.as_str(), *bytes)))
        };
        Ok(Self { kind, stored: matrices.map(named).transpose()? })
    }

    /// Returns the number formats of a model in this format: [`planning::recipe`](super::recipe), with the bytes of stored blocks.
    pub fn recipe(&self) -> Recipe {
        self.stored.map_or_else(|| super::recipe(self.kind), Recipe::blocks)
    }
}
