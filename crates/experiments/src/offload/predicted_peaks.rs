//! The peak of a step that `accounting` predicts, and the one that the allocator counts: a table over methods, rings, tiers,
//! activation plans, adapters and optimizer placement, on models of a few layers.
//!
//! A step is run three times and the third is measured: by then the ring, the optimizer's state and the gradients are what they
//! are in every later step. The figure is what the model, the optimizer and the step hold on the device, above what was live before
//! the model was made.

use std::sync::{Arc, Mutex, PoisonError};

use accounting::activation_plan::Kept;
use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::{self, Choices, Logits};
use accounting::offload::{self as paper, Footprint, Rates, Setup, Start, simulate};
use accounting::recompute::NormKernel;
use fused_ce::{Chunk, LinearCrossEntropy};
use lora::{Adapters, LoraConfig};
use models::module::{Context, Input, LanguageModel, trainable};
use models::{Llama, LlamaConfig};
use offload::{HookPoint, HostAdamW, HostOptions, Method, Offload, Options, TestHook, Tier};
use runtime::autograd::{backward, set_grad};
use runtime::memory::{Region, live_bytes};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::{self, LayerPlan};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};
use training::predicted;

/// What a step does.
#[derive(Debug, Clone, PartialEq)]
pub enum Pass {
    /// Reads the batch and computes the logits of each row's last token.
    Inference,
    /// Trains all weights.
    Full,
    /// Trains adapters beside a frozen base.
    Adapters {
        /// Projections by their short names.
        targets: &'static [&'static str],
        /// Width of the adapters.
        rank: i64,
        /// Probability that an adapter's input is dropped.
        dropout: f64,
    },
}

/// Where layers are.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// On the device, under an activation plan.
    Resident(Vec<LayerPlan>),
    /// In host memory or in files.
    Offloaded {
        /// How they come and go.
        method: Method,
        /// Slots of the ring.
        ring: usize,
        /// In files instead of the host's memory.
        in_files: bool,
        /// Those that stay on the device.
        resident: Vec<usize>,
    },
}

/// Where the optimizer's state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerPlace {
    /// Forward and backward alone.
    None,
    /// With the parameters on the device.
    Device,
    /// With the layers on the host.
    Host,
}

/// How the loss is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Head {
    /// All logits at once.
    Logits,
    /// So many tokens at a time.
    Chunks(i64),
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What the table calls its model and batch.
    pub shape: &'static str,
    /// The model.
    pub config: LlamaConfig,
    /// Rows of a batch and tokens of a row.
    pub batch: [i64; 2],
    /// Dtype of the weights.
    pub kind: Kind,
    /// What a step does.
    pub pass: Pass,
    /// Where layers are.
    pub place: Place,
    /// Where the optimizer's state is.
    pub optimizer: OptimizerPlace,
    /// How the loss is computed.
    pub head: Head,
}

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
        offload.map_or(Ok(()), |offload| Ok(offload.synchronize()?))
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
    /// Those of the model and of the step.
    pub fn measure(&self) -> anyhow::Result<u64> {
        let device = Device::Cpu;
        let before = live_bytes(device)?;
        runtime::random::seed(1)?;
        let in_step = Arc::new(InStep::default());
        let folder = tempfile::tempdir()?;
        let (mut model, offload) = match &self.place {
            Place::Resident(_) => (Llama::new(&self.config, (self.kind, device))?, None),
            Place::Offloaded { method, ring, in_files, resident } => {
                let options = Options {
                    method: *method,
                    ring: *ring,
                    tier: if *in_files { Tier::File(folder.path().to_owned()) } else { Tier::Host },
                    resident: resident.clone(),
                    test_hook: Some(in_step.clone()),
                    ..Options::default()
                };
                let init = models::init::Init::Normal { std: 0.02 };
                let (model, offload) = Offload::assemble(&self.config, init, self.kind, &options)?;
                (model, Some(Arc::new(offload)))
            }
        };
        if let Head::Chunks(tokens) = self.head {
            let chunk = Some(Chunk::Tokens(tokens));
            fused_ce::install(&mut model, &LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() })?;
        }
        if let Pass::Adapters { targets, rank, dropout } = &self.pass {
            let names = targets.iter().map(|name| format!("{name}_proj")).collect();
            let config = LoraConfig {
                r: *rank,
                lora_dropout: *dropout,
                target_modules: Some(lora::Names::List(names)),
                ..LoraConfig::default()
            };
            Adapters::install(&mut model, &config, 1)?;
        }
        let plan = match &self.place {
            Place::Resident(plan) => Some(activations::apply(&mut model, plan)?),
            Place::Offloaded { .. } => None,
        };
        in_step.watch(offload.clone());
        let mut optimizer = match (self.optimizer, &offload) {
            (OptimizerPlace::None, _) => Steps::None,
            (OptimizerPlace::Host, Some(offload)) => {
                let groups = vec![Group::new(trainable(&model), 1e-4)];
                Steps::Host(HostAdamW::new(offload, groups, AdamW::default(), HostOptions::default())?)
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
        let vocabulary = self.config.vocab_size;
        let drawn =
            Generator::new(2)?.uniform(&self.batch, (0.0, vocabulary as f64), (Kind::Double, Device::Cpu))?;
        Ok(drawn.f_floor()?.f_to_kind(Kind::Int64)?.f_clamp(0, vocabulary - 1)?)
    }
}

impl Row {
    /// The same step as `accounting` predicts it.
    ///
    /// # Errors
    /// A shape that is not modelled.
    pub fn predict(&self) -> anyhow::Result<Footprint> {
        let model = predicted::decoder(&self.config)?;
        let [rows, tokens] = self.batch;
        let work = Workload { batch: rows.unsigned_abs(), sequence: tokens.unsigned_abs() };
        let choices = Choices {
            recipe: if self.kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16 },
            loss: match self.head {
                Head::Logits => Loss::Eager,
                Head::Chunks(tokens) => Loss::LinearCrossEntropy { tokens: tokens.unsigned_abs() },
            },
            norm: NormKernel::Output,
            logits: Logits::LastToken,
            ..Choices::default()
        };
        let lora = match &self.pass {
            Pass::Adapters { targets, rank, dropout } => Some(LowRank {
                rank: rank.unsigned_abs(),
                targets: targets.join(",").parse()?,
                dropout: *dropout > 0.0,
                on_cpu: true,
            }),
            _ => None,
        };
        let mut job = match (&self.pass, &lora) {
            (Pass::Inference, _) => sizes::inference(&model, work, &choices)?,
            (_, None) => sizes::training(&model, work, &choices)?,
            (_, Some(lora)) => sizes::adapters(&model, lora, work, None, &choices)?,
        };
        if self.optimizer == OptimizerPlace::None {
            job.fixed.state_bytes = 0;
            job.layers.iter_mut().for_each(|layer| layer.state_bytes = 0);
        }
        let setup = match &self.place {
            Place::Resident(plan) => {
                if job.training {
                    let plan: Vec<Kept> = plan.iter().map(|plan| kept(*plan)).collect();
                    job = sizes::with_activation_plan(job, &model, lora.as_ref(), work, &choices, &plan)?;
                }
                Setup {
                    method: paper::Method::Resident { recompute: false },
                    resident: Vec::new(),
                    optimizer: paper::OptimizerPlace::Device,
                }
            }
            Place::Offloaded { method, ring, resident, .. } => Setup {
                method: match method {
                    Method::Overlap => paper::Method::Overlap { ring: *ring },
                    _ => paper::Method::OneAtATime,
                },
                resident: resident.clone(),
                optimizer: paper::OptimizerPlace::Host,
            },
        };
        // Gradients leave before the next layer runs, as `InStep` has it.
        let rates = Rates { load: 1e15, store: f64::MAX, host_optimizer: 1e15, device_optimizer: 1e15 };
        Ok(simulate(&job, &rates, &setup, Start::Warm)?.device)
    }
}

impl OptimizerPlace {
    /// A name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

impl Row {
    /// What a step does, for tables.
    pub fn pass_name(&self) -> String {
        match &self.pass {
            Pass::Inference => "inference".to_owned(),
            Pass::Full => "full training".to_owned(),
            Pass::Adapters { targets, rank, dropout } => {
                let which = if targets.len() == 7 { "all projections" } else { "attention" };
                let dropout = if *dropout > 0.0 { ", dropout" } else { "" };
                format!("LoRA, rank {rank}, {which}{dropout}")
            }
        }
    }

    /// How layers are kept or moved, the ring's slots and the tier, for tables.
    pub fn place_names(&self) -> [String; 3] {
        let none = || "–".to_owned();
        match &self.place {
            Place::Resident(plan) if plan.iter().all(|of| *of == plan[0]) => {
                [format!("resident, {}", plan[0]), none(), none()]
            }
            Place::Resident(_) => ["resident, one plan for each layer".to_owned(), none(), none()],
            Place::Offloaded { method, ring, in_files, resident } => {
                let some = if resident.is_empty() {
                    String::new()
                } else {
                    format!(", {} layers resident", resident.len())
                };
                let ring = if *method == Method::Overlap { ring.to_string() } else { none() };
                let tier = if *in_files { "file" } else { "host" };
                [format!("{}{some}", method.name()), ring, tier.to_owned()]
            }
        }
    }

    /// How the loss is computed, for tables.
    pub fn head_name(&self) -> String {
        match self.head {
            Head::Logits => "all logits".to_owned(),
            Head::Chunks(tokens) => format!("chunks of {tokens} tokens"),
        }
    }
}

/// What `accounting` calls a way of keeping activations.
fn kept(plan: LayerPlan) -> Kept {
    match plan {
        LayerPlan::KeepAll => Kept::Everything,
        LayerPlan::RecomputeElementwise => Kept::Products,
        LayerPlan::RecomputeMlp => Kept::Attention,
        LayerPlan::RecomputeAttention => Kept::FeedForward,
        LayerPlan::RecomputeAll => Kept::Input,
        LayerPlan::Offload => Kept::InputOnHost,
    }
}

/// A Qwen2 of few layers.
fn qwen2(vocabulary: i64, hidden: i64, inner: i64, layers: i64, heads: i64) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 512,
        ..LlamaConfig::qwen2(vocabulary, hidden, inner, layers, heads)
    }
}

/// The table: every method, ring, tier, activation plan, set of adapters and place of the optimizer, on several shapes.
pub fn rows() -> Vec<Row> {
    use LayerPlan::{KeepAll, Offload, RecomputeAll, RecomputeAttention, RecomputeElementwise, RecomputeMlp};
    let offloaded = |method, ring| Place::Offloaded { method, ring, in_files: false, resident: Vec::new() };
    let in_files = |method, ring| Place::Offloaded { method, ring, in_files: true, resident: Vec::new() };
    let base = Row {
        shape: "square",
        config: qwen2(400, 128, 512, 4, 4),
        batch: [2, 48],
        kind: Kind::Float,
        pass: Pass::Full,
        place: Place::Resident(vec![KeepAll; 4]),
        optimizer: OptimizerPlace::None,
        head: Head::Chunks(32),
    };
    // A wide one of few tokens, whose weights are most of a step, and one of many tokens, whose activations are.
    let wide =
        Row { config: qwen2(300, 192, 768, 4, 4), batch: [1, 24], head: Head::Chunks(24), ..base.clone() };
    let wide = Row { place: Place::Resident(vec![KeepAll; 4]), ..wide };
    let long =
        Row { config: qwen2(500, 64, 192, 4, 4), batch: [4, 96], head: Head::Chunks(96), ..base.clone() };
    let llama = LlamaConfig {
        num_key_value_heads: 4,
        max_position_embeddings: 512,
        tie_word_embeddings: false,
        ..LlamaConfig::llama(600, 96, 288, 4, 4)
    };
    let llama = Row { shape: "Llama, untied", config: llama, batch: [3, 32], ..base.clone() };
    let mut rows = Vec::new();

    for row in [&base, &wide, &long, &llama] {
        let layers = row.config.num_hidden_layers as usize;
        // Activation plans, with the optimizer's state on the device and without.
        for plan in [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll, Offload] {
            rows.push(Row { place: Place::Resident(vec![plan; layers]), ..row.clone() });
        }
        rows.push(Row {
            place: Place::Resident(vec![RecomputeAll, RecomputeMlp, RecomputeElementwise, KeepAll]),
            optimizer: OptimizerPlace::Device,
            ..row.clone()
        });
        // Methods and rings.
        for pass in [Pass::Inference, Pass::Full] {
            let of = |place| Row { pass: pass.clone(), place, ..row.clone() };
            let one = if pass == Pass::Inference { Method::OneLayer } else { Method::Checkpointing };
            rows.push(of(offloaded(one, 1)));
            rows.push(of(offloaded(Method::Function, 1)));
            rows.extend([1, 2, 3].map(|ring| of(offloaded(Method::Overlap, ring))));
        }
        rows.push(Row { pass: Pass::Inference, place: in_files(Method::Overlap, 2), ..row.clone() });
        rows.push(Row {
            place: offloaded(Method::Overlap, 2),
            optimizer: OptimizerPlace::Host,
            ..row.clone()
        });
        let some =
            Place::Offloaded { method: Method::Overlap, ring: 2, in_files: false, resident: vec![1, 3] };
        rows.push(Row { place: some, optimizer: OptimizerPlace::Host, ..row.clone() });
    }
    for row in [&base, &long] {
        let layers = row.config.num_hidden_layers as usize;
        let attention = Pass::Adapters { targets: &["q", "k", "v", "o"], rank: 8, dropout: 0.0 };
        let all =
            Pass::Adapters { targets: &["q", "k", "v", "o", "gate", "up", "down"], rank: 4, dropout: 0.1 };
        for pass in [attention, all] {
            for plan in [KeepAll, RecomputeAll] {
                let place = Place::Resident(vec![plan; layers]);
                rows.push(Row {
                    pass: pass.clone(),
                    place,
                    optimizer: OptimizerPlace::Device,
                    ..row.clone()
                });
            }
            let of = |place| Row { pass: pass.clone(), place, ..row.clone() };
            rows.push(of(offloaded(Method::Function, 1)));
            rows.push(of(in_files(Method::Overlap, 2)));
            rows.push(Row { optimizer: OptimizerPlace::Host, ..of(offloaded(Method::Overlap, 3)) });
        }
    }
    for row in [&base, &llama] {
        rows.push(Row { head: Head::Logits, ..row.clone() });
        rows.push(Row { head: Head::Logits, place: offloaded(Method::Overlap, 2), ..row.clone() });
    }
    rows
}
