//! Data parallelism with weights, gradients and optimizer state sharded over ranks (ZeRO stages 1, 2 and 3).
//!
//! N processes train one model; rank r computes every N-th micro-batch. Each rank owns a shard of the parameters: it sums their
//! gradients over all micro-batches, steps them with its shard of the optimizer's state, and sends the result to the others. With
//! P trained parameters, `b` bytes of a weight and of its gradient, and AdamW:
//!
//! | stage | weights | gradients | optimizer state | sent per rank and step of A rounds, f = (N − 1)/N |
//! |---|---|---|---|---|
//! | [`Stage::One`] | b·P | b·P + 4·P/N | 8·P/N | f·(A·b + b)·P |
//! | [`Stage::Two`] | b·P | up to three buckets + 4·P/N | 8·P/N | the same |
//! | [`Stage::Three`] | b·P/N + slots · largest layer | 3 layers + 4·P/N | 8·P/N | less than f·A·(2·b + b)·P |
//!
//! A round is one micro-batch of each rank. Stage 1 reduces gradients when its backward passes have ended, stage 2 reduces each
//! bucket during backward, as soon as its gradients are there, and frees them. fp32 master weights of half-precision parameters
//! are divided too: with bf16 weights and master copies a rank of stage 3 holds 18·P/N bytes. One rank alone neither copies nor sends
//! fp32 gradients: those of a step's first micro-batch become its sums. Nor does it load layers: their shards are whole.
//!
//! # Layers over ranks
//!
//! Stage 3 divides layers; embedding, head and last norm stay whole, as in stage 2. [`Shards`] hold this rank's part of each layer, and are
//! the source (`training::layer_source`) from which `offload`'s ring loads: while one layer computes, the next are gathered, straight into
//! the slots. Of n layers and s slots, the s last of forward stay for backward, and the s first for the next micro-batch: a rank sends
//! f·b·P/n for each of 2·A·(n − s) + s loads of a step. Between its passes a layer keeps its input and runs again, or its activations
//! without its weights (`offload::OffloadConfig::keep`); either way it is gathered as often. A rank without a micro-batch in the last round
//! runs another's, so that it gathers as often as the others, and adds nothing. [`FrozenWeights`] says whether the base of adapters is
//! divided too, or stays on each rank, where offload puts it.
//!
//! A layer is whole on a rank only while it is divided, if it is created or read then: [`Shards::read_values`], and
//! `offload::Offload::assemble` for a new model.
//!
//! ```ignore
//! let shards = sharding::Shards::new(&ranks, FrozenWeights::Sharded)?;
//! let source: Arc<dyn LayerSource> = Arc::new(shards.clone());
//! let offload = offload::OffloadConfig { source: Some(source), ..Default::default() }.install(&mut model)?;
//! let options = sharding::ShardingConfig { stage: Stage::Three, shards: Some(shards), ..Default::default() };
//! let optimizer = ShardedOptimizer::new(AdamW::default(), groups, &ranks, options)?;
//! ```
//!
//! # Replicas
//!
//! [`Mesh::new`] divides N ranks into R replicas of N/R consecutive ones (hybrid sharding, PyTorch's HSDP). In the table above N is then
//! the ranks of a replica: weights are gathered within it alone, for example within a machine. In each round the fp32 sums of a shard pass
//! through the replicas in turn, each adding its ranks' gradients, and the last one sends them to all: 4·P·R/N bytes per rank, once for
//! each of the first R − 1 replicas, R − 1 times for the last.
//!
//! ```no_run
//! # fn training(ranks: &runtime::collectives::Group, groups: Vec<training::optimizer::Group>) -> Result<(), training::Error> {
//! let mesh = sharding::Mesh::new(ranks, 2)?;
//! let options = sharding::ShardingConfig { stage: sharding::Stage::Two, ..Default::default() };
//! let optimizer = sharding::ShardedOptimizer::new(training::optimizer::AdamW::default(), groups, mesh, options)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Rows that ranks divide
//!
//! [`Mesh::with_sequence`] lets C consecutive ranks take one micro-batch, each its part of every row
//! ([sequence parallelism](training::ranks)), for rows whose activations one rank cannot hold. What is divided of the model stays as
//! it is; a round is one micro-batch of each group of C ranks, and their gradients are summed in the order of ranks.
//!
//! # GPUs
//!
//! [`Mesh::over_devices`] takes two groups of the same ranks: one over CPUs, for what the host decides and for checkpoints, and one over
//! NCCL, for gradients, weights and norms. Parameters are then on the GPU. Reductions run on a stream of their own, which waits for the
//! gradients, and the step's stream waits for the sums; the host waits once in a step for the norm, and once for a scaler's flag. This is
//! **written, never run on a GPU**: all stages run, in tests, over what stands for NCCL on a CPU, and two ranks on one GPU are a test that
//! is skipped without one.
//!
//! ```no_run
//! # fn mesh(control: &runtime::collectives::Group, local_rank: usize) -> Result<sharding::Mesh, training::Error> {
//! use runtime::collectives::GroupConfig;
//!
//! let device = tch::Device::Cuda(local_rank);
//! runtime::device::make_current(device)?;
//! let devices = control.reconnect("devices", GroupConfig { device, ..GroupConfig::default() })?;
//! let mesh = sharding::Mesh::over_devices(control, &devices, 1)?;
//! # Ok(mesh)
//! # }
//! ```
//!
//! # Bitwise identical at any number of ranks
//!
//! **Parameters, optimizer state, losses and gradient norms do not depend on N**, nor on the number of replicas (but on among how many
//! ranks a row is divided), given the same number of
//! threads for each rank, the same kind of processor, and micro-batches of the same size. PyTorch's FSDP, DeepSpeed and Megatron do not
//! promise that. Three things make it so:
//!
//! - The owner adds gradients in fp32 in the order of the global micro-batches, ((g₀ + g₁) + g₂) + …, whoever computed them. A rank
//!   without a micro-batch in the last round sends −0, which changes no number.
//! - The gradient norm is a sum of f64 sums over blocks of [`BLOCK`] elements, each added pair by pair, and then in the order of the blocks.
//!   Shards begin at blocks. Stage 3 has other blocks than stages 1 and 2, so that clipped steps may differ from theirs in the last bit.
//! - Each micro-batch has a random seed of its own, and losses are added in the order of micro-batches
//!   ([`Trainer`](training::Trainer)).
//!
//! [`Reduction::Native`] takes the backend's own collectives instead: then bits depend on the number of ranks.
//!
//! With fp32 parameters, no dropout and no clipping they are also the bits of a training without ranks.
//!
//! ```
//! use models::{Gpt2Like, Gpt2LikeConfig, module};
//! use runtime::collectives::Group;
//! use sharding::{ShardingConfig, ShardedOptimizer};
//! use tch::{Device, Kind};
//! use training::optimizer::{self, AdamW};
//!
//! let config = Gpt2LikeConfig {
//!     vocab_size: 32, embedding_dim: 16, hidden_dim: 16, num_heads: 2, ff_dim: 32, max_length: 16,
//!     ..Gpt2LikeConfig::default()
//! };
//! let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu))?;
//! let parameters = module::trainable(&model);
//! let order = parameters.iter().map(|(name, _)| name.clone()).collect();
//! let groups = optimizer::Group::by_dimension(parameters, 3e-3, 0.1);
//! // In a process that a launcher started: `Group::new(&Store::connect(…)?, "training", …)`.
//! let ranks = Group::alone();
//! let optimizer = ShardedOptimizer::new(AdamW::default(), groups, &ranks, ShardingConfig { order, ..ShardingConfig::default() })?;
//! let trainer = training::Trainer::new(Box::new(model), Box::new(optimizer), training::trainer::TrainerConfig::default())?;
//! # Ok::<(), training::Error>(())
//! ```
//!
//! # Checkpoints
//!
//! Rank 0 writes the trainer's ordinary checkpoints, with whole tensors. They do not say how many ranks wrote them: any number of
//! ranks resumes from them, and so does a training without ranks. Tensors are gathered while they are written, piece by piece
//! ([`training::checkpoint`]): besides what it holds in training, rank 0 takes 4 MiB. To resume, each rank reads its parts of the file.
//!
//! # Not supported
//!
//! GPUs; loss scalers that decide on the device; groups with a rule of their own; rules that update whole tensors, as Muon and Adafactor do;
//! 8-bit state in stage 3; parameters whose memory is exchanged later, such as
//! those of layers that are offloaded to host memory. Each is refused by name.
//!
//! Sources: ZeRO (Rajbhandari et al., arXiv:1910.02054); DeepSpeed's and FSDP2's documentation.

mod agreement;
mod bucket;
mod divided;
mod mesh;
mod norm;
mod optimizer;
mod round;
mod shards;
mod sums;

pub use bucket::ALIGNMENT;
pub use mesh::{Mesh, Reduction};
pub use norm::BLOCK;
pub use optimizer::{ShardedOptimizer, ShardingConfig, Stage};
pub use shards::{FrozenWeights, Shards};

// For its callers, who then depend on this crate alone.
pub use {runtime, tch, training};

pub(crate) type Result<T, E = training::Error> = std::result::Result<T, E>;

pub(crate) fn refused(reason: impl std::fmt::Display) -> training::Error {
    training::Error::config("sharding", reason)
}
