//! Adapters over a base in NF4 and in GGUF's blocks, compared with the same adapters over the dequantized base in fp32.

use std::sync::{Arc, Mutex};

use kernels::nf4::{self, Scales};
use kernels::quantized;
use kernels::quantized::blocks::{self, BlockType};
use lora::{Adapters, Init, LoraConfig, LoraLinear, LoraLinearConfig};
use models::module::{Context, Input, LanguageModel, Projection, parameters, tensors};
use models::{DecoderConfig, Linear, Llama};
use runtime::autograd::{Checkpoint, backward, set_grad};
use runtime::random::{Generator, RandomState};
use tch::{Device, Kind, Tensor, kind};

/// Dropout draws its seed from the process's shared generator, so tests that replay it run alone.
static GENERATOR: Mutex<()> = Mutex::new(());

const TRAINING: Context<'_> = Context {
    documents: None,
    positions: None,
    extension: None,
    training: true,
    accuracy: false,
    labelled_tokens: None,
    label_weights: None,
    embedding_noise: None,
    balance: None,
    sequence: None,
};

struct Case {
    /// Over few bits, and over the same values in fp32.
    layers: [LoraLinear; 2],
    stored: Tensor,
}

/// Returns a matrix in blocks of 8 bits, with one scale of 2⁻⁶.
fn in_blocks(weight: &Tensor) -> Tensor {
    let (out, inner) = weight.size2().unwrap();
    let codes = (weight * 64.0).round().clamp(-127.0, 127.0).to_kind(Kind::Int8).view_dtype(Kind::Uint8);
    let scale = Tensor::from_slice(&[0x00u8, 0x24]).view([1, 1, 2]).expand([out, inner / 32, 2], false);
    let bytes = Tensor::cat(&[scale, codes.view([out, inner / 32, 32])], 2);
    let bytes: Vec<u8> = Vec::try_from(bytes.view([-1])).unwrap();
    blocks::from_bytes(BlockType::Q8_0, [out, inner], &bytes).unwrap()
}

fn case(out: i64, inner: i64, options: &LoraLinearConfig) -> Case {
    let mut generator = Generator::new(1).unwrap();
    let mut normal = |shape: &[i64]| generator.normal(shape, kind::FLOAT_CPU).unwrap();
    let stored = match inner % 256 {
        0 => in_blocks(&normal(&[out, inner])),
        _ => nf4::quantize(&normal(&[out, inner]), Scales::Nested).unwrap(),
    };
    let bias = normal(&[out]);
    let dense = quantized::dequantize(&stored, Kind::Float).unwrap();
    let layers = [&stored, &dense].map(|weight| {
        let linear = Linear { weight: weight.shallow_clone(), bias: Some(bias.copy()) };
        LoraLinear::new(linear, options).unwrap()
    });
    for layer in &layers {
        let mut generator = Generator::new(2).unwrap();
        for (name, tensor) in parameters(layer).into_iter().filter(|(name, _)| name.starts_with("lora_B")) {
            let noise = generator.normal(&tensor.size(), kind::FLOAT_CPU).unwrap() * 0.3;
            let _no_grad = tch::no_grad_guard();
            assert!(tensor.shallow_clone().f_add_(&noise).is_ok(), "{name}");
        }
    }
    Case { layers, stored }
}

/// The result, the gradient of x, and those of the adapter.
fn step(layer: &LoraLinear, x: &Tensor, state: &RandomState) -> Vec<Tensor> {
    let _replay = state.replay().unwrap();
    let x = x.detach().set_requires_grad(true);
    let y = layer.forward(&x, &TRAINING).unwrap();
    let upstream = Generator::new(3).unwrap().normal(&y.size(), kind::FLOAT_CPU).unwrap();
    backward(&[&(&y * upstream.to_kind(y.kind())).sum(Kind::Float)]).unwrap();
    let mut found = vec![y.detach(), x.grad()];
    for (_, tensor) in parameters(layer).into_iter().filter(|(_, tensor)| tensor.requires_grad()) {
        found.push(tensor.grad().copy());
        set_grad(tensor, None).unwrap();
    }
    found
}

fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let [found, expected] = [found, expected].map(|x| x.to_kind(Kind::Double));
    (&found - &expected).abs().max().double_value(&[]) / expected.abs().max().double_value(&[])
}

fn variants() -> Vec<LoraLinearConfig> {
    let base = LoraLinearConfig { r: 4, alpha: 6.0, ..LoraLinearConfig::default() };
    vec![
        base.clone(),
        LoraLinearConfig { rslora: true, init: Init::Gaussian, ..base.clone() },
        LoraLinearConfig { dropout: 0.4, ..base.clone() },
        LoraLinearConfig { dora: true, ..base.clone() },
        LoraLinearConfig { dora: true, dropout: 0.3, ..base.clone() },
        LoraLinearConfig { init: Init::Pissa, ..base.clone() },
        LoraLinearConfig { init: Init::Olora, dropout: 0.2, ..base.clone() },
        LoraLinearConfig { init: Init::Orthogonal, ..base },
    ]
}

#[test]
fn results_and_gradients_are_those_of_the_dequantized_base() {
    let _alone = GENERATOR.lock().unwrap();
    let state = RandomState::capture(Device::Cpu).unwrap();
    for options in variants() {
        for (out, inner) in [(96, 128), (50, 22), (72, 256)] {
            let Case { layers: [quantized, dense], stored } = case(out, inner, &options);
            let before = stored.copy();
            for tokens in [3, 40] {
                let x = Generator::new(4).unwrap().normal(&[2, tokens, inner], kind::FLOAT_CPU).unwrap();
                let found = step(&quantized, &x, &state);
                let expected = step(&dense, &x, &state);
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(&expected) {
                    // Six rows are summed in another order.
                    assert!(
                        error(found, expected) < 2e-6,
                        "{options:?} {tokens}: {}",
                        error(found, expected)
                    );
                }
                if tokens == 40 && !options.dora {
                    assert_eq!(found, expected, "{options:?}");
                }
            }
            assert_eq!(stored, before, "the base is never written");
        }
    }
}

/// In bf16 the difference to the dense base is that of another rounding.
#[test]
fn an_input_in_bf16_keeps_its_dtype() {
    let _alone = GENERATOR.lock().unwrap();
    let state = RandomState::capture(Device::Cpu).unwrap();
    for options in variants() {
        let Case { layers: [quantized, dense], .. } = case(96, 128, &options);
        for tokens in [3, 40] {
            let x = Generator::new(4).unwrap().normal(&[2, tokens, 128], kind::FLOAT_CPU).unwrap();
            let x = x.to_kind(Kind::BFloat16);
            let found = step(&quantized, &x, &state);
            assert_eq!(
                (found[0].kind(), found[1].kind(), found[2].kind()),
                (Kind::BFloat16, Kind::BFloat16, Kind::Float)
            );
            for (found, expected) in found.iter().zip(step(&dense, &x.to_kind(Kind::Float), &state)) {
                assert!(error(found, &expected) < 2e-2, "{options:?}: {}", error(found, &expected));
            }
        }
    }
}

#[test]
fn a_recomputed_segment_has_the_same_bits() {
    let _alone = GENERATOR.lock().unwrap();
    for options in [
        LoraLinearConfig { dropout: 0.4, ..LoraLinearConfig::default() },
        LoraLinearConfig { dora: true, ..LoraLinearConfig::default() },
    ] {
        for tokens in [3, 40] {
            let Case { layers: [quantized, _], .. } = case(96, 128, &options);
            let state = RandomState::capture(Device::Cpu).unwrap();
            let x = Generator::new(4).unwrap().normal(&[tokens, 128], kind::FLOAT_CPU).unwrap();
            let expected = step(&quantized, &x, &state);
            let learned: Vec<Tensor> = parameters(&quantized)
                .into_iter()
                .filter(|(_, tensor)| tensor.requires_grad())
                .map(|(_, tensor)| tensor.shallow_clone())
                .collect();
            let layer = Arc::new(Mutex::new(quantized));
            for retain_products in [false, true] {
                let _replay = state.replay().unwrap();
                let x = x.detach().set_requires_grad(true);
                let inner = layer.clone();
                let segment = move |[x]: [&Tensor; 1]| Ok([inner.lock().unwrap().forward(x, &TRAINING)?]);
                let [y] = Checkpoint { retain_products, ..Checkpoint::default() }.run(segment, [&x]).unwrap();
                let upstream = Generator::new(3).unwrap().normal(&y.size(), kind::FLOAT_CPU).unwrap();
                backward(&[&(&y * upstream).sum(Kind::Float)]).unwrap();
                let mut found = vec![y.detach(), x.grad()];
                for tensor in &learned {
                    found.push(tensor.grad().copy());
                    set_grad(tensor, None).unwrap();
                }
                assert_eq!(found, expected, "{options:?} {retain_products}");
            }
        }
    }
}

#[test]
fn adapters_of_a_model_are_saved_disabled_and_unloaded_and_a_merge_is_refused() {
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(50, 64, 96, 2, 4) };
    let mut model = Llama::new(&config, (Scales::Nested.kind(), Device::Cpu)).unwrap();
    let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
    let logits = |model: &Llama| tch::no_grad(|| model.logits(&Input::new(&tokens)).unwrap());
    let base = logits(&model);
    let lora = LoraConfig {
        r: 4,
        init_lora_weights: false.into(),
        target_modules: Some(["q_proj", "v_proj", "up_proj", "down_proj"].into()),
        ..LoraConfig::default()
    };
    let adapters = LoraConfig { seed: 7, ..lora.clone() }.install(&mut model).unwrap();
    let adapted = logits(&model);
    assert_ne!(adapted, base);
    {
        let _off = adapters.disable().unwrap();
        assert_eq!(logits(&model), base);
    }
    let folder = tempfile::tempdir().unwrap();
    adapters.save(folder.path()).unwrap();

    let error = adapters.merge().unwrap_err().to_string();
    assert!(
        error.contains("the base is in NF4") && error.contains("its original files, and merge there"),
        "{error}"
    );
    assert_eq!(logits(&model), adapted);
    adapters.unload(&mut model).unwrap();
    assert_eq!(logits(&model), base);
    let again = Adapters::load(&mut model, folder.path()).unwrap();
    assert_eq!(logits(&model), adapted);
    assert!(again.merge_and_unload(&mut model).is_err());
    assert_eq!(tensors(&model).iter().filter(|named| nf4::is_nf4(named.tensor)).count(), 14);
}
