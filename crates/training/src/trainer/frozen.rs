//! Frozen parameters in checkpoints: saved, or identified by a fingerprint.
//!
//! A training of adapters changes a thousandth of the model. Its checkpoints need not contain the rest, which is available
//! where the model came from, but must not be loaded over other values. So a fingerprint identifies it: of names, dtypes,
//! shapes and all values, computed once for each set of them: what is unfrozen during a training is in its next checkpoint.

use std::sync::{Mutex, PoisonError};

use dataloading::fingerprint;
use models::module::{self, LanguageModel, NamedTensor, Role};
use tch::{Device, Tensor};

use super::Trainer;
use crate::error::Result;

/// Which parameters without a gradient a checkpoint contains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Frozen {
    /// Their values.
    #[default]
    Saved,
    /// A fingerprint of them. Only a training with the same values and the same setting resumes from such a checkpoint; others
    /// are refused.
    LeftOut,
}

/// The fingerprint, once computed, and the names of the parameters that it is of.
pub(super) type Fingerprint = Mutex<Option<(Vec<String>, String)>>;

/// Bytes read at a time: the extra memory needed beside the model.
const BLOCK: usize = 16 << 20;

/// Returns the model's tensors that a checkpoint contains.
pub(super) fn kept(model: &dyn LanguageModel, frozen: Frozen) -> Vec<(String, &Tensor)> {
    let left_out = |named: &NamedTensor<'_>| named.role == Role::Parameter && !named.tensor.requires_grad();
    let all = module::tensors(model).into_iter();
    let kept = all.filter(|named| frozen == Frozen::Saved || !left_out(named));
    kept.map(|named| (named.name, named.tensor)).collect()
}

impl Trainer {
    /// Returns the fingerprint of the tensors that a checkpoint leaves out; `None` if it contains all.
    pub(super) fn frozen_fingerprint(&self) -> Result<Option<String>> {
        if self.options.frozen == Frozen::Saved {
            return Ok(None);
        }
        let frozen = module::parameters(self.model.as_ref()).into_iter();
        let frozen: Vec<(String, &Tensor)> = frozen.filter(|(_, tensor)| !tensor.requires_grad()).collect();
        let names: Vec<String> = frozen.iter().map(|(name, _)| name.clone()).collect();
        let mut known = self.fingerprint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = known.as_ref().filter(|(of, _)| *of == names) {
            return Ok(Some(text.clone()));
        }
        let mut all = fingerprint::Fingerprint::new("frozen parameters");
        let mut count = 0u64;
        for (name, tensor) in frozen {
            let weight = self.optimizer.whole_weight(tensor)?;
            all = of_tensor(all.number(name_of(&name)), &weight)?;
            // The pages of a layer in a file are not held until the end.
            runtime::file::forget(&weight)?;
            count += tensor.numel() as u64;
        }
        let summary = format!("{count} numbers with the fingerprint {:016x}", all.finish());
        *known = Some((names, summary.clone()));
        Ok(Some(summary))
    }
}

fn name_of(text: &str) -> u64 {
    fingerprint::Fingerprint::new(text).finish()
}

fn of_tensor(all: fingerprint::Fingerprint, tensor: &Tensor) -> Result<fingerprint::Fingerprint> {
    let _no_grad = tch::no_grad_guard();
    let sizes = tensor.size();
    let mut all = all
        .number(name_of(&format!("{:?}", tensor.kind())))
        .numbers(sizes.iter().map(|size| size.cast_unsigned()));
    let width = tensor.kind().elt_size_in_bytes();
    let flat = tensor.f_detach()?.f_reshape([-1])?;
    let (count, step) = (flat.numel(), BLOCK / width.max(1));
    let mut bytes = vec![0; BLOCK.min(count * width)];
    for start in (0..count).step_by(step) {
        let length = step.min(count - start);
        let block = flat.f_narrow(0, start as i64, length as i64)?.f_to_device(Device::Cpu)?;
        let bytes = &mut bytes[..length * width];
        block.f_contiguous()?.f_copy_data_u8(bytes, length)?;
        let number = |chunk: &[u8]| {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(eight)
        };
        all = all.numbers(bytes.chunks(8).map(number));
    }
    Ok(all)
}
