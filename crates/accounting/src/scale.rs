//! The time of a training step over many ranks, its bound, and the cost of failures.
//!
//! A decoder of L layers; each layer's weights of W bytes are gathered before its passes, and its gradients of G bytes reduced after
//! its backward, while other layers compute. With f = (N − 1)/N of N ranks, B bytes per second, and a latency of α per step of a tree:
//!
//! ```text
//! gather(W)  = f·W/B + α·log₂N                          reduce(G) likewise
//! ZeRO-3     forward  = max(compute, gather)            of each layer; the first gather is exposed
//!            backward = max(compute, gather + reduce)   of each layer; the last reduction is exposed
//! ZeRO-2     backward = max(compute, reduce)            the gather of all weights after the step is exposed
//! ZeRO-1     both are exposed
//! replicas   2·(R − 1)/R·G/B of each layer, beside the other transfers (hybrid sharding: N ranks hold a replica, R replicas)
//! ```
//!
//! B is the rate within a node, or between nodes if that is less: a ring's data crosses each node's border once, so there the
//! rate is that of all the node's links together. It cancels from the **critical tokens**: with fewer tokens per rank than
//!
//! ```text
//! T* = max(b_w/2, (b_w + b_g)/4) · FLOP/s / B          b_w, b_g bytes of a weight, of its gradient
//! ```
//!
//! a step of ZeRO-3 waits for transfers, whatever the model. A training of M batch tokens does not get faster beyond M/T* ranks.
//!
//! **Direct messages** ([`Network::direct`]) are no ring: each rank sends every other its part, (N − 1)/N of the bytes as in a ring, but of g
//! ranks of a node each sends (N − g)/N to other nodes. So with N ranks over nodes of g there cross g·(N − g)/(N − 1) times a ring's bytes, up
//! to g times. Sums in the order of ranks, whose bits do not depend on the number of ranks, are direct messages, and their b_g counts so often
//! in T*; so are this project's gathers over Gloo. Over replicas such sums pass from one to the next, and from the last to all: 2·(R − 1)·G
//! bytes one after the other.
//!
//! **Rows that ranks divide** ([`sequence_parallel`](crate::sequence_parallel)) are exchanged by all-to-alls, during which nothing computes. Of C
//! ranks on nodes of g, (C − g)/(C − 1) of what each sends goes to other nodes.
//!
//! **Failures.** With a checkpoint every τ = √(2·save·MTBF) (Young 1974; Daly 2006), the share of time in which the training advances is
//! 1 − save/τ − (τ/2 + restart)/MTBF, and the MTBF of a run that of a GPU divided by their number.
//!
//! Not modelled: stragglers, congestion, transfers of tensor and pipeline parallelism. So the result is an upper bound of the speed.
//!
//! Sources: ZeRO (arXiv:1910.02054); PyTorch FSDP (arXiv:2304.11277); Llama 3 (arXiv:2407.21783) for its interruptions.

mod failures;
mod gpus;

pub use failures::Failures;
pub use gpus::{Gpus, LLAMA_3_FAILURES, Parallelism, Run};

use crate::memory::zero::ZeroStage;

/// Rates between ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Ranks of a node.
    pub node: u64,
    /// Bytes per second of a collective within a node.
    pub local: f64,
    /// Bytes per second between nodes, of all the links of a node together.
    pub between: f64,
    /// Seconds of one step of a tree.
    pub latency: f64,
    /// Whether each rank sends every other what it needs, instead of a ring's passing on.
    pub direct: bool,
}

impl Network {
    /// Returns the bytes per second of a collective over `ranks`, which fill whole nodes if they do not fit one.
    pub fn rate(&self, ranks: u64) -> f64 {
        if ranks <= self.node {
            return self.local;
        }
        let times = if self.direct { direct_bytes_over_ring(ranks, self.node) } else { 1.0 };
        self.local.min(self.between / times)
    }

    /// Returns the seconds of an all-to-all in which each of `ranks` sends `bytes` in all: those of the bytes and those of the latency.
    fn all_to_all(&self, bytes: f64, ranks: u64) -> [f64; 2] {
        if ranks < 2 || bytes == 0.0 {
            return [0.0; 2];
        }
        let (near, others) = (self.node.clamp(1, ranks), (ranks - 1) as f64);
        let within = bytes * (near - 1) as f64 / others / self.local;
        // All ranks of a node send over its links.
        let across = near as f64 * bytes * (ranks - near) as f64 / others / self.between;
        [within.max(across), self.latency]
    }

    /// Returns the seconds of gathering or reducing `bytes` over `ranks`: those of the bytes and those of the latency.
    fn collective(&self, bytes: f64, ranks: u64) -> [f64; 2] {
        if ranks < 2 {
            return [0.0; 2];
        }
        let sent = bytes * (ranks - 1) as f64 / ranks as f64;
        [sent / self.rate(ranks), self.latency * (ranks as f64).log2().ceil()]
    }
}

/// How ranks divide a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// The model states that are divided.
    pub stage: ZeroStage,
    /// Ranks that hold a replica together.
    pub shard: u64,
    /// Replicas. Those of a hybrid sharding are one in each node.
    pub replicas: u64,
}

/// The work of one rank in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Number of layers; the parameters outside of them count as one more.
    pub layers: u64,
    /// Seconds of a layer's forward.
    pub forward: f64,
    /// Seconds of a layer's backward, with recomputation.
    pub backward: f64,
    /// Seconds of embedding, head and loss, forward and backward.
    pub outside: f64,
    /// Seconds of the optimizer, of this rank's part.
    pub optimizer: f64,
    /// Bytes of a layer's weights.
    pub weights: f64,
    /// Bytes of a layer's gradients.
    pub gradients: f64,
    /// Bytes of the weights outside of the layers.
    pub outside_weights: f64,
    /// Bytes of their gradients.
    pub outside_gradients: f64,
    /// What ranks send each other that divide rows.
    pub exchange: Exchange,
}

/// The all-to-alls of ranks that divide each row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// The ranks that divide a row.
    pub ranks: u64,
    /// Bytes that a rank sends in one pass of a layer.
    pub bytes: f64,
    /// Passes of a layer in a step: forward, backward, and recomputation in layers that run again.
    pub passes: f64,
}

impl Default for Exchange {
    /// Whole rows.
    fn default() -> Self {
        Self { ranks: 1, bytes: 0.0, passes: 0.0 }
    }
}

/// Seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// Seconds in which the rank computes.
    pub compute: f64,
    /// Seconds in which it waits for weights.
    pub gather: f64,
    /// Seconds in which it waits for reductions of gradients.
    pub reduce: f64,
    /// Seconds in which it waits for the reduction over replicas.
    pub replicas: f64,
    /// Seconds in which it waits for parts of its rows.
    pub exchange: f64,
    /// Seconds in which it waits for latencies.
    pub latency: f64,
}

/// The activity that takes most of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The ranks compute.
    Compute,
    /// Gathering weights.
    Gather,
    /// Reducing gradients.
    Reduce,
    /// Reducing gradients over replicas.
    Replicas,
    /// Exchanging heads for tokens with the ranks that divide a row.
    Exchange,
    /// Latencies of the transfers.
    Latency,
    /// Checkpoints, lost work and restarts.
    Failures,
}

impl Bound {
    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Gather => "gathering weights",
            Self::Reduce => "reducing gradients",
            Self::Replicas => "reducing over replicas",
            Self::Exchange => "exchanging heads",
            Self::Latency => "latency",
            Self::Failures => "failures",
        }
    }
}

impl Step {
    /// Returns the seconds of the step.
    pub fn seconds(&self) -> f64 {
        self.compute + self.exposed()
    }

    /// Returns the seconds in which the rank waits for others.
    pub fn exposed(&self) -> f64 {
        self.gather + self.reduce + self.replicas + self.exchange + self.latency
    }

    /// Returns the activity that takes most of the time, if the training advances in the share `effective` of it. Where ranks wait longer
    /// than they compute, it is the longest wait.
    pub fn bound(&self, effective: f64) -> Bound {
        let waits = [
            (Bound::Gather, self.gather),
            (Bound::Reduce, self.reduce),
            (Bound::Replicas, self.replicas),
            (Bound::Exchange, self.exchange),
            (Bound::Latency, self.latency),
        ];
        let advancing = effective * self.compute.max(self.exposed()) / self.seconds().max(f64::MIN_POSITIVE);
        if 1.0 - effective > advancing {
            return Bound::Failures;
        }
        if self.compute >= self.exposed() {
            return Bound::Compute;
        }
        waits.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bound::Compute, |(bound, _)| bound)
    }

    /// Adds what `times` passes of `compute` seconds wait for transfers beside them: gathers and reductions one after the other, the
    /// reduction over replicas on links of its own.
    fn wait(&mut self, times: f64, compute: f64, gather: [f64; 2], reduce: [f64; 2], replicas: [f64; 2]) {
        let lane = gather[0] + reduce[0] + gather[1] + reduce[1];
        let other = replicas[0] + replicas[1];
        let exposed = times * (lane.max(other) - compute).max(0.0);
        if exposed == 0.0 {
            return;
        }
        if other > lane {
            self.replicas += exposed * replicas[0] / other;
            self.latency += exposed * replicas[1] / other;
        } else {
            self.gather += exposed * gather[0] / lane;
            self.reduce += exposed * reduce[0] / lane;
            self.latency += exposed * (gather[1] + reduce[1]) / lane;
        }
    }
}

/// All-to-alls of a layer's pass.
const EXCHANGES: f64 = 4.0;

/// Returns the seconds of a step.
pub fn step(work: &Work, division: Division, network: &Network) -> Step {
    const NOTHING: [f64; 2] = [0.0; 2];
    let Division { stage, shard, replicas } = division;
    let layers = work.layers as f64;
    let over = |bytes: f64| network.collective(bytes, shard);
    // Each node's ranks reduce their parts over the replicas at once, over the node's links.
    let across = |bytes: f64| {
        if replicas < 2 {
            return NOTHING;
        }
        let passed = (replicas - 1) as f64 / if network.direct { 1.0 } else { replicas as f64 };
        let sent = 2.0 * bytes * passed;
        [sent / network.between, 2.0 * network.latency * (replicas as f64).log2().ceil()]
    };
    let compute = layers * (work.forward + work.backward) + work.outside + work.optimizer;
    let mut step = Step { compute, ..Step::default() };
    let Exchange { ranks, bytes, passes } = work.exchange;
    // Queries, keys and values come one after the other, and the output.
    let [of_bytes, latency] = network.all_to_all(bytes, ranks);
    step.exchange = layers * passes * of_bytes;
    step.latency = layers * passes * EXCHANGES * latency;
    let (gather, reduce, replica) = (over(work.weights), over(work.gradients), across(work.gradients));
    let (outside_gather, outside_reduce) = (over(work.outside_weights), over(work.outside_gradients));
    let outside_replica = across(work.outside_gradients);
    match stage {
        ZeroStage::Three => {
            step.wait(layers, work.forward, gather, NOTHING, NOTHING);
            step.wait(layers, work.backward, gather, reduce, replica);
            step.wait(1.0, work.outside, outside_gather, outside_reduce, outside_replica);
            // Nothing computes yet, and nothing any more.
            step.wait(1.0, 0.0, gather, reduce, NOTHING);
        }
        ZeroStage::Zero | ZeroStage::Two => {
            // An all-reduce is a reduction and a gather.
            let gathers = |of: [f64; 2]| if stage == ZeroStage::Zero { of } else { NOTHING };
            step.wait(layers, work.backward, gathers(reduce), reduce, replica);
            step.wait(1.0, work.outside, gathers(outside_reduce), outside_reduce, outside_replica);
            step.wait(1.0, 0.0, NOTHING, reduce, NOTHING);
        }
        ZeroStage::One => {
            step.wait(layers, 0.0, NOTHING, reduce, replica);
            step.wait(1.0, 0.0, NOTHING, outside_reduce, outside_replica);
        }
    }
    if matches!(stage, ZeroStage::One | ZeroStage::Two) {
        step.wait(layers, 0.0, gather, NOTHING, NOTHING);
        step.wait(1.0, 0.0, outside_gather, NOTHING, NOTHING);
    }
    step
}

/// Returns the tokens per rank and pass from which on a step of ZeRO-3 hides its transfers, for bytes of a weight and of its gradient,
/// the FLOP/s that a rank reaches, and the bytes per second of its group. With recomputation fewer do: backward computes longer.
pub fn critical_tokens(weight: f64, gradient: f64, flops: f64, rate: f64) -> f64 {
    (weight / 2.0).max((weight + gradient) / 4.0) * flops / rate
}

/// Returns how many times a ring's bytes the direct messages of `ranks`, which fill nodes of `node` ranks, send between nodes: 1 within a node.
pub fn direct_bytes_over_ring(ranks: u64, node: u64) -> f64 {
    if ranks <= node {
        return 1.0;
    }
    node as f64 * (ranks - node) as f64 / (ranks - 1) as f64
}

#[cfg(test)]
mod tests;
