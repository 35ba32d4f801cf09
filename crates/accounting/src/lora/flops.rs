//! FLOPs of a step that trains adapters.
//!
//! For n tokens, m of them labelled, and a projection `[o, i]` with an adapter of rank r:
//!
//! | | base | adapter |
//! |---|---|---|
//! | forward | `2·n·i·o` | `2·n·r·(i + o)` |
//! | backward, dx | `2·n·i·o` | `2·n·r·i` |
//! | – the adapter's own | – | `2·n·r·(i + 2·o)`: du, dA and dB |
//!
//! No product makes the gradient of a frozen weight, so that forward and backward are `4·N` FLOPs per token and not `6·N`. The
//! queries', keys' and values' dx of the first block is not computed: the embedding is frozen. The output projection is
//! `2·m·d·v` forward, and as much backward, of its input only. Attention's core is that of full training, its backward twice
//! its forward.

use super::{LowRank, Projection};
use crate::Error;
use crate::decoder_flops::{self, Flops, FlopsRow, Recomputation, StepFlops, Workload};
use crate::flops::MatrixProduct;
use crate::model::{Decoder, Part};
use crate::recompute::Recompute;

/// Returns the FLOPs of one training step of `lora` in a frozen `model`, with `labelled` tokens that have a label (`None`: all). The loss
/// is one that goes over the labelled tokens only.
///
/// # Errors
/// Adapters that [`LowRank`] refuses; more labelled tokens than there are.
///
/// ```
/// use accounting::decoder_flops::{Recomputation, Workload, step};
/// use accounting::lora::{LowRank, flops};
/// use accounting::presets;
///
/// let (model, work) = (presets::find("qwen2.5-0.5b")?, Workload { batch: 2, sequence: 256 });
/// let again = Recomputation::default();
/// let adapted = flops::step(&model, &LowRank::default(), work, None, &again)?.model()?;
/// let whole = step(&model, work, &again)?.model()?;
/// // Two thirds, plus the adapters and attention's core.
/// assert_eq!(adapted.dense * 1000 / whole.dense, 675);
/// assert_eq!(adapted.dense, 1_047_698_341_888);
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn step(
    model: &Decoder,
    lora: &LowRank,
    work: Workload,
    labelled: Option<u64>,
    recomputation: &Recomputation,
) -> Result<StepFlops, Error> {
    lora.check_step(model, work, labelled, recomputation)?;
    let tokens = work.tokens()?;
    let whole = decoder_flops::step(model, work, recomputation)?;
    let product =
        |rows, inner, columns| Ok::<_, Error>(Flops::both(MatrixProduct::new(rows, inner, columns).flops()?));
    // In how many blocks a projection's input, or attention's, has a gradient.
    let blocks = |which: Projection| if lora.reaches(which) { model.layers } else { model.layers - 1 };

    let mut rows = whole.rows;
    let mut backward = Vec::new();
    let mut recomputed = vec![whole.recomputed];
    for row in &mut rows {
        if row.part == Part::Output {
            let labelled = labelled.unwrap_or(tokens);
            let matrix = product(labelled, model.hidden, model.vocabulary)?;
            backward.push(matrix);
            // The columns of replaced rows are products of their own, whose rows are trained.
            let replaced = match lora.token_rows.in_head {
                0 => Flops::default(),
                rows => product(labelled, model.hidden, rows)?,
            };
            backward.push(replaced.times(2)?);
            row.forward = Flops::sum([matrix, replaced])?;
        } else if !row.has_weight {
            backward.push(row.forward.over(model.layers).times(2 * blocks(Projection::Output))?);
        }
    }
    let mut adapters = Vec::new();
    for (which, linear) in Projection::linears(model)? {
        let times = blocks(which);
        backward.push(product(tokens, linear.inputs, linear.outputs)?.times(times)?);
        if !lora.targets.has(which) {
            continue;
        }
        let down = product(tokens, linear.inputs, lora.rank)?;
        let up = product(tokens, lora.rank, linear.outputs)?;
        // Each pass computes ν: W·Aᵀ, and B·(A·Aᵀ). With dropout W multiplies the dropped part and the kept part.
        let (mut norms, mut again) = (Flops::default(), Flops::default());
        if lora.magnitudes {
            norms = Flops::sum([
                product(linear.outputs, linear.inputs, lora.rank)?,
                product(linear.outputs, lora.rank, lora.rank)?,
            ])?;
            again = if lora.dropout { product(tokens, linear.inputs, linear.outputs)? } else { again };
            backward.push(again.times(times)?);
        }
        // A frozen term has no dA and dB.
        let frozen = if lora.subtracted { Flops::sum([down, up])? } else { Flops::default() };
        backward.push(frozen.times(times)?);
        adapters.push(FlopsRow {
            name: format!("{} adapter", linear.name),
            part: linear.part,
            has_weight: true,
            times: model.layers,
            forward: Flops::sum([down, up, norms, again, frozen])?.times(model.layers)?,
        });
        // dB and du, dA; and dx.
        backward.push(Flops::sum([up, up, down])?.times(model.layers)?);
        backward.push(down.times(times)?);
    }
    if recomputation.checkpoint == Recompute::Full {
        recomputed.extend(adapters.iter().map(|row| row.forward));
    }
    let first_core = rows.iter().position(|row| !row.has_weight).unwrap_or(rows.len());
    let mut recomputed = Flops::sum(recomputed)?;
    if !lora.reaches(Projection::Output) {
        // The first block's attention has no backward, which would compute its scores again.
        let scores = rows[first_core].forward.over(model.layers);
        recomputed =
            Flops { dense: recomputed.dense - scores.dense, causal: recomputed.causal - scores.causal };
    }
    rows.splice(first_core..first_core, adapters);
    Ok(StepFlops {
        forward: Flops::sum(rows.iter().map(|row| row.forward))?,
        backward: Flops::sum(backward)?,
        recomputed,
        rows,
    })
}
