//! The search for the fastest way to run a step over ranks.

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Allowed, Batch, Candidate, Job, Placement, Ranks};
use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::zero::ZeroStage;
use accounting::offload::sizes::Choices;
use accounting::offload::{AvailableMemory, Rates};
use accounting::presets;
use accounting::scale::Network;

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

/// A step of four batches of Qwen2.5-0.5B over so many processes of one CPU.
fn job(lora: bool, ranks: u64) -> Job {
    let batch = Batch::new(Workload { batch: 2, sequence: 256 }, None);
    let rates = Rates { load: 5e9, store: 5e9, host_optimizer: 7e8, device_optimizer: 7e8 };
    let choices = Choices { flops: 1e11, bandwidth: 2e10, ..Choices::default() };
    let network = Network { node: ranks, local: 2e9, between: 2e9, latency: 1e-4, direct: true };
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let lora = lora.then(|| LowRank { on_cpu: true, ..LowRank::default() });
    Job {
        accumulation: 4,
        on_cpu: true,
        ranks: Some(Ranks { stage: ZeroStage::One, ranks, replicas: 1, slots: 2, in_files: false, network }),
        ..Job::new(model, lora, choices, batch, rates)
    }
}

fn of_stage(job: &Job, stage: ZeroStage) -> Job {
    Job { ranks: job.ranks.map(|ranks| Ranks { stage, ..ranks }), ..job.clone() }
}

fn allowed() -> Allowed {
    Allowed { offloaded: None, stages: STAGES.to_vec(), ..Allowed::default() }
}

fn all(job: &Job, plan: LayerPlan) -> Candidate {
    job.evaluate(Placement::Resident(vec![plan; job.model.layers as usize]), None).unwrap()
}

#[test]
fn more_is_divided_where_memory_is_short() {
    for lora in [false, true] {
        let job = job(lora, 2);
        let kept: Vec<Candidate> =
            STAGES.iter().map(|stage| all(&of_stage(&job, *stage), LayerPlan::KeepAll)).collect();
        let [one, two, three] = [0, 1, 2].map(|stage| &kept[stage]);
        assert!(two.peak.total <= one.peak.total && three.peak.total < two.peak.total, "{kept:?}");
        assert!(three.seconds > one.seconds, "{} {}", three.seconds, one.seconds);
        let found =
            |bytes: u64| job.search(&allowed(), AvailableMemory { device: bytes, host: None }).unwrap();
        let ample = found(1 << 40);
        assert_ne!(ample.chosen().unwrap().ranks.unwrap().stage, ZeroStage::Three);
        assert_eq!(ample.chosen().unwrap().placement, kept[0].placement);
        // The least that is left divides the layers too, and keeps their inputs alone.
        let least = ample.least().unwrap();
        assert_eq!(least.ranks.unwrap().stage, ZeroStage::Three);
        let short = found(least.peak.total);
        assert_eq!(short.chosen().unwrap().ranks.unwrap().stage, ZeroStage::Three);
        assert!(found(least.peak.total - 1).chosen().is_none());
    }
}

/// Of all stages and uniform activation plans, none that fits is faster than the chosen one.
#[test]
fn no_uniform_plan_is_faster() {
    let job = job(false, 2);
    let [most, least] =
        [all(&job, LayerPlan::KeepAll), all(&of_stage(&job, ZeroStage::Three), LayerPlan::RecomputeAll)]
            .map(|one| one.peak.total);
    for part in 0..=8 {
        let device = least + (most - least) / 8 * part;
        let found = job.search(&allowed(), AvailableMemory { device, host: None }).unwrap();
        let chosen = found.chosen().unwrap();
        assert!(chosen.peak.total <= device);
        for stage in STAGES {
            for plan in [LayerPlan::KeepAll, LayerPlan::RecomputeAll] {
                let other = all(&of_stage(&job, stage), plan);
                let is_slower = chosen.seconds <= other.seconds * 1.03;
                assert!(other.peak.total > device || is_slower, "{} {}", chosen.name(), other.name());
            }
        }
    }
}

/// One process alone as the only rank keeps the bytes of one without ranks, but for the sums of gradients that ranks have of their own.
#[test]
fn rounds_take_turns_with_the_ranks() {
    let (two, four) = (all(&job(false, 2), LayerPlan::KeepAll), all(&job(false, 4), LayerPlan::KeepAll));
    assert!(four.seconds < two.seconds, "{} {}", four.seconds, two.seconds);
    assert!(four.peak.total < two.peak.total);
    // What a step of four batches over two ranks computes, each computes in two rounds.
    let alone = all(&Job { ranks: None, accumulation: 2, ..job(false, 1) }, LayerPlan::KeepAll);
    let sends = two.seconds - alone.seconds;
    assert!(sends > 0.0 && sends < alone.seconds, "{sends} {}", alone.seconds);
    let text = two.name();
    assert_eq!(text, "ZeRO-1, keep all");
}

/// A layer that ranks divide keeps all its activations or its input.
#[test]
fn divided_layers_are_whole_or_run_again() {
    let job = of_stage(&job(false, 2), ZeroStage::Three);
    let (most, least) = (all(&job, LayerPlan::KeepAll), all(&job, LayerPlan::RecomputeAll));
    let device = least.peak.total.midpoint(most.peak.total);
    let allowed = Allowed { stages: vec![ZeroStage::Three], splits: false, ..allowed() };
    let found = job.search(&allowed, AvailableMemory { device, host: None }).unwrap();
    let Placement::Resident(plan) = &found.chosen().unwrap().placement else { panic!() };
    let count = |of: LayerPlan| plan.iter().filter(|kept| **kept == of).count();
    assert_eq!(count(LayerPlan::KeepAll) + count(LayerPlan::RecomputeAll), plan.len());
    assert!(count(LayerPlan::RecomputeAll) > 0 && count(LayerPlan::KeepAll) > 0, "{plan:?}");
}

/// What is in files takes no memory, and more time: of a slow disk more than any recomputation.
#[test]
fn shards_are_in_slow_files_where_nothing_else_fits() {
    for lora in [false, true] {
        let job = Job { file_optimizer: 1e7, file_load: 1e8, ..job(lora, 2) };
        let in_memory = all(&of_stage(&job, ZeroStage::Three), LayerPlan::RecomputeAll);
        let in_files = Job { ranks: job.ranks.map(|ranks| Ranks { in_files: true, ..ranks }), ..job.clone() };
        let in_files = all(&of_stage(&in_files, ZeroStage::Three), LayerPlan::RecomputeAll);
        let layers = job.model.layers * job.model.block_parameters().unwrap();
        // Half of the layers' weights; and of what is trained the sums, two moments and a copy.
        let recipe = job.choices.recipe;
        let weight = recipe.parameters.storage_bits() / 8;
        let bytes = |number: accounting::dtype::Dtype| number.storage_bits() / 8;
        let state = 4 + 2 * bytes(recipe.state) + recipe.master.map_or(0, bytes);
        let trained = job.lora.as_ref().map_or(layers, |lora| lora.parameters(&job.model).unwrap());
        let owned = (layers * weight + trained * (state + if lora { weight } else { 0 })) / 2;
        let saved = in_memory.peak.total - in_files.peak.total;
        let off = saved as f64 / owned as f64 - 1.0;
        assert!(off.abs() < 0.005, "{saved} and {owned}");
        assert!(in_files.seconds > in_memory.seconds && in_files.name() == "ZeRO-3 in files, recompute all");
        let allowed = Allowed { shards_in_files: true, splits: false, ..allowed() };
        let search = |device: u64| job.search(&allowed, AvailableMemory { device, host: None }).unwrap();
        assert!(!search(in_memory.peak.total).chosen().unwrap().ranks.unwrap().in_files);
        let short = search(in_memory.peak.total - 1);
        let chosen = short.chosen().unwrap();
        assert!(
            chosen.ranks.unwrap().in_files && job.at(chosen).ranks.unwrap().in_files,
            "{}",
            chosen.name()
        );
    }
}
