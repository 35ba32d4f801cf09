//! The change that a merge makes for an adapter that was trained over NF4.
//!
//! The adapter learned beside the dequantized weights, and is merged into the original ones. On given texts, D(p‖q) = Σ p·ln(p/q) is
//! taken over the vocabulary at each position, of p with the adapter over NF4 and q of the merged model, and of p and the original
//! model with the same adapter in NF4 left out: the second says how much the adapter itself does.

use std::path::Path;

use anyhow::{Context, bail};
use frugal::companion_files::CompanionFiles;
use frugal::config::Dtype;
use models::Llama;
use models::hugging_face::Folder;
use models::module::{Input, LanguageModel};
use tch::{Device, Kind, Tensor};

use crate::flags::model::load_adapter;

/// Means over all positions.
pub(crate) struct Difference {
    pub(crate) positions: i64,
    /// Of the merged model from the adapter over NF4, in nats.
    pub(crate) merged: f64,
    /// Of NF4 without the adapter, in nats.
    pub(crate) without: f64,
    /// Share of positions with the same most likely token.
    pub(crate) same_token: f64,
}

/// Measures the difference on each line of a file.
///
/// # Errors
/// A file without a line of two tokens; those of the models.
pub(crate) fn measure(
    (folder, companions): (&Folder, &CompanionFiles),
    adapter: &Path,
    merged: &Llama,
    texts: &Path,
    device: Device,
) -> anyhow::Result<Difference> {
    let text = std::fs::read_to_string(texts).with_context(|| texts.display().to_string())?;
    let tokenizer = companions.tokenizer()?;
    let most = usize::try_from(folder.config().max_position_embeddings)?;
    let mut quantized = folder.load(Some(Dtype::Nf4.kind()), device)?;
    let adapters = load_adapter(&mut quantized, adapter)?;
    let _no_grad = tch::no_grad_guard();
    let (mut positions, mut sums) = (0, [0.0; 3]);
    for line in text.lines() {
        let tokens: Vec<i64> = tokenizer.encode(line)?.into_iter().take(most).map(i64::from).collect();
        if tokens.len() < 2 {
            continue;
        }
        let tokens = Tensor::from_slice(&tokens).view([1, -1]).f_to_device(device)?;
        let logarithms = |model: &Llama| -> anyhow::Result<Tensor> {
            Ok(model.logits(&Input::new(&tokens))?.f_to_kind(Kind::Float)?.f_log_softmax(-1, Kind::Float)?)
        };
        let over_nf4 = logarithms(&quantized)?;
        let without = {
            let _off = adapters.disable()?;
            logarithms(&quantized)?
        };
        let merged = logarithms(merged)?;
        let divergence = |other: &Tensor| -> anyhow::Result<f64> {
            let each = over_nf4.f_exp()?.f_mul(&over_nf4.f_sub(other)?)?;
            Ok(each.f_sum(Kind::Double)?.f_double_value(&[])?)
        };
        let best = |x: &Tensor| x.f_argmax(-1, false);
        let same = best(&merged)?.f_eq_tensor(&best(&over_nf4)?)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        for (sum, value) in sums.iter_mut().zip([divergence(&merged)?, divergence(&without)?, same]) {
            *sum += value;
        }
        positions += tokens.size()[1];
    }
    if positions == 0 {
        bail!("{}: no line of at least two tokens in it", texts.display());
    }
    let [merged, without, same_token] = sums.map(|sum| sum / positions as f64);
    Ok(Difference { positions, merged, without, same_token })
}
