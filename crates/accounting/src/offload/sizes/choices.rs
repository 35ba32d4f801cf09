//! Settings that determine the costs of a step.

use crate::decoder_flops::Workload;
use crate::experts::StreamedExperts;
use crate::memory::logits::Loss;
use crate::memory::optimizer::Optimizer;
use crate::memory::quantized;
use crate::memory::recipe::Recipe;
use crate::passes::head::Logits;
use crate::recompute::NormKernel;
use crate::sequence_parallel;

/// Further settings that determine the costs of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choices {
    /// FLOP/s that products reach.
    pub flops: f64,
    /// Bytes per second of the device's memory, which bounds a step of few tokens.
    pub bandwidth: f64,
    /// Number formats.
    pub recipe: Recipe,
    /// The optimizer of the trained parameters.
    pub optimizer: Optimizer,
    /// The implementation of the loss.
    pub loss: Loss,
    /// The implementation of an RMSNorm.
    pub norm: NormKernel,
    /// The tokens whose logits an inference computes.
    pub logits: Logits,
    /// Bytes that the device's libraries keep for matrix products; 0 on a CPU.
    pub product_workspaces: u64,
    /// Whether rows hold several documents.
    pub documents: bool,
    /// Ranks that divide each row ([`sequence_parallel`](crate::sequence_parallel)): memory and time are those of one rank's part, without what
    /// is sent. 1 for whole rows.
    pub sequence_ranks: u64,
    /// Whether products of 16 bits in mixed precision, and those with weights in NF4, are computed in fp32, as on a CPU without
    /// instructions for 16 bits.
    pub widens: bool,
    /// Largest number of bytes of a tile of a weight in NF4: `kernels::quantized::tile_bytes`.
    pub tile_bytes: u64,
    /// Whether a product packs its weights before it computes, as on a CPU: then the time to read and write them adds up with that of the
    /// FLOPs, and passes over fewer rows take longer.
    pub packs: bool,
    /// Whether layers that keep their inputs alone keep them in host memory. [`Job`](crate::candidates::Job)s decide this by placement.
    pub inputs_on_host: bool,
    /// Whether attention runs by flash attention on a GPU, whose backward has a workspace.
    pub flash_workspace: bool,
    /// Whether one kernel computes attention with windows and sinks, which then take no memory, as on a CPU. Elsewhere such models are refused.
    pub attention_kernel: bool,
    /// Bytes of the temporaries of MLPs that keep their inputs alone and run over tiles of tokens (`swiglu-ckpt`), `u64::MAX` for all tokens
    /// at once; `None` for ordinary MLPs.
    pub mlp_tile: Option<u64>,
    /// How the experts of a mixture are streamed; `None` for experts in memory, with their layers.
    pub experts: Option<StreamedExperts>,
    /// Tiles of logits that exist in a training's loss beside that of the model, of a teacher.
    pub further_tiles: u64,
}

impl Default for Choices {
    /// Returns 100 TFLOP/s, 1 TB/s, everything in bf16 with fp32 master weights, AdamW, a loss in tiles of 1024 tokens,
    /// and the logits of every token.
    fn default() -> Self {
        Self {
            flops: 100e12,
            bandwidth: 1e12,
            recipe: Recipe::BF16_MASTER,
            optimizer: Optimizer::AdamW,
            loss: Loss::LinearCrossEntropy { tokens: 1024, whole: 0 },
            norm: NormKernel::default(),
            logits: Logits::default(),
            product_workspaces: 0,
            documents: false,
            sequence_ranks: 1,
            widens: false,
            tile_bytes: quantized::CPU_TILE,
            packs: false,
            inputs_on_host: false,
            flash_workspace: false,
            attention_kernel: false,
            mlp_tile: None,
            experts: None,
            further_tiles: 0,
        }
    }
}

impl Choices {
    /// Returns what a rank computes of a batch of whole rows.
    pub(super) fn part(&self, work: Workload) -> Workload {
        sequence_parallel::part(work, self.sequence_ranks)
    }

    /// Returns a rank's part of FLOPs.
    pub(super) fn share(&self, flops: f64) -> f64 {
        flops / self.sequence_ranks.max(1) as f64
    }

    /// Seconds of products with these FLOPs that go over weights so many times.
    pub(super) fn seconds(&self, flops: f64, passes: f64, weight_bytes: u64) -> f64 {
        (flops / self.flops).max(passes * weight_bytes as f64 / self.bandwidth)
    }

    /// The same in training, where products have many rows.
    pub(super) fn training_seconds(&self, flops: f64, passes: f64, weight_bytes: u64) -> f64 {
        if !self.packs {
            return self.seconds(flops, passes, weight_bytes);
        }
        flops / self.flops + 2.0 * passes * weight_bytes as f64 / self.bandwidth
    }
}
