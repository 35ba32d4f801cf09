//! The memory budget of a training step on one device.
//!
//! A step has five moments at which its memory can be largest. Each is a sum of eight parts:
//!
//! | moment | gradients | activations | logits and loss | temporaries |
//! |---|---|---|---|---|
//! | loss | none yet¹, or the output's³ | all | all | gathered parameters² |
//! | backward of the last block | those of the output¹ | all | what the caller holds | one block's backward, buffers² |
//! | backward of the first block | all | one block's | what the caller holds | one block's backward, buffers² |
//! | backward of the embedding | all | tokens | what the caller holds | a tied matrix' second gradient |
//! | optimizer step | all | none | none | the step's own |
//!
//! ¹ all of them if gradients are accumulated over several batches. ² of ZeRO, or of tensors on the host. ³ if the loss
//! computes it in chunks.
//!
//! Parameters, master weights and optimizer state are on the device at every moment, unless they are on the host
//! ([`host`](crate::memory::host)). From the last to the first block, activations decrease and gradients increase by constant
//! amounts, so one of the two ends is the larger. The **peak** is the largest moment.
//!
//! A step that trains adapters of a frozen base ([`TrainingPlan::lora`]) has the same moments with other parts: [`lora`](crate::lora).
//!
//! Not counted: the CUDA context (about 0.5 GiB), a cuBLAS workspace, and the allocator's fragmentation.
//!
//! ```
//! use accounting::estimate::{Part, TrainingPlan, estimate};
//! use accounting::{decoder_flops::Workload, presets};
//!
//! let plan = TrainingPlan { work: Workload { batch: 4, sequence: 1024 }, ..TrainingPlan::default() };
//! let estimate = estimate(&presets::find("gpt2")?, &plan)?;
//! let peak = estimate.peak();
//! assert_eq!(peak.moment.name(), "loss");
//! assert_eq!(peak.bytes(Part::OptimizerState), 8 * 124_439_808);
//! # Ok::<(), accounting::Error>(())
//! ```

mod adapters;
mod moments;
mod plan;

pub use moments::{Budget, Estimate, Moment, Part};
pub use plan::TrainingPlan;

use crate::decoder_flops::check_positions;
use crate::memory::activations;
use crate::memory::host::OnHost;
use crate::memory::logits::{self, Loss};
use crate::memory::zero::{ModelStates, ZeroStage, model_states};
use crate::memory::{total, working_set};
use crate::model::Decoder;
use crate::{Error, exact};

/// Estimates a training step of `model`.
pub fn estimate(model: &Decoder, plan: &TrainingPlan) -> Result<Estimate, Error> {
    let mut estimate = of_the_model(model, plan)?;
    for moment in &mut estimate.moments {
        *moment = moment.with(Part::Temporaries, plan.product_workspaces)?;
    }
    Ok(estimate)
}

/// Estimates everything except the workspaces of products.
fn of_the_model(model: &Decoder, plan: &TrainingPlan) -> Result<Estimate, Error> {
    check_positions(model, plan.work.sequence)?;
    plan.host.check(&plan.recomputation)?;
    if let Some(lora) = &plan.lora {
        return adapters::estimate(model, lora, plan);
    }
    let TrainingPlan { work, recipe, optimizer, sharding, host, .. } = *plan;
    recipe.check_trained()?;
    let choices = plan.activation_choices();
    let parameters = model.parameters()?;
    let (states, hosted) = split(model_states(model, &recipe, optimizer, sharding)?, host);

    let block = activations::block(model, work, &choices)?;
    let outside_blocks = activations::outside_blocks(model, work, &choices)?;
    let outside = total(&outside_blocks)?;
    let inputs = exact::product("activations of all blocks", &[model.layers, total(&block)?])?;
    // One where it is used; the other, in flight, counts as temporary.
    let on_device = if host.block_inputs { total(&block)? } else { inputs };
    let all_kept = exact::sum("activations", [outside, on_device])?;
    let one_kept = exact::sum("activations", [outside, total(&block)?])?;

    let loss_peak = total(&logits::peak(model, work, &recipe, plan.loss, plan.labelled)?)?;
    let loss_held = total(&logits::held(model, work, &recipe, plan.loss)?)?;
    let buffers = working_set::communication(model, &choices, sharding, host)?;
    let gathered = buffers.iter().filter(|item| item.name == working_set::GATHERED);
    let in_flight = if host.block_inputs { total(&block)? } else { 0 };
    let gathered = exact::sum("gathered parameters", gathered.map(|item| item.bytes).chain([in_flight]))?;
    let backward = exact::sum(
        "temporaries",
        [total(&working_set::block_backward(model, work, &choices)?)?, total(&buffers)?],
    )?;
    // The first block has no further one to prefetch.
    let last_backward = exact::sum("temporaries", [backward, in_flight])?;
    let step = optimizer.step_bytes(
        model,
        recipe.state,
        plan.step,
        if sharding.divides(ZeroStage::One) { sharding.devices } else { 1 },
    )?;
    let step = if host.optimizer { 0 } else { step };

    let output = exact::product("parameters of the output", &[model.vocabulary, model.hidden])?;
    let output_gradient = recipe.gradients.bytes(sharding.share(output, ZeroStage::Two))?;
    let table = exact::product("parameters of the embedding", &[model.vocabulary, model.embedding])?;
    // A tied matrix, or an accumulated one, already has its gradient when the embedding's part arrives. A gradient on the host
    // is added to there, but the new part passes through the device.
    let twice = model.tied || plan.accumulate || host.gradients;
    let second_gradient = if twice { recipe.gradients.bytes(table)? } else { 0 };
    let (casts, one_cast) = autocast_copies(model, plan)?;
    let early = |gradients: u64| match (host.gradients, plan.accumulate) {
        (false, true) => states.gradients,
        _ => gradients,
    };
    // The gradient of the output matrix arrives with the chunks of the loss, or with the backward of the logits.
    let at_loss = if plan.loss == Loss::Eager { 0 } else { output_gradient };

    let budget = |moment, casts, gradients, activations, logits, temporaries| {
        let ModelStates { parameters, master, optimizer, .. } = states;
        Budget::new(
            moment,
            [parameters, casts, master, optimizer, gradients, activations, logits, temporaries],
        )
    };
    let all = states.gradients;
    let kept_on_host = if host.block_inputs { inputs } else { 0 };
    Ok(Estimate {
        parameters,
        states,
        moments: [
            budget(Moment::Loss, casts, early(at_loss), all_kept, loss_peak, gathered)?,
            budget(Moment::LastBlock, casts, early(output_gradient), all_kept, loss_held, last_backward)?,
            budget(Moment::FirstBlock, one_cast, all, one_kept, loss_held, backward)?,
            budget(Moment::Embedding, 0, all, outside, loss_held, second_gradient)?,
            budget(Moment::Step, 0, all, 0, 0, step)?,
        ],
        block,
        outside_blocks,
        host_bytes: exact::sum("bytes on the host", [hosted.total()?, kept_on_host])?,
    })
}

/// Divides the model states between device and host.
fn split(states: ModelStates, host: OnHost) -> (ModelStates, ModelStates) {
    let place = |bytes: u64, on_host: bool| if on_host { (0, bytes) } else { (bytes, 0) };
    let parameters = place(states.parameters, host.parameters);
    let gradients = place(states.gradients, host.gradients);
    let master = place(states.master, host.optimizer);
    let optimizer = place(states.optimizer, host.optimizer);
    let one =
        |parameters, master, gradients, optimizer| ModelStates { parameters, master, gradients, optimizer };
    (
        one(parameters.0, master.0, gradients.0, optimizer.0),
        one(parameters.1, master.1, gradients.1, optimizer.1),
    )
}

/// Autocast's copies of all weights and of one block's. The gathered parameters of ZeRO-3, or those fetched from the host,
/// replace them.
fn autocast_copies(model: &Decoder, plan: &TrainingPlan) -> Result<(u64, u64), Error> {
    if !plan.recipe.casts || plan.sharding.divides(ZeroStage::Three) || plan.host.parameters {
        return Ok((0, 0));
    }
    let all = plan.recipe.compute.bytes(model.product_parameters()?)?;
    let one = plan.recipe.compute.bytes(model.block_parameters()?)?;
    Ok((all, one.min(all)))
}
