//! Fewer rows at a time have the loss and the gradients of the whole batch.

use dataloading::Batch;
use models::module::{LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};

use training::accumulation::{MicroBatches, fetch, forward};
use training::masked_rows::Arrangement::{Packed, Padded, PaddingFree};
use training::masked_rows::{Layout, MaskedBatches, MaskedRow};

/// Rows of 3 to 13 tokens; the first half of each is a prompt.
fn rows() -> Vec<MaskedRow> {
    let row = |number: i64| {
        let tokens: Vec<i64> = (0..3 + number * 7 % 11).map(|at| (number * 5 + at * at) % 23).collect();
        let labels =
            (0..).zip(&tokens).map(|(at, id)| if at < tokens.len() / 2 { -100 } else { *id }).collect();
        MaskedRow::new(tokens, labels)
    };
    (0..20).map(row).collect()
}

fn gradients(model: &dyn LanguageModel, micro: &MicroBatches) -> (f64, Vec<Tensor>) {
    let mut sum = 0.0;
    for batch in &micro.batches {
        let output = forward(model, batch, true, false).unwrap();
        backward(&[&(&output.sum / micro.denominator())]).unwrap();
        sum += output.sum.double_value(&[]);
    }
    let taken = trainable(model).into_iter().map(|(_, tensor)| {
        let grad = tensor.grad().copy();
        set_grad(tensor, None).unwrap();
        grad
    });
    (sum, taken.collect())
}

#[test]
fn parts_of_a_batch_have_its_loss_and_gradients() {
    runtime::random::seed(2).unwrap();
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(23, 16, 40, 2, 4) };
    let model = Llama::new(&config, (Kind::Double, Device::Cpu)).unwrap();
    for arrangement in [Padded, PaddingFree, Packed(16)] {
        let layout = Layout { batch: 5, arrangement, ..Layout::default() };
        let micro =
            || fetch(&mut MaskedBatches::new(rows(), layout, Device::Cpu).unwrap(), 2).unwrap().unwrap();
        let (loss, expected) = gradients(&model, &micro());
        for rows in [1, 2, 3, 5, 9] {
            let parts = micro().split(rows).unwrap();
            let of = |all: usize| all.div_ceil(rows);
            let all = |batch: &Batch| match (arrangement, &batch.packing) {
                (PaddingFree, Some(packing)) => packing.starts.len() - 1,
                _ => batch.tokens.size()[0] as usize,
            };
            assert_eq!(
                parts.batches.len(),
                micro().batches.iter().map(|batch| of(all(batch))).sum::<usize>()
            );
            assert!(parts.batches.iter().all(|part| all(part) <= rows));
            let (sum, found) = gradients(&model, &parts);
            assert!((sum / loss - 1.0).abs() < 1e-12, "{arrangement:?}, {rows} rows: {sum} and {loss}");
            for (found, expected) in found.iter().zip(&expected) {
                let error = (found - expected).norm() / expected.norm();
                assert!(error.double_value(&[]) < 1e-12, "{arrangement:?}, {rows} rows: {error:?}");
            }
        }
    }
}
