//! Weights that are updated during backward: their predicted peaks, and the memory of gradients that is saved.

use super::*;

fn during(config: &mut Config) {
    (config.optimizer.in_backward, config.optimizer.clip) = (true, 0.0);
}

const DURING: Case = Case { name: "fp32", further: during, ..FULL };
const BF16: Case =
    Case { name: "bf16, rounded stochastically", kind: Kind::BFloat16, stochastic: true, ..DURING };

const CASES_DURING: [Case; 9] = [
    DURING,
    Case { name: "recomputed", placement: recompute, length: 100, ..DURING },
    Case { name: "mixed plan", placement: mixed, ..DURING },
    BF16,
    Case { name: "bf16, recomputed", placement: recompute, ..BF16 },
    Case { name: "bf16, 8-bit AdamW", rule: OptimizerRule::AdamW8bit, ..BF16 },
    Case { name: "bf16, 8-bit AdamW, short", rule: OptimizerRule::AdamW8bit, length: 16, rows: 1, ..BF16 },
    Case {
        name: "Lion, MLPs keep their input",
        rule: OptimizerRule::Lion,
        mlp: Some("input-only"),
        ..DURING
    },
    Case { name: "adapters", further: during, ..ADAPTED },
];

#[test]
fn predicted_peaks_of_updates_during_backward_are_those_of_the_allocator() {
    let wrong: Vec<String> =
        models().iter().flat_map(|(model, shape)| compare(model, shape, &CASES_DURING, TOLERANCE)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_gradients_of_layers_are_never_in_memory_at_once() {
    // Few activations beside the weights, and a head of its own.
    let shape = DecoderConfig { max_position_embeddings: 256, ..DecoderConfig::llama(300, 256, 1024, 8, 4) };
    let path = tempfile::tempdir().unwrap();
    let weights = Llama::new(&shape, (Kind::Float, Device::Cpu)).unwrap();
    let parameters: u64 =
        models::module::parameters(&weights).iter().map(|(_, tensor)| tensor.numel() as u64).sum();
    hugging_face::save(&weights, path.path(), hugging_face::SHARD_BYTES).unwrap();
    drop(weights);
    let folder = Folder::open(path.path()).unwrap();
    for (kind, bytes) in [(Kind::Float, 4), (Kind::BFloat16, 2)] {
        let after = Case { kind, stochastic: kind == Kind::BFloat16, rows: 1, length: 8, ..FULL };
        let saved = measured(&after, &folder) - measured(&Case { further: during, ..after }, &folder);
        let gradients = bytes * parameters;
        eprintln!("{kind:?}: {saved} of {gradients} bytes");
        // All but those of a layer.
        assert!(saved > gradients * 8 / 10, "{kind:?}: {saved} of {gradients} bytes");
    }
}
