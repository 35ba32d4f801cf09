//! Runs the step of a row and reads its peak from the allocator.
//!
//! A step is run three times and the third is measured: by then the ring, the optimizer's state and the gradients are what they
//! are in every later step. The figure is what the model, the optimizer and the step hold on the device, above what was live before
//! the model was made.

use std::sync::{Arc, Mutex, PoisonError};

use fused_ce::{Chunk, LinearCrossEntropy};
use lora::LoraConfig;
use models::Llama;
use models::module::{Context, Input, LanguageModel, trainable};
use offload::{HookPoint, HostAdamW, HostAdamWConfig, Offload, OffloadConfig, TestHook, Tier};
use runtime::autograd::{backward, set_grad};
use runtime::memory::{Region, live_bytes};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::Activations;
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use super::{AdapterKind, Head, OptimizerPlace, Pass, Placement, Row};

/// Makes compute wait for the gradients of the layer before: how many are under way at a time would otherwise depend on the speed of
/// two threads.
#[derive(Default)]
struct InStep(Mutex<Option<Arc<Offload>>>);

impl InStep {
    fn watch(&self, offload: Option<Arc<Offload>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = offload;
    }
}

impl TestHook for InStep {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        let offload = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .filter(|_| point == HookPoint::Compute);
        offload.map_or(Ok(()), |offload| offload.synchronize())
    }
}

enum Steps {
    None,
    Device(DeviceOptimizer),
    Host(HostAdamW),
}

impl Row {
    /// The most bytes of a step that the CPU's allocator counts.
    ///
    /// # Errors
    /// Errors of the model and of the step.
    pub fn measure(&self) -> anyhow::Result<u64> {
        let device = Device::Cpu;
        let before = live_bytes(device)?;
        runtime::random::seed(1)?;
        let in_step = Arc::new(InStep::default());
        let folder = tempfile::tempdir()?;
        let (mut model, offload) = match &self.placement {
            Placement::Resident(_) => (Llama::new(&self.config, (self.kind, device))?, None),
            Placement::Offloaded { method, ring, in_files, resident } => {
                let options = OffloadConfig {
                    method: *method,
                    ring: *ring,
                    tier: if *in_files { Tier::File(folder.path().to_owned()) } else { Tier::Host },
                    resident: resident.clone(),
                    test_hook: Some(in_step.clone()),
                    ..OffloadConfig::default()
                };
                let init = models::init::Init::Normal { std: 0.02 };
                let (model, offload) = Offload::assemble(&self.config, init, self.kind, &options)?;
                (model, Some(Arc::new(offload)))
            }
        };
        if let Head::Chunks(tokens) = self.head {
            let chunk = Some(Chunk::Tokens(tokens));
            LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }.install(&mut model)?;
        }
        if let Pass::Adapters { targets, experts, rank, dropout, kind } = &self.pass {
            let of_experts = experts.iter().map(|name| format!("experts.{name}")).collect();
            let module = |name: &&str| match name.starts_with("in_proj") {
                true => (*name).to_owned(),
                false => format!("{name}_proj"),
            };
            let names = targets.iter().map(module).collect();
            let config = LoraConfig {
                r: *rank,
                lora_dropout: *dropout,
                use_dora: *kind == AdapterKind::Dora,
                init_lora_weights: serde_json::json!(match kind {
                    AdapterKind::Lora | AdapterKind::Dora => "gaussian",
                    AdapterKind::Pissa => "pissa",
                }),
                target_modules: Some(lora::Names::List(names)),
                target_parameters: Some(of_experts),
                ..LoraConfig::default()
            };
            LoraConfig { seed: 1, ..config.clone() }.install(&mut model)?;
        }
        let plan = match &self.placement {
            Placement::Resident(plan) => Some(Activations::install(&mut model, plan)?),
            Placement::Offloaded { .. } => None,
        };
        in_step.watch(offload.clone());
        let mut optimizer = match (self.optimizer, &offload) {
            (OptimizerPlace::None, _) => Steps::None,
            (OptimizerPlace::Host, Some(offload)) => {
                let groups = vec![Group::new(trainable(&model), 1e-4)];
                Steps::Host(HostAdamW::new(offload, groups, AdamW::default(), HostAdamWConfig::default())?)
            }
            _ => Steps::Device(DeviceOptimizer::new(
                AdamW::default(),
                vec![Group::new(trainable(&model), 1e-4)],
            )?),
        };
        self.step(&model, &mut optimizer)?;
        self.step(&model, &mut optimizer)?;
        if let Some(offload) = &offload {
            offload.synchronize()?;
        }
        let region = Region::start(device)?;
        self.step(&model, &mut optimizer)?;
        let peak = region.finish()?.peak - before;
        in_step.watch(None);
        drop((optimizer, plan, offload, model));
        Ok(peak)
    }

    fn step(&self, model: &Llama, optimizer: &mut Steps) -> anyhow::Result<()> {
        let tokens = self.tokens()?;
        if self.pass == Pass::Inference {
            let _no_grad = tch::no_grad_guard();
            let hidden = model.hidden(&Input::new(&tokens))?;
            let last = hidden.f_narrow(1, self.batch[1] - 1, 1)?;
            drop(hidden);
            let _logits = model.head().logits(&last, &Context::default())?;
            return Ok(());
        }
        let context = Context { training: true, ..Context::default() };
        let input = Input { tokens: &tokens, positions: None, context };
        let loss = model.loss(&input, &tokens)?.sum;
        backward(&[&loss])?;
        drop(loss);
        match optimizer {
            Steps::None => trainable(model).into_iter().try_for_each(|(_, tensor)| set_grad(tensor, None))?,
            Steps::Device(optimizer) => {
                optimizer.step()?;
                optimizer.zero_grad(ZeroGrad::ToNone)?;
            }
            Steps::Host(optimizer) => {
                optimizer.step()?;
            }
        }
        Ok(())
    }

    fn tokens(&self) -> anyhow::Result<Tensor> {
        // Equal tokens are given to the same experts, so that these have as many rows as any routing gives them.
        if self.config.mixture.as_ref().is_some_and(|mixture| mixture.per_token < mixture.experts) {
            return Ok(Tensor::f_full(self.batch, 7, (Kind::Int64, Device::Cpu))?);
        }
        let vocabulary = self.config.vocab_size;
        let drawn =
            Generator::new(2)?.uniform(&self.batch, (0.0, vocabulary as f64), (Kind::Double, Device::Cpu))?;
        Ok(drawn.f_floor()?.f_to_kind(Kind::Int64)?.f_clamp(0, vocabulary - 1)?)
    }
}
