//! `training stages`: one setup, stage by stage, from the assignment's script with all of its inefficiencies to the fastest step.
//!
//! All stages live at once and take turns of a few steps, round by round, each round in another order, so that a drift of the machine
//! is in all of them. A stage's speedup is a ratio within one round.

use std::collections::BTreeSet;

use anyhow::Result;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::memory::Region;
use tch::Device;

use super::injected_slowdowns::Inefficiency;
use super::profiling::Turn;
use super::setup::{Common, Setup, Techniques};
use super::sizes::Sizes;
use crate::corpus::{Corpus, DataArgs};
use crate::driver::Bench;

/// Steps of each stage before it is measured; its peak is theirs.
const WARMUP: u64 = 3;

/// A part of the assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Base,
    Data,
    Precision,
    Profiling,
    Bonus,
}

impl Part {
    /// The stages that change a training, in the assignment's order.
    const ALL: [Self; 4] = [Self::Data, Self::Precision, Self::Profiling, Self::Bonus];

    fn name(self) -> &'static str {
        match self {
            Self::Base => "the script as it is",
            Self::Data => "efficient data loading",
            Self::Precision => "mixed precision",
            Self::Profiling => "profiling and repairs",
            Self::Bonus => "bonuses: fused norms and loss",
        }
    }
}

/// A setup on the way.
#[derive(Debug, Clone)]
struct Stage {
    part: Part,
    name: String,
    on: BTreeSet<Inefficiency>,
    techniques: Techniques,
    /// The stage that it is compared with.
    before: usize,
    /// Whether the next stage begins with it.
    kept: bool,
}

/// The stages on a device. Mixed precision is measured, and stays where it `gains`.
fn stages(device: Device, gains: bool) -> Vec<Stage> {
    let concerned = Inefficiency::ALL.into_iter().filter(|inefficiency| inefficiency.concerns(device));
    let base = Stage {
        part: Part::Base,
        name: "all inefficiencies, fp32".into(),
        on: concerned.clone().collect(),
        techniques: Techniques::default(),
        before: 0,
        kept: true,
    };
    let mut stages = vec![base];
    let mut last = 0;
    let mut push = |part, name: String, kept, change: &dyn Fn(&mut Stage)| {
        let mut stage = Stage { part, name, before: last, kept, ..stages[last].clone() };
        change(&mut stage);
        stages.push(stage);
        if kept {
            last = stages.len() - 1;
        }
    };
    let packing = Inefficiency::PadToMax;
    push(Part::Data, "packed rows".into(), true, &|stage| {
        stage.on.remove(&packing);
    });
    push(Part::Precision, "bf16 products".into(), gains, &|stage| stage.techniques.mixed_precision = true);
    for repaired in concerned.filter(|inefficiency| *inefficiency != packing) {
        push(Part::Profiling, format!("without {repaired}"), true, &|stage| {
            stage.on.remove(&repaired);
        });
    }
    push(Part::Bonus, "fused layer norm".into(), true, &|stage| stage.techniques.fused_norms = true);
    push(Part::Bonus, "fused loss".into(), true, &|stage| stage.techniques.fused_loss = true);
    stages
}

/// The result of a stage.
#[derive(Debug, Clone, Default)]
struct Measured {
    turns: Vec<Turn>,
    peak_bytes: u64,
    validation_loss: f64,
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: u64,
    /// Steps of a turn.
    turn: u64,
}

pub(crate) fn run(bench: &mut Bench, data: &DataArgs) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let scale = bench.scale;
    let sizes = Sizes::new(scale);
    let corpus = sizes.corpus(data, scale)?;
    corpus.put(bench)?;
    let effort = Effort { rounds: sizes.stage_rounds, turn: if device.is_cuda() { 10 } else { 1 } };
    let common = Common {
        model: sizes.profiled,
        odd: sizes.odd,
        batch_size: sizes.batch_size,
        lr: if scale == Scale::Paper { 1e-4 } else { 1e-3 },
        device,
        seed: bench.seed,
    };
    let with_precision = stages(device, true);
    bench.expect(with_precision.len() + effort.rounds as usize + 1);
    bench.message("does mixed precision gain on this device?");
    let trial = Effort { rounds: 3, ..effort };
    let trials = measure(&corpus, &common, &with_precision[1..3], trial, |_| {})?;
    let gain = Metric::of_samples("speedup", "ratio", &trials[1].speedups(&trials[0]));
    let stages = stages(device, gain.value.is_some_and(|gain| gain > 1.0));
    bench.step();
    let measured = measure(&corpus, &common, &stages, effort, |message| {
        bench.message(message);
        bench.step();
    })?;
    put_stages(bench, &stages, &measured)?;
    put_parts(bench, &stages, &measured)?;
    let why = if device.is_cuda() {
        "a captured step needs the same shapes in each step, and packed rows have other documents in each; \
         `cargo xtask run-all --only runtime-cost --device cuda` measures a captured step"
    } else {
        "a graph of launches exists on CUDA devices alone (`cargo xtask run-all --only runtime-cost --device cuda` measures one); \
         torch.compile on this processor: `cargo xtask compare --only training-vs-pytorch`"
    };
    let case = Case::new()
        .with("shows", "stage")
        .with("part", "bonuses: compiled step")
        .with("stage", stages.len() as u64)
        .with("setup", "captured step");
    let missing = |(name, unit)| Metric::not_measured(name, unit, why);
    let columns = [("tokens_per_second", "tokens/s"), ("stage_speedup", "ratio")];
    bench.put(&case, columns.map(missing).to_vec())
}

/// Makes all stages, one after the other, and measures them in turns.
fn measure(
    corpus: &Corpus,
    common: &Common,
    stages: &[Stage],
    effort: Effort,
    mut report: impl FnMut(&str),
) -> Result<Vec<Measured>> {
    let (mut setups, mut measured) = (Vec::new(), Vec::new());
    for stage in stages {
        report(&format!("{}, warm-up", stage.name));
        let region = Region::start(common.device)?;
        let mut setup = Setup::with(corpus, &stage.on, stage.techniques, common)?;
        setup.run(WARMUP)?;
        measured.push(Measured { peak_bytes: region.finish()?.peak_above_start(), ..Measured::default() });
        setups.push(setup);
    }
    let count = stages.len();
    for round in 0..effort.rounds {
        report(&format!("all stages, round {} of {}", round + 1, effort.rounds));
        for turn in 0..count {
            // Each round begins with another stage, and every second one goes backwards.
            let index = (turn + round as usize * 5) % count;
            let index = if round % 2 == 0 { index } else { count - 1 - index };
            measured[index].turns.push(Turn::measure(&mut setups[index], effort.turn)?);
        }
    }
    for (setup, measured) in setups.iter().zip(&mut measured) {
        measured.validation_loss = setup.validation_loss(corpus, common)?;
    }
    Ok(measured)
}

impl Measured {
    fn rates(&self) -> Metric {
        let rates: Vec<f64> = self.turns.iter().map(|turn| 1.0 / turn.token).collect();
        Metric::of_samples("tokens_per_second", "tokens/s", &rates)
    }

    /// Tokens per second over those of `before`, round by round.
    fn speedups(&self, before: &Self) -> Vec<f64> {
        before.turns.iter().zip(&self.turns).map(|(before, turn)| before.token / turn.token).collect()
    }
}

fn put_stages(bench: &mut Bench, stages: &[Stage], measured: &[Measured]) -> Result<()> {
    for (number, (stage, result)) in stages.iter().zip(measured).enumerate() {
        let steps: Vec<f64> = result.turns.iter().map(|turn| turn.step).collect();
        let mut metrics = vec![
            result.rates(),
            Metric::of_samples("step_seconds", "s", &steps),
            Metric::exact("peak_bytes", "B", result.peak_bytes as f64),
            Metric::exact("validation_loss", "nat", result.validation_loss),
            Metric::exact("kept", "count", f64::from(u8::from(stage.kept))),
        ];
        if number > 0 {
            let speedups = result.speedups(&measured[stage.before]);
            let faster = speedups.iter().filter(|&&speedup| speedup > 1.0).count();
            metrics.push(Metric::of_samples("stage_speedup", "ratio", &speedups));
            metrics.push(Metric::exact(
                "faster_rounds",
                "ratio",
                faster as f64 / speedups.len().max(1) as f64,
            ));
            metrics.push(Metric::of_samples("cumulative_speedup", "ratio", &result.speedups(&measured[0])));
        }
        let case = Case::new()
            .with("shows", "stage")
            .with("part", stage.part.name())
            .with("stage", number as u64)
            .with("setup", stage.name.as_str());
        bench.put(&case, metrics)?;
    }
    Ok(())
}

/// Writes the gain of each part of the assignment and of all parts: its last stage beside the stage before its first.
fn put_parts(bench: &mut Bench, stages: &[Stage], measured: &[Measured]) -> Result<()> {
    let mut ends: Vec<(&str, usize, usize)> = Vec::new();
    for part in Part::ALL {
        let of_part = || (0..stages.len()).filter(|&index| stages[index].part == part);
        if let (Some(first), Some(last)) = (of_part().next(), of_part().next_back()) {
            ends.push((part.name(), stages[first].before, last));
        }
    }
    let last = (0..stages.len()).rev().find(|&index| stages[index].kept).unwrap_or(0);
    ends.push(("all of them", 0, last));
    for (part, before, after) in ends {
        let case = |end: &str| Case::new().with("shows", "part").with("part", part).with("end", end);
        for (end, index) in [("before", before), ("after", after)] {
            let result = &measured[index];
            let metrics = vec![
                result.rates(),
                Metric::exact("peak_bytes", "B", result.peak_bytes as f64),
                Metric::exact("validation_loss", "nat", result.validation_loss),
            ];
            bench.put(&case(end), metrics)?;
        }
        let speedups = measured[after].speedups(&measured[before]);
        let metrics = vec![
            Metric::of_samples("speedup", "ratio", &speedups),
            Metric::exact(
                "peak_ratio",
                "ratio",
                measured[after].peak_bytes as f64 / measured[before].peak_bytes as f64,
            ),
        ];
        bench.put(&case("after"), metrics)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_changes_one_thing_and_the_last_has_no_inefficiency() {
        check(true);
        check(false);
    }

    fn check(gains: bool) {
        let stages = stages(Device::Cpu, gains);
        let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(
            names[..4],
            ["all inefficiencies, fp32", "packed rows", "bf16 products", "without tokenize-per-item"]
        );
        for stage in &stages[1..] {
            let before = &stages[stage.before];
            let repaired = before.on.len() - stage.on.len();
            let techniques = |stage: &Stage| {
                let Techniques { mixed_precision, fused_norms, fused_loss } = stage.techniques;
                usize::from(mixed_precision) + usize::from(fused_norms) + usize::from(fused_loss)
            };
            assert_eq!(repaired + techniques(stage) - techniques(before), 1, "{}", stage.name);
            assert!(before.kept, "{} goes on from a stage that was left", stage.name);
        }
        let last = &stages[stages.len() - 1];
        assert_eq!(last.techniques.mixed_precision, gains);
        assert!(last.on.is_empty() && last.techniques.fused_loss && last.techniques.fused_norms);
    }
}
