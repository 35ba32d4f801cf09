//! Who exchanges or writes a tensor's memory before, after and on both sides of `OffloadConfig::install`, and what is computed then: the bits of
//! the model without offload, or an error that names the tensor. Never another result.

use std::collections::BTreeMap;

use lora::{Adapters, BiasTraining, Disabled, LoraConfig};
use models::module::{Input, LanguageModel, freeze, parameters, tensors, trainable};
use models::{DecoderConfig, Llama};
use offload::{HostAdamW, HostAdamWConfig, Method, Offload, OffloadConfig, Tier};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Two rows of nine tokens.
fn batch(vocabulary: i64, number: u64) -> Tensor {
    let uniform = Generator::new(number).unwrap().uniform(&[2, 9], (0.0, 1.0), FLOAT).unwrap();
    (uniform * vocabulary as f64).to_kind(Kind::Int64).clamp(0, vocabulary - 1)
}

/// What is done to a model, one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Do {
    Freeze,
    /// Adapters on four projections, and what else is trained with them.
    Install(Extra),
    /// A second adapter in the place of the first.
    AddAnother,
    /// Writes the adapters' tensors in place.
    Perturb,
    Merge,
    Unmerge,
    Disable,
    Enable,
    DeleteFirst,
    Unload,
    MergeAndUnload,
    /// Gives a weight of a layer other memory with other values.
    SetData,
    /// Writes a weight of a layer in place.
    Write,
    /// Makes an optimizer of what is trained: the offload's own, or the ordinary one.
    Optimizer,
    Forward,
    Backward,
    /// A step of the optimizer: loss, gradients, weights.
    Step,
    Logits,
    /// What the adapters would save.
    Saved,
    Apply,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Extra {
    Nothing,
    Biases,
    Modules,
}

enum Either {
    Host(HostAdamW),
    Ordinary(DeviceOptimizer),
}

struct World {
    model: Llama,
    options: OffloadConfig,
    host_adam_w: bool,
    offload: Option<Offload>,
    adapters: Option<Adapters>,
    disabled: Option<Disabled>,
    optimizer: Option<Either>,
    loss: Option<Tensor>,
    steps: u64,
    seen: BTreeMap<String, Tensor>,
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn config(extra: Extra) -> LoraConfig {
    LoraConfig {
        r: 2,
        lora_alpha: 5.0,
        target_modules: Some(["q_proj", "v_proj", "down_proj"].into()),
        bias: if extra == Extra::Biases { BiasTraining::All } else { BiasTraining::None },
        modules_to_save: (extra == Extra::Modules)
            .then(|| vec!["post_attention_layernorm".into(), "up_proj".into()]),
        ..LoraConfig::default()
    }
}

const WEIGHT: &str = "layers.1.mlp.gate_proj.weight";

impl World {
    fn new(options: OffloadConfig, host_adam_w: bool) -> Self {
        runtime::random::seed(1).unwrap();
        let config = DecoderConfig { num_key_value_heads: 1, ..DecoderConfig::qwen2(40, 16, 24, 3, 2) };
        Self {
            model: Llama::new(&config, FLOAT).unwrap(),
            options,
            host_adam_w,
            offload: None,
            adapters: None,
            disabled: None,
            optimizer: None,
            loss: None,
            steps: 0,
            seen: BTreeMap::new(),
        }
    }

    fn see(&mut self, at: usize, what: &str, tensor: &Tensor) {
        self.seen.insert(format!("{at:02} {what}"), tensor.detach().copy());
    }

    fn loss(&self) -> models::Result<Tensor> {
        let tokens = batch(40, self.steps);
        Ok(self.model.loss(&Input::new(&tokens), &tokens)?.sum)
    }

    fn adapters(&self) -> &Adapters {
        self.adapters.as_ref().unwrap()
    }

    fn weight(&self) -> Tensor {
        parameters(&self.model).into_iter().find(|(name, _)| name == WEIGHT).unwrap().1.shallow_clone()
    }

    fn perturb(&mut self) {
        let mut generator = Generator::new(5).unwrap();
        let _no_grad = tch::no_grad_guard();
        for name in self.adapters().names() {
            for (_, tensor) in self.adapters().tensors(&name).unwrap() {
                let noise = generator.normal(&tensor.size(), FLOAT).unwrap() * 0.2;
                let _ = tensor.shallow_clone().f_add_(&noise).unwrap();
            }
        }
    }

    fn step(&mut self, at: usize) -> Outcome {
        let loss = self.loss()?;
        self.see(at, "loss", &loss);
        backward(&[&loss])?;
        self.steps += 1;
        match self.optimizer.take().unwrap() {
            Either::Host(mut optimizer) => {
                optimizer.step()?;
                self.optimizer = Some(Either::Host(optimizer));
            }
            Either::Ordinary(mut optimizer) => {
                let gradients: Vec<(String, Tensor)> = trainable(&self.model)
                    .into_iter()
                    .map(|(name, tensor)| (name, tensor.grad()))
                    .filter(|(_, gradient)| gradient.defined())
                    .collect();
                for (name, gradient) in gradients {
                    self.see(at, &format!("gradient of {name}"), &gradient);
                }
                optimizer.step()?;
                optimizer.zero_grad(ZeroGrad::ToNone)?;
                self.optimizer = Some(Either::Ordinary(optimizer));
            }
        }
        self.weights(at);
        Ok(())
    }

    fn weights(&mut self, at: usize) {
        let all: Vec<(String, Tensor)> = tensors(&self.model)
            .into_iter()
            .map(|named| (named.name, named.tensor.shallow_clone()))
            .collect();
        for (name, tensor) in all {
            self.see(at, &format!("weight {name}"), &tensor);
        }
    }

    fn run(&mut self, at: usize, what: Do) -> Outcome {
        if let Some(offload) = &self.offload {
            // Whoever writes memory of the host does so when nothing is on its way.
            offload.synchronize()?;
        }
        match what {
            Do::Apply => self.offload = Some(self.options.install(&mut self.model)?),
            Do::Freeze => {
                freeze(&self.model, ".*", true)?;
            }
            Do::Install(extra) => {
                self.adapters = Some(LoraConfig { seed: 3, ..config(extra) }.install(&mut self.model)?);
            }
            Do::AddAnother => {
                let adapters = self.adapters.as_mut().unwrap();
                adapters.add(&mut self.model, "other", &LoraConfig { seed: 4, ..config(Extra::Nothing) })?;
                adapters.set_active(&["other"])?;
            }
            Do::Perturb => self.perturb(),
            Do::Merge => self.adapters().merge()?,
            Do::Unmerge => self.adapters().unmerge()?,
            Do::Disable => self.disabled = Some(self.adapters().disable()?),
            Do::Enable => self.disabled = None,
            Do::DeleteFirst => self.adapters.as_mut().unwrap().delete(&mut self.model, "default")?,
            Do::Unload => self.adapters.take().unwrap().unload(&mut self.model)?,
            Do::MergeAndUnload => {
                let _ = self.adapters.take().unwrap().merge_and_unload(&mut self.model)?;
            }
            Do::SetData => {
                let _no_grad = tch::no_grad_guard();
                let other = self.weight().detach() * 1.5;
                self.weight().set_data(&other);
            }
            Do::Write => {
                let _no_grad = tch::no_grad_guard();
                let _ = self.weight().f_mul_scalar_(0.5)?;
            }
            Do::Optimizer => {
                let group = Group::new(
                    trainable(&self.model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())),
                    1e-2,
                );
                let rule = AdamW::default();
                self.optimizer = Some(match &self.offload {
                    Some(offload) if self.host_adam_w => {
                        Either::Host(HostAdamW::new(offload, vec![group], rule, HostAdamWConfig::default())?)
                    }
                    _ => Either::Ordinary(DeviceOptimizer::new(rule, vec![group])?),
                });
            }
            Do::Forward => self.loss = Some(self.loss()?),
            Do::Backward => {
                let loss = self.loss.take().unwrap();
                backward(&[&loss])?;
                let gradients: Vec<(String, Tensor)> =
                    trainable(&self.model).into_iter().map(|(name, tensor)| (name, tensor.grad())).collect();
                for (name, gradient) in gradients.iter().filter(|(_, gradient)| gradient.defined()) {
                    self.see(at, &format!("gradient of {name}"), gradient);
                }
            }
            Do::Step => self.step(at)?,
            Do::Logits => {
                let tokens = batch(40, 99);
                let logits = {
                    let _no_grad = tch::no_grad_guard();
                    self.model.logits(&Input::new(&tokens))?
                };
                self.see(at, "logits", &logits);
            }
            Do::Saved => {
                let folder = tempfile::tempdir()?;
                for name in self.adapters().names() {
                    self.adapters().save_one(&name, folder.path())?;
                    let file = folder.path().join("adapter_model.safetensors");
                    for (key, tensor) in models::tensors_file::read(&file, tch::Device::Cpu)? {
                        self.see(at, &format!("{name} in its file: {key}"), &tensor);
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs all, up to the first error.
    fn all(&mut self, scenario: &[Do]) -> Result<(), String> {
        for (at, what) in scenario.iter().enumerate() {
            // `Apply` is beside the numbers, which are the reference's.
            let at = at - usize::from(scenario[..at].contains(&Do::Apply));
            self.run(at, *what).map_err(|error| format!("{what:?}: {error}"))?;
        }
        Ok(())
    }
}

const METHODS: [Method; 4] = Method::ALL;

/// Runs the scenario without offload, and with it applied before each of its operations and after the last, by every method and tier.
/// What is refused is returned: for each, where it was and the words.
fn cross(scenario: &[Do]) -> Vec<String> {
    let mut reference = World::new(OffloadConfig::default(), false);
    let expected = reference.all(scenario);
    let records = scenario.iter().any(|what| matches!(what, Do::Step | Do::Forward));
    let optimizes = scenario.contains(&Do::Optimizer);
    let folder = tempfile::tempdir().unwrap();
    let mut refused = Vec::new();
    let methods = METHODS.into_iter().filter(|method| !(records && *method == Method::OneLayer));
    for (number, method) in methods.enumerate() {
        for position in 0..=scenario.len() {
            // Each pair of method, position, tier and optimizer is met, not each product.
            let turn = number + position;
            let tier = if turn % 2 == 0 { Tier::Host } else { Tier::File(folder.path().to_owned()) };
            let host_adam_w = optimizes && turn / 2 % 2 == 0;
            let mut with = scenario.to_vec();
            with.insert(position, Do::Apply);
            let options = OffloadConfig { method, tier: tier.clone(), ring: 2, ..OffloadConfig::default() };
            let mut world = World::new(options, host_adam_w);
            let found = world.all(&with);
            let in_files = if tier == Tier::Host { "host" } else { "files" };
            let case = format!(
                "{}, {in_files}, host AdamW {host_adam_w}, applied before operation {position} of {scenario:?}",
                method.name()
            );
            for (what, tensor) in &world.seen {
                let same = reference.seen.get(what).is_some_and(|expected| expected.equal(tensor));
                assert!(same, "{case}: {what} is another");
            }
            match (&expected, found) {
                (Ok(()), Ok(())) => {
                    for what in reference.seen.keys() {
                        let by_host = host_adam_w && what.contains(" gradient of ");
                        assert!(by_host || world.seen.contains_key(what), "{case}: {what} was not seen");
                    }
                }
                (_, Err(error)) => {
                    let error = error.replace(&folder.path().display().to_string(), "DIR");
                    refused.push(format!("{in_files}, {}, before {position}: {error}", method.name()));
                }
                (Err(error), Ok(())) => {
                    panic!("{case}: no error, but without offload {error}")
                }
            }
        }
    }
    refused
}

fn supported(scenario: &[Do]) {
    assert_eq!(cross(scenario), Vec::<String>::new(), "{scenario:?}");
}

use Do::*;

#[test]
fn a_merge_and_its_undoing() {
    supported(&[Freeze, Install(Extra::Nothing), Perturb, Logits, Merge, Logits, Unmerge, Logits]);
    supported(&[
        Freeze,
        Install(Extra::Nothing),
        Perturb,
        Merge,
        Unmerge,
        Logits,
        Merge,
        Disable,
        Logits,
        Enable,
        Logits,
    ]);
}

#[test]
fn a_model_that_is_unloaded() {
    for extra in [Extra::Nothing, Extra::Biases, Extra::Modules] {
        supported(&[Freeze, Install(extra), Perturb, MergeAndUnload, Logits]);
        supported(&[Freeze, Install(extra), Perturb, Merge, Logits, MergeAndUnload, Logits]);
        supported(&[Freeze, Install(extra), Perturb, Logits, Unload, Logits]);
    }
}

#[test]
fn tensors_that_are_trained_whole() {
    for extra in [Extra::Biases, Extra::Modules] {
        supported(&[Freeze, Install(extra), Optimizer, Step, Step, Saved, Logits]);
        supported(&[
            Freeze,
            Install(extra),
            Optimizer,
            Step,
            Disable,
            Logits,
            Enable,
            Step,
            Saved,
            Unload,
            Logits,
        ]);
    }
}

#[test]
fn a_merge_between_steps() {
    supported(&[Freeze, Install(Extra::Nothing), Optimizer, Step, Merge, Logits, Unmerge, Step, Saved]);
    supported(&[Freeze, Install(Extra::Biases), Optimizer, Step, Merge, Unmerge, Step, Merge, Logits, Saved]);
}

#[test]
fn an_optimizer_that_was_made_before_the_adapters() {
    supported(&[Optimizer, Install(Extra::Nothing), Perturb, Step, Step, Saved]);
    supported(&[
        Install(Extra::Nothing),
        Optimizer,
        Step,
        AddAnother,
        Step,
        DeleteFirst,
        Step,
        Saved,
        Logits,
    ]);
    supported(&[
        Freeze,
        Install(Extra::Modules),
        Optimizer,
        Step,
        AddAnother,
        Step,
        DeleteFirst,
        Step,
        Saved,
        Logits,
    ]);
}

#[test]
fn other_memory_and_other_values() {
    supported(&[Optimizer, Step, SetData, Logits, Step, Write, Logits, Step]);
    supported(&[Logits, SetData, Logits, SetData, Logits]);
}

/// What a layer's backward would run with other values than its forward: refused where libtorch refuses it too, and where it would go on
/// with the values of then.
#[test]
fn changes_between_a_forward_and_its_backward() {
    let wanted = "was written, or given other memory, between a forward and its backward";
    for scenario in [
        [Freeze, Install(Extra::Nothing), Perturb, Forward, Merge, Backward],
        [Freeze, Install(Extra::Modules), Perturb, Forward, Disable, Backward],
        [Freeze, Install(Extra::Biases), Perturb, Forward, Disable, Backward],
        [Logits, Logits, Logits, Forward, Write, Backward],
        [Logits, Logits, Logits, Forward, SetData, Backward],
    ] {
        let refused = cross(&scenario);
        assert!(!refused.is_empty(), "{scenario:?}");
        for error in refused {
            // Applied after the forward, the graph is libtorch's own.
            let own = "modified by an inplace operation";
            // A recomputed segment sees first that a merged layer goes by another setting.
            let setting = "a setting that its layers read";
            assert!(
                [wanted, own, setting].iter().any(|words| error.contains(words)),
                "{scenario:?}: {error}"
            );
        }
    }
}

/// No tensor is touched, but a backward that runs the layer again would run another function.
#[test]
fn adapters_that_are_switched_between_a_forward_and_its_backward() {
    let refused = cross(&[Freeze, Install(Extra::Nothing), Perturb, Forward, Disable, Backward]);
    assert!(!refused.is_empty());
    for error in refused {
        assert!(error.contains("Backward: ") && error.contains("a setting that its layers read"), "{error}");
    }
    supported(&[Freeze, Install(Extra::Nothing), Perturb, Forward, Disable, Logits, Enable, Backward]);
}
