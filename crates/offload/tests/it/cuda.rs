//! Loads that run asynchronously on a GPU. Prints that it is skipped without CUDA.

use models::module::{Input, LanguageModel, parameters};
use models::{DecoderConfig, Llama};
use offload::OffloadConfig;
use runtime::device::{self, Stream};
use tch::{Device, Kind, Tensor};

use crate::support::alone;

/// Layers of 42 MB whose compute takes longer than the host takes to queue them.
fn model_and_tokens(device: Device) -> (Llama, Tensor) {
    runtime::random::seed(1).unwrap();
    let config =
        DecoderConfig { max_position_embeddings: 2048, ..DecoderConfig::qwen2(1000, 1024, 2304, 8, 16) };
    let model = Llama::new(&config, (Kind::Float, device)).unwrap();
    let tokens = Tensor::randint(1000, [2, 2048], (Kind::Int64, device));
    (model, tokens)
}

fn on_cuda(body: impl FnOnce(Device)) {
    let _alone = alone();
    match device::cuda_count().unwrap() {
        0 => eprintln!("skipped: no CUDA device"),
        _ => body(device::select("cuda").unwrap()),
    }
}

/// The loss of an inference pass, left on the device: the host does not wait for it.
fn forward(model: &Llama, tokens: &Tensor) -> Tensor {
    tch::no_grad(|| model.loss(&Input::new(tokens), tokens).unwrap().sum)
}

/// Multiplies the weights of the layers, in the memory where they are.
fn scale_layers(model: &Llama, factor: f64) {
    tch::no_grad(|| {
        for (name, mut tensor) in parameters(model).into_iter().map(|(name, t)| (name, t.shallow_clone())) {
            if name.contains("layers.") {
                let _ = tensor.f_mul_scalar_(factor).unwrap();
            }
        }
    });
}

#[test]
fn weights_written_after_synchronize_do_not_reach_the_pass_before_it() {
    on_cuda(|device| {
        let (mut model, tokens) = model_and_tokens(device);
        let before = forward(&model, &tokens);
        // A power of two: scaling back restores the bits.
        scale_layers(&model, 2.0);
        let after = forward(&model, &tokens);
        scale_layers(&model, 0.5);
        assert_ne!(before, after);

        let offload =
            OffloadConfig { device, ring: 3, ..OffloadConfig::default() }.install(&mut model).unwrap();
        for round in 0..10 {
            let first = forward(&model, &tokens);
            offload.synchronize().unwrap();
            scale_layers(&model, 2.0);
            let second = forward(&model, &tokens);
            offload.synchronize().unwrap();
            scale_layers(&model, 0.5);
            assert_eq!(first, before, "round {round}");
            assert_eq!(second, after, "round {round}");
        }
    });
}

#[test]
fn passes_on_two_streams_share_the_ring() {
    on_cuda(|device| {
        let (mut model, tokens) = model_and_tokens(device);
        let expected = forward(&model, &tokens);
        let _offload =
            OffloadConfig { device, ring: 2, ..OffloadConfig::default() }.install(&mut model).unwrap();
        device::synchronize(device).unwrap();
        let streams = [Stream::new(device).unwrap(), Stream::new(device).unwrap()];
        let mut found = Vec::new();
        for round in 0..10 {
            // The pass on the other stream still computes when this one reuses its slots.
            let _current = streams[round % 2].enter().unwrap();
            found.push(forward(&model, &tokens));
        }
        device::synchronize(device).unwrap();
        for (round, found) in found.into_iter().enumerate() {
            assert_eq!(found, expected, "round {round}");
        }
    });
}

#[test]
fn a_model_on_a_gpu_is_not_offloaded_to_run_on_the_cpu() {
    on_cuda(|device| {
        let (mut model, tokens) = model_and_tokens(device);
        let error = OffloadConfig::default().install(&mut model).unwrap_err().to_string();
        assert!(error.contains("layers would run on Cpu, and `"), "{error}");
        // Nothing has changed.
        assert!(forward(&model, &tokens).isfinite().all().int64_value(&[]) == 1);
    });
}
