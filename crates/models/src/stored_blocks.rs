//! Models whose matrices stay in the blocks of a GGUF file, as a frozen base for adapters and for generation.
//!
//! Each matrix is one tensor with the file's bytes ([`kernels::quantized::blocks`]), in the order of Hugging Face's rows; the types may
//! differ from matrix to matrix. The embedding is looked up by dequantizing its rows, and is the output too where the file ties them.
//! Norms, biases, and matrices that the file has in a floating dtype are in bf16.

use std::path::Path;

use gguf::{FileTensor, ModelFile};
use kernels::quantized::blocks::{self, BlockType, from_bytes};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::hugging_face::tensor_name;
use crate::init::Init;
use crate::linear::is_placeholder;
use crate::llama::{DecoderConfig, EMBEDDING, LM_HEAD, Llama};
use crate::module::{Block, Module, ModuleMapper, Role, map_modules};

/// The beginning of the names of the blocks' tensors.
const LAYERS: &str = "layers.";
/// Numbers that are decoded at a time.
const PIECE: u64 = 1 << 18;

/// Reads a model, and keeps its matrices in the file's blocks. It takes the memory of the model, and the file's pages are released.
///
/// # Errors
/// A configuration that the file contradicts; a type of blocks that products do not read, by the tensor's name; a device other than the
/// CPU; too little memory.
pub fn load(file: &ModelFile, device: Device) -> Result<Llama> {
    load_with(file, 0, device)
}

/// [`load`] of a model whose embedding and head have `vocabulary` rows, if the file has fewer: the others are zeros, for tokens whose rows
/// are elsewhere ([`crate::token_rows`]).
///
/// # Errors
/// As [`load`].
pub fn load_with(file: &ModelFile, vocabulary: i64, device: Device) -> Result<Llama> {
    assemble(file, vocabulary, device, &mut |_, block| Ok(block))
}

/// [`load_with`], passing each block with its number to `wrap` once its tensors are read and before the next block is created, as
/// [`Llama::assemble`]: offloading reads a model in the memory of one block.
///
/// # Errors
/// As [`load`]; those of `wrap`.
pub fn assemble(
    file: &ModelFile,
    vocabulary: i64,
    device: Device,
    wrap: &mut dyn FnMut(usize, Box<dyn Block>) -> Result<Box<dyn Block>>,
) -> Result<Llama> {
    if device != Device::Cpu {
        let reason = format!(
            "blocks are multiplied on a CPU only, not on {device:?}; load the model in bfloat16, or in nf4"
        );
        return Err(Error::file(file.path(), reason));
    }
    let mut config: DecoderConfig = serde_json::from_value(serde_json::Value::Object(file.config().clone()))
        .map_err(|cause| Error::file(file.path(), cause))?;
    config.vocab_size = config.vocab_size.max(vocabulary);
    let options = (blocks::KIND, device);
    let mut model = Llama::assemble(&config, Init::Uninitialised, options, &mut |number, mut block| {
        fill(&mut *block, &format!("{LAYERS}{number}"), file)?;
        wrap(number, block)
    })?;
    let mut outside = Fill { prefix: String::new(), file, embedding: None, skipped: Some(LAYERS) };
    map_modules(&mut model, &mut outside)?;
    map_modules(&mut model, &mut Rows { vocabulary: config.vocab_size, embedding: None })?;
    Ok(model)
}

/// Reads the tensors of a part, whose name in the model is `prefix` (empty, or `layers.0`), and which was created in [`blocks::KIND`].
///
/// # Errors
/// As [`load`].
pub fn fill(part: &mut (impl Module + ?Sized), prefix: &str, file: &ModelFile) -> Result<()> {
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}.") };
    map_modules(part, &mut Fill { prefix, file, embedding: None, skipped: None })
}

/// Returns the bytes of each matrix of a model in the blocks of a file, by the model's name, for a plan: see [`load_with`].
///
/// # Errors
/// A type of blocks that products do not read.
pub fn matrix_bytes(file: &ModelFile, vocabulary: i64) -> Result<Vec<(String, u64)>> {
    let bytes = |tensor: &FileTensor| {
        let &[rows, columns] = &tensor.shape[..] else { return Ok(None) };
        let name = tensor.name.strip_prefix("model.").unwrap_or(&tensor.name).to_owned();
        let has_tokens = [EMBEDDING, LM_HEAD].contains(&&*name);
        let rows = if has_tokens { rows.max(vocabulary.unsigned_abs()) } else { rows };
        let of_row = match block_type(file, tensor)?.filter(|_| tensor.has_blocks()) {
            Some(stored) => columns / stored.values() as u64 * stored.bytes() as u64,
            None => 2 * columns,
        };
        Ok(Some((name, rows * of_row)))
    };
    file.tensors().iter().filter_map(|tensor| bytes(tensor).transpose()).collect()
}

/// Appends rows of zeros to the embedding and the head, to `vocabulary` rows. A block of zeros has the values 0 in every type.
struct Rows {
    vocabulary: i64,
    /// The embedding before and after, which a tied head shares.
    embedding: Option<(Tensor, Tensor)>,
}

impl ModuleMapper for Rows {
    fn tensor(&mut self, name: &str, tensor: &mut Tensor, _: Role) -> Result<()> {
        let more = self.vocabulary - tensor.size().first().copied().unwrap_or(self.vocabulary);
        if ![EMBEDDING, LM_HEAD].contains(&name) || more <= 0 {
            return Ok(());
        }
        let before = tensor.shallow_clone();
        *tensor = match &self.embedding {
            Some((known, longer)) if known.data_ptr() == before.data_ptr() => longer.shallow_clone(),
            _ => {
                let size = [&[more], &before.size()[1..]].concat();
                Tensor::f_cat(
                    &[&before, &Tensor::f_zeros(size.as_slice(), (before.kind(), before.device()))?],
                    0,
                )?
            }
        };
        if name == EMBEDDING {
            self.embedding = Some((before, tensor.shallow_clone()));
        }
        Ok(())
    }
}

struct Fill<'a> {
    prefix: String,
    file: &'a ModelFile,
    /// The embedding, which a tied head shares.
    embedding: Option<Tensor>,
    /// The beginning of the names of tensors that are read already.
    skipped: Option<&'static str>,
}

impl ModuleMapper for Fill<'_> {
    fn tensor(&mut self, name: &str, tensor: &mut Tensor, _: Role) -> Result<()> {
        let name = format!("{}{name}", self.prefix);
        if self.skipped.is_some_and(|skipped| name.starts_with(skipped)) {
            return Ok(());
        }
        let Some(source) = self.file.tensor(&tensor_name(&name)) else {
            return match self.embedding.as_ref().filter(|_| name == LM_HEAD) {
                Some(embedding) => {
                    *tensor = embedding.shallow_clone();
                    Ok(())
                }
                None => Err(Error::file(self.file.path(), format!("it has no tensor for `{name}`"))),
            };
        };
        if is_placeholder(tensor) {
            *tensor = matrix(self.file, source)?;
        } else {
            copy(self.file, source, tensor)?;
        }
        if name == EMBEDDING {
            self.embedding = Some(tensor.shallow_clone());
        }
        self.file.forget(source).map_err(|cause| Error::file(self.file.path(), cause))
    }
}

/// Returns the type of a tensor's blocks; `None` for one in a floating dtype.
fn block_type(file: &ModelFile, tensor: &FileTensor) -> Result<Option<BlockType>> {
    let number = tensor.kind.number();
    match BlockType::from_ggml(number) {
        None if !matches!(number, 0 | 1 | 30) => {
            let known = BlockType::ALL.map(BlockType::name).join(", ");
            let reason = format!(
                "`{}` is in {}; the blocks that are multiplied are {known}: load the model in bfloat16, or in nf4",
                tensor.name, tensor.kind
            );
            Err(Error::file(file.path(), reason))
        }
        stored => Ok(stored),
    }
}

/// Returns a matrix in its blocks, or in bf16.
fn matrix(file: &ModelFile, tensor: &FileTensor) -> Result<Tensor> {
    let &[rows, columns] = &tensor.shape[..] else {
        return Err(Error::file(
            file.path(),
            format!("`{}` is {:?}; expected a matrix", tensor.name, tensor.shape),
        ));
    };
    let shape = [rows as i64, columns as i64];
    if let Some(stored) = block_type(file, tensor)?
        && let Some(bytes) = file.blocks(tensor, 0..rows).map_err(|cause| Error::file(file.path(), cause))?
    {
        return from_bytes(stored, shape, &bytes);
    }
    let values = Tensor::f_empty(shape, (Kind::BFloat16, Device::Cpu))?;
    copy(file, tensor, &values)?;
    Ok(values)
}

/// Copies values by rows; a vector is one row.
fn copy(file: &ModelFile, tensor: &FileTensor, target: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let (rows, columns) = match tensor.shape[..] {
        [columns] => (1, columns),
        [rows, columns] | [rows, 1, columns] => (rows, columns),
        _ => (0, 1),
    };
    let expected: Vec<i64> = tensor.shape.iter().map(|size| *size as i64).collect();
    if target.size() != expected {
        return Err(Error::file(
            file.path(),
            format!("`{}` is {expected:?}; expected {:?}", tensor.name, target.size()),
        ));
    }
    let target = target.f_view([rows as i64, columns as i64])?;
    let step = (PIECE / columns.max(1)).max(1);
    let mut values = Vec::new();
    for start in (0..rows).step_by(step as usize) {
        let count = step.min(rows - start);
        values.clear();
        file.rows(tensor, start..start + count, &mut values)
            .map_err(|cause| Error::file(file.path(), cause))?;
        let piece = Tensor::f_from_slice(&values)?.f_view([count as i64, columns as i64])?;
        target.f_narrow(0, start as i64, count as i64)?.f_copy_(&piece)?;
    }
    Ok(())
}

/// Opens a file, and reads it: see [`load`].
///
/// # Errors
/// As [`ModelFile::open`] and [`load`].
pub fn open(path: &Path, device: Device) -> Result<Llama> {
    let file =
        ModelFile::open(path, gguf::ReadOptions::default()).map_err(|cause| Error::file(path, cause))?;
    load(&file, device)
}
