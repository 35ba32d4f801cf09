//! The search for the fastest way to run a step under a budget.

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{
    Allowed, Batch, Candidate, Job, Layers, OffloadedLayers, Placement, SearchResult, Tier,
};
use accounting::decoder_flops::Workload;
use accounting::lora::LowRank;
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::offload::sizes::Choices;
use accounting::offload::{AvailableMemory, Footprint, Moment, OptimizerPlace, Rates};
use accounting::presets;

fn job(lora: bool) -> Job {
    let batch = Batch::new(Workload { batch: 4, sequence: 512 }, None);
    Job {
        model: presets::find("qwen2.5-0.5b").unwrap(),
        lora: lora.then(|| LowRank { on_cpu: true, ..LowRank::default() }),
        choices: Choices {
            flops: 1e11,
            bandwidth: 2e10,
            recipe: Recipe::BF16_FP32_STATE,
            loss: Loss::LinearCrossEntropy { tokens: 128, whole: 0 },
            packs: true,
            ..Choices::default()
        },
        largest: vec![batch],
        mean: batch,
        evaluation: None,
        accumulation: 4,
        clips: true,
        in_backward: false,
        rates: Rates { load: 5e9, store: 5e9, host_optimizer: 7e8, device_optimizer: 7e8 },
        file_load: 2e9,
        file_optimizer: 1e8,
        on_cpu: true,
        ranks: None,
        further_passes: 0,
        teacher: None,
    }
}

fn allowed() -> Allowed {
    let offloaded = OffloadedLayers {
        tiers: vec![Tier::File],
        most_slots: 4,
        resident: None,
        keep: None,
        inputs_on_host: None,
        optimizer: OptimizerPlace::Device,
    };
    Allowed { offloaded: Some(offloaded), ..Allowed::default() }
}

fn search(job: &Job, allowed: &Allowed, bytes: u64) -> SearchResult {
    job.search(allowed, AvailableMemory { device: bytes, host: None }).unwrap()
}

const ENOUGH: u64 = 1 << 40;

/// The least bytes that a whole batch takes, and those of keeping everything.
fn range(job: &Job, allowed: &Allowed) -> (u64, u64) {
    let found = search(job, &Allowed { splits: false, ..allowed.clone() }, ENOUGH);
    (found.least().unwrap().peak.total, found.chosen().unwrap().peak.total)
}

/// Layers that keep less than everything.
fn again(candidate: &Candidate) -> usize {
    let Placement::Resident(layers) = &candidate.placement else { return 0 };
    layers.iter().filter(|kept| **kept != LayerPlan::KeepAll).count()
}

#[test]
fn less_memory_takes_more_time_and_what_is_chosen_fits() {
    let job = job(true);
    let (least, keep) = range(&job, &allowed());
    let mut seconds = 0.0;
    for eighths in (0..=8).rev() {
        let budget = least + (keep - least) / 8 * eighths + 8;
        let found = search(&job, &Allowed { splits: false, ..allowed() }, budget);
        let Some(chosen) = found.chosen() else { panic!("{eighths}: {:?}", found.least()) };
        assert!(chosen.peak.total <= budget, "{}", chosen.name());
        assert_eq!(chosen.peak.total, chosen.peak.parts.iter().map(|part| part.bytes).sum::<u64>());
        assert!(chosen.seconds >= seconds * 0.999, "{eighths}: {}", chosen.name());
        // Nothing that is shown and fits is faster by more than what is taken for a tie.
        let fitting = found.candidates.iter().filter(|one| found.fits(one));
        assert!(fitting.clone().all(|one| one.seconds > chosen.seconds * 0.97), "{}", chosen.name());
        assert!(found.cheaper().is_none_or(|one| one.peak.total < chosen.peak.total));
        assert!(found.faster().is_none_or(|one| !found.fits(one) && one.seconds < chosen.seconds));
        seconds = chosen.seconds;
    }
    let found = search(&job, &allowed(), 100 << 20);
    assert!(found.chosen().is_none() && found.least().unwrap().peak.total > 100 << 20);
}

#[test]
fn fewer_rows_replace_recomputation_where_they_are_allowed() {
    let job = job(true);
    let allowed = || Allowed { offloaded: None, ..allowed() };
    let (least, keep) = range(&job, &allowed());
    let budget = least + (keep - least) / 2;
    let whole = search(&job, &Allowed { splits: false, ..allowed() }, budget);
    let split = search(&job, &allowed(), budget);
    assert!(whole.chosen().unwrap().keeps_bits() && again(whole.chosen().unwrap()) > 0, "{whole:?}");
    assert!(!split.chosen().unwrap().keeps_bits());
    assert!(split.chosen().unwrap().seconds < whole.chosen().unwrap().seconds);
    // With room for all, the whole batch is taken.
    let found = search(&job, &allowed(), ENOUGH);
    assert_eq!(found.chosen().unwrap().name(), "keep all");
}

#[test]
fn what_is_named_is_kept() {
    let job = job(true);
    let keep = Layers::Only(vec![LayerPlan::KeepAll; 24]);
    let only = Allowed {
        layers: Some(keep),
        offloaded: None,
        splits: false,
        rows: None,
        stages: Vec::new(),
        replicas: Vec::new(),
        shards_in_files: false,
    };
    let (least, keep) = range(&job, &allowed());
    let found = search(&job, &only, (least + keep) / 2);
    assert_eq!((found.candidates.len(), found.chosen), (1, None));
    let rows = Allowed { rows: Some(2), ..only };
    assert!(search(&job, &rows, ENOUGH).candidates.iter().all(|one| one.rows == Some(2)));
    let ring = OffloadedLayers { most_slots: 3, resident: Some(vec![0, 5]), ..allowed().offloaded.unwrap() };
    for keep in [None, Some(Vec::new()), Some(vec![2, 7])] {
        let offloaded = Some(OffloadedLayers { keep: keep.clone(), ..ring.clone() });
        let files = Allowed {
            layers: None,
            offloaded,
            splits: false,
            rows: None,
            stages: Vec::new(),
            replicas: Vec::new(),
            shards_in_files: false,
        };
        let found = search(&job, &files, ENOUGH);
        let Placement::Offloaded { ring, resident, keep: kept, .. } = &found.chosen().unwrap().placement
        else {
            panic!("offloaded")
        };
        assert_eq!((*ring, &resident[..]), (3, &[0, 5][..]));
        // With enough memory, all.
        assert_eq!(*kept, keep.unwrap_or_else(|| (0..24).collect()));
    }
}

/// Layers in files keep as many activations as fit, and a pass is faster by their recomputation.
#[test]
fn offloaded_layers_keep_the_activations_that_fit() {
    let job = job(true);
    let of = |bytes, keep: Option<Vec<usize>>| {
        let offloaded = OffloadedLayers { keep, ..allowed().offloaded.unwrap() };
        let files = Allowed {
            layers: None,
            offloaded: Some(offloaded),
            splits: false,
            rows: None,
            stages: Vec::new(),
            replicas: Vec::new(),
            shards_in_files: false,
        };
        search(&job, &files, bytes)
    };
    let least = of(ENOUGH, Some(Vec::new())).least().unwrap().peak.total;
    let most = of(ENOUGH, Some((0..24).collect())).least().unwrap().peak.total;
    assert!(most > 2 * least, "{least} {most}");
    let mut before = f64::INFINITY;
    for part in 1..=4 {
        let budget = least + (most - least) / 4 * part;
        let found = of(budget, None);
        let chosen = found.chosen().unwrap();
        let Placement::Offloaded { keep, .. } = &chosen.placement else { panic!("offloaded") };
        assert!(chosen.peak.total <= budget && chosen.seconds < before, "{chosen:?}");
        assert!(keep.len() >= 5 * part as usize && keep.last() == Some(&23), "{budget}: {keep:?}");
        // No plan that recomputes every layer is as fast.
        let recomputed = of(budget, Some(Vec::new()));
        assert!(recomputed.chosen().unwrap().seconds > 1.05 * chosen.seconds);
        before = chosen.seconds;
    }
}

#[test]
fn the_plans_of_a_training_that_is_short_of_memory_take_less_and_less() {
    for lora in [true, false] {
        let job = job(lora);
        let found = search(&job, &Allowed { splits: false, ..allowed() }, ENOUGH);
        let chosen = found.chosen().unwrap();
        let plans = job.cheaper_plans(chosen).unwrap();
        assert!(plans.len() >= 3, "{plans:?}");
        let peaks: Vec<u64> = [chosen].into_iter().chain(&plans).map(|plan| plan.peak.total).collect();
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
        assert!(plans.iter().all(Candidate::keeps_bits));
        assert!(job.cheaper_plans(plans.last().unwrap()).unwrap().is_empty());
    }
}

/// All gradients exist while a second pass adds to them; a step of bf16 weights on a CPU casts them.
#[test]
fn accumulated_gradients_and_casts_are_counted() {
    let one = Job { accumulation: 1, ..job(false) };
    let keep = || Placement::Resident(vec![LayerPlan::KeepAll; 24]);
    let single = one.evaluate(keep(), None).unwrap();
    let several = job(false).evaluate(keep(), None).unwrap();
    let parameters = presets::find("qwen2.5-0.5b").unwrap().parameters().unwrap();
    assert_eq!(several.peak.bytes("gradients"), 2 * parameters);
    assert_eq!(several.peak.bytes("optimizer state"), 8 * parameters);
    assert!(several.peak.total > single.peak.total + parameters);
    // Of the embedding, whose copies would take 1.1 GB, 32 MiB at a time.
    let moments = job(false).moments(&several).unwrap();
    let update = moments.iter().find(|footprint| footprint.moment == Moment::Update).unwrap();
    assert_eq!(update.bytes("working memory"), (32 + 64) << 20);
}

#[test]
fn updates_during_backward_leave_the_gradients_of_a_layer() {
    let after = Job { accumulation: 1, clips: false, ..job(false) };
    let during = Job { in_backward: true, ..after.clone() };
    let keep = || Placement::Resident(vec![LayerPlan::KeepAll; 24]);
    let [after, during] = [&after, &during].map(|job| {
        let candidate = job.evaluate(keep(), None).unwrap();
        job.moments(&candidate).unwrap()
    });
    let bytes = |moments: &[Footprint], moment: Moment, name: &str| {
        moments.iter().find(|footprint| footprint.moment == moment).map(|footprint| footprint.bytes(name))
    };
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let (all, matrix) = (2 * model.parameters().unwrap(), 2 * model.vocabulary * model.hidden);
    // The head's gradient waits for the embedding's, which is the same tensor.
    for (moments, in_layers) in [(&after, all - matrix - 2 * model.hidden), (&during, 0)] {
        assert_eq!(bytes(moments, Moment::Embedding, "layer gradients").unwrap_or(0), in_layers);
        let beside = if in_layers > 0 { 2 * model.hidden } else { 0 };
        assert_eq!(bytes(moments, Moment::Embedding, "fixed gradients"), Some(matrix + beside));
    }
    assert_eq!(bytes(&during, Moment::Update, "working memory"), None);
    let first = Moment::Backward(0);
    let copies =
        bytes(&during, first, "working memory").unwrap() - bytes(&after, first, "working memory").unwrap();
    // 4864 × 896 weights and gradients in fp32 would be 34.9 MB.
    assert_eq!(copies, 32 << 20);
}

/// Rows of the validation data may be longer than those of the training.
#[test]
fn a_plan_that_no_evaluation_fits_is_not_chosen() {
    let long = Batch::new(Workload { batch: 1, sequence: 8192 }, None);
    let short = Batch::new(Workload { batch: 1, sequence: 64 }, None);
    let without = Job { largest: vec![short], mean: short, ..job(true) };
    let with = Job { evaluation: Some(long), ..without.clone() };
    let chosen = search(&without, &allowed(), ENOUGH).chosen().unwrap().clone();
    assert!(matches!(chosen.placement, Placement::Resident(_)) && chosen.evaluation_bytes == 0, "{chosen:?}");
    let same = search(&with, &allowed(), ENOUGH).chosen().unwrap().clone();
    assert_eq!(same.placement, chosen.placement);
    assert_eq!(same.device_bytes(), with.evaluation(&same.placement, long).unwrap().total);
    assert!(same.device_bytes() > same.peak.total);
    // The step alone would fit.
    let budget = same.device_bytes() - 1;
    assert!(matches!(
        search(&without, &allowed(), budget).chosen().unwrap().placement,
        Placement::Resident(_)
    ));
    let found = search(&with, &allowed(), budget);
    let offloaded = found.chosen().unwrap();
    assert!(matches!(offloaded.placement, Placement::Offloaded { .. }), "{offloaded:?}");
    assert!(offloaded.device_bytes() <= budget && found.fits(offloaded));
}

#[test]
fn fewer_trained_weights_and_more_recomputation_reduce_bytes() {
    let peak = |targets: Option<&str>, kept: LayerPlan, labelled| {
        let lora = targets.map(|targets| LowRank { targets: targets.parse().unwrap(), ..LowRank::default() });
        let batch = Batch::new(Workload { batch: 4, sequence: 1024 }, labelled);
        let job = Job { lora, largest: vec![batch], mean: batch, accumulation: 1, ..job(false) };
        let plan = vec![kept; job.model.layers as usize];
        job.evaluate(Placement::Resident(plan), None).unwrap().peak.total
    };
    let (keep, recompute) = (LayerPlan::KeepAll, LayerPlan::RecomputeAll);
    let peaks = [
        peak(None, keep, None),
        peak(Some("all"), keep, None),
        peak(Some("q,k,v,o"), keep, None),
        peak(Some("q,k,v,o"), keep, Some(1024)),
        peak(Some("q,k,v,o"), recompute, Some(1024)),
    ];
    assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
}

/// The largest of a step's moments is the candidate's peak, wherever its layers are.
#[test]
fn the_peak_is_the_largest_moment() {
    for (lora, bytes) in
        [(true, ENOUGH), (true, 2 << 30), (true, 1 << 30), (false, 8 << 30), (false, 6 << 30)]
    {
        for candidate in search(&job(lora), &allowed(), bytes).candidates {
            let moments = job(lora).moments(&candidate).unwrap();
            let largest = moments.iter().max_by_key(|one| one.total).unwrap();
            assert_eq!(largest.total, candidate.peak.total, "{}", candidate.name());
            assert!(moments.contains(&candidate.peak), "{}", candidate.name());
            for moment in &moments {
                assert_eq!(moment.total, moment.parts.iter().map(|part| part.bytes).sum::<u64>());
            }
        }
    }
}

/// A training with offloaded layers: its model, the rates of its GPU, FLOP/s and bytes per second, and those of its link.
fn streamed(model: &str, tokens: u64, lora: bool, [flops, bandwidth, link]: [f64; 3]) -> Job {
    let batch = Batch::new(Workload { batch: 1, sequence: tokens }, None);
    let rates = Rates { load: link, store: link, host_optimizer: 2e9, device_optimizer: 30e9 };
    let choices = Choices { flops, bandwidth, recipe: Recipe::BF16_FP32_STATE, ..Choices::default() };
    let lora = lora.then(LowRank::default);
    let model = accounting::Decoder::new(accounting::model::Sizes {
        context: tokens,
        ..*presets::find(model).unwrap()
    });
    Job::new(model.unwrap(), lora, choices, batch, rates)
}

/// On an H200 and on a laptop (8 GB, PCIe 3), inputs of layers are in host memory where that fits a budget that others do not fit, or leaves
/// room for more layers; not where the device has room for all, nor where the host has none.
#[test]
fn inputs_of_layers_are_in_host_memory_where_that_is_faster_or_fits() {
    let h200 = streamed("llama-3-8b", 131_072, false, [600e12, 4.8e12, 55e9]);
    let laptop = streamed("qwen2.5-7b", 8192, true, [40e12, 0.25e12, 12e9]);
    let host = OptimizerPlace::Host;
    for (job, optimizer, gigabytes, room) in
        [(h200, host, [45, 60, 70], 400), (laptop, OptimizerPlace::Device, [5, 6, 6], 64)]
    {
        let search = |inputs_on_host, device: u64, host: u64| {
            let offloaded = OffloadedLayers {
                tiers: vec![Tier::Host],
                inputs_on_host,
                optimizer,
                ..Allowed::default().offloaded.unwrap()
            };
            let allowed = Allowed { layers: None, offloaded: Some(offloaded), ..Allowed::default() };
            job.search(&allowed, AvailableMemory { device, host: Some(host) }).unwrap()
        };
        let is_on_host = |candidate: &Candidate| {
            matches!(candidate.placement, Placement::Offloaded { inputs_on_host: true, .. })
        };
        for gigabytes in gigabytes {
            let device = gigabytes * 1_000_000_000;
            let [open, on_device] = [None, Some(false)].map(|place| search(place, device, room << 30));
            let chosen = open.chosen().unwrap();
            assert!(is_on_host(chosen) && chosen.peak.total <= device, "{gigabytes}: {}", chosen.name());
            assert!(chosen.name().contains("inputs in host memory"), "{}", chosen.name());
            // Beside all inputs not one layer fits.
            let least = on_device.least().unwrap();
            assert!(
                on_device.chosen().is_none() && least.peak.total > device,
                "{gigabytes}: {}",
                least.name()
            );
            // The layers fit the host, their inputs do not.
            let limited = search(None, device, least.host_bytes);
            assert!(limited.chosen().is_none_or(|one| !is_on_host(one)), "{gigabytes}");
        }
        // Where both fit, inputs go to the host only if that saves more time than a tie.
        let most_on_device = search(Some(false), 1 << 40, room << 30);
        let least = most_on_device.least().unwrap().peak.total;
        for part in 0..4 {
            let device = least + (least / 8) * part;
            let [open, on_device] = [None, Some(false)].map(|place| search(place, device, room << 30));
            let (open, on_device) = (open.chosen().unwrap(), on_device.chosen().unwrap());
            assert!(
                open.seconds <= on_device.seconds * 1.021,
                "{part}: {} {}",
                open.name(),
                on_device.name()
            );
            assert!(!is_on_host(open) || open.seconds < on_device.seconds, "{part}: {}", open.name());
        }
        let most = search(None, 1 << 40, room << 30);
        assert!(!is_on_host(most.chosen().unwrap()), "{}", most.chosen().unwrap().name());
    }
}

/// With adapters a forward takes about half of what a forward and a backward of its input take.
#[test]
fn a_reference_takes_a_forward_more_and_no_memory() {
    let (plain, keep) = (job(true), Placement::Resident(vec![LayerPlan::KeepAll; 24]));
    let with = Job { further_passes: 1, ..plain.clone() };
    let [without, with] = [plain, with].map(|job| job.evaluate(keep.clone(), None).unwrap());
    assert_eq!(with.peak, without.peak);
    let share = with.seconds / without.seconds;
    assert!((1.4..=1.55).contains(&share), "{share}");
}
