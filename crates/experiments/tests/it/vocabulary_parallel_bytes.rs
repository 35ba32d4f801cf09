//! Tests the bytes that the vocabulary-parallel loss reduces over its ranks against the prediction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accounting::decoder_flops::Workload;
use accounting::memory::recipe::Recipe;
use accounting::memory::vocabulary_parallel::rank_bytes;
use fused_ce::vocabulary_parallel::{ProcessGroup, ReduceOp, Shard};
use fused_ce::{Chunk, Inputs, LinearCrossEntropy};
use models::DecoderConfig;
use tch::{Device, Kind, Tensor};

/// A group of one rank that counts the bytes it reduces.
#[derive(Debug, Default)]
struct Counting(Arc<AtomicU64>);

impl ProcessGroup for Counting {
    fn all_reduce(&self, tensor: &mut Tensor, _: ReduceOp) -> runtime::Result<()> {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn as_many_bytes_are_reduced_as_predicted() {
    let (tokens, tile) = (24, 7);
    let model = accounting::Decoder::from_config(&DecoderConfig::qwen2(40, 16, 24, 1, 2)).unwrap();
    for (kind, recipe) in [(Kind::Float, Recipe::FP32), (Kind::BFloat16, Recipe::BF16)] {
        let group = Counting::default();
        let reduced = group.0.clone();
        let shard = Shard { first: 0, vocabulary: 40, widest: 40, group: Box::new(group) };
        let options = (kind, Device::Cpu);
        let [hidden, weight] =
            [[tokens, 16], [40, 16]].map(|size| Tensor::ones(size, options).set_requires_grad(true));
        let targets = Tensor::zeros([tokens], (Kind::Int64, Device::Cpu));
        let loss = LinearCrossEntropy { chunk: Some(Chunk::Tokens(tile)), ..LinearCrossEntropy::default() };
        let inputs = Inputs { shard: Some(Arc::new(shard)), ..Inputs::new(&hidden, &weight, &targets) };
        let output = loss.run(&inputs).unwrap();
        runtime::autograd::backward(&[&output.loss]).unwrap();
        let work = Workload { batch: 1, sequence: tokens.unsigned_abs() };
        let predicted = rank_bytes(&model, work, &recipe, tile.unsigned_abs(), 1).unwrap();
        assert_eq!(reduced.load(Ordering::Relaxed), predicted.reduced().unwrap(), "{kind:?}");
    }
}
