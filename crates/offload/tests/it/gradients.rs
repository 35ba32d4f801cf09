//! The assignment's `compare_grads`: three training steps with every method, compared with the plain model. Losses, gradients and
//! weights are equal bit for bit.

use crate::support;
use crate::support::{FLOAT, alone, compare, steps, tiny, ways};
use models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use offload::{OffloadConfig, Tier};
use tch::Tensor;

#[test]
fn every_method_trains_like_the_plain_model() {
    let _alone = alone();
    let reference = steps(tiny(), None, 3, 1);
    for (name, options) in ways(5) {
        compare(&reference, &steps(tiny(), Some(options), 3, 1), &name);
    }
}

#[test]
fn every_ring_and_residency_trains_alike() {
    let _alone = alone();
    let reference = steps(tiny(), None, 3, 1);
    let check =
        |name: &str, options: OffloadConfig| compare(&reference, &steps(tiny(), Some(options), 3, 1), name);
    for ring in 1..=7 {
        check(&format!("ring {ring}"), OffloadConfig { ring, ..OffloadConfig::default() });
    }
    for resident in [vec![0], vec![4], vec![1, 3], vec![0, 1, 2, 3, 4]] {
        check(&format!("resident {resident:?}"), OffloadConfig { resident, ..OffloadConfig::default() });
    }
    for (ring, resident, keep) in [
        (1, vec![], vec![0, 1, 2, 3, 4]),
        (2, vec![1, 3], vec![0, 1, 2, 3, 4]),
        (2, vec![0, 2], vec![1, 2]),
        (5, vec![], vec![1, 2]),
    ] {
        let name = format!("ring {ring}, resident {resident:?}, activations of {keep:?} kept");
        check(&name, OffloadConfig { ring, resident, keep, ..OffloadConfig::default() });
    }
}

#[test]
fn gradients_accumulate_over_micro_batches() {
    let _alone = alone();
    let reference = steps(tiny(), None, 3, 3);
    for (name, options) in ways(5) {
        compare(&reference, &steps(tiny(), Some(options), 3, 3), &name);
    }
}

#[test]
fn recomputed_dropout_draws_the_same_mask() {
    let _alone = alone();
    let config = Gpt2Config {
        vocabulary: 50,
        max_sequence: 16,
        hidden: 32,
        heads: 2,
        layers: 4,
        dropout: 0.2,
        ..Gpt2Config::small()
    };
    let model = || {
        runtime::random::seed(5).unwrap();
        Box::new(Gpt2::new(&config, FLOAT).unwrap())
    };
    let reference = steps(model(), None, 3, 1);
    for (name, options) in ways(4) {
        compare(&reference, &steps(model(), Some(options), 3, 1), &name);
    }
}

#[test]
fn frozen_layers_in_files_and_trained_tensors_on_the_host_train_alike() {
    let _alone = alone();
    // Only biases are trained, like adapters: matrices and norms are in files.
    let model = || {
        let model = tiny();
        models::module::freeze(&*model, r".*(weight)", true).unwrap();
        model
    };
    let folder = tempfile::tempdir().unwrap();
    let reference = steps(model(), None, 3, 2);
    for (name, options) in ways(5) {
        let tier = Tier::File(folder.path().to_owned());
        compare(&reference, &steps(model(), Some(OffloadConfig { tier, ..options }), 3, 2), &name);
    }
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "the tier's files are gone with the model"
    );
}

#[test]
fn low_precision_trains_alike() {
    let _alone = alone();
    for kind in [tch::Kind::BFloat16, tch::Kind::Double] {
        let model = || {
            runtime::random::seed(3).unwrap();
            let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(60, 32, 48, 5, 4) };
            Box::new(Llama::new(&config, (kind, tch::Device::Cpu)).unwrap())
        };
        let reference = steps(model(), None, 3, 1);
        for (name, options) in ways(5) {
            compare(&reference, &steps(model(), Some(options), 3, 1), &format!("{name} {kind:?}"));
        }
    }
}

/// The assignment's configuration with five layers, at full width, and with few of its words: the embedding stays on the device. (Full
/// size is the experiment `offload equality`.)
#[test]
fn qwen2_with_the_assignments_five_layers() {
    let _alone = alone();
    let model = || {
        runtime::random::seed(0).unwrap();
        let config = DecoderConfig { num_hidden_layers: 5, vocab_size: 1000, ..support::assignment() };
        Box::new(Llama::new(&config, FLOAT).unwrap())
    };
    let reference = steps(model(), None, 2, 1);
    for (name, options) in ways(5) {
        compare(&reference, &steps(model(), Some(options), 2, 1), &name);
    }
}

#[test]
fn a_graph_that_outlives_its_lease_is_an_error() {
    let _alone = alone();
    // Deliberately keeps a graph over a slot's views while the slot is overwritten, which OverlapOffloadFunction never does.
    let slot = Tensor::zeros([256], (tch::Kind::Uint8, tch::Device::Cpu));
    let weight =
        slot.narrow(0, 0, 64).view_dtype(tch::Kind::Float).view([4, 4]).detach().set_requires_grad(true);
    let x = Tensor::ones([2, 4], FLOAT).set_requires_grad(true);
    let y = x.matmul(&weight).sum(tch::Kind::Float);
    runtime::device::copy_on_this_thread(&slot, &Tensor::ones([256], (tch::Kind::Uint8, tch::Device::Cpu)))
        .unwrap();
    let error = runtime::autograd::backward(&[&y]).unwrap_err();
    assert!(error.to_string().contains("modified by an inplace operation"), "{error}");
}
