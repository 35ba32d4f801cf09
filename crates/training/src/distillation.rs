//! Distillation: the model learns the next-token distributions of a teacher, beside the labels or in their place.
//!
//! The teacher is a second, frozen model of the same tokens, whose hidden size, depth and family may be others. Just before a micro-batch's forward it
//! reads the same tokens, with the same documents and positions, without a graph or dropout, in the dtype of its own weights. What it leaves are
//! the inputs of its head `[batch, sequence, hidden]`: the logits of both are made a chunk at a time, in the loss
//! ([`models::distillation`] has the mathematics). So a teacher takes its weights, or those of a few of its layers where the others are offloaded,
//! one layer's activations before the forward, and one hidden state for each position during it.
//!
//! Or the teacher is asked once, before the training: [`write_top_k`] writes its k most probable tokens at every label to a file, 6·k bytes each, and
//! a training reads those of its batches ([`MaskedBatches::with_top_k`](crate::masked_rows::MaskedBatches::with_top_k)). Then it takes no memory and no
//! time beside the student.
//!
//! The loss of a step is Σ ℓ over its labelled positions, divided by their number; with weights of examples each counts as its example does.
//!
//! ```
//! use models::distillation::DistillationConfig;
//! use models::{DecoderConfig, Llama, module};
//! use tch::{Device, Kind};
//! use training::distillation::Distillation;
//! use training::batches::Synthetic;
//! use training::optimizer::{AdamW, DeviceOptimizer, Group};
//! use training::trainer::{Trainer, TrainerConfig};
//!
//! let kind = (Kind::Float, Device::Cpu);
//! let teacher = Llama::new(&DecoderConfig::llama(32, 24, 40, 2, 2), kind)?;
//! let student = Llama::new(&DecoderConfig::llama(32, 16, 24, 1, 2), kind)?;
//! let groups = Group::by_dimension(module::trainable(&student), 1e-3, 0.0);
//! let optimizer = DeviceOptimizer::new(AdamW::default(), groups)?;
//! let options = TrainerConfig { steps: 2, ..TrainerConfig::default() };
//! let mut trainer = Trainer::new(Box::new(student), Box::new(optimizer), options)?;
//! trainer.distillation = Some(Distillation::new(Box::new(teacher), DistillationConfig::default())?);
//! let mut data = Synthetic {
//!     seed: 1, vocabulary: 32, rows: 2, length: 8, noise: 1, batches: None, device: Device::Cpu, position: 0,
//! };
//! trainer.run(&mut data, None)?;
//! # Ok::<(), training::Error>(())
//! ```

mod top_k;

use std::fmt;

use dataloading::{Batch, TopK};
use models::RouterBalance;
use models::distillation::{
    DistillationConfig, DistilledLoss, Divergence, OUTSIDE_THE_SET, OutputProjection, Teacher,
};
use models::module::{self, Context, Input, LanguageModel};
use runtime::precision;
use serde::Serialize;
use tch::{Kind, Tensor};

use crate::accumulation::{documents, labelled_bound};
use crate::embedding_noise::strength;
use crate::error::{Error, Result};

pub use top_k::write_top_k;

/// A training on the distributions of a teacher. See the [module](self).
pub struct Distillation {
    /// `None` for a teacher that was asked before.
    teacher: Option<Box<dyn LanguageModel>>,
    /// What is learned.
    pub config: DistillationConfig,
}

/// The means over the labelled positions of a step or of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DistillationFigures {
    /// The divergence from the teacher, in nats.
    pub divergence: f64,
    /// The loss of the labels alone, in nats: that of an ordinary training.
    pub cross_entropy: f64,
}

impl Distillation {
    /// Creates a training on the distributions of `teacher`, which is frozen.
    ///
    /// # Errors
    /// An option outside its range; a teacher whose head is not one projection.
    pub fn new(teacher: Box<dyn LanguageModel>, config: DistillationConfig) -> Result<Self> {
        config.check()?;
        for named in module::tensors(teacher.as_ref()) {
            if named.tensor.requires_grad() {
                let _ = named.tensor.set_requires_grad(false);
            }
        }
        projection(teacher.as_ref())?;
        Ok(Self { teacher: Some(teacher), config })
    }

    /// Creates a training on what a teacher found most probable at the labels of the batches ([`write_top_k`]).
    ///
    /// # Errors
    /// An option outside its range; another divergence than the forward one.
    pub fn from_files(config: DistillationConfig) -> Result<Self> {
        config.check()?;
        if config.divergence != Divergence::ForwardKl {
            return Err(Error::config("distillation", OUTSIDE_THE_SET));
        }
        Ok(Self { teacher: None, config })
    }

    /// The teacher, if it is at hand.
    pub fn teacher(&self) -> Option<&dyn LanguageModel> {
        self.teacher.as_deref()
    }

    /// Computes the loss of a batch, in training or not, with `accuracy` also the number of correct predictions; the student reads it with
    /// [noise](crate::embedding_noise) of an α.
    ///
    /// # Errors
    /// Tokens that the teacher does not have; errors of either model.
    pub fn forward(
        &self,
        model: &(impl LanguageModel + ?Sized),
        batch: &Batch,
        (training, accuracy): (bool, bool),
        (balance, noise): (Option<&RouterBalance>, Option<f64>),
    ) -> Result<DistilledLoss> {
        let noise = noise.map(|alpha| strength(batch, alpha)).transpose()?;
        let (hidden_btd, teacher);
        let teacher = match (&batch.taught, &self.teacher) {
            (Some(TopK { tokens, log_probabilities }), _) => {
                Teacher::TopK { tokens_btk: tokens, log_probabilities_btk: log_probabilities }
            }
            (None, Some(own)) => {
                teacher = own.as_ref();
                hidden_btd = hidden(teacher, batch)?;
                Teacher::Hidden { hidden_btd: &hidden_btd, projection: projection(teacher)? }
            }
            (None, None) => {
                let reason = "the batches have no probabilities of a teacher; have it write them";
                return Err(Error::config("distillation", reason));
            }
        };
        let documents = documents(batch)?;
        let context = Context {
            documents: documents.as_ref(),
            training,
            accuracy,
            labelled_tokens: labelled_bound(batch.counts.targets, batch.tokens.numel()),
            embedding_noise: noise.as_ref(),
            label_weights: batch.weights.as_ref().map(|weights| &weights.positions),
            balance,
            ..Context::default()
        };
        let positions = batch.packing.as_ref().map(|packing| &packing.positions);
        let input = Input { tokens: &batch.tokens, positions, context };
        Ok(model.distilled_loss(&input, &batch.labels, (&teacher, &self.config))?)
    }
}

/// Returns the input of the teacher's head `[batch, sequence, hidden]`.
fn hidden(teacher: &dyn LanguageModel, batch: &Batch) -> Result<Tensor> {
    let _range = runtime::profile::range("teacher");
    let _no_grad = tch::no_grad_guard();
    let _precision = precision::enter(None);
    let documents = documents(batch)?;
    let context = Context { documents: documents.as_ref(), ..Context::default() };
    let positions = batch.packing.as_ref().map(|packing| &packing.positions);
    Ok(teacher.hidden(&Input { tokens: &batch.tokens, positions, context })?)
}

/// Returns the sums of a loss beside that which is learned, `[2]` in fp64.
pub(crate) fn parts(loss: &DistilledLoss) -> Result<Tensor> {
    let part = |of: &Tensor| of.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([1]);
    Ok(Tensor::f_cat(&[part(&loss.divergence)?, part(&loss.cross_entropy)?], 0)?)
}

fn projection(teacher: &dyn LanguageModel) -> Result<OutputProjection<'_>> {
    teacher.head().output_projection().ok_or_else(|| {
        let reason = "the teacher's head is more than one projection, whose logits cannot be made in parts";
        Error::config("distillation", reason)
    })
}

impl fmt::Debug for Distillation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Distillation").field("config", &self.config).finish_non_exhaustive()
    }
}
