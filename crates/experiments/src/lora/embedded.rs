//! `lora embedded`: pretrains a small model on generated text, and adapts it to answer questions.

mod grading;
mod learning;
mod world;

use std::time::Instant;

use anyhow::Context;
use clap::Args;
use decoder::rope::Frequencies;
use frugal::tasks::gsm8k::{Accuracy, Evaluation, Grader};
use lora::LoraConfig;
use models::module::{LanguageModel, parameter_count};
use models::state_dict::{load_state_dict, state_dict};
use models::{DecoderConfig, Llama};
use report::cli::Scale;
use report::{Case, Metric};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::schedule::{LrSchedule, Shape};

use crate::driver::Bench;
use crate::step_peak::StepPeak;
use grading::grade;
use learning::{Learner, loss_of};
use world::{Reading, World, permutation};

/// Positions of a row, more than three solved examples and a question with its answer take.
const CONTEXT: i64 = 384;

/// Held-out rows whose loss is followed.
const FOLLOWED: usize = 32;

#[derive(Args)]
pub(crate) struct EmbeddedArgs {
    /// Show this many answers of each model beside their questions
    #[arg(long, default_value_t = 0)]
    show: usize,
    #[command(flatten)]
    recipe: Recipe,
}

/// Steps and learning rates; the default of each depends on the scale.
#[derive(Args)]
struct Recipe {
    /// Steps of pretraining
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pretraining_steps: Option<u64>,
    /// Steps of LoRA, and of full fine-tuning
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    adaptation_steps: Option<u64>,
    /// Learning rate of pretraining
    #[arg(long, default_value_t = 2.5e-3)]
    pretraining_rate: f64,
    /// Learning rate of LoRA
    #[arg(long, default_value_t = 5e-3)]
    lora_rate: f64,
    /// Learning rate of full fine-tuning
    #[arg(long, default_value_t = 1e-3)]
    full_rate: f64,
    /// Rank of the adapters on q, k, v and o
    #[arg(long, default_value_t = 8)]
    rank: i64,
}

/// How much is trained and graded.
struct Sizes {
    /// Steps of pretraining, rows of each, tokens of a row.
    pretraining: (u64, i64, i64),
    /// Steps of an adaptation, problems of each.
    adaptation: (u64, usize),
    /// Held-out problems.
    held_out: usize,
}

impl Sizes {
    fn new(bench: &Bench, recipe: &Recipe) -> Self {
        let (pretraining, adaptation, held_out) = bench.sized([
            ((12, 2, 64), (4, 4), 2),
            ((1600, 2, 128), (200, 16), 50),
            ((2400, 2, 128), (300, 16), 200),
            ((6000, 8, 128), (600, 32), 200),
        ]);
        Self {
            pretraining: (recipe.pretraining_steps.unwrap_or(pretraining.0), pretraining.1, pretraining.2),
            adaptation: (recipe.adaptation_steps.unwrap_or(adaptation.0), adaptation.1),
            held_out,
        }
    }
}

/// The parameters that an adaptation trains.
#[derive(Clone, Copy, PartialEq)]
enum Method {
    Lora,
    Full,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Lora => "LoRA",
            Self::Full => "full fine-tuning",
        }
    }
}

fn case(method: &str) -> Case {
    Case::new().with("method", method)
}

/// The costs by which two adaptations are compared: peak bytes, bytes of the optimizer's state, and seconds of a step.
struct Cost {
    peak: f64,
    state: f64,
    step_seconds: f64,
}

/// A small model, and what it reads.
struct Embedded<'a> {
    world: World,
    sizes: Sizes,
    arguments: &'a EmbeddedArgs,
    device: Device,
    seed: u64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &EmbeddedArgs) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    let sizes = Sizes::new(bench, &arguments.recipe);
    bench.expect((sizes.pretraining.0 + 2 * sizes.adaptation.0 + 3) as usize);
    let (device, seed) = (bench.device, bench.seed);
    let world = World::read(CONTEXT as usize, sizes.held_out)?;
    let embedded = Embedded { world, sizes, arguments, device, seed };
    let base = embedded.pretrain(bench)?;
    let lora = embedded.adapt(&base, Method::Lora, bench)?;
    let full = embedded.adapt(&base, Method::Full, bench)?;
    let ratios = vec![
        Metric::exact("peak_vs_full", "ratio", lora.peak / full.peak),
        Metric::exact("state_vs_full", "ratio", lora.state / full.state),
        Metric::exact("step_time_vs_full", "ratio", lora.step_seconds / full.step_seconds),
    ];
    bench.put(&case(Method::Lora.name()), ratios)
}

impl Embedded<'_> {
    fn model(&self) -> anyhow::Result<Llama> {
        let vocabulary = self.world.encoder.options().vocabulary as i64;
        let config = DecoderConfig {
            num_key_value_heads: 2,
            max_position_embeddings: CONTEXT,
            rope: Frequencies { theta: 1e4, ..Frequencies::default() },
            ..DecoderConfig::qwen2(vocabulary, 128, 384, 4, 4)
        };
        let mut model = Llama::new(&config, (Kind::Float, self.device))?;
        fused_ce::LinearCrossEntropy::default().install(&mut model)?;
        Ok(model)
    }

    /// The weights of a model that was pretrained on stories, calculations and the encyclopedia.
    fn pretrain(&self, bench: &mut Bench) -> anyhow::Result<Vec<(String, Tensor)>> {
        let (steps, rows, length) = self.sizes.pretraining;
        runtime::random::seed(self.seed)?;
        let model = self.model()?;
        bench.message("pretraining");
        let start = Instant::now();
        let mut learner = Learner::new(&model, self.arguments.recipe.pretraining_rate, 0.05)?;
        let mut reading = Reading::new(&self.world, self.seed)?;
        for step in 0..steps {
            let batch = reading.next(rows, length, self.device)?;
            learner.step(&batch, pace(step, steps))?;
            bench.step();
        }
        let seconds = start.elapsed().as_secs_f64();
        let pretraining = case("pretraining");
        let tokens = (steps as i64 * rows * length) as f64;
        let [stories, lists, corpus] = self.world.text_tokens().map(|tokens| tokens as f64);
        let metrics = vec![
            Metric::exact("parameters", "count", parameter_count(&model).total as f64),
            Metric::exact("tokens", "count", tokens),
            Metric::exact("story_tokens", "count", stories),
            Metric::exact("calculation_tokens", "count", lists),
            Metric::exact("encyclopedia_tokens", "count", corpus),
            Metric::exact("training_seconds", "s", seconds),
            Metric::of_samples("step_seconds", "s", &learner.seconds),
        ];
        curve(bench, &pretraining, &learner.losses)?;
        bench.put(&pretraining, metrics)?;
        drop(learner);
        self.judge("base", &model, bench)?;
        state_dict(&model).into_iter().map(|(name, tensor)| Ok((name, tensor.f_detach_copy()?))).collect()
    }

    /// Trains a model with these weights to answer questions, and grades it.
    fn adapt(&self, base: &[(String, Tensor)], method: Method, bench: &mut Bench) -> anyhow::Result<Cost> {
        let recipe = &self.arguments.recipe;
        let (steps, problems) = self.sizes.adaptation;
        let before = runtime::memory::live_bytes(self.device)?;
        let mut peak = StepPeak::start(self.device)?;
        let mut model = self.model()?;
        load_state_dict(&model, base, "the pretrained model")?;
        let rate = match method {
            Method::Full => recipe.full_rate,
            Method::Lora => {
                let config = LoraConfig {
                    r: recipe.rank,
                    lora_alpha: 2.0 * recipe.rank as f64,
                    target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
                    ..LoraConfig::default()
                };
                LoraConfig { seed: self.seed, ..config.clone() }.install(&mut model)?;
                recipe.lora_rate
            }
        };
        bench.message(method.name());
        let schedule = LrSchedule { shape: Shape::Cosine, warmup: 20.min(steps / 2), steps, floor: 0.05 };
        let mut learner = Learner::new(&model, rate, 0.0)?;
        let followed: Vec<usize> = (0..self.world.test_rows.len().min(FOLLOWED)).collect();
        let followed = self.world.batch(&self.world.test_rows, &followed, self.device)?;
        let mut generator = Generator::new(self.seed)?;
        let (mut order, mut loading) = (Vec::new(), Instant::now());
        let mut seconds = 0.0;
        for step in 0..steps {
            if order.len() < problems {
                order = permutation(self.world.train_rows.len(), &mut generator)?;
            }
            let numbers = order.split_off(order.len() - problems);
            let batch = self.world.batch(&self.world.train_rows, &numbers, self.device)?;
            learner.step(&batch, schedule.factor(step))?;
            seconds += loading.elapsed().as_secs_f64();
            peak.after_step()?;
            if (step + 1).is_multiple_of((steps / 10).max(1)) {
                let loss = loss_of(&model, &followed)?;
                let case = case(method.name()).with("step", step + 1);
                bench.put(&case, vec![Metric::exact("held_out_loss", "nat", loss)])?;
                peak.after_evaluation()?;
            }
            bench.step();
            loading = Instant::now();
        }
        let count = parameter_count(&model);
        let step_seconds = Metric::of_samples("step_seconds", "s", &learner.seconds);
        let cost = Cost {
            peak: peak.bytes().saturating_sub(before) as f64,
            state: learner.state_bytes() as f64,
            step_seconds: step_seconds.value.context("no step was timed")?,
        };
        let metrics = vec![
            Metric::exact("trainable_parameters", "count", count.trainable as f64),
            Metric::exact("trainable_share", "ratio", count.trainable as f64 / count.total as f64),
            Metric::exact("peak_bytes", "B", cost.peak),
            Metric::exact("optimizer_bytes", "B", cost.state),
            step_seconds,
            Metric::exact("training_seconds", "s", seconds),
        ];
        curve(bench, &case(method.name()), &learner.losses)?;
        bench.put(&case(method.name()), metrics)?;
        drop(learner);
        self.judge(method.name(), &model, bench)?;
        Ok(cost)
    }

    /// Grades the model's answers to the held-out problems, and measures its loss on the encyclopedia.
    fn judge(&self, name: &str, model: &dyn LanguageModel, bench: &mut Bench) -> anyhow::Result<()> {
        bench.message(&format!("{name}: answers to held-out problems"));
        let start = Instant::now();
        let evaluation = grade(model, &self.world, &self.world.prompts)?;
        let seconds = start.elapsed().as_secs_f64();
        self.show(name, &evaluation, bench);
        let three_shot = grade(model, &self.world, &self.world.three_shot)?;
        self.show(&format!("{name}, three examples"), &three_shot, bench);
        let (_, _, length) = self.sizes.pretraining;
        let encyclopedia = loss_of(model, &self.world.validation(16, length, self.device)?)?;
        let mut metrics = Vec::new();
        for grader in Grader::ALL {
            let wanted = if grader == Grader::Strict { 3 } else { 1 };
            let figures = accuracy(bench.scale, &grader.to_string(), evaluation.accuracy(grader));
            metrics.extend(figures.into_iter().take(wanted));
        }
        metrics.extend(accuracy(bench.scale, "three_shot", three_shot.accuracy(Grader::Strict)));
        let longest = three_shot.graded.iter().map(|graded| graded.prompt_tokens).max().unwrap_or(0);
        metrics.push(Metric::exact("three_shot_prompt_tokens", "tokens", longest as f64));
        metrics.push(Metric::exact("encyclopedia_loss", "nat", encyclopedia));
        metrics.push(Metric::exact("answering_seconds", "s", seconds));
        bench.step();
        bench.put(&case(name), metrics)
    }

    fn show(&self, name: &str, evaluation: &Evaluation, bench: &Bench) {
        for graded in evaluation.graded.iter().take(self.arguments.show) {
            let question = &self.world.test[graded.number].question;
            let text = format!("{name}: {question}\n{}\n(gold: {})\n\n", graded.text, graded.gold);
            bench.print(&text);
        }
    }
}

/// The share of right answers, and its interval.
fn accuracy(scale: Scale, graded: &str, accuracy: Accuracy) -> Vec<Metric> {
    let (low, high) = accuracy.interval();
    let figures = [("accuracy", accuracy.share()), ("accuracy_from", low), ("accuracy_to", high)];
    let metric = |(what, value): (&str, f64)| {
        let name = format!("{graded}_{what}");
        match scale {
            Scale::Smoke => {
                Metric::not_measured(&name, "ratio", "at the smoke scale nothing is trained to its end")
            }
            Scale::Laptop | Scale::Full | Scale::Paper => Metric::exact(&name, "ratio", value),
        }
    };
    figures.into_iter().map(metric).collect()
}

/// The factor of the learning rate in pretraining: up within 50 steps, then 1, then down to 0 over the last two fifths, as
/// in Hägele et al. (arXiv:2405.18392).
fn pace(step: u64, steps: u64) -> f64 {
    let up = (step + 1) as f64 / 50.0;
    let down = (steps - step) as f64 / (0.4 * steps as f64);
    up.min(down).min(1.0)
}

/// Maximum number of points of a curve.
const POINTS: usize = 60;

/// The training loss by step, each point the mean of the steps since the one before.
fn curve(bench: &mut Bench, case: &Case, losses: &[f64]) -> anyhow::Result<()> {
    let stretch = losses.len().div_ceil(POINTS).max(1);
    for (number, losses) in losses.chunks(stretch).enumerate() {
        let case = case.clone().with("step", number * stretch + losses.len());
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        bench.put(&case, vec![Metric::exact("training_loss", "nat", mean)])?;
    }
    Ok(())
}
