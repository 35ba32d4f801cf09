//! Every plan gives the gradients of keeping everything bit for bit.
//!
//! Dropout draws from the process's generator, so no other test may run at the same time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use models::module::{Context, Input, LanguageModel, ModuleMapper, freeze, map_modules, parameters, tensors};
use models::{DecoderConfig, Documents, Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig, Llama};
use runtime::autograd::{GradMode, backward, set_grad};
use runtime::precision::{self, Policy, Product};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::LayerPlan::{
    KeepAll, Offload, RecomputeAll, RecomputeAttention, RecomputeElementwise, RecomputeMlp,
};
use training::activations::{Activations, LayerPlan, every_kth};

const LAYERS: usize = 4;
const ROWS: i64 = 3;
const LENGTH: i64 = 10;

fn serial() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn config(dropout: f64) -> Gpt2Config {
    let (heads, layers, hidden, vocabulary) = (2, LAYERS as i64, 16, 40);
    Gpt2Config { vocabulary, max_sequence: LENGTH, hidden, heads, layers, dropout, ..Gpt2Config::small() }
}

fn model(dropout: f64) -> (Gpt2, Activations) {
    let mut model = Gpt2::new(&config(dropout), (Kind::Float, Device::Cpu)).unwrap();
    let activations = Activations::install(&mut model, &[KeepAll; LAYERS]).unwrap();
    (model, activations)
}

fn tokens(seed: u64) -> Tensor {
    let values =
        Generator::new(seed).unwrap().uniform(&[ROWS, LENGTH], (0.0, 40.0), (Kind::Float, Device::Cpu));
    values.unwrap().to_kind(Kind::Int64)
}

/// Documents in each row, and the position of each token in its document.
fn documents() -> Documents {
    Documents::new(&[vec![4, 6], vec![10], vec![1, 2, 7]], Device::Cpu).unwrap()
}

fn positions() -> Tensor {
    let row = |lengths: &[i64]| lengths.iter().flat_map(|&length| 0..length).collect::<Vec<i64>>();
    Tensor::from_slice2(&[row(&[4, 6]), row(&[10]), row(&[1, 2, 7])])
}

/// The loss and the gradients of `batches` batches, whose gradients add up.
fn step(model: &dyn LanguageModel, documents: Option<&Documents>, batches: u64) -> Vec<Option<Tensor>> {
    runtime::random::seed(11).unwrap();
    for (_, tensor) in parameters(model) {
        set_grad(tensor, None).unwrap();
    }
    let mut results = Vec::new();
    for batch in 0..batches {
        let (tokens, labels) = (tokens(batch), tokens(batch + 100));
        let context = Context { documents, training: true, ..Context::default() };
        let positions = documents.map(|_| positions());
        let loss = model
            .loss(&Input { tokens: &tokens, positions: positions.as_ref(), context }, &labels)
            .unwrap()
            .sum;
        backward(&[&loss]).unwrap();
        results.push(Some(loss.detach()));
    }
    results.extend(parameters(model).iter().map(|(_, tensor)| Some(tensor.grad()).filter(Tensor::defined)));
    results
}

fn plans() -> Vec<Vec<LayerPlan>> {
    let mut plans: Vec<Vec<LayerPlan>> = LayerPlan::ALL[1..].iter().map(|plan| vec![*plan; LAYERS]).collect();
    plans.push(every_kth(LAYERS, 2, RecomputeAll).unwrap());
    plans.push(vec![Offload, RecomputeElementwise, RecomputeMlp, KeepAll]);
    plans.push(vec![RecomputeMlp, Offload, KeepAll, Offload]);
    plans.push(vec![RecomputeAttention, RecomputeMlp, RecomputeAttention, RecomputeAll]);
    plans
}

/// Rounds the input of a linear layer to bf16 and multiplies in fp32.
#[derive(Debug)]
struct Rounded;

impl Policy for Rounded {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> runtime::Result<Tensor> {
        let round = |t: &Tensor| t.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        product(&round(x), &round(weight), bias)
    }
}

/// Name, dropout, documents, what is frozen, batches, mixed precision.
type Case<'a> = (&'a str, f64, Option<&'a Documents>, Option<&'a str>, u64, bool);

#[test]
fn gradients_match_keeping_everything_bit_for_bit() {
    let _serial = serial();
    let documents = documents();
    let frozen_first = r"wte.weight|wpe.*|h\.[01]\..*";
    let cases: [Case<'_>; 8] = [
        ("plain", 0.0, None, None, 1, false),
        ("dropout", 0.3, None, None, 1, false),
        ("packed", 0.0, Some(&documents), None, 1, false),
        ("packed with dropout", 0.3, Some(&documents), None, 1, false),
        ("first layers frozen", 0.1, None, Some(frozen_first), 1, false),
        ("biases and norms frozen", 0.0, None, Some(r".*bias|.*ln_.*"), 1, false),
        ("three batches", 0.1, None, None, 3, false),
        ("mixed precision", 0.1, None, None, 1, true),
    ];
    for (name, dropout, documents, frozen, batches, mixed) in cases {
        runtime::random::seed(5).unwrap();
        let (model, activations) = model(dropout);
        if let Some(pattern) = frozen {
            freeze(&model, pattern, true).unwrap();
        }
        let _precision = precision::enter(mixed.then(|| Arc::new(Rounded) as Arc<dyn Policy>));
        let expected = step(&model, documents, batches);
        assert!(expected.iter().flatten().all(|t| t.isfinite().all().int64_value(&[]) == 1));
        for plan in plans() {
            activations.change(&plan).unwrap();
            assert_eq!(activations.plan(), plan);
            let found = step(&model, documents, batches);
            assert_eq!(found, expected, "{name}: {plan:?}");
            assert_eq!(activations.host_bytes(), 0);
        }
    }
}

/// Rotary embeddings, which recomputation must reproduce, and fewer key-value heads.
#[test]
fn gradients_of_llama_match_too() {
    let _serial = serial();
    runtime::random::seed(5).unwrap();
    let config = DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: LENGTH,
        ..DecoderConfig::llama(40, 16, 40, LAYERS as i64, 4)
    };
    let mut model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let activations = Activations::install(&mut model, &[KeepAll; LAYERS]).unwrap();
    let packed = documents();
    for documents in [None, Some(&packed)] {
        activations.change(&[KeepAll; LAYERS]).unwrap();
        let expected = step(&model, documents, 2);
        for plan in plans() {
            activations.change(&plan).unwrap();
            assert_eq!(step(&model, documents, 2), expected, "{plan:?}");
        }
    }
}

fn recomputed(model: &Gpt2) -> u64 {
    let counter = Counter::on_this_thread().unwrap();
    step(model, None, 1);
    counter.finish().unwrap().recomputed.flops.dense
}

#[test]
fn only_planned_layers_are_recomputed() {
    let _serial = serial();
    let (model, activations) = model(0.0);
    let of = |plan: &[LayerPlan]| {
        activations.change(plan).unwrap();
        recomputed(&model)
    };
    let (d, n) = (16, (ROWS * LENGTH) as u64);
    let mlp = 2 * n * 8 * d * d;
    let products = 2 * n * 12 * d * d;
    // The scores and the weighted values of every pair of query and key.
    let attention = 4 * ROWS as u64 * (LENGTH * LENGTH) as u64 * d;
    assert_eq!(of(&[KeepAll; LAYERS]), 0);
    assert_eq!(of(&[RecomputeElementwise; LAYERS]), 0, "no product is computed twice");
    assert_eq!(of(&[RecomputeMlp; LAYERS]), LAYERS as u64 * mlp);
    assert_eq!(of(&[RecomputeAttention; LAYERS]), LAYERS as u64 * (products - mlp + attention));
    assert_eq!(of(&[RecomputeAll; LAYERS]), LAYERS as u64 * (products + attention));
    assert_eq!(of(&[Offload; LAYERS]), LAYERS as u64 * (products + attention));
    assert_eq!(of(&every_kth(LAYERS, 2, RecomputeAll).unwrap()), 2 * (products + attention));
    freeze(&model, r"wte.weight|wpe.*|h\.[01]\..*", true).unwrap();
    assert_eq!(
        of(&[RecomputeAll; LAYERS]),
        2 * (products + attention),
        "nothing in the first two needs a gradient"
    );
}

#[test]
fn an_evaluation_copies_nothing_to_the_host() {
    let _serial = serial();
    let (model, activations) = model(0.0);
    let tokens = tokens(1);
    let kept = {
        let _no_grad = GradMode::off();
        model.hidden(&Input::new(&tokens)).unwrap()
    };
    activations.change(&[Offload; LAYERS]).unwrap();
    let _no_grad = GradMode::off();
    assert_eq!(model.hidden(&Input::new(&tokens)).unwrap(), kept);
    assert_eq!(activations.host_bytes(), 0);
}

#[test]
fn host_bytes_are_the_offloaded_inputs_until_their_backward() {
    let _serial = serial();
    let (model, activations) = model(0.0);
    let input = (ROWS * LENGTH * 16 * 4) as u64;
    activations.change(&[Offload, KeepAll, Offload, Offload]).unwrap();
    let loss = |seed| {
        let tokens = tokens(seed);
        model.loss(&Input::new(&tokens), &tokens).unwrap().sum
    };
    let (first, second) = (loss(1), loss(2));
    assert_eq!(activations.host_bytes(), 6 * input);
    backward(&[&first]).unwrap();
    assert_eq!(activations.host_bytes(), 3 * input);
    drop(second);
    assert_eq!(activations.host_bytes(), 0, "a backward that never runs leaves nothing");
}

#[test]
fn two_graphs_work_in_either_order() {
    let _serial = serial();
    let (model, activations) = model(0.0);
    let run = |order: [usize; 2]| {
        for (_, tensor) in parameters(&model) {
            set_grad(tensor, None).unwrap();
        }
        let losses = [1, 2].map(|seed| {
            let tokens = tokens(seed);
            model.loss(&Input::new(&tokens), &tokens).unwrap().sum
        });
        order.iter().for_each(|index| backward(&[&losses[*index]]).unwrap());
        parameters(&model).iter().map(|(_, tensor)| tensor.grad()).collect::<Vec<_>>()
    };
    for order in [[0, 1], [1, 0]] {
        activations.change(&[KeepAll; LAYERS]).unwrap();
        let expected = run(order);
        activations.change(&[Offload; LAYERS]).unwrap();
        assert_eq!(run(order), expected, "{order:?}");
    }
}

#[test]
fn names_and_tensors_of_a_model_are_unchanged() {
    let _serial = serial();
    let plain = Gpt2::new(&config(0.0), (Kind::Float, Device::Cpu)).unwrap();
    let names = |model: &Gpt2| tensors(model).into_iter().map(|named| named.name).collect::<Vec<_>>();
    let expected = names(&plain);
    let (mut model, activations) = model(0.0);
    assert_eq!(names(&model), expected);

    /// Doubles every tensor in place of it.
    struct Doubled;
    impl ModuleMapper for Doubled {
        fn tensor(&mut self, name: &str, tensor: &mut Tensor, _: models::module::Role) -> models::Result<()> {
            if name == "h.2.mlp.c_fc.weight" {
                *tensor = tensor.detach().f_mul_scalar(2.0)?.f_set_requires_grad(true)?;
            }
            Ok(())
        }
    }
    let weight = |model: &Gpt2| {
        let all = tensors(model);
        all.iter().find(|named| named.name == "h.2.mlp.c_fc.weight").unwrap().tensor.detach().copy()
    };
    let before = weight(&model);
    activations.change(&[RecomputeAll; LAYERS]).unwrap();
    let tokens = tokens(1);
    let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
    let error = map_modules(&mut model, &mut Doubled).unwrap_err().to_string();
    assert!(error.contains("a graph whose backward has not run holds `h.0`"), "{error}");
    backward(&[&loss]).unwrap();
    map_modules(&mut model, &mut Doubled).unwrap();
    assert_eq!(weight(&model), before * 2.0, "a replaced tensor is seen, through both switches");
}

#[test]
fn a_model_without_an_attention_of_its_own_refuses_to_recompute_it() {
    let _serial = serial();
    let config = Gpt2LikeConfig {
        vocab_size: 40,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: LENGTH,
        ..Gpt2LikeConfig::default()
    };
    let mut model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let expected = "activation plan: this model's blocks have no single attention that can be recomputed; take `recompute all`";
    assert_eq!(Activations::install(&mut model, &[RecomputeAttention]).unwrap_err().to_string(), expected);
    let activations = Activations::install(&mut model, &[KeepAll]).unwrap();
    assert_eq!(activations.change(&[RecomputeAttention]).unwrap_err().to_string(), expected);
    assert_eq!(activations.plan(), [KeepAll]);
}

#[test]
fn errors_name_the_cause() {
    let _serial = serial();
    let mut plain = Gpt2::new(&config(0.0), (Kind::Float, Device::Cpu)).unwrap();
    let error = Activations::install(&mut plain, &[RecomputeAll; 3]).unwrap_err().to_string();
    assert_eq!(error, "activation plan: 3 entries for a model of 4 blocks; give one for each block");
    let activations = Activations::install(&mut plain, &[RecomputeAll; LAYERS]).unwrap();
    assert!(activations.change(&[]).unwrap_err().to_string().contains("0 entries for a model of 4 blocks"));
    let error = every_kth(4, 0, RecomputeAll).unwrap_err().to_string();
    assert!(error.contains("every 0th layer"), "{error}");
    let hidden = Tensor::zeros([1, 4, 16], (Kind::Float, Device::Cpu));
    let error = activations.probe(&mut plain, &hidden, &Context::default(), 0).unwrap_err().to_string();
    assert!(error.contains("0 rounds measure nothing"), "{error}");
    // A recomputed layer returns the model's own errors unchanged.
    let wrong = Tensor::zeros([1, 4, 8], (Kind::Float, Device::Cpu));
    let error = activations.probe(&mut plain, &wrong, &Context::default(), 1).unwrap_err().to_string();
    assert_eq!(error, "layer norm: `x` has shape [1, 4, 8]; expected […, 16]");
    assert_eq!(activations.plan(), [RecomputeAll; LAYERS], "a probe that fails leaves the plan");
}
