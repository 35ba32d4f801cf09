//! A Llama and its batches, the same in every program: weights and tokens are a hash of their position.

use clap::Args;
use dataloading::{Batch, Counts};
use models::module::{self, LanguageModel};
use models::{DecoderConfig, Llama};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use training::Trainer;
use training::batches::Batches;

/// Sizes of the model and of a micro-batch.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Sizes {
    #[arg(long)]
    pub(crate) hidden: i64,
    #[arg(long)]
    pub(crate) feed_forward: i64,
    #[arg(long)]
    pub(crate) layers: i64,
    #[arg(long)]
    pub(crate) vocabulary: i64,
    /// Tokens of a rank's micro-batch, one row
    #[arg(long)]
    pub(crate) tokens: i64,
    /// Bytes of a bucket, at least
    #[arg(long)]
    pub(crate) bucket_bytes: usize,
}

impl Sizes {
    /// 26 million parameters in 8 layers.
    pub(crate) const LARGE: Self = Self {
        hidden: 512,
        feed_forward: 1408,
        layers: 8,
        vocabulary: 1024,
        tokens: 512,
        bucket_bytes: 16 << 20,
    };
    /// 3 million parameters in 4 layers, in buckets that are as small beside them.
    pub(crate) const SMALL: Self = Self {
        hidden: 256,
        feed_forward: 704,
        layers: 4,
        vocabulary: 512,
        tokens: 64,
        bucket_bytes: 1 << 20,
    };

    /// 0.1 million parameters in 2 layers.
    pub(crate) const TINY: Self = Self {
        hidden: 64,
        feed_forward: 176,
        layers: 2,
        vocabulary: 256,
        tokens: 16,
        bucket_bytes: 64 << 10,
    };

    /// The flags that give these sizes.
    pub(crate) fn flags(&self) -> Vec<String> {
        let Self { hidden, feed_forward, layers, vocabulary, tokens, bucket_bytes } = *self;
        [
            ("--hidden", hidden.to_string()),
            ("--feed-forward", feed_forward.to_string()),
            ("--layers", layers.to_string()),
            ("--vocabulary", vocabulary.to_string()),
            ("--tokens", tokens.to_string()),
            ("--bucket-bytes", bucket_bytes.to_string()),
        ]
        .into_iter()
        .flat_map(|(flag, size)| [flag.to_owned(), size])
        .collect()
    }

    pub(crate) fn config(&self) -> DecoderConfig {
        let Self { hidden, feed_forward, layers, vocabulary, tokens, .. } = *self;
        let config = DecoderConfig::llama(vocabulary, hidden, feed_forward, layers, 8);
        let max_position_embeddings = config.max_position_embeddings.max(tokens);
        DecoderConfig { tie_word_embeddings: true, max_position_embeddings, ..config }
    }

    /// Returns the model in fp32: matrices between ±0.035, norms of 1.
    pub(crate) fn model(&self) -> anyhow::Result<Box<dyn LanguageModel>> {
        let model: Box<dyn LanguageModel> = Box::new(Llama::new(&self.config(), (Kind::Float, Device::Cpu))?);
        let _no_grad = tch::no_grad_guard();
        for (number, (_, tensor)) in (0..).zip(module::parameters(model.as_ref())) {
            if tensor.dim() < 2 {
                continue;
            }
            let weight =
                |index: u32| ((f64::from(hash(index, number)) / 4_294_967_296.0 - 0.5) * 0.07) as f32;
            let values: Vec<f32> = (0..u32::try_from(tensor.numel())?).map(weight).collect();
            tensor.shallow_clone().f_copy_(&Tensor::f_from_slice(&values)?.f_view_as(tensor)?)?;
        }
        Ok(model)
    }
}

/// Projections of all parameters on directions of ±1, p·w/‖w‖ + 1: their ratio in two trainings differs from 1 by about the relative
/// distance of the parameters. All ranks call it.
pub(crate) fn projections(trainer: &Trainer) -> anyhow::Result<Vec<f64>> {
    const COUNT: u32 = 4;
    let (mut sums, mut squares) = ([0.0; COUNT as usize], 0.0);
    for (number, (_, tensor)) in (0..).zip(module::parameters(trainer.model.as_ref())) {
        let weights = trainer.optimizer.whole_weight(tensor)?.f_reshape([-1])?.f_to_kind(Kind::Float)?;
        for (index, value) in (0..).zip(Vec::<f32>::try_from(weights)?) {
            let value = f64::from(value);
            squares += value * value;
            for (direction, sum) in (0..).zip(&mut sums) {
                let is_negative = hash(index, 5000 + COUNT * number + direction) >> 31 == 1;
                *sum += if is_negative { -value } else { value };
            }
        }
    }
    Ok(sums.map(|sum: f64| 1.0 + sum / f64::sqrt(squares)).to_vec())
}

/// A hash of two numbers.
fn hash(index: u32, seed: u32) -> u32 {
    let mut x = index.wrapping_add(seed.wrapping_mul(0x0100_0003));
    x = x.wrapping_mul(0x9e37_79b1);
    x ^= x >> 15;
    x = x.wrapping_mul(0x85eb_ca77);
    x ^ (x >> 13)
}

/// Micro-batches of one row, numbered over all ranks and steps.
#[derive(Debug)]
pub(crate) struct HashedBatches {
    pub(crate) sizes: Sizes,
    /// The next one's number.
    pub(crate) next: u32,
    /// The distance to the number of the next batch.
    pub(crate) stride: u32,
}

impl Batches for HashedBatches {
    fn next(&mut self) -> training::Result<Option<Batch>> {
        let Sizes { vocabulary, tokens, .. } = self.sizes;
        let token = |index: i64| i64::from(hash(index as u32, self.next.wrapping_add(1000))) % vocabulary;
        let row: Vec<i64> = (0..=tokens).map(token).collect();
        self.next += self.stride;
        let tensor = |values: &[i64]| Tensor::f_from_slice(values)?.f_view([1, tokens]);
        let (inputs, labels) = (tensor(&row[..row.len() - 1])?, tensor(&row[1..])?);
        let count = row.len() - 1;
        let counts = Counts { tokens: count, targets: count, documents: 1, ..Counts::default() };
        Ok(Some(Batch {
            tokens: inputs,
            labels,
            packing: None,
            padding: Vec::new(),
            sequences: None,
            taught: None,
            weights: None,
            counts,
        }))
    }

    fn state(&self) -> Value {
        json!({ "next": self.next })
    }

    fn resume(&mut self, _: &Value) -> training::Result<()> {
        Ok(())
    }
}
