//! A frozen base whose matrices stay in the blocks of a GGUF file.

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Method, OptimizerPlace, Setup, Start, simulate};
use frugal::kernels::quantized::blocks;
use frugal::offload::{Offload, OffloadConfig, Tier};
use frugal::planning::{self, MachineRates, WeightFormat};
use frugal::runtime;
use frugal::runtime::device::pinned_bytes;
use frugal::runtime::memory::{Region, live_bytes};
use gguf::TensorType;
use models::generation::{GenerationConfig, generate};
use models::hugging_face::Folder;
use tch::{Device, Kind};
use training::masked_rows::Arrangement::Packed;

use super::{ADAPTED, Case, alone, compare_in, dora, files, mixed, pissa, recompute, token_rows};
use crate::blocks_file::Shape;

/// The share of the measured peak by which a prediction may be wrong.
const TOLERANCE: f64 = 0.03;

/// All logits are one chunk: of several, a batch of fewer labels may have larger ones.
const IN_BLOCKS: Case = Case { name: "blocks", kind: blocks::KIND, chunk: 256, ..ADAPTED };
const CASES: [Case; 10] = [
    IN_BLOCKS,
    Case { name: "blocks, no dropout", adapters: Some(alone), length: 24, rows: 2, ..IN_BLOCKS },
    Case { name: "blocks, packed", arrangement: Packed(64), length: 25, ..IN_BLOCKS },
    Case { name: "blocks, recomputed", placement: recompute, length: 100, ..IN_BLOCKS },
    Case { name: "blocks, mixed plan", placement: mixed, accumulation: 2, ..IN_BLOCKS },
    Case { name: "blocks, two rows at a time", at_once: Some(2), ..IN_BLOCKS },
    Case { name: "blocks, DoRA", adapters: Some(dora), ..IN_BLOCKS },
    Case { name: "blocks, PiSSA, recomputed", adapters: Some(pissa), placement: recompute, ..IN_BLOCKS },
    Case { name: "blocks, rows of tokens", adapters: Some(token_rows), ..IN_BLOCKS },
    Case { name: "blocks, layers in files", placement: files, ..IN_BLOCKS },
];

/// The widths are whole blocks of every type. A tile of the larger output matrix is not the whole matrix, in either direction.
const SHAPES: [(&str, Shape); 2] = [
    (
        "qwen2",
        Shape {
            architecture: "qwen2",
            vocabulary: 600,
            hidden: 256,
            inner: 512,
            layers: 4,
            embedding: TensorType::Q6K,
            output: None,
        },
    ),
    (
        "llama, untied",
        Shape {
            architecture: "llama",
            vocabulary: 20_000,
            hidden: 256,
            inner: 768,
            layers: 5,
            embedding: TensorType::Q4K,
            output: Some(TensorType::Q8_0),
        },
    ),
];

#[test]
fn predicted_peaks_of_a_base_in_blocks_are_those_of_the_allocator() {
    let mut wrong = Vec::new();
    for (name, shape) in &SHAPES {
        let scratch = tempfile::tempdir().unwrap();
        let folder = shape.open(scratch.path());
        assert_eq!(folder.config().tie_word_embeddings, shape.output.is_none());
        assert_eq!(folder.kind().unwrap(), Kind::BFloat16);
        // All labels of a batch may be in the rows of one pass: that is a bound, wide where there are many logits.
        let (exact, bounds): (Vec<Case>, Vec<Case>) =
            CASES.into_iter().partition(|case| case.at_once.is_none());
        wrong.extend(compare_in(name, &folder, &exact, TOLERANCE));
        if shape.output.is_none() {
            wrong.extend(compare_in(name, &folder, &bounds, 0.05));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Layers of three sizes, most of the model.
const DEEP: Shape = Shape {
    architecture: "llama",
    vocabulary: 600,
    hidden: 256,
    inner: 768,
    layers: 18,
    embedding: TensorType::Q6K,
    output: None,
};

fn options(tier: Tier, ring: usize, resident: &[usize]) -> OffloadConfig {
    OffloadConfig { tier, ring, resident: resident.to_vec(), ..OffloadConfig::default() }
}

fn held() -> u64 {
    live_bytes(Device::Cpu).unwrap() + pinned_bytes(Device::Cpu).unwrap().live
}

/// A layer goes to its tier before the next one is read, so a model that is larger than a budget is opened within it.
#[test]
fn a_base_in_blocks_is_read_layer_by_layer() {
    runtime::memory::track_cpu().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let folder = DEEP.open(scratch.path());
    let stored = WeightFormat::of(&folder, blocks::KIND).unwrap().stored.unwrap();
    let before = held();
    let region = Region::start(Device::Cpu).unwrap();
    let tier = Tier::File(scratch.path().to_owned());
    let (model, offload) = Offload::open(&folder, Some(blocks::KIND), &options(tier, 2, &[])).unwrap();
    let peak = region.finish().unwrap().peak + pinned_bytes(Device::Cpu).unwrap().live - before;
    // The embedding, a layer, and norms and angles.
    let most = stored.outer + 2 * stored.largest_layer + (64 << 10);
    assert!(peak < most && most < stored.layers / 3, "{peak} {most} {}", stored.layers);
    drop((model, offload));

    let (model, offload) = Offload::open(&folder, Some(blocks::KIND), &options(Tier::Host, 1, &[])).unwrap();
    let of_layers = offload.host_bytes().unwrap();
    assert!((stored.layers..stored.layers * 21 / 20).contains(&of_layers), "{of_layers} {}", stored.layers);
    drop(model);
}

/// The peak of generating after prompts, with some layers resident, whose sizes differ. A few vectors are multiplied without a tile, which the
/// prediction has nevertheless.
#[test]
fn predicted_peaks_of_generating_over_blocks_are_those_of_the_allocator() {
    runtime::memory::track_cpu().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let folder = DEEP.open(scratch.path());
    let peaks = |(ring, resident): (usize, &[usize]), (rows, length): (u64, u64)| {
        let predicted = generation_peak(&folder, (ring, resident), (rows, length));
        let tier = Tier::File(scratch.path().to_owned());
        let before = held();
        let (model, _offload) =
            Offload::open(&folder, Some(blocks::KIND), &options(tier, ring, resident)).unwrap();
        let prompt = |row: i64| (0..length as i64).map(|at| (17 * at + row) % 256).collect();
        let prompts: Vec<Vec<i64>> = (0..rows as i64).map(prompt).collect();
        let config = GenerationConfig { max_new_tokens: NEW as usize, ..GenerationConfig::default() };
        let region = Region::start(Device::Cpu).unwrap();
        generate(&model, &prompts, &config, &mut ()).unwrap();
        let measured = region.finish().unwrap().peak - before;
        eprintln!(
            "ring {ring}, resident {resident:?}, {rows} × {length}: {predicted} B predicted, {measured} B measured"
        );
        (predicted, measured)
    };
    // What is allocated once in a process.
    peaks((1, &[]), (1, 8));
    let all: Vec<usize> = (0..DEEP.layers).collect();
    let cases: [(usize, &[usize]); 4] = [(1, &[]), (3, &[]), (2, &[1, 4, 7, 10, 13, 16]), (1, &all)];
    for case in cases {
        let (predicted, measured) = peaks(case, (3, 60));
        let off = predicted as f64 / measured as f64 - 1.0;
        assert!(off.abs() <= TOLERANCE, "{case:?}: {predicted} {measured}");
        let (predicted, measured) = peaks(case, (1, 8));
        let tile = 4 * DEEP.inner * DEEP.hidden;
        assert!(
            (measured..measured * 103 / 100 + tile).contains(&predicted),
            "{case:?}: {predicted} {measured}"
        );
    }
}

const NEW: u64 = 6;

fn generation_peak(folder: &Folder, (ring, resident): (usize, &[usize]), (rows, length): (u64, u64)) -> u64 {
    let format = WeightFormat::of(folder, blocks::KIND).unwrap();
    let rates = MachineRates::NOMINAL;
    let choices =
        Choices { recipe: format.recipe(), ..planning::choices((blocks::KIND, Device::Cpu), &rates, length) };
    let model = Decoder::from_config(folder.config()).unwrap();
    let work = Workload { batch: rows, sequence: length };
    let costs = sizes::generation(&model, work, NEW, &choices).unwrap();
    let setup = Setup {
        method: Method::Overlap { ring },
        resident: resident.to_vec(),
        optimizer: OptimizerPlace::Host,
    };
    simulate(&costs, &rates.transfers, &setup, Start::Warm).unwrap().device.total
}
