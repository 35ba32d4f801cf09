//! Trainings on clusters of GPUs.

use super::{Division, Exchange, Failures, Network, Step, Work, step};
use crate::decoder_flops::{self, Recomputation, Workload};
use crate::exact::positive;
use crate::memory::recipe::Recipe;
use crate::memory::zero::ZeroStage;
use crate::model::Decoder;
use crate::{Dtype, Error};

/// Llama 3's pre-training: 419 unexpected interruptions in 54 days on 16 384 GPUs (arXiv:2407.21783, table 5), with 30 s for a
/// checkpoint and 10 min for a restart, which are assumed.
pub const LLAMA_3_FAILURES: Failures =
    Failures { gpu_mtbf: 54.0 * 86_400.0 * 16_384.0 / 419.0, save: 30.0, restart: 600.0 };

/// GPUs with their network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpus {
    /// Peak FLOP/s of a GPU, for the utilization.
    pub peak: f64,
    /// FLOP/s that its products reach, recomputed ones included.
    pub flops: f64,
    /// Rates between them.
    pub network: Network,
}

/// How the GPUs of a run share the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parallelism {
    /// All GPUs.
    pub gpus: u64,
    /// GPUs that divide a replica's weights, gradients and state (ZeRO-3); fewer than all: hybrid sharding.
    pub shard: u64,
    /// GPUs that divide each layer or the layers (tensor and pipeline parallelism), whose transfers count as hidden.
    pub model: u64,
    /// The share of the time in which a pipeline is empty.
    pub bubble: f64,
}

/// A training step on GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run<'a> {
    /// The model.
    pub model: &'a Decoder,
    /// Sequences of one data-parallel rank, which are several GPUs under tensor or pipeline parallelism.
    pub work: Workload,
    /// Forwards that the backward computes again: 0 to 1.
    pub recomputed: f64,
    /// Number format of gathered weights.
    pub weights: Dtype,
    /// Number format of reduced gradients.
    pub gradients: Dtype,
    /// The division.
    pub parallelism: Parallelism,
}

impl Run<'_> {
    /// Returns the FLOPs of the model in a step of one GPU, attention counted dense, without recomputation.
    pub fn model_flops(&self) -> Result<f64, Error> {
        let one = decoder_flops::step(self.model, self.work, &Recomputation::default())?;
        Ok(one.model()?.dense as f64 / self.parallelism.model as f64)
    }

    /// Returns the tokens of a GPU in a step.
    pub fn tokens(&self) -> Result<f64, Error> {
        Ok(self.work.tokens()? as f64 / self.parallelism.model as f64)
    }

    /// Returns the seconds of a step.
    ///
    /// # Errors
    /// No GPUs; a division that does not come out even; counts beyond 64 bits.
    pub fn step(&self, gpus: &Gpus) -> Result<Step, Error> {
        let Parallelism { gpus: all, shard, model, bubble } = self.parallelism;
        let replica = positive("GPUs of a shard", shard)? * positive("GPUs of a model", model)?;
        if !positive("the number of GPUs", all)?.is_multiple_of(replica) {
            return Err(Error::Shape {
                what: format!("{all} GPUs are not a multiple of {shard} × {model}"),
                remedy: "give a multiple of the GPUs that hold a replica".into(),
            });
        }
        let division = Division { stage: ZeroStage::Three, shard, replicas: all / replica };
        let mut network = gpus.network;
        // The ranks of tensor parallelism fill the nodes, and each has its share of the links.
        network.node = (network.node / model).max(1);
        network.between = gpus.network.between / model.min(gpus.network.node) as f64;
        let mut step = step(&self.work(gpus)?, division, &network);
        step.compute /= 1.0 - bubble;
        Ok(step)
    }

    fn work(&self, gpus: &Gpus) -> Result<Work, Error> {
        let flops = decoder_flops::step(self.model, self.work, &Recomputation::default())?;
        let share = self.parallelism.model as f64;
        let layers = self.model.layers as f64;
        let outer = flops.rows.iter().filter(|row| !in_block(row.part));
        let outer: f64 = outer.map(|row| row.forward.dense as f64).sum();
        let forward = (flops.forward.dense as f64 - outer) / layers / share / gpus.flops;
        let block = self.model.block_parameters()?;
        let outside = (self.model.parameters()? - self.model.layers * block) as f64 / share;
        let bytes = |dtype: Dtype| dtype.storage_bits() as f64 / 8.0;
        let (weights, gradients) = (bytes(self.weights), bytes(self.gradients));
        Ok(Work {
            exchange: Exchange::default(),
            layers: self.model.layers,
            forward,
            backward: (2.0 + self.recomputed) * forward,
            outside: 3.0 * outer / share / gpus.flops,
            optimizer: 0.0,
            weights: weights * block as f64 / share,
            gradients: gradients * block as f64 / share,
            outside_weights: weights * outside,
            outside_gradients: gradients * outside,
        })
    }

    /// Returns the tokens per second of a GPU.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn tokens_per_second(&self, gpus: &Gpus) -> Result<f64, Error> {
        Ok(self.tokens()? / self.step(gpus)?.seconds())
    }

    /// Returns the model FLOPs utilization.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn utilization(&self, gpus: &Gpus) -> Result<f64, Error> {
        Ok(self.model_flops()? / gpus.peak / self.step(gpus)?.seconds())
    }

    /// Returns `gpus` with the FLOP/s at which this run has the published tokens per second and GPU.
    ///
    /// # Errors
    /// As [`Run::step`].
    pub fn calibrate(&self, gpus: &Gpus, tokens_per_second: f64) -> Result<Gpus, Error> {
        let flops = self.step(gpus)?.compute * gpus.flops;
        let seconds = self.tokens()? / tokens_per_second;
        let mut calibrated = Gpus { flops: flops / seconds, ..*gpus };
        // The exposed seconds depend little on the rate.
        for _ in 0..8 {
            calibrated.flops = flops / (seconds - self.step(&calibrated)?.exposed());
        }
        Ok(calibrated)
    }

    /// Returns the bytes of a GPU's weights, gradients and optimizer state, all divided, in the recipe's formats.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn state_bytes(&self, recipe: &Recipe) -> Result<f64, Error> {
        let bytes = recipe.bytes_per_parameter(crate::memory::optimizer::Optimizer::AdamW);
        let replica = self.parallelism.shard * self.parallelism.model;
        Ok(bytes * self.model.parameters()? as f64 / replica as f64)
    }
}

fn in_block(part: crate::model::Part) -> bool {
    use crate::model::Part;
    matches!(part, Part::Attention | Part::FeedForward)
}
