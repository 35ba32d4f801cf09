//! Steps of a GPT-2 under activation plans: bytes and time, predicted and measured.
//!
//! Bytes are predicted first, from a model of one layer. Then the whole model runs each plan in turns, round by round; what a round
//! will take is predicted from a layer measured just before it, as the machine's speed changes from minute to minute.
//! Gradients are added to those of the step before, so that a step begins and ends with the same bytes alive.

use std::time::Instant;

use anyhow::Result;
use models::module::{Context, Input, LanguageModel};
use models::{AttentionPath, Gpt2, Gpt2Config};
use runtime::autograd::backward;
use runtime::device::synchronize;
use runtime::memory::{Region, live_bytes};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan, StepCost, StepPredictor, every_kth};

/// A stack of layers and its steps.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Rows of a batch.
    pub rows: i64,
    /// Tokens of a row.
    pub length: i64,
    /// Width.
    pub hidden: i64,
    /// Attention heads.
    pub heads: i64,
    /// Layers.
    pub layers: i64,
    /// Tokens that the model knows: few, so that the layers are what costs.
    pub vocabulary: i64,
    /// Probability that an activation is dropped.
    pub dropout: f64,
    /// Where.
    pub device: Device,
    /// Seed of the weights and tokens.
    pub seed: u64,
}

/// A plan by the name that tables know it by.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedPlan {
    /// Its name.
    pub name: String,
    /// The plan of each layer.
    pub plan: Vec<LayerPlan>,
    /// The bytes beyond those alive between steps that it was made for.
    pub budget: Option<u64>,
}

/// The predicted and the measured cost of a plan.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Which.
    pub plan: NamedPlan,
    /// Before the first round.
    pub predictor: StepCost,
    /// Seconds predicted before each round.
    pub predicted_seconds: Vec<f64>,
    /// The most bytes on the device in a step, beyond those alive between steps.
    pub peak_bytes: u64,
    /// Bytes on the host when a forward was done.
    pub host_bytes: u64,
    /// Seconds of forward and backward in each round.
    pub seconds: Vec<f64>,
}

/// A model and a batch.
#[derive(Debug)]
pub struct Bench {
    model: Gpt2,
    activations: Activations,
    tokens: Tensor,
    labels: Tensor,
    device: Device,
}

impl Stack {
    /// The model with `layers` layers, and its batch.
    ///
    /// # Errors
    /// Sizes that make no model.
    pub fn bench(&self, layers: i64) -> Result<Bench> {
        let &Self { rows, length, hidden, heads, vocabulary, dropout, device, seed, .. } = self;
        runtime::random::seed(seed)?;
        let attention = AttentionPath::Fused;
        let config =
            Gpt2Config { vocabulary, max_sequence: length, hidden, heads, layers, dropout, attention };
        let mut model = Gpt2::new(&config, (Kind::Float, device))?;
        let activations = Activations::install(&mut model, &vec![LayerPlan::KeepAll; layers as usize])?;
        let mut generator = Generator::new(seed)?;
        let mut draw = || -> Result<Tensor> {
            let range = (0.0, vocabulary as f64);
            let values = generator.uniform(&[rows, length], range, (Kind::Float, Device::Cpu))?;
            Ok(values.f_to_kind(Kind::Int64)?.f_clamp_max(vocabulary - 1)?.f_to_device(device)?)
        };
        Ok(Bench { tokens: draw()?, labels: draw()?, model, activations, device })
    }

    /// Predicts steps of this stack from a measurement of one of its layers.
    ///
    /// # Errors
    /// Errors of [`StepPredictor::measure`].
    pub fn step_predictor(&self, rounds: usize) -> Result<StepPredictor> {
        let Bench { mut model, activations, tokens, labels, .. } = self.bench(1)?;
        let input = Input { tokens: &tokens, positions: None, context: context() };
        Ok(StepPredictor::measure(&mut model, &activations, &input, &labels, rounds)?)
    }

    /// Every layer the same, every second one, and what is planned for budgets of a third and two thirds of the way between
    /// the least that a plan takes and what keeping everything takes.
    ///
    /// # Errors
    /// Errors of the planner.
    pub fn plans(&self, predictor: &StepPredictor) -> Result<Vec<NamedPlan>> {
        let layers = self.layers as usize;
        let mut plans: Vec<NamedPlan> = LayerPlan::ALL
            .into_iter()
            .map(|plan| NamedPlan { name: plan.to_string(), plan: vec![plan; layers], budget: None })
            .collect();
        let every_second = every_kth(layers, 2, LayerPlan::RecomputeAll)?;
        plans.push(NamedPlan { name: "recompute every 2nd".into(), plan: every_second, budget: None });
        let peaks: Vec<u64> =
            plans.iter().map(|plan| Ok(predictor.step(&plan.plan)?.peak_bytes)).collect::<Result<_>>()?;
        let least = peaks.iter().copied().min().unwrap_or(0);
        for thirds in [1, 2] {
            let budget = least + (peaks[0] - least) * thirds / 3;
            let plan = predictor.least_recomputation(layers, budget)?.layers;
            plans.push(NamedPlan {
                name: format!("planned, {thirds}/3 of the range"),
                plan,
                budget: Some(budget),
            });
        }
        Ok(plans)
    }
}

fn context() -> Context<'static> {
    Context { training: true, ..Context::default() }
}

impl Bench {
    /// Runs `plans` in turns: once each to warm up, then in `rounds` rounds. Before each round `stack`'s layer is measured
    /// `probes` times. `report` is called with the name of each run.
    ///
    /// # Errors
    /// Errors of the model.
    pub fn run(
        &self,
        stack: &Stack,
        predictor: &StepPredictor,
        plans: Vec<NamedPlan>,
        [rounds, probes]: [usize; 2],
        mut report: impl FnMut(&str),
    ) -> Result<Vec<Outcome>> {
        let outcome = |plan: NamedPlan| {
            let predictor = predictor.step(&plan.plan)?;
            let (predicted_seconds, seconds) = (Vec::new(), Vec::new());
            Ok(Outcome { plan, predictor, predicted_seconds, peak_bytes: 0, host_bytes: 0, seconds })
        };
        let mut outcomes: Vec<Outcome> = plans.into_iter().map(outcome).collect::<Result<_>>()?;
        let number = outcomes.len();
        for round in 0..=rounds {
            let layer = if round > 0 { Some(stack.step_predictor(probes)?) } else { None };
            for outcome in &mut outcomes {
                if let Some(layer) = &layer {
                    outcome.predicted_seconds.push(layer.step(&outcome.plan.plan)?.seconds);
                }
            }
            for turn in 0..number {
                // Each round begins with another plan, so that none is always the first or the last.
                let outcome = &mut outcomes[(turn + round * number / rounds.max(1)) % number];
                report(&outcome.plan.name);
                self.step(outcome, round > 0)?;
            }
        }
        Ok(outcomes)
    }

    fn step(&self, outcome: &mut Outcome, counts: bool) -> Result<()> {
        self.activations.change(&outcome.plan.plan)?;
        let input = Input { tokens: &self.tokens, positions: None, context: context() };
        synchronize(self.device)?;
        let alive = live_bytes(self.device)?;
        let region = Region::start(self.device)?;
        let start = Instant::now();
        let loss = self.model.loss(&input, &self.labels)?.sum;
        let host_bytes = self.activations.host_bytes();
        backward(&[&loss])?;
        synchronize(self.device)?;
        let seconds = start.elapsed().as_secs_f64();
        let peak = region.finish()?.peak - alive;
        if counts {
            outcome.seconds.push(seconds);
            outcome.peak_bytes = outcome.peak_bytes.max(peak);
            outcome.host_bytes = outcome.host_bytes.max(host_bytes);
        }
        Ok(())
    }
}
