//! Tensors between processes: send and receive, gathers, reductions, barriers, over libtorch's c10d.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use runtime::collectives::{Division, Group, GroupConfig, Launch, ReduceConfig, Store};
//! use tch::{Kind, Tensor};
//!
//! // `frugal launch -n 2 -- PROGRAM` and torchrun tell each process its rank.
//! let group = match Launch::from_environment()? {
//!     None => Group::alone(),
//!     Some(launch) => {
//!         let store = Store::connect(&launch, Duration::from_secs(60))?;
//!         Group::new(&store, "world", GroupConfig::default())?
//!     }
//! };
//! group.agree(&[("torch", runtime::torch_version())])?;
//!
//! // ZeRO-2: reduce this rank's part of the gradients, step it, gather the weights.
//! let division = Division::even(1000, group.size());
//! let gradients = Tensor::ones([1000], (Kind::BFloat16, tch::Device::Cpu));
//! let weights = Tensor::zeros([1000], (Kind::Float, tch::Device::Cpu));
//! let own = division.range(group.rank());
//! let sum = Tensor::zeros([own.end - own.start], (Kind::Float, tch::Device::Cpu));
//! group.reduce_scatter(&gradients, division, &sum, ReduceConfig::default(), "layer 3")?.wait()?;
//! let shard = weights.narrow(0, own.start, own.end - own.start);
//! let _ = shard.shallow_clone().g_sub_(&(&sum * 0.1));
//! group.all_gather(&weights, division, &shard, "layer 3")?.wait()?;
//! group.barrier("end")?;
//! # Ok::<(), runtime::Error>(())
//! ```
//!
//! # The contract
//!
//! - **Order.** All ranks call the same operations of a group in the same order. Operations of different groups are independent: use
//!   one for gathers, one for reductions, and one for control.
//! - **Bits.** [`Order::Ordered`], the default, adds in fp32 (f64, i64) in the order of ranks: the result is that of one process which
//!   adds the same tensors in turn, whatever arrives first, and however large the pieces.
//! - **Memory.** What is received arrives in the given tensor, without a copy. A [`Work`] keeps its tensors until it is done. libtorch
//!   counts a receive as an in-place change when it is posted. Reductions take `2 · (N − 1)` pieces of [`piece_bytes`] beside.
//! - **Bytes.** [`Group::bytes`] counts what crosses the wire, exactly: an all-gather or a reduce-scatter of `B` bytes sends `B · (N − 1)
//!   / N` per rank.
//! - **Time.** Every wait ends after the group's timeout. Then, or when a peer is gone, the group is dead: the error names rank, peer,
//!   operation and label, and every later call returns it again. Each rank's last 256 operations are written into the folder that
//!   `FRUGAL_COLLECTIVES_DUMP` names, if it is set. A process cannot repair a group; it ends, and its launcher restarts the ranks.
//! - **Sizes.** Ranks that disagree about an operation or its size wait until the deadline; nothing of the wrong size is received.
//!   [`Group::agree`] compares options beforehand and names the first that differs.
//!
//! CPUs are connected by Gloo, by its point-to-point transfers. Against Gloo's own collectives, with 64 MiB in fp32 over two processes on
//! two cores, an all-gather takes about 0.4 of the time and a reduce-scatter as much. A large all-reduce takes 1.2 to 1.3, also with each
//! piece gathered as soon as it is reduced: use the two halves.
//!
//! # GPUs
//!
//! A group whose [`GroupConfig::device`] is a CUDA device is connected by libtorch's NCCL, and its tensors are on that device. This is
//! **written, never run on a GPU**: on a machine without one, whose CUDA runtime was made to report one, its classes were constructed and
//! destroyed with the libraries of libtorch 2.11.0 and 2.13.0. Other versions of libtorch are refused. The code above them runs, in the
//! tests of this crate, `sharding` and `frugal`, over a stand-in on CPUs ([`GroupConfig::nccl_stand_in`]), which has the first two
//! differences that are listed below. It finds waits that are missing and orders that differ among ranks; it does not find a tensor that
//! is on the host, because its own are.
//!
//! ```no_run
//! # use runtime::collectives::{Group, GroupConfig, Store};
//! # fn connect(store: &Store) -> runtime::Result<Group> {
//! let device = tch::Device::Cuda(store.launch().local_rank);
//! Group::new(store, "gpus", GroupConfig { device, ..GroupConfig::default() })
//! # }
//! ```
//!
//! An all-gather of equal shards is NCCL's own. One of unequal shards, and an ordered reduction, is one group of sends and receives for
//! each round; an ordered reduction of `B` MiB has `B / 8N` rounds. What differs from a group on CPUs:
//!
//! - **Waiting.** [`Work::wait`] makes the current stream wait, and returns. The host waits in [`Group::barrier`] and
//!   [`Group::first_failure`] alone. Work that is posted on one stream may be waited for on another.
//! - **Order.** NCCL matches messages by their order alone, and runs a group's operations one after the other. So of two ranks that send
//!   to each other, one receives first; where both send first, or both receive first, they wait until the timeout.
//! - **Time.** libtorch watches operations from a thread of its own: one that takes longer than the group's timeout, or whose peer is gone,
//!   **ends the process** (`SIGABRT`, with a message on standard error), because the device cannot be stopped in another way. There is no
//!   [`CollectiveError`] then and no list of operations, and the launcher sees a process that has died. With
//!   `TORCH_NCCL_BLOCKING_WAIT=1` libtorch waits on the host, and the operation fails as on CPUs. [`Group::new`], [`Group::agree`] and
//!   [`Group::barrier`] meet at the store and return an error that names the ranks that are late; each leaves about 100 bytes a rank there.
//! - **Sizes.** Ranks that disagree about a size are not noticed: NCCL waits until the timeout, or delivers what it has.
//! - **Bytes.** The count is that of the messages above. By which path they travel is NCCL's choice.
//! - **End.** Dropping the last clone of a group waits for its operations. All ranks do so at about the same time.

mod agree;
mod arrival;
mod division;
mod failure;
mod first_failure;
mod group;
mod launch;
mod machines;
mod messages;
mod operands;
mod operation_log;
mod ordered;
pub mod ranks;
mod reduce;
mod slurm;
mod store;
mod transfers;
mod work;

pub use division::Division;
pub use failure::CollectiveError;
pub use group::{Group, GroupConfig};
pub use launch::Launch;
pub use ordered::piece_bytes;
pub use slurm::Machines;
pub use store::Store;
pub use work::Work;

/// The operation of a reduction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReduceOp {
    /// Element-wise sum.
    #[default]
    Sum,
    /// Element-wise maximum.
    Max,
}

/// The order of a reduction's additions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The order of ranks.
    #[default]
    Ordered,
    /// That of the backend's own collectives, Gloo's or NCCL's, in the tensor's dtype.
    Native,
}

/// How a reduction is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReduceConfig {
    /// Sum or maximum.
    pub op: ReduceOp,
    /// The order of additions.
    pub order: Order,
    /// Reduce onto what the result contains, instead of replacing it.
    pub accumulate: bool,
}

/// Bytes of tensors that crossed the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Sent by this rank.
    pub sent: u64,
    /// Received by this rank.
    pub received: u64,
}
