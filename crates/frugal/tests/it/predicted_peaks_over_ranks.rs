//! Predicted peaks of one of two ranks against its allocator's: stages, methods and ways to run a step.

use std::time::Duration;

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Allowed, Candidate, Job, Placement};
use accounting::scale::Network;
use frugal::config::{
    Config, Dtype, LossHeadKind, MasterWeights, OffloadConfig, OffloadTier, OptimizerPlace, OptimizerRule,
    ZeroStage,
};
use frugal::planning::{self, DataShape, KnownRates};
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::{Recipe, runtime};
use lora::LoraConfig;
use models::hugging_face::{self, Folder};
use models::{DecoderConfig, Llama};
use runtime::memory::{Region, live_bytes};
use tch::{Device, Kind};
use testing::ranks::Ranks;
use training::masked_rows::{Layout, MaskedBatches, MaskedRow};

/// The share of the measured peak by which a prediction may be wrong.
const TOLERANCE: f64 = 0.05;
const RANKS: usize = 2;

/// What is trained, and how.
#[derive(Clone, Copy, Debug)]
struct Case {
    adapters: bool,
    kind: Kind,
    plan: fn(usize) -> LayerPlan,
    at_once: Option<usize>,
    accumulation: usize,
    in_files: bool,
    stochastic: bool,
    rule: OptimizerRule,
}

const KEPT: Case = Case {
    adapters: false,
    kind: Kind::Float,
    plan: |_| LayerPlan::KeepAll,
    at_once: None,
    accumulation: 2,
    in_files: false,
    stochastic: false,
    rule: OptimizerRule::AdamW,
};
const SOME: fn(usize) -> LayerPlan =
    |layer| if layer.is_multiple_of(2) { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };

const CASES: [Case; 12] = [
    KEPT,
    Case { plan: SOME, at_once: Some(1), ..KEPT },
    Case { kind: Kind::BFloat16, plan: SOME, accumulation: 4, ..KEPT },
    Case { adapters: true, ..KEPT },
    Case { adapters: true, plan: |_| LayerPlan::RecomputeAll, at_once: Some(1), ..KEPT },
    Case { in_files: true, kind: Kind::BFloat16, plan: |_| LayerPlan::RecomputeAll, ..KEPT },
    Case { in_files: true, adapters: true, plan: SOME, ..KEPT },
    Case { stochastic: true, kind: Kind::BFloat16, ..KEPT },
    Case { stochastic: true, in_files: true, kind: Kind::BFloat16, ..KEPT },
    Case { rule: OptimizerRule::AdamW8bit, ..KEPT },
    Case { rule: OptimizerRule::AdamW8bit, stochastic: true, kind: Kind::BFloat16, ..KEPT },
    Case { rule: OptimizerRule::Lion, plan: SOME, ..KEPT },
];

/// Several buckets of gradients, and layers that are not small beside them.
fn shape() -> DecoderConfig {
    DecoderConfig { num_key_value_heads: 4, ..DecoderConfig::llama(2048, 320, 960, 4, 8) }
}

fn config(case: &Case) -> Config {
    let adapter = case.adapters.then(|| LoraConfig { r: 8, ..Config::default_adapter() });
    let mut config = Config { adapter, ..Config::default() };
    config.model.dtype = (case.kind == Kind::BFloat16).then_some(Dtype::Bfloat16);
    (config.training.batch, config.training.accumulation) = (2, case.accumulation);
    config.training.micro_batch_size = case.at_once;
    config.loss.head = LossHeadKind::Fused;
    config.optimizer.rule = case.rule;
    if case.stochastic {
        config.optimizer.master_weights = MasterWeights::Stochastic;
    }
    if case.in_files {
        config.offload = Some(OffloadConfig { tier: OffloadTier::File, ..OffloadConfig::default() });
        if !case.adapters {
            config.optimizer.place = OptimizerPlace::Host;
        }
    }
    config
}

impl Case {
    /// Only the shards of stage 3 can be in files.
    fn stages(&self) -> &'static [ZeroStage] {
        match (self.in_files, self.rule) {
            (true, _) => &ZeroStage::ALL[2..],
            // Its blocks are not divided.
            (false, OptimizerRule::AdamW8bit) => &ZeroStage::ALL[..2],
            (false, _) => &ZeroStage::ALL,
        }
    }
}

fn batches(case: &Case) -> MaskedBatches {
    let row = |number: usize| {
        let tokens: Vec<i64> = (0..128).map(|at| ((31 * at + 17 * number) % 2048) as i64).collect();
        MaskedRow::new(tokens.clone(), tokens)
    };
    let layout = Layout { batch: 2, ..Layout::default() };
    MaskedBatches::new((0..8 * case.accumulation).map(row).collect(), layout, Device::Cpu).unwrap()
}

/// The way that the case names, in a stage.
fn predicted(case: &Case, stage: ZeroStage) -> (Job, Candidate) {
    let data = DataShape::of(&batches(case), 100).unwrap();
    let rates = KnownRates::nominal(Device::Cpu).unwrap();
    let (config, shape, on) = (config(case), shape(), (case.kind, Device::Cpu));
    let job = planning::job(&config, &shape, on, &data, &rates).unwrap();
    let node = RANKS as u64;
    let network = Network { node, local: 1e9, between: 1e9, latency: 1e-4, direct: true };
    let ranks = planning::ranks(&config, RANKS, network);
    let (mut job, _) = planning::over_ranks((job, Allowed::default()), &config, ranks, on).unwrap();
    job.ranks.as_mut().unwrap().stage = stage.decided().unwrap();
    let plan = (0..shape.num_hidden_layers as usize).map(case.plan).collect();
    let candidate = job.evaluate(Placement::Resident(plan), case.at_once.map(|rows| rows as u64)).unwrap();
    (job, candidate)
}

/// The peaks of the first and of the third step, above what was live before the model.
fn measured(case: &Case, stage: ZeroStage, folder: &Folder, ranks: &Group) -> [u64; 2] {
    runtime::random::seed(1).unwrap();
    let before = live_bytes(Device::Cpu).unwrap();
    let (_, candidate) = predicted(case, stage);
    let config = planning::with_choice(&config(case), &candidate);
    assert_eq!(config.optimizer.zero_stage, stage);
    let prepared = Recipe::new(&config).unwrap().over(ranks).unwrap().open(folder, Device::Cpu).unwrap();
    let (mut trainer, handles) = prepared.trainer(3).unwrap();
    if let (Placement::Resident(plan), Some(activations)) = (&candidate.placement, &handles.activations) {
        activations.change(plan).unwrap();
    }
    let mut data = batches(case);
    let mut peak_of = |step: u64| {
        let region = Region::start(Device::Cpu).unwrap();
        trainer.advance(step, &mut data, None).unwrap();
        region.finish().unwrap().peak - before
    };
    let (first, _, third) = (peak_of(1), peak_of(2), peak_of(3));
    [first, third]
}

/// A rank's process runs this test alone.
#[test]
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        runtime::memory::track_cpu().unwrap();
        runtime::random::seed(1).unwrap();
        let path = tempfile::tempdir().unwrap();
        let weights = Llama::new(&shape(), (Kind::Float, Device::Cpu)).unwrap();
        hugging_face::save(&weights, path.path(), hugging_face::SHARD_BYTES).unwrap();
        drop(weights);
        let folder = Folder::open(path.path()).unwrap();
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        for (number, case) in CASES.iter().enumerate() {
            for &stage in case.stages() {
                let name = format!("case {number}, {stage:?}");
                let ranks = Group::new(&store, &name, GroupConfig::default()).unwrap();
                let [first, third] = measured(case, stage, &folder, &ranks);
                println!("{number} {} {first} {third}", stage as u8);
                ranks.barrier("the next one").unwrap();
            }
        }
    });
}

#[test]
fn predicted_peaks_of_ranks_are_those_of_their_allocators() {
    let printed = Ranks::new("predicted_peaks_over_ranks::a_rank", RANKS).run(&());
    let mut wrong = Vec::new();
    for line in &printed[0] {
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let &[number, stage, first, third] = &numbers[..] else { panic!("{line}") };
        let case = &CASES[number as usize];
        let stage = ZeroStage::ALL[stage as usize - 1];
        let (job, candidate) = predicted(case, stage);
        let most = candidate.peak.total as f64;
        // Of a reduction that may be under way still.
        let least = most - job.overlapping_bytes().unwrap() as f64;
        let off = |measured: u64| match measured as f64 {
            measured if measured > most => most / measured - 1.0,
            measured if measured < least => least / measured - 1.0,
            _ => 0.0,
        };
        let text = format!(
            "{case:?}, {stage:?}: {:+.2} %, in the first step {:+.2} %: {most} B predicted in the {}, {third} and {first} B measured; {}",
            100.0 * off(third),
            100.0 * off(first),
            candidate.peak.moment,
            candidate.peak.summary(),
        );
        eprintln!("{text}");
        // The first step has no state before its end, and takes no more than later ones.
        if off(third).abs() > TOLERANCE || off(first) < -TOLERANCE {
            wrong.push(text);
        }
    }
    assert_eq!(printed[0].len(), CASES.iter().map(|case| case.stages().len()).sum::<usize>());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
