//! Mixtures of experts: files that hold all experts of a layer in one tensor, the types of their matrices, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gguf::{FileType, Model, ModelFile, ReadOptions, TensorType};
use serde_json::{Map, Value, json};

use crate::tiny_model::{EXPERTS, HIDDEN, INNER, LAYERS, Tiny, value, values, written};

/// Shape and values of each tensor.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

fn read(tiny: &Tiny) -> Tensors {
    let numbers = |(seed, (name, shape)): (usize, (String, Vec<u64>))| {
        let numel = shape.iter().product();
        (name, (shape, (0..numel).map(|at| value(seed, at)).collect()))
    };
    tiny.tensors().into_iter().enumerate().map(numbers).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, (shape, values)) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
}

fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

/// Joins the experts of each layer as transformers has them in memory: gates above ups, or of gpt-oss in turns and transposed.
fn join(tensors: &mut Tensors, is_transposed: bool) {
    for layer in 0..LAYERS {
        let layer = format!("model.layers.{layer}.mlp.experts");
        let mut joint: [Vec<f32>; 4] = Default::default();
        for expert in 0..EXPERTS {
            let mut take =
                |name: &str| tensors.remove(&format!("{layer}.{expert}.{name}")).map(|(_, values)| values);
            let [gate, up, down] =
                ["gate_proj.weight", "up_proj.weight", "down_proj.weight"].map(|name| take(name).unwrap());
            let biases = ["gate_proj.bias", "up_proj.bias", "down_proj.bias"]
                .map(|name| take(name).unwrap_or_default());
            if !is_transposed {
                joint[0].extend(gate.into_iter().chain(up));
                joint[1].extend(down);
                continue;
            }
            let rows = gate.chunks(HIDDEN as usize).zip(up.chunks(HIDDEN as usize));
            let turns: Vec<f32> = rows.flat_map(|(gate, up)| gate.iter().chain(up).copied()).collect();
            joint[0].extend(transposed(&turns, HIDDEN as usize));
            joint[1].extend(transposed(&down, INNER as usize));
            joint[2].extend(biases[0].iter().zip(&biases[1]).flat_map(|(gate, up)| [*gate, *up]));
            joint[3].extend(&biases[2]);
        }
        let [gate_up, down, gate_up_bias, down_bias] = joint;
        let (both, shape) = match is_transposed {
            true => (vec![EXPERTS, HIDDEN, 2 * INNER], vec![EXPERTS, INNER, HIDDEN]),
            false => (vec![EXPERTS, 2 * INNER, HIDDEN], vec![EXPERTS, HIDDEN, INNER]),
        };
        tensors.insert(format!("{layer}.gate_up_proj"), (both, gate_up));
        tensors.insert(format!("{layer}.down_proj"), (shape, down));
        if is_transposed {
            tensors.insert(format!("{layer}.gate_up_proj_bias"), (vec![EXPERTS, 2 * INNER], gate_up_bias));
            tensors.insert(format!("{layer}.down_proj_bias"), (vec![EXPERTS, HIDDEN], down_bias));
        }
    }
}

#[test]
fn experts_in_one_tensor_give_the_same_file() {
    for (family, is_transposed) in [("gpt_oss", true), ("qwen3_5_moe_text", false), ("qwen3_moe", false)] {
        let tiny = Tiny::of(family);
        let convert = |name: &str, kind| {
            let path = tiny.path(name);
            written(&Model::open(tiny.folder.path()).unwrap().convert(kind).unwrap(), &path);
            fs::read(path).unwrap()
        };
        let kinds = [FileType::F32, FileType::Q4KM, FileType::Mxfp4Moe];
        let expected = kinds.map(|kind| convert("apart.gguf", kind));
        let mut tensors = read(&tiny);
        join(&mut tensors, is_transposed);
        write(&tiny.path("model.safetensors"), &tensors);
        let found = kinds.map(|kind| convert("joint.gguf", kind));
        assert!(found == expected, "{family}");
    }
}

/// Names, shapes and types of a layer of gpt-oss, and the order of experts: 2 before 10.
#[test]
fn experts_are_in_the_order_of_their_numbers() {
    let tiny = Tiny::of("gpt_oss");
    let original = read(&tiny);
    let model = Model::open(tiny.folder.path()).unwrap();
    let conversion = model.convert(FileType::F32).unwrap();
    // Yarn's bounds are no whole pairs.
    assert!(conversion.notes().iter().any(|note| note.contains("rounds the bounds of yarn's ramp")));
    let file = written(&conversion, &tiny.path("out.gguf"));
    for (name, part, is_bias) in [
        ("gate", "gate_proj.weight", false),
        ("up", "up_proj.bias", true),
        ("down", "down_proj.weight", false),
    ] {
        let kind = if is_bias { "bias" } else { "weight" };
        let found = values(&file, &format!("blk.1.ffn_{name}_exps.{kind}"));
        let expert = |expert| original[&format!("model.layers.1.mlp.experts.{expert}.{part}")].1.clone();
        let expected: Vec<f32> = (0..EXPERTS).flat_map(expert).collect();
        assert!(found == expected, "{name}");
    }
    for (name, shape) in [
        ("ffn_gate_exps.weight", vec![EXPERTS, INNER, HIDDEN]),
        ("ffn_down_exps.bias", vec![EXPERTS, HIDDEN]),
        ("ffn_gate_inp.weight", vec![EXPERTS, HIDDEN]),
        ("attn_sinks.weight", vec![4]),
        ("post_attention_norm.weight", vec![HIDDEN]),
    ] {
        let at = file.position(&format!("blk.0.{name}")).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(file.header().tensors[at].shape, shape, "{name}");
    }
    let file = written(&model.convert(FileType::Mxfp4Moe).unwrap(), &tiny.path("mxfp4.gguf"));
    let kind = |name: &str| file.header().tensors[file.position(name).unwrap()].kind;
    assert_eq!(kind("blk.0.ffn_up_exps.weight"), TensorType::MXFP4);
    assert_eq!(kind("blk.0.attn_q.weight"), TensorType::Q8_0);
    assert_eq!(kind("output.weight"), TensorType::Q8_0);
    assert_eq!(kind("blk.0.ffn_gate_inp.weight"), TensorType::F32);
    // An expert's rows and blocks are those of its part.
    let read = ModelFile::open(&tiny.path("mxfp4.gguf"), ReadOptions::default()).unwrap();
    let tensor = read.tensor("model.layers.1.mlp.experts.10.up_proj.weight").unwrap();
    let (mut rows, mut decoded) = (Vec::new(), Vec::new());
    read.rows(tensor, 3..7, &mut rows).unwrap();
    tensor.kind.decode(&read.blocks(tensor, 3..7).unwrap().unwrap(), &mut decoded);
    assert_eq!(rows, decoded);
    let stored = values(&file, "blk.1.ffn_up_exps.weight");
    let start = ((10 * INNER + 3) * HIDDEN) as usize;
    assert_eq!(rows, stored[start..start + rows.len()]);
}

#[test]
fn mixtures_that_llama_cpp_would_compute_differently_are_refused() {
    for (family, key, value, expected) in [
        (
            "qwen3_moe",
            "norm_topk_prob",
            json!(false),
            "`norm_topk_prob` of a `qwen3_moe` is not supported: false; llama.cpp divides the weights of a token's experts by their sum",
        ),
        (
            "qwen3_moe",
            "mlp_only_layers",
            json!([0]),
            "`mlp_only_layers` of a `qwen3_moe` is not supported: with which 1 of 2 layers have experts; llama.cpp expects experts in every \
             layer of this family",
        ),
        (
            "gpt_oss",
            "swiglu_limit",
            json!(6.0),
            "`swiglu_alpha` and `swiglu_limit` of a `gpt_oss` is not supported: 1.702 and 6; llama.cpp computes 1.702 and 7",
        ),
        (
            "gpt_oss",
            "attention_bias",
            json!(false),
            "`attention_bias` of a `gpt_oss` is not supported: false; llama.cpp reads biases of this family's attention",
        ),
        (
            "gpt_oss",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "`layer_types` of a `gpt_oss` is not supported: [\"full_attention\",\"sliding_attention\"]; llama.cpp takes every 2th layer as the \
             other kind",
        ),
    ] {
        let tiny = Tiny::of(family);
        tiny.change("config.json", |config| config[key] = value);
        let error = Model::open(tiny.folder.path()).unwrap_err().to_string();
        assert_eq!(error, expected);
    }
    // An expert that is missing.
    let tiny = Tiny::of("gpt_oss");
    tiny.without("experts.7.up_proj.weight");
    let model = Model::open(tiny.folder.path()).unwrap();
    let error = model.convert(FileType::F32).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("`blk.0.ffn_up_exps.weight` has 10 of 11 experts; get the files again"),
        "{error}"
    );
}
