//! What the graphs of captured steps keep on a GPU.
//!
//! A graph's memory is its own: what the step allocates is in a pool, which no other tensor uses until the last graph is dropped. With
//!
//! - B bytes that live between steps: weights, optimizer state, workspaces of products;
//! - S bytes of a step at its peak ([`Candidate::peak`]), E of an evaluation;
//! - k shapes of steps with a graph, each with static inputs of 16·n bytes for n positions (tokens and labels in int64; packed rows 32·n,
//!   with positions and document numbers),
//!
//! the pool has P = S − B, since graphs of one pool run one after another and each frees what it allocated, so the largest decides. A
//! repeated step takes B + P + inputs = S + inputs. A step without a graph has its own activations beside the pool: the first two of each
//! further shape, and an evaluation. So the most is
//!
//! B + P + inputs + max(P if k > 1, E − B).
//!
//! Not in it: what the allocator loses where a larger shape comes after a smaller one, whose blocks it cannot join; at most the smaller
//! one's pool. A training that is refused this memory drops the graphs and goes on without (`training::trainer::captured`), so a plan
//! needs S alone, and shows the rest.

use super::{Candidate, Job};
use crate::Error;
use crate::exact::{product, sum};
use crate::offload::BETWEEN_STEPS;

/// The memory of captured steps, in bytes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapturedMemory {
    /// The pool of all graphs.
    pub pool: u64,
    /// The static inputs of all shapes.
    pub inputs: u64,
    /// Most bytes of a training whose graphs are never dropped.
    pub most: u64,
}

impl Job {
    /// Predicts what the graphs of `shapes` shapes of steps keep, the largest batch among them.
    ///
    /// # Errors
    /// As [`Job::evaluate`].
    pub fn captured(&self, candidate: &Candidate, shapes: u64) -> Result<CapturedMemory, Error> {
        const WHAT: &str = "bytes of captured steps";
        let between = candidate.peak.parts.iter().filter(|part| BETWEEN_STEPS.contains(&part.name));
        let between = sum(WHAT, between.map(|part| part.bytes))?;
        let pool = candidate.peak.total.saturating_sub(between);
        let work = self.widest().work;
        let each = if self.choices.documents { 32 } else { 16 };
        let batches = self.accumulation.max(1);
        let inputs = product(WHAT, &[shapes, batches, work.batch, work.sequence, each])?;
        let other_shape = if shapes > 1 { pool } else { 0 };
        let beside = other_shape.max(candidate.evaluation_bytes.saturating_sub(between));
        let most = sum(WHAT, [between, pool, inputs, beside])?;
        Ok(CapturedMemory { pool, inputs, most })
    }
}

#[cfg(test)]
mod tests {
    use crate::activation_plan::LayerPlan;
    use crate::candidates::{Batch, Job, Placement};
    use crate::decoder_flops::Workload;
    use crate::lora::LowRank;
    use crate::offload::Rates;
    use crate::offload::sizes::Choices;
    use crate::presets;

    fn job(documents: bool) -> Job {
        let rates = Rates { load: 25e9, store: 25e9, host_optimizer: 2e9, device_optimizer: 35e9 };
        let batch = Batch::new(Workload { batch: 2, sequence: 256 }, None);
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let choices = Choices { documents, ..Choices::default() };
        Job::new(model, Some(LowRank::default()), choices, batch, rates)
    }

    #[test]
    fn the_pool_is_what_a_step_allocates() {
        let mut job = job(false);
        let layers = job.model.layers as usize;
        let candidate = job.evaluate(Placement::Resident(vec![LayerPlan::KeepAll; layers]), None).unwrap();
        let between = job.costs(job.widest()).unwrap();
        let between = between.fixed.weight_bytes
            + between.layer_bytes().unwrap()
            + between.state_bytes().unwrap()
            + between.working.constant_bytes;
        let one = job.captured(&candidate, 1).unwrap();
        assert_eq!(one.pool, candidate.peak.total - between);
        assert_eq!(one.inputs, 16 * 2 * 256);
        assert_eq!(one.most, candidate.peak.total + one.inputs, "a repeated step allocates nothing");
        let several = job.captured(&candidate, 8).unwrap();
        assert_eq!((several.pool, several.inputs), (one.pool, 8 * one.inputs));
        assert_eq!(several.most, candidate.peak.total + several.inputs + several.pool);
        // An evaluation beside the pool, which is smaller than a step.
        job.evaluation = Some(job.mean);
        let candidate = job.evaluate(candidate.placement, None).unwrap();
        let evaluated = job.captured(&candidate, 1).unwrap();
        assert!(one.most < evaluated.most && evaluated.most < one.most + one.pool, "{evaluated:?}");
        assert_eq!(self::job(true).captured(&candidate, 1).unwrap().inputs, 2 * one.inputs);
    }

    /// Fewer activations are a smaller pool.
    #[test]
    fn recomputation_makes_the_pool_smaller() {
        let job = job(false);
        let layers = job.model.layers as usize;
        let [keep, recompute] = [LayerPlan::KeepAll, LayerPlan::RecomputeAll].map(|plan| {
            let candidate = job.evaluate(Placement::Resident(vec![plan; layers]), None).unwrap();
            job.captured(&candidate, 1).unwrap().pool
        });
        assert!(recompute < keep, "{recompute} {keep}");
    }
}
