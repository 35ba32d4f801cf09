//! The rows of the table.

use kernels::nf4::Scales;
use models::DecoderConfig;
use models::llama::Family;
use offload::Method;
use tch::{Device, Kind};

use super::{AdapterKind, Head, OptimizerPlace, Pass, Placement, Row};
use training::activations::LayerPlan;

/// A Qwen2 of few layers.
fn qwen2(vocabulary: i64, hidden: i64, inner: i64, layers: i64, heads: i64) -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 512,
        ..DecoderConfig::qwen2(vocabulary, hidden, inner, layers, heads)
    }
}

/// The table: every method, ring, tier, activation plan, set of adapters and placement of the optimizer, on several shapes.
pub fn rows() -> Vec<Row> {
    use LayerPlan::{KeepAll, Offload, RecomputeAll, RecomputeAttention, RecomputeElementwise, RecomputeMlp};
    let offloaded =
        |method, ring| Placement::Offloaded { method, ring, in_files: false, resident: Vec::new() };
    let in_files = |method, ring| Placement::Offloaded { method, ring, in_files: true, resident: Vec::new() };
    let base = Row {
        shape: "square",
        config: qwen2(400, 128, 512, 4, 4),
        batch: [2, 48],
        kind: Kind::Float,
        pass: Pass::Full,
        placement: Placement::Resident(vec![KeepAll; 4]),
        optimizer: OptimizerPlace::None,
        head: Head::Chunks(32),
    };
    // A wide one of few tokens, whose weights are most of a step, and one of many tokens, whose activations are.
    let wide =
        Row { config: qwen2(300, 192, 768, 4, 4), batch: [1, 24], head: Head::Chunks(24), ..base.clone() };
    let wide = Row { placement: Placement::Resident(vec![KeepAll; 4]), ..wide };
    let long =
        Row { config: qwen2(500, 64, 192, 4, 4), batch: [4, 96], head: Head::Chunks(96), ..base.clone() };
    let llama = DecoderConfig {
        num_key_value_heads: 4,
        max_position_embeddings: 512,
        tie_word_embeddings: false,
        ..DecoderConfig::llama(600, 96, 288, 4, 4)
    };
    let llama = Row { shape: "Llama, untied", config: llama, batch: [3, 32], ..base.clone() };
    // Heads that are wide together, as in Qwen3-0.6B.
    let qwen3 = DecoderConfig {
        family: Family::Qwen3,
        head_dim: 64,
        ..DecoderConfig { tie_word_embeddings: true, ..qwen2(500, 128, 320, 4, 4) }
    };
    let qwen3 = Row { shape: "Qwen3", config: qwen3, batch: [3, 64], ..base.clone() };
    let granite = DecoderConfig {
        family: Family::Granite,
        residual_multiplier: 0.22,
        embedding_multiplier: 12.0,
        logits_scaling: 8.0,
        ..llama.config.clone()
    };
    let granite = Row { shape: "Granite", config: granite, batch: [3, 64], ..base.clone() };
    let mut rows = Vec::new();

    for row in [&base, &wide, &long, &llama] {
        let layers = row.config.num_hidden_layers as usize;
        // Activation plans, with the optimizer's state on the device and without.
        for plan in [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll, Offload] {
            rows.push(Row { placement: Placement::Resident(vec![plan; layers]), ..row.clone() });
        }
        rows.push(Row {
            placement: Placement::Resident(vec![RecomputeAll, RecomputeMlp, RecomputeElementwise, KeepAll]),
            optimizer: OptimizerPlace::Device,
            ..row.clone()
        });
        // Methods and rings.
        for pass in [Pass::Inference, Pass::Full] {
            let of = |placement| Row { pass: pass.clone(), placement, ..row.clone() };
            let one = if pass == Pass::Inference { Method::OneLayer } else { Method::Checkpointing };
            rows.push(of(offloaded(one, 1)));
            rows.push(of(offloaded(Method::Function, 1)));
            rows.extend([1, 2, 3].map(|ring| of(offloaded(Method::Overlap, ring))));
        }
        rows.push(Row { pass: Pass::Inference, placement: in_files(Method::Overlap, 2), ..row.clone() });
        rows.push(Row {
            placement: offloaded(Method::Overlap, 2),
            optimizer: OptimizerPlace::Host,
            ..row.clone()
        });
        let some =
            Placement::Offloaded { method: Method::Overlap, ring: 2, in_files: false, resident: vec![1, 3] };
        rows.push(Row { placement: some, optimizer: OptimizerPlace::Host, ..row.clone() });
    }
    let attention =
        Pass::Adapters { targets: &["q", "k", "v", "o"], rank: 8, dropout: 0.0, kind: AdapterKind::Lora };
    // Other families: the plans that differ, and offloaded layers.
    let all = Pass::Adapters {
        targets: &["q", "k", "v", "o", "gate", "up", "down"],
        rank: 4,
        dropout: 0.1,
        kind: AdapterKind::Lora,
    };
    for (row, plan) in [(&qwen3, RecomputeAttention), (&granite, RecomputeMlp)] {
        let of = |pass: &Pass, placement| Row { pass: pass.clone(), placement, ..row.clone() };
        rows.push(of(&Pass::Full, Placement::Resident(vec![KeepAll; 4])));
        rows.push(of(&Pass::Full, Placement::Resident(vec![RecomputeElementwise, plan, RecomputeAll, plan])));
        rows.push(of(&Pass::Inference, offloaded(Method::Overlap, 2)));
        rows.push(of(&attention, Placement::Resident(vec![KeepAll; 4])));
        rows.push(of(&all, offloaded(Method::Function, 1)));
    }
    for row in [&base, &long] {
        let layers = row.config.num_hidden_layers as usize;
        for pass in [attention.clone(), all.clone()] {
            for plan in [KeepAll, RecomputeAll] {
                let placement = Placement::Resident(vec![plan; layers]);
                rows.push(Row {
                    pass: pass.clone(),
                    placement,
                    optimizer: OptimizerPlace::Device,
                    ..row.clone()
                });
            }
            let of = |placement| Row { pass: pass.clone(), placement, ..row.clone() };
            rows.push(of(offloaded(Method::Function, 1)));
            rows.push(of(in_files(Method::Overlap, 2)));
            rows.push(Row { optimizer: OptimizerPlace::Host, ..of(offloaded(Method::Overlap, 3)) });
        }
    }
    // DoRA, with dropout and without; PiSSA, whose layers lie on the device when its adapters are made of them.
    for row in [&base, &long] {
        let of = |pass: &Pass, kind: AdapterKind, plan| {
            let mut pass = pass.clone();
            if let Pass::Adapters { kind: one, .. } = &mut pass {
                *one = kind;
            }
            Row {
                pass,
                placement: Placement::Resident(vec![plan; 4]),
                optimizer: OptimizerPlace::Device,
                ..row.clone()
            }
        };
        for pass in [&attention, &all] {
            for plan in [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll] {
                rows.push(of(pass, AdapterKind::Dora, plan));
            }
            for plan in [KeepAll, RecomputeElementwise, RecomputeAll] {
                rows.push(of(pass, AdapterKind::Pissa, plan));
            }
        }
        for kind in [AdapterKind::Dora, AdapterKind::Pissa] {
            let placement = in_files(Method::Overlap, 2);
            rows.push(Row { placement, optimizer: OptimizerPlace::None, ..of(&attention, kind, KeepAll) });
        }
    }
    // A base in NF4, whose activations are in bf16. Where libtorch multiplies bf16, a product packs its operands into buffers of up to
    // 230 KB, which is a tenth of a small peak and of no other.
    let widens = frugal::planning::widens(Scales::Nested.kind(), Device::Cpu);
    for row in [&wide, &long].into_iter().skip(usize::from(!widens)) {
        let quantized = Row { kind: Scales::Nested.kind(), pass: attention.clone(), ..row.clone() };
        for plan in [KeepAll, RecomputeAll] {
            let placement = Placement::Resident(vec![plan; 4]);
            rows.push(Row { placement, optimizer: OptimizerPlace::Device, ..quantized.clone() });
        }
        rows.push(Row { placement: offloaded(Method::Function, 1), ..quantized.clone() });
        rows.push(Row { placement: in_files(Method::Overlap, 2), ..quantized.clone() });
        let placement = offloaded(Method::Overlap, 3);
        rows.push(Row { placement, optimizer: OptimizerPlace::Host, ..quantized.clone() });
        rows.push(Row { pass: Pass::Inference, placement: offloaded(Method::Overlap, 2), ..quantized });
    }
    for row in [&base, &llama] {
        rows.push(Row { head: Head::Logits, ..row.clone() });
        rows.push(Row { head: Head::Logits, placement: offloaded(Method::Overlap, 2), ..row.clone() });
    }
    rows
}
