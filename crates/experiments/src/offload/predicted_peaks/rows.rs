//! The rows of the table of peaks. They cover every offloading method, ring, tier (host memory or files), activation plan, kind of adapters and
//! placement of the optimizer, on models of four layers.

mod families;

use kernels::nf4::Scales;
use models::DecoderConfig;
use models::llama::{Family, Mixture};
use offload::Method;
use tch::{Device, Kind};
use training::activations::LayerPlan::{
    self, KeepAll, Offload, RecomputeAll, RecomputeAttention, RecomputeElementwise, RecomputeMlp,
};

use super::{AdapterKind, Head, OptimizerPlace, Pass, Placement, Row};
pub use families::rows_of_families;

/// Layers of each model.
const LAYERS: usize = 4;
/// Adapters on the projections of attention.
const ATTENTION: Pass = of(&["q", "k", "v", "o"], &[]);
/// Adapters on all projections, with dropout.
const ALL: Pass = Pass::Adapters {
    targets: &["q", "k", "v", "o", "gate", "up", "down"],
    experts: &[],
    rank: 4,
    dropout: 0.1,
    kind: AdapterKind::Lora,
};

/// LoRA of rank 8 on these projections, and on these tensors of all experts.
const fn of(targets: &'static [&'static str], experts: &'static [&'static str]) -> Pass {
    Pass::Adapters { targets, experts, rank: 8, dropout: 0.0, kind: AdapterKind::Lora }
}

/// Returns all rows.
pub fn rows() -> Vec<Row> {
    let Shapes { square, wide, long, llama, qwen3, granite, mixture, few_experts } = Shapes::new();
    // Without own bf16 products, libtorch's allocate packing buffers of up to 230 KB. That is a tenth of the smallest shape's peak, so the
    // shape is left out, and so are the mixtures (81 KB of 1.2 to 5 MB on a Zen 4). Tests under AVX2, without such instructions, have them.
    let widens = frugal::planning::widens(Scales::Nested.kind(), Device::Cpu);
    let quantized_shapes: &[&Row] = if widens { &[&wide, &long, &mixture, &few_experts] } else { &[&long] };
    [
        [&square, &wide, &long, &llama, &mixture]
            .into_iter()
            .flat_map(plans_and_methods)
            .collect::<Vec<Row>>(),
        other_family(&qwen3, RecomputeAttention),
        other_family(&granite, RecomputeMlp),
        [&mixture, &few_experts].into_iter().flat_map(of_attention).collect(),
        [&square, &long].into_iter().flat_map(adapters).collect(),
        [&square, &long].into_iter().flat_map(dora_and_pissa).collect(),
        quantized_shapes.iter().copied().flat_map(quantized).collect(),
        [&square, &llama].into_iter().flat_map(all_logits).collect(),
    ]
    .concat()
}

/// The base row of each shape: a step that trains all weights of resident layers, without an optimizer.
struct Shapes {
    square: Row,
    /// A row with few tokens: its weights are most of a step.
    wide: Row,
    /// A row with many tokens: its activations are most of a step.
    long: Row,
    llama: Row,
    qwen3: Row,
    granite: Row,
    /// A mixture whose tokens are given to all experts.
    mixture: Row,
    /// A mixture whose tokens are equal, and so all given to the same experts.
    few_experts: Row,
}

impl Shapes {
    fn new() -> Self {
        let square = Row {
            shape: "square",
            config: qwen2(400, 128, 512),
            batch: [2, 48],
            kind: Kind::Float,
            pass: Pass::Full,
            placement: resident(KeepAll),
            optimizer: OptimizerPlace::None,
            head: Head::Chunks(32),
        };
        let shaped = |shape, config, batch| Row { shape, config, batch, ..square.clone() };
        let llama = DecoderConfig {
            num_key_value_heads: 4,
            max_position_embeddings: 512,
            tie_word_embeddings: false,
            ..DecoderConfig::llama(600, 96, 288, LAYERS as i64, 4)
        };
        // Heads · head width exceeds the hidden size, as in Qwen3-0.6B.
        let qwen3 = DecoderConfig {
            family: Family::Qwen3,
            head_dim: 64,
            tie_word_embeddings: true,
            ..qwen2(500, 128, 320)
        };
        let granite = DecoderConfig {
            family: Family::Granite,
            residual_multiplier: 0.22,
            embedding_multiplier: 12.0,
            logits_scaling: 8.0,
            ..llama.clone()
        };
        let experts = |experts, per_token| DecoderConfig {
            family: Family::Qwen3Moe,
            tie_word_embeddings: false,
            mixture: Some(Mixture {
                experts,
                per_token,
                intermediate_size: 96,
                shared: None,
                clamped: None,
                normalizes: true,
                step: 1,
                dense_layers: Vec::new(),
            }),
            ..qwen3.clone()
        };
        Self {
            mixture: shaped("mixture", experts(3, 3), [3, 64]),
            few_experts: shaped("mixture, equal tokens", experts(8, 2), [3, 64]),
            wide: Row { head: Head::Chunks(24), ..shaped("square", qwen2(300, 192, 768), [1, 24]) },
            long: Row { head: Head::Chunks(96), ..shaped("square", qwen2(500, 64, 192), [4, 96]) },
            llama: shaped("Llama, untied", llama, [3, 32]),
            qwen3: shaped("Qwen3", qwen3, [3, 64]),
            granite: shaped("Granite", granite, [3, 64]),
            square,
        }
    }
}

/// A Qwen2 of few layers.
fn qwen2(vocabulary: i64, hidden: i64, inner: i64) -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 512,
        ..DecoderConfig::qwen2(vocabulary, hidden, inner, LAYERS as i64, 4)
    }
}

fn resident(plan: LayerPlan) -> Placement {
    Placement::Resident(vec![plan; LAYERS])
}

fn offloaded(method: Method, ring: usize) -> Placement {
    Placement::Offloaded { method, ring, in_files: false, resident: Vec::new() }
}

fn in_files(method: Method, ring: usize) -> Placement {
    Placement::Offloaded { method, ring, in_files: true, resident: Vec::new() }
}

/// Variations of a row.
impl Row {
    fn placed(&self, placement: Placement) -> Self {
        Self { placement, ..self.clone() }
    }

    fn with_optimizer(&self, optimizer: OptimizerPlace) -> Self {
        Self { optimizer, ..self.clone() }
    }

    fn with_pass(&self, pass: &Pass) -> Self {
        Self { pass: pass.clone(), ..self.clone() }
    }
}

/// Each activation plan; mixed plans with the optimizer on the device; each offloading method and ring, in inference and training; files;
/// the optimizer on the host.
fn plans_and_methods(row: &Row) -> Vec<Row> {
    let plans = [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll, Offload];
    let mixed = Placement::Resident(vec![RecomputeAll, RecomputeMlp, RecomputeElementwise, KeepAll]);
    let half_resident =
        Placement::Offloaded { method: Method::Overlap, ring: 2, in_files: false, resident: vec![1, 3] };
    let rings = [(Method::Function, 1), (Method::Overlap, 1), (Method::Overlap, 2), (Method::Overlap, 3)];
    let inference = row.with_pass(&Pass::Inference);
    [
        plans.map(|plan| row.placed(resident(plan))).to_vec(),
        vec![row.placed(mixed).with_optimizer(OptimizerPlace::Device)],
        vec![inference.placed(offloaded(Method::OneLayer, 1))],
        rings.map(|(method, ring)| inference.placed(offloaded(method, ring))).to_vec(),
        vec![row.placed(offloaded(Method::Checkpointing, 1))],
        rings.map(|(method, ring)| row.placed(offloaded(method, ring))).to_vec(),
        vec![
            inference.placed(in_files(Method::Overlap, 2)),
            row.placed(offloaded(Method::Overlap, 2)).with_optimizer(OptimizerPlace::Host),
            row.placed(half_resident).with_optimizer(OptimizerPlace::Host),
        ],
    ]
    .concat()
}

/// Rows of another family: mixed plans with `plan`, which differs in this family, offloaded layers and adapters.
fn other_family(row: &Row, plan: LayerPlan) -> Vec<Row> {
    vec![
        row.clone(),
        row.placed(Placement::Resident(vec![RecomputeElementwise, plan, RecomputeAll, plan])),
        row.with_pass(&Pass::Inference).placed(offloaded(Method::Overlap, 2)),
        row.with_pass(&ATTENTION),
        row.with_pass(&ALL).placed(offloaded(Method::Function, 1)),
    ]
}

/// Adapters on attention and on all projections: resident, offloaded and in files.
fn adapters(row: &Row) -> Vec<Row> {
    let rows_of = |pass: &Pass| {
        let row = row.with_pass(pass);
        [
            row.placed(resident(KeepAll)).with_optimizer(OptimizerPlace::Device),
            row.placed(resident(RecomputeAll)).with_optimizer(OptimizerPlace::Device),
            row.placed(offloaded(Method::Function, 1)),
            row.placed(in_files(Method::Overlap, 2)),
            row.placed(offloaded(Method::Overlap, 3)).with_optimizer(OptimizerPlace::Host),
        ]
    };
    [ATTENTION, ALL].iter().flat_map(rows_of).collect()
}

/// [`adapters`] on attention alone, with each activation plan, and inference.
fn of_attention(row: &Row) -> Vec<Row> {
    let row = row.with_pass(&ATTENTION);
    let plans = [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll];
    let inference = row.with_pass(&Pass::Inference);
    [
        plans.map(|plan| row.placed(resident(plan)).with_optimizer(OptimizerPlace::Device)).to_vec(),
        vec![
            row.placed(offloaded(Method::Function, 1)),
            row.placed(in_files(Method::Overlap, 2)),
            row.placed(offloaded(Method::Overlap, 3)).with_optimizer(OptimizerPlace::Host),
            inference.clone(),
            inference.placed(offloaded(Method::Overlap, 2)),
        ],
    ]
    .concat()
}

/// DoRA and PiSSA, with dropout and without. PiSSA's adapters are computed from the weights, which are on the device then.
fn dora_and_pissa(row: &Row) -> Vec<Row> {
    let kind = |pass: Pass, kind| match pass {
        Pass::Adapters { targets, experts, rank, dropout, .. } => {
            Pass::Adapters { targets, experts, rank, dropout, kind }
        }
        other => other,
    };
    let on_device = |pass: &Pass, adapters: AdapterKind, plans: &[LayerPlan]| -> Vec<Row> {
        let row = row.with_pass(&kind(pass.clone(), adapters));
        plans.iter().map(|&plan| row.placed(resident(plan)).with_optimizer(OptimizerPlace::Device)).collect()
    };
    let of_pass = |pass: &Pass| {
        let dora = [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll];
        let pissa = [KeepAll, RecomputeElementwise, RecomputeAll];
        [on_device(pass, AdapterKind::Dora, &dora), on_device(pass, AdapterKind::Pissa, &pissa)].concat()
    };
    let from_files =
        |adapters| row.with_pass(&kind(ATTENTION, adapters)).placed(in_files(Method::Overlap, 2));
    [of_pass(&ATTENTION), of_pass(&ALL), [AdapterKind::Dora, AdapterKind::Pissa].map(from_files).to_vec()]
        .concat()
}

/// A base in NF4, whose activations are in bf16.
fn quantized(row: &Row) -> Vec<Row> {
    let row = Row { kind: Scales::Nested.kind(), ..row.with_pass(&ATTENTION) };
    vec![
        row.placed(resident(KeepAll)).with_optimizer(OptimizerPlace::Device),
        row.placed(resident(RecomputeAll)).with_optimizer(OptimizerPlace::Device),
        row.placed(offloaded(Method::Function, 1)),
        row.placed(in_files(Method::Overlap, 2)),
        row.placed(offloaded(Method::Overlap, 3)).with_optimizer(OptimizerPlace::Host),
        row.with_pass(&Pass::Inference).placed(offloaded(Method::Overlap, 2)),
    ]
}

/// A loss over all logits at once.
fn all_logits(row: &Row) -> Vec<Row> {
    let row = Row { head: Head::Logits, ..row.clone() };
    vec![row.clone(), row.placed(offloaded(Method::Overlap, 2))]
}
