//! Gradients of several micro-batches as those of one batch.
//!
//! With the summed loss Sᵢ and nᵢ targets of micro-batch i, the loss of the step is L = Σ Sᵢ / Σ nᵢ. Each micro-batch runs
//! backward from Sᵢ / Σ nᵢ, and the gradients add up to that of L. (The mean of the means, Σ (Sᵢ/nᵢ) / k, gives the tokens
//! of short micro-batches more weight.) Σ nᵢ has to be known before the first backward: the loader counts targets on the
//! host, so all micro-batches of a step are fetched first; they are integers, a few bytes a token.

use dataloading::Batch;
use models::module::{Context, Input, LanguageModel};
use models::{Documents, module::LossOutput};

use crate::batches::Batches;
use crate::error::Result;

/// The micro-batches of one step.
#[derive(Debug)]
pub struct MicroBatches {
    /// In order.
    pub batches: Vec<Batch>,
    /// Σ nᵢ.
    pub targets: usize,
    /// Tokens of documents, padding not counted.
    pub tokens: usize,
    /// Places that pad.
    pub padding: usize,
}

impl MicroBatches {
    /// What a summed loss is divided by; 1 where there is no target at all, so that the loss is 0.
    pub fn denominator(&self) -> f64 {
        self.targets.max(1) as f64
    }
}

/// Fetches `count` micro-batches, fewer where the data ends; `None` where it has ended.
///
/// # Errors
/// Those of the source.
pub fn fetch(source: &mut (impl Batches + ?Sized), count: usize) -> Result<Option<MicroBatches>> {
    let mut all = MicroBatches { batches: Vec::new(), targets: 0, tokens: 0, padding: 0 };
    while all.batches.len() < count {
        let Some(batch) = source.next()? else { break };
        all.targets += batch.counts.targets;
        all.tokens += batch.counts.tokens;
        all.padding += batch.counts.padding;
        all.batches.push(batch);
    }
    Ok((!all.batches.is_empty()).then_some(all))
}

/// Where the documents of a packed batch lie; `None` where each row is one document.
///
/// # Errors
/// Those of libtorch.
pub fn documents(batch: &Batch) -> Result<Option<Documents>> {
    let documents = batch.packing.as_ref().map(|packing| {
        let (ids, cu_seqlens) = (packing.document_ids.shallow_clone(), packing.cu_seqlens.shallow_clone());
        Documents::from_parts(ids, cu_seqlens, packing.starts.clone())
    });
    Ok(documents.transpose()?)
}

/// The summed loss of a batch; with `accuracy`, also how many targets were predicted right.
///
/// # Errors
/// Those of the model.
pub fn forward(
    model: &(impl LanguageModel + ?Sized),
    batch: &Batch,
    training: bool,
    accuracy: bool,
) -> Result<LossOutput> {
    let documents = documents(batch)?;
    let input = Input {
        tokens: &batch.tokens,
        positions: batch.packing.as_ref().map(|packing| &packing.positions),
        context: Context { documents: documents.as_ref(), training, accuracy, ..Context::default() },
    };
    Ok(model.loss(&input, &batch.labels)?)
}
