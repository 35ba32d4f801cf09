//! Models with recomputed MLPs, compared with the plain models.

use std::path::Path;
use std::sync::Arc;

use models::module::{
    Context, Input, LanguageModel, Mlp, Module, Visitor, VisitorMut, freeze, map_modules, parameters,
    tensors, trainable,
};
use models::{Activation, DecoderConfig, FeedForward, Gpt2, Gpt2Config, Init, Linear, Llama, Swiglu};
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::memory::{live_bytes, track_cpu};
use runtime::precision::{self, Policy};
use runtime::random::Generator;
use swiglu_ckpt::gelu::Layer;
use swiglu_ckpt::{CheckpointLevel, feed_forward};
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::{Trainer, trainer};

const LEVELS: [CheckpointLevel; 5] = [
    CheckpointLevel::SaveAll,
    CheckpointLevel::SaveGateUp,
    CheckpointLevel::SaveOne,
    CheckpointLevel::InputOnly,
    CheckpointLevel::InputOnlyTiled { bytes: 4096 },
];
const TWO_LAYERS: [CheckpointLevel; 3] =
    [CheckpointLevel::SaveGateUp, CheckpointLevel::SaveOne, CheckpointLevel::InputOnly];

fn llama(kind: Kind) -> Box<dyn LanguageModel> {
    runtime::random::seed(1).unwrap();
    let config = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::qwen2(60, 32, 88, 3, 4) };
    Box::new(Llama::new(&config, (kind, Device::Cpu)).unwrap())
}

fn gpt2(kind: Kind) -> Box<dyn LanguageModel> {
    runtime::random::seed(1).unwrap();
    let config = Gpt2Config {
        vocabulary: 60,
        max_sequence: 64,
        hidden: 32,
        heads: 4,
        layers: 3,
        ..Gpt2Config::small()
    };
    Box::new(Gpt2::new(&config, (kind, Device::Cpu)).unwrap())
}

/// Loss and gradients of two batches, summed.
fn gradients(model: &dyn LanguageModel) -> Vec<(String, Option<Tensor>)> {
    let mut found = Vec::new();
    for number in 0..2 {
        let drawn =
            Generator::new(number).unwrap().uniform(&[2, 17], (0.0, 60.0), (Kind::Double, Device::Cpu));
        let tokens = drawn.unwrap().to_kind(Kind::Int64);
        let context = Context { training: true, ..Context::default() };
        let loss = model.loss(&Input { context, ..Input::new(&tokens) }, &tokens).unwrap().sum;
        backward(&[&loss]).unwrap();
        found.push((format!("loss {number}"), Some(loss.detach())));
    }
    found.extend(parameters(model).into_iter().map(|(name, tensor)| {
        let grad = tensor.grad();
        (name, grad.defined().then_some(grad))
    }));
    found
}

fn same_names(model: &dyn LanguageModel, plain: &dyn LanguageModel) {
    let of = |model| -> Vec<(String, Vec<i64>)> {
        tensors(model).into_iter().map(|named| (named.name, named.tensor.size())).collect()
    };
    assert_eq!(of(model), of(plain), "names and order are the model's");
}

const FROZEN: [Option<&str>; 4] =
    [None, Some(".*mlp.*"), Some(r".*(gate_proj|c_fc).*"), Some(".*(down_proj|c_proj).*")];

#[test]
fn installing_keeps_a_llamas_losses_and_gradients() {
    // Products are `kernels::matmul`'s, libtorch's in the plain model: sums in another order.
    for (kind, tolerance) in [(Kind::Float, 2e-5), (Kind::Double, 1e-12)] {
        for frozen in FROZEN {
            let model = || {
                let model = llama(kind);
                if let Some(pattern) = frozen {
                    freeze(&*model, pattern, true).unwrap();
                }
                model
            };
            let plain = model();
            let expected = gradients(&*plain);
            for level in LEVELS {
                let mut model = model();
                assert_eq!(level.install(&mut *model).unwrap(), 3);
                same_names(&*model, &*plain);
                for ((name, found), (_, expected)) in gradients(&*model).iter().zip(&expected) {
                    assert_eq!(found.is_some(), expected.is_some(), "{level}, {frozen:?}: {name}");
                    let (Some(found), Some(expected)) = (found, expected) else { continue };
                    let scale = expected.abs().max().double_value(&[]).max(1e-3);
                    let off = (found - expected).abs().max().double_value(&[]) / scale;
                    assert!(off < tolerance, "{level}, {frozen:?}, {kind:?}: {name} is off by {off:e}");
                }
            }
        }
    }
}

#[test]
fn installing_keeps_a_gpt2s_bits() {
    for kind in [Kind::Float, Kind::Double] {
        for frozen in FROZEN {
            let model = || {
                let model = gpt2(kind);
                if let Some(pattern) = frozen {
                    freeze(&*model, pattern, true).unwrap();
                }
                model
            };
            let plain = model();
            let expected = gradients(&*plain);
            for level in TWO_LAYERS {
                let mut model = model();
                assert_eq!(level.install(&mut *model).unwrap(), 3);
                same_names(&*model, &*plain);
                for ((name, found), (_, expected)) in gradients(&*model).iter().zip(&expected) {
                    let what = format!("{level}, {frozen:?}, {kind:?}: `{name}`");
                    // The gradient of the second weight is a product of the same operands. MKL's for AVX2 has other bits on an Intel.
                    let (true, Some(found), Some(expected)) =
                        (name.ends_with("mlp.c_proj.weight"), found, expected)
                    else {
                        assert!(found == expected, "{what} has other bits");
                        continue;
                    };
                    let error = (found - expected).abs().max() / expected.abs().max();
                    assert!(error.double_value(&[]) <= 1e-6, "{what}: {error:?}");
                }
            }
        }
    }
}

#[test]
fn two_layers_pass_gradcheck_for_every_pattern_of_needs() {
    let mut generator = Generator::new(2).unwrap();
    let shapes: [&[i64]; 5] = [&[2, 3, 4], &[5, 4], &[4, 5], &[5], &[4]];
    let drawn = shapes.map(|shape| generator.normal(shape, (Kind::Double, Device::Cpu)).unwrap());
    for activation in [Activation::GeluTanh, Activation::Gelu, Activation::Relu] {
        for level in TWO_LAYERS {
            for pattern in 1..32 {
                let inputs: Vec<Tensor> =
                    (0..5).map(|i| drawn[i].copy().set_requires_grad(pattern & (1 << i) != 0)).collect();
                let f = |t: &[Tensor]| {
                    let layers = [
                        Layer { weight: &t[1], bias: Some(&t[3]) },
                        Layer { weight: &t[2], bias: Some(&t[4]) },
                    ];
                    let y = feed_forward(&t[0], layers, activation, level);
                    Ok(vec![y?])
                };
                let report = gradcheck(f, &inputs.iter().collect::<Vec<_>>(), GradcheckConfig::default())
                    .unwrap_or_else(|error| panic!("{activation:?} {level} {pattern:b}: {error}"));
                assert!(report.percent_of_tolerance < 10.0, "{activation:?} {level} {pattern:b}: {report}");
            }
        }
    }
}

const DATA: Synthetic = Synthetic {
    seed: 1,
    vocabulary: 60,
    rows: 2,
    length: 12,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

/// A training with accumulation, clipping and, if given, an activation plan over the recomputed MLPs.
fn training(
    make: fn(Kind) -> Box<dyn LanguageModel>,
    folder: &Path,
    steps: u64,
    plan: Option<LayerPlan>,
) -> Trainer {
    let mut model = make(Kind::Float);
    CheckpointLevel::InputOnly.install(&mut *model).unwrap();
    if let Some(plan) = plan {
        Activations::install(&mut *model, &[plan, LayerPlan::KeepAll, plan]).unwrap();
    }
    let groups = vec![Group::new(trainable(&*model), 1e-2)];
    let optimizer = Box::new(DeviceOptimizer::new(AdamW::default(), groups).unwrap());
    let options = trainer::TrainerConfig {
        steps,
        accumulation: 2,
        clip: Some(0.5),
        ..trainer::TrainerConfig::default()
    };
    let mut trainer = Trainer::new(model, optimizer, options).unwrap();
    trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
    trainer
}

fn values(trainer: &Trainer) -> Vec<(String, Tensor)> {
    parameters(&*trainer.model).into_iter().map(|(name, tensor)| (name, tensor.detach())).collect()
}

#[test]
fn activation_plans_and_resume_keep_every_bit() {
    for make in [llama, gpt2] {
        let whole = tempfile::tempdir().unwrap();
        let mut unbroken = training(make, whole.path(), 5, None);
        unbroken.run(&mut DATA.clone(), None).unwrap();
        for plan in [LayerPlan::RecomputeAll, LayerPlan::RecomputeMlp, LayerPlan::RecomputeElementwise] {
            let folder = tempfile::tempdir().unwrap();
            training(make, folder.path(), 3, Some(plan)).run(&mut DATA.clone(), None).unwrap();
            let mut resumed = training(make, folder.path(), 5, Some(plan));
            let mut data = DATA.clone();
            assert_eq!(resumed.resume(&mut data).unwrap(), Some(3));
            resumed.run(&mut data, None).unwrap();
            assert_eq!(values(&resumed), values(&unbroken), "{plan:?}");
        }
    }
}

/// A model that is one MLP.
#[derive(Debug)]
struct One(Box<dyn Mlp>);

impl Module for One {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("mlp", &*self.0);
    }
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.mlp("mlp", &mut self.0)
    }
}

fn swiglu_of(bias: bool) -> One {
    let mlp = Swiglu::new(32, 88, bias, Init::Normal { std: 0.2 }, (Kind::Float, Device::Cpu)).unwrap();
    One(Box::new(mlp))
}

fn two_layers(dropout: f64) -> One {
    let linear = |from, to| Linear::new(from, to, true, (Kind::Float, Device::Cpu)).unwrap();
    One(Box::new(FeedForward::new(
        ["c_fc", "c_proj"],
        linear(32, 88),
        linear(88, 32),
        Activation::GeluTanh,
        dropout,
    )))
}

#[test]
fn bytes_between_the_passes_match_the_level() {
    track_cpu().unwrap();
    let (tokens, h, f) = (40u64, 32u64, 88u64);
    let held = |of: &One| {
        let x = Tensor::randn([tokens as i64, h as i64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let before = live_bytes(Device::Cpu).unwrap();
        let y = of.0.forward(&x, &Context { training: true, ..Context::default() }).unwrap();
        // The output belongs to the caller.
        let held = live_bytes(Device::Cpu).unwrap() - before - 4 * tokens * h;
        backward(&[&y.sum(Kind::Float)]).unwrap();
        held
    };
    for level in LEVELS {
        let mut model = swiglu_of(false);
        level.install(&mut model).unwrap();
        let expected = level.saved_elements_per_token(h, f) - h;
        assert_eq!(held(&model), 4 * tokens * expected, "{level}");
    }
    for level in TWO_LAYERS {
        let mut model = two_layers(0.0);
        level.install(&mut model).unwrap();
        let expected = if level == CheckpointLevel::InputOnly { 0 } else { f };
        assert_eq!(held(&model), 4 * tokens * expected, "{level}");
    }
    assert_eq!(held(&two_layers(0.0)), 4 * tokens * 2 * f, "the plain one");
}

/// Casts to bf16, as autocast does.
#[derive(Debug)]
struct Low;

impl Policy for Low {
    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        Ok(x.f_to_kind(Kind::BFloat16)?)
    }
    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        Ok(weight.f_to_kind(Kind::BFloat16)?)
    }
}

#[test]
fn a_policy_sets_the_dtype_and_weights_keep_theirs() {
    for (mut model, level) in
        [(swiglu_of(false), CheckpointLevel::InputOnly), (two_layers(0.0), CheckpointLevel::InputOnly)]
    {
        let x = Generator::new(4).unwrap().normal(&[3, 5, 32], (Kind::Float, Device::Cpu)).unwrap();
        let exact = tch::no_grad(|| model.0.forward(&x, &Context::default()).unwrap());
        level.install(&mut model).unwrap();
        let _within = precision::enter(Some(Arc::new(Low)));
        let y = model.0.forward(&x, &Context::default()).unwrap();
        assert_eq!(y.kind(), Kind::BFloat16);
        let off = ((y.to_kind(Kind::Float) - &exact).norm() / exact.norm()).double_value(&[]);
        assert!(off < 1e-2, "{off}");
        backward(&[&y.to_kind(Kind::Float).sum(Kind::Float)]).unwrap();
        assert!(parameters(&model).iter().all(|(_, tensor)| tensor.grad().kind() == Kind::Float));
    }
}

#[test]
fn unsupported_mlps_are_refused_and_unchanged() {
    let refused = |model: &mut dyn Module, level: CheckpointLevel, words: &str| {
        let error = level.install(model).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let input_only = CheckpointLevel::InputOnly;
    refused(
        &mut swiglu_of(true),
        input_only,
        "the MLP `mlp` has biases, which its hand-written backward does not compute",
    );
    refused(&mut two_layers(0.1), input_only, "the MLP `mlp` drops activations with probability 0.1");
    refused(&mut two_layers(0.0), CheckpointLevel::SaveAll, "do not support the level save-all");
    let mut twice = swiglu_of(false);
    input_only.install(&mut twice).unwrap();
    refused(&mut twice, input_only, "the MLP `mlp` is already recomputed");
    let mut planned = llama(Kind::Float);
    Activations::install(&mut *planned, &[LayerPlan::KeepAll; 3]).unwrap();
    refused(&mut *planned, input_only, "install recomputation before activation plans and offloading");
    refused(
        &mut swiglu_of(false),
        CheckpointLevel::InputOnlyTiled { bytes: 16 },
        "a tile of 16 bytes is below the ",
    );
    let mut none = Linear::new(2, 2, false, (Kind::Float, Device::Cpu)).unwrap();
    refused(&mut none, input_only, "has no MLP to recompute");

    /// A projection with a tensor besides its weight, as an adapted one has.
    #[derive(Debug)]
    struct Adapted(Linear, Tensor);
    impl Module for Adapted {
        fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
            self.0.visit(visitor);
            visitor.parameter("lora_A.default.weight", &self.1);
        }
        fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
            self.0.visit_mut(visitor)
        }
    }
    impl models::module::Projection for Adapted {
        fn forward(&self, x: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
            self.0.forward(x, context)
        }
        fn in_features(&self) -> i64 {
            self.0.in_features()
        }
        fn out_features(&self) -> i64 {
            self.0.out_features()
        }
    }
    struct Adapt;
    impl models::module::ModuleMapper for Adapt {
        fn projection(
            &mut self,
            name: &str,
            slot: &mut Box<dyn models::module::Projection>,
        ) -> models::Result<()> {
            if name == "mlp.up_proj" {
                let linear = Linear::new(32, 88, false, (Kind::Float, Device::Cpu))?;
                *slot = Box::new(Adapted(linear, Tensor::zeros([4, 32], (Kind::Float, Device::Cpu))));
            }
            Ok(())
        }
    }
    let mut adapted = swiglu_of(false);
    map_modules(&mut adapted, &mut Adapt).unwrap();
    let names: Vec<String> = parameters(&adapted).into_iter().map(|(name, _)| name).collect();
    refused(
        &mut adapted,
        input_only,
        "has the tensor `up_proj.lora_A.default.weight` besides weights and biases",
    );
    let after: Vec<String> = parameters(&adapted).into_iter().map(|(name, _)| name).collect();
    assert_eq!(after, names);
}
