//! Layers divided among ranks (ZeRO-3): offload's ring over sharding's shards, in processes.

mod faults;
#[path = "../../../sharding/tests/it/faulty.rs"]
mod faulty;
mod training_case;
#[path = "../../../sharding/tests/it/trainings.rs"]
mod trainings;

use accounting::Dtype;
use accounting::lora::LowRank;
use accounting::memory::optimizer::Optimizer as AccountingOptimizer;
use accounting::memory::recipe::Recipe as AccountingRecipe;
use accounting::memory::zero::ZeroStage;
use accounting::sharding::Layout;
use expect_test::expect;
use frugal::Recipe;
use runtime::collectives::Group;
use testing::ranks::Ranks;
use training_case::{Case, Start};
use trainings::{EVALUATED, Place, end, files};

/// A rank's process runs this test alone.
#[test]
fn a_rank() {
    trainings::rank(|case: &Case| case.timeout.unwrap_or(trainings::TIMEOUT), Case::run);
}

const A_RANK: &str = "layers_over_ranks::a_rank";

/// A training of 3 steps in a ZeRO stage, clipped to a norm (0 for not), with further settings.
fn case(stage: u8, clip: f64, micro_batches: usize, others: &str) -> Case {
    let recipe = format!(
        "[optimizer]\nzero_stage = {stage}\nclip = {clip}\nlr = 3e-3\nweight_decay = 0.1\nschedule = \"constant\"\nwarmup = 0\n\
         [training]\naccumulation = {micro_batches}\n{others}"
    );
    Case { recipe, steps: 3, ..Case::default() }
}

/// Runs trainings, each with a number of ranks. Returns for each what its ranks printed.
#[track_caller]
fn run(runs: &[(Case, usize)]) -> Vec<Vec<Vec<String>>> {
    trainings::run(A_RANK, runs)
}

/// Runs trainings; each group prints the same: losses and norms on every rank, weights on every rank, the state on rank 0.
/// Returns for each training what its ranks printed.
#[track_caller]
fn check_equal(groups: &[Vec<(Case, usize)>]) -> Vec<Vec<Vec<String>>> {
    let all = run(&groups.concat());
    let mut printed = all.iter();
    for group in groups {
        let mut first: Option<&Vec<String>> = None;
        for (case, count) in group {
            for (rank, found) in printed.next().unwrap().iter().enumerate() {
                let whole = *first.get_or_insert(found);
                assert!(whole.len() > 20, "{whole:?}");
                let of =
                    |line: &&String| !line.starts_with("bytes") && (rank == 0 || !line.starts_with("state"));
                let expected: Vec<&String> = whole.iter().filter(of).collect();
                let found: Vec<&String> = found.iter().filter(of).collect();
                assert_eq!(expected, found, "rank {rank} of {count}, {case:?}");
            }
        }
    }
    all
}

#[test]
fn no_bit_depends_on_the_number_of_ranks() {
    // In fp32 and without clipping, neither on the stage.
    let three = case(3, 0.0, 4, "");
    let alone = Case { without_ranks: true, ..case(1, 0.0, 4, "") };
    let fp16 = case(3, 0.5, 4, "[precision]\ncompute = \"fp16\"\n");
    let bf16 = Case { bf16: true, ..case(3, 0.5, 4, "") };
    let dropout = Case { dropout: true, ..case(3, 0.5, 3, "[offload]\nring = 1\n") };
    let masters = bf16.recipe.replace("zero_stage", "master_weights = true\nzero_stage");
    let masters = Case { recipe: masters, ..bf16.clone() };
    let stochastic = bf16.recipe.replace("zero_stage", "master_weights = \"stochastic\"\nzero_stage");
    let stochastic = Case { recipe: stochastic, ..bf16.clone() };
    let lora = "[adapter]\nr = 4\n[offload]\nring = 2\n";
    let whole = lora_recipe_with_whole_base(lora);
    // Nor on what the layers keep.
    let keep = |case: &Case| Case { recipe: format!("{}{KEEP}", case.recipe), ..case.clone() };
    // Nor on where the shards are.
    let every_second = case(3, 0.0, 4, "[activations]\nplan = \"every-k\"\n[offload]\nring = 1\n");
    let mut groups = [
        vec![
            (keep(&three), 1),
            (keep(&three), 3),
            (every_second.clone(), 1),
            (every_second, 2),
            (alone, 1),
            (case(2, 0.0, 4, ""), 2),
            (three.clone(), 1),
            (three.clone(), 2),
            (three.clone(), 3),
            (in_replicas(2, &three), 4),
            (in_replicas(2, &keep(&three)), 2),
            (in_files(&three), 1),
            (in_files(&keep(&three)), 2),
            (in_files(&in_replicas(2, &three)), 4),
            (three, 4),
        ],
        // A last round with fewer micro-batches than ranks.
        vec![
            (case(3, 0.5, 5, "[offload]\nresident = [1]\n"), 1),
            (case(3, 0.5, 5, "[offload]\nresident = [1]\n"), 4),
            (case(3, 0.5, 5, "[offload]\nresident = [1]\nkeep = [0, 1]\n"), 4),
        ],
        vec![(dropout.clone(), 1), (dropout.clone(), 2), (keep(&dropout), 2), (dropout, 3)],
        vec![(fp16.clone(), 1), (fp16, 2)],
        // Master weights are the default.
        vec![
            (bf16.clone(), 1),
            (masters.clone(), 1),
            (in_replicas(2, &masters), 4),
            (in_files(&masters), 1),
            (in_files(&masters), 3),
            (masters, 2),
            (keep(&bf16), 3),
        ],
        vec![
            (stochastic.clone(), 1),
            (keep(&stochastic), 3),
            (in_files(&stochastic), 2),
            (in_replicas(2, &stochastic), 4),
        ],
        // Adapters over a frozen base, divided or not.
        vec![
            (case(3, 0.5, 4, lora), 1),
            (case(3, 0.5, 4, lora), 2),
            (case(3, 0.5, 4, lora), 4),
            (in_replicas(2, &case(3, 0.5, 4, lora)), 4),
            (keep(&case(3, 0.5, 4, lora)), 2),
            (case(3, 0.5, 4, "[adapter]\nr = 4\n[offload]\nring = 2\ntier = \"file\"\n"), 2),
            (whole.clone(), 1),
            (keep(&whole), 2),
            (whole, 3),
        ],
    ];
    // Nor on whether the ranks are connected as CPUs are or as GPUs.
    for group in &mut groups {
        let over_devices =
            |(case, count): &(Case, usize)| (Case { place: Place::StandIn, ..case.clone() }, *count);
        group.extend(group.iter().filter(|(_, count)| *count > 1).map(over_devices).collect::<Vec<_>>());
    }
    check_equal(&groups);
}

/// The same training with its ranks in replicas.
fn in_replicas(replicas: usize, case: &Case) -> Case {
    let recipe = case.recipe.replace("zero_stage", &format!("replicas = {replicas}\nzero_stage"));
    Case { recipe, ..case.clone() }
}

const KEEP: &str = "[activations]\nplan = \"keep\"\n";

/// The same training of all weights with its shards and their state in files.
fn in_files(case: &Case) -> Case {
    let recipe = case.recipe.replace("zero_stage", "place = \"host\"\nzero_stage");
    Case { recipe: format!("{recipe}[offload]\ntier = \"file\"\n"), ..case.clone() }
}

fn lora_recipe_with_whole_base(lora: &str) -> Case {
    let case = case(3, 0.5, 4, lora);
    let recipe = case.recipe.replace("zero_stage", "frozen_weights = \"whole\"\nzero_stage");
    Case { recipe, ..case }
}

#[test]
fn a_killed_training_resumes_with_other_numbers_of_ranks_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let unbroken = Case { steps: 6, dropout: true, ..case(3, 0.5, 4, "") };
    let saved = Case { folder: Some(folder.path().to_owned()), ..unbroken.clone() };
    let killed = Case { killed_after: 2, ..in_replicas(2, &saved) };
    let printed = Ranks { lost: &[0, 1, 2, 3], ..Ranks::new(A_RANK, 4) }.run(&[(killed, 4)]);
    // The others name the one that is gone, of four or of the two with it in a replica, or with its shard.
    let names = ["with rank 3", "ranks 2 3`: ", "ranks 1 3`: "];
    let named = |log: &Vec<String>| log.iter().any(|line| names.iter().any(|name| line.contains(name)));
    assert!(printed[..3].iter().any(named), "{printed:?}");
    // With two ranks up to step 4, with three and shards in files to the end; and with one that is not stopped.
    let printed = run(&[(Case { steps: 4, ..saved.clone() }, 2), (in_files(&saved), 3), (unbroken, 1)]);
    let of = |lines| end(lines, 6).into_iter().filter(|line| !line.starts_with("bytes")).collect::<Vec<_>>();
    assert_eq!(of(&printed[1][0]), of(&printed[2][0]));
}

/// Equal up to the order of sums, over replicas and over one, with more and with fewer ranks for each row.
#[test]
fn rows_are_divided_among_other_numbers_of_ranks_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let unbroken = case(3, 0.5, 4, "");
    let until = |steps: u64, parts: usize| {
        let others = format!("sequence_parallel_size = {parts}\n");
        Case { steps, folder: Some(folder.path().to_owned()), ..case(3, 0.5, 4, &others) }
    };
    let printed = run(&[
        (in_replicas(2, &until(2, 2)), 4),
        (until(4, 1), 3),
        (until(6, 2), 2),
        (Case { steps: 6, ..unbroken }, 1),
    ]);
    let losses = |lines: &Vec<String>| -> Vec<f64> {
        let of_step =
            |line: &String| Some(line.strip_prefix("step ")?.split_once(" loss ")?.1[..16].to_owned());
        let number = |bits: String| f64::from_bits(u64::from_str_radix(&bits, 16).unwrap());
        lines.iter().filter_map(of_step).map(number).collect()
    };
    let resumed: Vec<f64> = printed[..3].iter().flat_map(|ranks| losses(&ranks[0])).collect();
    let whole = losses(&printed[3][0]);
    assert_eq!((resumed.len(), whole.len()), (6, 6));
    for (resumed, whole) in resumed.iter().zip(&whole) {
        assert!((resumed / whole - 1.0).abs() < 1e-5, "{resumed} and {whole}");
    }
    assert!((whole[5] / whole[0] - 1.0).abs() > 1e-2, "{whole:?}");
}

#[test]
fn checkpoints_do_not_say_how_many_ranks_wrote_them() {
    let lora = "[adapter]\nr = 4\n";
    let folders: Vec<_> = (0..6).map(|_| tempfile::tempdir().unwrap()).collect();
    let cases = [(case(1, 0.0, 4, ""), 1), (case(3, 0.0, 4, ""), 2), (case(3, 0.0, 4, ""), 4)];
    let adapted = [(case(3, 0.5, 4, lora), 1), (case(3, 0.5, 4, lora), 3)];
    let replicas = [(in_replicas(2, &case(3, 0.0, 4, "")), 4)];
    let runs: Vec<(Case, usize)> = cases
        .into_iter()
        .chain(adapted)
        .chain(replicas)
        .zip(&folders)
        .map(|((case, count), folder)| (Case { folder: Some(folder.path().to_owned()), ..case }, count))
        .collect();
    run(&runs);
    let one = files(folders[0].path());
    assert!(one.len() >= 4);
    assert!(files(folders[1].path()) == one && files(folders[2].path()) == one, "all weights");
    assert!(files(folders[3].path()) == files(folders[4].path()), "adapters");
    assert!(files(folders[5].path()) == one, "replicas");
}

/// The sum over ranks of bytes that each printed.
fn bytes(printed: &[Vec<String>], what: &str) -> u64 {
    let prefix = format!("bytes {what} ");
    let of = |lines: &Vec<String>| {
        lines.iter().find_map(|line| line.strip_prefix(&prefix)?.parse::<u64>().ok()).unwrap()
    };
    printed.iter().map(of).sum()
}

/// Layers and slots of the trainings whose bytes are counted.
const LAYERS: u64 = 4;
const SLOTS: u64 = 2;
const STEPS: u64 = 3;

/// A training in bf16 whose layers are large beside the rest.
fn counted(micro_batches: usize, others: &str) -> Case {
    let case = case(3, 0.0, micro_batches, &format!("[offload]\nring = {SLOTS}\n{others}"));
    let recipe = case.recipe.replace("zero_stage", "master_weights = true\nzero_stage");
    Case { bf16: true, hidden: 128, recipe, ..case }
}

/// Runs a training with one and with two rounds a step. The ranks send as much more as is predicted.
#[track_caller]
fn check_sent(count: usize, others: &str, layout: &Layout) -> Vec<Vec<String>> {
    let of = |rounds: usize| in_replicas(layout.replicas as usize, &counted(rounds * count, others));
    let mut printed = run(&[(of(1), count), (of(2), count)]);
    let ranks = count as u64;
    for (rounds, printed) in [1, 2].into_iter().zip(&printed) {
        let loads = 2 * rounds * (LAYERS - SLOTS) + SLOTS;
        let evaluation = EVALUATED.div_ceil(ranks) * LAYERS;
        assert_eq!(bytes(printed, "loads"), ranks * (STEPS * loads + evaluation));
        let layer = bytes(printed, "layer") / ranks;
        assert_eq!(
            bytes(printed, "gathered"),
            (STEPS * loads + evaluation) * layer * (layout.ranks - 1) * layout.replicas
        );
    }
    let of_round: u64 = (0..ranks)
        .map(|rank| {
            let sent = |rounds| layout.sent_bytes(rank, rounds, SLOTS).unwrap();
            // And an fp64 loss of each micro-batch to each other rank.
            sent(2) - sent(1) + 8 * ranks * (ranks - 1)
        })
        .sum();
    let sent = |printed: &[Vec<String>]| bytes(printed, "sent") + bytes(printed, "gathered");
    assert_eq!(sent(&printed[1]) - sent(&printed[0]), STEPS * of_round);
    printed.swap_remove(0)
}

#[test]
fn bytes_on_the_wire_and_in_memory_are_the_predicted_ones() {
    let model = accounting::Decoder::from_config(&counted(1, "").llama()).unwrap();
    let recipe = AccountingRecipe::BF16_MASTER;
    for count in [2, 3] {
        let ranks = count as u64;
        let layout = Layout::of_decoder(&model, &recipe, ZeroStage::Three, ranks).unwrap();
        // Layers that keep their activations are gathered as often.
        check_sent(count, KEEP, &layout);
        let printed = check_sent(count, "", &layout);
        // bf16 weights, fp32 master copies, sums and two moments, divided; the embedding and the last norm are also whole.
        let live = bytes(&printed, "live");
        let predicted = (0..ranks).map(|rank| {
            let rank = layout.rank_bytes(rank, &recipe, AccountingOptimizer::AdamW, SLOTS).unwrap();
            rank.weights + rank.slots + rank.sums + rank.master + rank.optimizer
        });
        let expected: u64 = predicted.sum();
        let distance = live as f64 / expected as f64 - 1.0;
        assert!(distance.abs() < 0.05, "{live} bytes, expected {expected}");
    }
}

#[test]
fn bytes_between_replicas_are_the_predicted_ones() {
    let model = accounting::Decoder::from_config(&counted(1, "").llama()).unwrap();
    let layout = |ranks| {
        let layout =
            Layout::of_decoder(&model, &AccountingRecipe::BF16_MASTER, ZeroStage::Three, ranks).unwrap();
        layout.with_replicas(2).unwrap()
    };
    check_sent(4, "", &layout(2));
    // Nothing is gathered from others.
    check_sent(2, KEEP, &layout(1));
}

#[test]
fn the_frozen_base_of_adapters_is_gathered_as_often_as_predicted() {
    let model = accounting::Decoder::from_config(&counted(1, "").llama()).unwrap();
    let lora = LowRank { rank: 4, ..LowRank::default() };
    let layout = Layout::of_adapters(&model, &lora, Dtype::Bf16, ZeroStage::Three, 2).unwrap();
    let adapter = "[adapter]\nr = 4\ntarget_modules = [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]\n";
    check_sent(2, adapter, &layout);
}

/// Layers of the model that is read: more than two ranks hold of it beside two whole ones.
const LAYERS_READ: i64 = 6;

#[test]
fn a_model_is_divided_layer_by_layer_as_it_is_read_or_created() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let whole = Case { hidden: 128, layers: LAYERS_READ, steps: 2, ..case(3, 0.5, 3, "") };
    whole.save_model(&path);
    let read = Case { start: Start::Open(path), ..whole.clone() };
    let adapted = |case: &Case, adapter: &str| Case {
        recipe: format!("{}[adapter]\nr = 4\n{adapter}", case.recipe),
        ..case.clone()
    };
    // The norms of DoRA are those of the base, so that the layers are read before.
    let groups = [
        vec![
            (whole.clone(), 2),
            (Case { start: Start::Create, ..whole.clone() }, 2),
            (read.clone(), 2),
            (read.clone(), 1),
        ],
        vec![(adapted(&whole, ""), 3), (adapted(&read, ""), 2)],
        vec![(adapted(&whole, "use_dora = true\n"), 1), (adapted(&read, "use_dora = true\n"), 2)],
    ];
    let printed = check_equal(&groups);
    let of = |number: usize, what: &str| bytes(&printed[number], what) / 2;
    let (layer, shards) = (of(2, "layer"), of(2, "shards"));
    // What stays whole: the embedding, the last norm and the table of positions. And a rank's shards of the adapters.
    let rest = 4 * (61 * 128 + 128) + 64 * 1024;
    let layers = LAYERS_READ as u64;
    let peaks = [0, 1, 2, 5].map(|number| of(number, "start"));
    assert!(peaks[0] > layers * layer, "{peaks:?}: the whole model, layers of {layer}");
    assert!(peaks[1] < shards + 2 * layer + rest, "{peaks:?}: shards of {shards}, layers of {layer}");
    assert!(peaks[2] < shards + layer + rest, "{peaks:?}: shards of {shards}, layers of {layer}");
    assert!(
        peaks[3] < shards + layer + layers * layer / 20 + rest,
        "{peaks:?}: shards of {shards}, layers of {layer}"
    );
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = |optimizer: &str, others: &str| {
        let text = format!("[optimizer]\nzero_stage = 3\n{optimizer}[training]\naccumulation = 4\n{others}");
        let recipe = Recipe::new(&text.parse().unwrap()).unwrap();
        recipe.over(&Group::alone()).unwrap_err().to_string() + "\n"
    };
    expect![[r#"
        `optimizer.place = "host"` and 1 ranks cannot be combined: the ranks' own optimizer steps the shards, where they are; use `optimizer.place = "device"`, or `offload.tier = "file"`, where the shards and their state are in files
        `offload.method` and 1 ranks cannot be combined: layers are gathered into the ring's slots; use `offload.method = "overlap"`
        `activations` and 1 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        `activations.plan = "keep"` in mixed precision and 1 ranks cannot be combined: the activations of a layer then include casts of its weights, which would stay for all layers at once; use `activations.plan = "recompute"`, or `model.dtype = "bfloat16"` with `precision.compute = "fp32"`
    "#]].assert_eq(
        &[
            refused("place = \"host\"\n", "[offload]\n"),
            refused("", "[offload]\nmethod = \"function\"\n"),
            refused("", "[activations]\nplan = \"every-k\"\nrecompute = \"mlp\"\n"),
            refused("", "[activations]\nplan = \"keep\"\n[precision]\ncompute = \"bf16\"\n"),
        ]
        .concat(),
    );
}
