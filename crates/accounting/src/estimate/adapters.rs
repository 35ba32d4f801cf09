//! The moments of a step that trains adapters.

use super::moments::{Budget, Estimate, Moment};
use super::plan::TrainingPlan;
use crate::Error;
use crate::exact::{product, sum};
use crate::lora::{LowRank, not_modelled};
use crate::memory::host::OnHost;
use crate::memory::logits::{self, Loss};
use crate::memory::nf4;
use crate::memory::optimizer::StepKernel;
use crate::memory::zero::ModelStates;
use crate::memory::{Item, total};
use crate::model::Decoder;
use crate::passes::PeakTracker;
use crate::passes::block::{Block, BlockOptions, Trained, backward_bytes, recomputed_bytes};
use crate::passes::head::{FIXED, HeadOptions, frozen_loss, outside};
use crate::recompute::Recompute;

/// Estimates a training step of `lora` in a frozen `model`.
pub(crate) fn estimate(model: &Decoder, lora: &LowRank, plan: &TrainingPlan) -> Result<Estimate, Error> {
    check(lora, model, plan)?;
    let adapters = lora.parameters(model)?;
    let base = model.parameters()?;
    let wide = |elements| LowRank::WIDE.bytes(elements);
    let tensors = lora.tensors(model)?;
    let states = ModelStates {
        parameters: sum(
            "bytes of the parameters",
            [nf4::model_bytes(model, &plan.recipe)?, wide(adapters)?, lora.frozen_bytes(model)?],
        )?,
        master: 0,
        gradients: wide(adapters)?,
        optimizer: plan
            .optimizer
            .state_bytes_of(tensors.iter().map(|&elements| (model.layers, elements)), LowRank::WIDE)?,
    };
    let block = Block::new(
        model,
        &BlockOptions {
            tokens: plan.work.tokens()?,
            recipe: &plan.recipe,
            norm: plan.norm,
            trained: Trained::Adapters(lora),
            gradients: false,
            documents: false,
            widens: false,
        },
    )?;
    let head = HeadOptions {
        work: plan.work,
        labelled: plan.labelled,
        recipe: &plan.recipe,
        norm: plan.norm,
        loss: plan.loss,
        trained: false,
        on_cpu: lora.on_cpu,
    };
    let full = plan.recomputation.checkpoint == Recompute::Full;
    let kept = |input: bool| {
        if full { vec![Item { name: "block input", bytes: block.narrow }] } else { block.kept(input) }
    };
    let (first, other) = (total(&kept(false))?, total(&kept(true))?);
    let others = product("activations of all blocks", &[model.layers - 1, other])?;
    let outside_blocks = outside(model, &head)?;
    let final_norm = total(&outside_blocks[FIXED..])?;
    let fixed = total(&outside_blocks[..FIXED])?;
    let before_loss = sum("activations", [fixed, first, others])?;
    let all_kept = sum("activations", [before_loss, final_norm])?;

    // The last block is also the first one if there is no other.
    let last_input = model.layers > 1;
    let backward = |input| if full { recomputed_bytes(&block, input) } else { backward_bytes(&block, input) };
    let loss_peak = total(&frozen_loss(model, &head)?)?;
    let held = total(&logits::held(model, plan.work, &plan.recipe, plan.loss)?)?;
    let stream = if plan.loss == Loss::Eager { block.narrow } else { 0 };
    let step = step_bytes(lora, model, plan)?;

    let all = states.gradients;
    let of_block = wide(lora.block_parameters(model)?)?;
    let early = |gradients: u64| if plan.accumulate { all } else { gradients };
    let budget = |moment, gradients, activations, logits, temporaries| {
        let ModelStates { parameters, optimizer, .. } = states;
        Budget::new(moment, [parameters, 0, 0, optimizer, gradients, activations, logits, temporaries])
    };
    // The last block's forward can exceed the loss, if nothing is kept or the vocabulary is small.
    let mut tracker = PeakTracker::default();
    block.forward(&mut tracker, !full, last_input);
    let in_block = tracker.peak()?;
    let before_last = if last_input {
        [fixed, first, product("activations of all blocks", &[model.layers - 2, other])?]
    } else {
        [fixed, 0, 0]
    };
    let before_last = sum("activations", before_last.into_iter().chain([block.narrow]))?;
    let at_loss = if sum("bytes", [before_last, in_block])? > sum("bytes", [all_kept, loss_peak])? {
        budget(Moment::Loss, early(0), before_last, 0, in_block)?
    } else {
        budget(Moment::Loss, early(0), all_kept, loss_peak, 0)?
    };
    Ok(Estimate {
        parameters: sum("number of parameters", [base, adapters])?,
        states,
        moments: [
            at_loss,
            budget(
                Moment::LastBlock,
                early(of_block),
                before_loss,
                held,
                sum("temporaries", [stream, backward(last_input)?])?,
            )?,
            budget(
                Moment::FirstBlock,
                all,
                sum("activations", [fixed, first])?,
                held,
                sum("temporaries", [stream, backward(false)?])?,
            )?,
            budget(Moment::Embedding, all, fixed, 0, 0)?,
            budget(Moment::Step, all, fixed, 0, step)?,
        ],
        block: kept(true),
        outside_blocks,
        host_bytes: 0,
    })
}

/// Refuses a plan that is not modelled.
fn check(lora: &LowRank, model: &Decoder, plan: &TrainingPlan) -> Result<(), Error> {
    lora.check_step(model, plan.work, plan.labelled, &plan.recomputation)?;
    if plan.recipe.casts {
        return Err(not_modelled("under autocast", "take a recipe of one dtype, as fp32 or bf16"));
    }
    if plan.sharding.devices > 1 || plan.host != OnHost::default() {
        return Err(not_modelled("on several devices or a host", "leave out sharding and the host"));
    }
    Ok(())
}

fn step_bytes(lora: &LowRank, model: &Decoder, plan: &TrainingPlan) -> Result<u64, Error> {
    let elements = match plan.step {
        StepKernel::Fused => 0,
        StepKernel::Foreach => lora.parameters(model)?,
        StepKernel::Loop => lora.tensors(model)?.into_iter().max().unwrap_or(0),
    };
    plan.optimizer.step_bytes_of(elements, LowRank::WIDE)
}

#[cfg(test)]
mod tests {
    use super::super::{Moment, Part, estimate};
    use super::*;
    use crate::decoder_flops::Workload;
    use crate::lora::Targets;
    use crate::presets;

    #[test]
    fn unsupported_settings_are_refused_by_name() {
        let message = |plan: TrainingPlan, model: &str| {
            let plan = TrainingPlan { lora: Some(plan.lora.unwrap_or_default()), ..plan };
            estimate(&presets::find(model).unwrap(), &plan).unwrap_err().to_string()
        };
        assert!(message(TrainingPlan::default(), "gpt2").starts_with("gpt2 has no projections q, k, v, o"));
        let of_rank = LowRank { rank: 0, ..LowRank::default() };
        assert!(
            message(TrainingPlan { lora: Some(of_rank), ..TrainingPlan::default() }, "qwen2.5-0.5b")
                .contains("rank of the adapters is 0")
        );
        let none = LowRank { targets: Targets::NONE, ..LowRank::default() };
        assert!(
            message(TrainingPlan { lora: Some(none), ..TrainingPlan::default() }, "qwen2.5-0.5b")
                .contains("no projection")
        );
        let recipe = crate::memory::recipe::Recipe::AMP_BF16;
        assert!(
            message(TrainingPlan { recipe, ..TrainingPlan::default() }, "qwen2.5-0.5b")
                .contains("under autocast")
        );
        let labelled = Some(1025);
        assert!(
            message(TrainingPlan { labelled, ..TrainingPlan::default() }, "qwen2.5-0.5b")
                .contains("1025 labelled tokens")
        );
    }

    /// Qwen2.5-0.5B in bf16, q, k, v and o with rank 8, counted manually per token of a block: two norms' outputs, queries and
    /// output of 896, keys and values of 128, gate and up of 4864 in 2 bytes; a log-sum-exp for each of 14 heads, two statistics
    /// and four u of 8 in 4 bytes.
    #[test]
    fn a_step_of_qwen_matches_a_manual_count() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let plan = TrainingPlan {
            work: Workload { batch: 2, sequence: 256 },
            recipe: crate::memory::recipe::Recipe::BF16,
            norm: crate::recompute::NormKernel::Output,
            lora: Some(LowRank::default()),
            ..TrainingPlan::default()
        };
        let found = estimate(&model, &plan).unwrap();
        let block = 2 * (2 * 896 + 2 * 896 + 2 * 128 + 2 * 4864) + 4 * (14 + 2 + 4 * 8);
        assert_eq!(crate::memory::total(&found.block).unwrap(), 512 * block);
        // The first norm keeps nothing, but its output is the adapters' input; tokens and labels, and the rotary table.
        let kept = 512 * (24 * block - 4) + 512 * 16 + 32768 * 64 * 4;
        assert_eq!(found.at(Moment::LastBlock).bytes(Part::Activations), kept);
        // At the peak, a product's gradient and the two computed from it.
        assert_eq!(found.at(Moment::LastBlock).bytes(Part::Temporaries), 512 * 2 * (3 * 4864 + 896));
        assert_eq!(found.states.total().unwrap(), 2 * 494_032_768 + 16 * 1_081_344);
    }

    #[test]
    fn fewer_trained_weights_and_more_recomputation_reduce_bytes() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let peak = |targets: &str, full: bool, labelled| {
            let mut plan = TrainingPlan {
                work: Workload { batch: 4, sequence: 1024 },
                lora: Some(LowRank { targets: targets.parse().unwrap(), ..LowRank::default() }),
                loss: crate::memory::logits::Loss::LinearCrossEntropy { tokens: 4096, whole: 0 },
                labelled,
                ..TrainingPlan::default()
            };
            if full {
                plan.recomputation.checkpoint = crate::recompute::Recompute::Full;
            }
            estimate(&model, &plan).unwrap().peak().total
        };
        let peaks = [
            peak("all", false, None),
            peak("q,k,v,o", false, None),
            peak("q,k,v,o", false, Some(1024)),
            peak("q,k,v,o", true, Some(1024)),
        ];
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
        let whole = estimate(
            &model,
            &TrainingPlan { work: Workload { batch: 4, sequence: 1024 }, ..TrainingPlan::default() },
        );
        assert!(whole.unwrap().peak().total > peaks[0]);
    }
}
