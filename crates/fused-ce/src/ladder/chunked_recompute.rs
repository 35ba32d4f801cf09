//! Chunk after chunk under [`checkpoint`]: ordinary autograd, which sums the gradient of W in W's own dtype.

use runtime::autograd::checkpoint;
use tch::Tensor;

use super::naive::{Tokens, logits, reduce};
use super::{Rung, chunk_tokens};
use crate::error::Result;
use crate::inputs::{Inputs, Targets, check, tile_kind};
use crate::linear_cross_entropy::Output;
use crate::options::{LinearCrossEntropy, LogSumExp};

pub(super) fn run(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Output> {
    let sizes = check(inputs, options)?;
    let rung = Rung::ChunkedRecompute;
    if inputs.shard.is_some() || inputs.adapter.is_some() {
        return rung.refuse("slices of the vocabulary or adapters");
    }
    if options.log_sum_exp != LogSumExp::No || options.predictions || options.entropy {
        return rung.refuse("outputs besides the loss");
    }
    let kind = tile_kind(inputs.hidden.kind());
    let most = chunk_tokens(options.chunk, sizes.tokens, sizes.vocabulary, kind.elt_size_in_bytes())?;
    let leading = inputs.hidden.size()[..inputs.hidden.dim() - 1].to_vec();
    let x = inputs.hidden.f_reshape([sizes.tokens, sizes.hidden])?;
    let (mut losses, mut divisors) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < sizes.tokens || losses.is_empty() {
        let count = most.min(sizes.tokens - start);
        let tokens = Tokens::new(inputs, options, sizes, start, count)?;
        let (options, class_weights) = (options.clone(), inputs.class_weights.map(Tensor::shallow_clone));
        let targets = match inputs.targets {
            Targets::Classes(targets) | Targets::Distributions(targets) => targets.shallow_clone(),
        };
        let has_bias = inputs.bias.is_some();
        let segment = move |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
            let inputs = Inputs {
                bias: has_bias.then(|| &given[2]),
                class_weights: class_weights.as_ref(),
                ..Inputs::new(&given[0], &given[1], &targets)
            };
            let z = logits(&given[0], &inputs, &options)?;
            let (losses, divisors) = tokens.losses(&z, &inputs, &options)?;
            Ok(vec![losses, divisors.f_detach()?])
        };
        let rows = x.f_narrow(0, start, count)?;
        let given: Vec<&Tensor> =
            [Some(&rows), Some(inputs.weight), inputs.bias].into_iter().flatten().collect();
        let mut outputs = checkpoint(segment, &given)?;
        divisors.push(outputs.remove(1).f_detach()?);
        losses.push(outputs.remove(0));
        start += count;
    }
    let loss = reduce(&Tensor::f_cat(&losses, 0)?, &Tensor::f_cat(&divisors, 0)?, inputs, options, &leading)?;
    Ok(Output { loss, log_sum_exp: None, predictions: None, correct: None, entropy: None })
}
