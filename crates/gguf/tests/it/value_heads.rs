//! The tensors of Qwen3.5's linear attention in a file.

use expect_test::expect;
use gguf::{Array, FileType, Model, ModelFile, ReadOptions, Value};
use serde_json::{Value as Json, json};

use crate::tiny_model::{Tiny, value, values, written};

/// Key head by key head in Hugging Face's files, and in llama.cpp's the first value head of each, then the second.
#[test]
fn value_heads_of_linear_attention_have_another_order() {
    let tiny = Tiny::of("qwen3_5_text");
    let model = Model::open(tiny.folder.path()).unwrap();
    let file = written(&model.convert(FileType::F32).unwrap(), &tiny.path("out.gguf"));
    let first: Vec<&gguf::TensorInfo> =
        file.header().tensors.iter().filter(|tensor| tensor.name.starts_with("blk.0.")).collect();
    let list: String = first.iter().map(|tensor| format!("{} {:?}\n", tensor.name, tensor.shape)).collect();
    expect![[r#"
        blk.0.attn_gate.weight [32, 64]
        blk.0.attn_norm.weight [64]
        blk.0.attn_qkv.weight [64, 64]
        blk.0.ffn_down.weight [64, 96]
        blk.0.ffn_gate.weight [96, 64]
        blk.0.ffn_up.weight [96, 64]
        blk.0.post_attention_norm.weight [64]
        blk.0.ssm_a [4]
        blk.0.ssm_alpha.weight [4, 64]
        blk.0.ssm_beta.weight [4, 64]
        blk.0.ssm_conv1d.weight [64, 4]
        blk.0.ssm_dt.bias [4]
        blk.0.ssm_norm.weight [8]
        blk.0.ssm_out.weight [64, 32]
    "#]]
    .assert_eq(&list);
    // The value heads 0, 2, 1 and 3, each of so many rows after `start`.
    let order = |start: u64, width: u64| {
        let heads = [0, 2, 1, 3]
            .into_iter()
            .flat_map(move |head| (0..width).map(move |row| start + head * width + row));
        (0..start).chain(heads).collect::<Vec<u64>>()
    };
    let tensors = tiny.tensors();
    let of = |name: &str| {
        let name = format!("model.layers.0.linear_attn.{name}");
        let seed = tensors.iter().position(|(other, _)| *other == name).unwrap();
        move |at: u64| value(seed, at)
    };
    let rows = |from: &str, name: &str, order: Vec<u64>, columns: u64| {
        let source = of(from);
        let meant = order.into_iter().flat_map(|row| (0..columns).map(move |column| row * columns + column));
        let meant: Vec<f32> = meant.map(source).collect();
        assert!(values(&file, &format!("blk.0.{name}")) == meant, "{name}");
    };
    rows("in_proj_qkv.weight", "attn_qkv.weight", order(32, 8), 64);
    rows("in_proj_z.weight", "attn_gate.weight", order(0, 8), 64);
    rows("in_proj_a.weight", "ssm_alpha.weight", order(0, 1), 64);
    rows("in_proj_b.weight", "ssm_beta.weight", order(0, 1), 64);
    rows("conv1d.weight", "ssm_conv1d.weight", order(32, 8), 4);
    rows("dt_bias", "ssm_dt.bias", order(0, 1), 1);
    rows("norm.weight", "ssm_norm.weight", (0..8).collect(), 1);
    let decays: Vec<f32> = order(0, 1).into_iter().map(|at| -of("A_log")(at).exp()).collect();
    assert_eq!(values(&file, "blk.0.ssm_a"), decays);
    let columns = |row: u64| order(0, 8).into_iter().map(move |column| row * 32 + column);
    let out: Vec<f32> = (0..64).flat_map(columns).map(of("out_proj.weight")).collect();
    assert!(values(&file, "blk.0.ssm_out.weight") == out);
    for (key, expected) in [
        ("full_attention_interval", 2u32),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 8),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 32),
        ("rope.dimension_count", 4),
    ] {
        assert_eq!(file.header().get(&format!("qwen35.{key}")), Some(&expected.into()), "{key}");
    }
    // llama.cpp has the order of layers as a period.
    let tiny = Tiny::of("qwen3_5_text");
    tiny.change("config.json", |config| {
        config["layer_types"] = json!(["full_attention", "linear_attention"])
    });
    let error = Model::open(tiny.folder.path()).unwrap_err().to_string();
    assert!(error.contains("llama.cpp takes every n-th layer as one that attends in full"), "{error}");
}

#[test]
fn sections_of_images_are_those_of_the_configuration_in_both_directions() {
    let sections = |rope: Json| {
        let tiny = Tiny::of("qwen3_5_text");
        tiny.change("config.json", |config| config["rope_parameters"] = rope);
        let path = tiny.path("out.gguf");
        let model = Model::open(tiny.folder.path()).unwrap();
        let file = written(&model.convert(FileType::F32).map_err(|error| error.to_string())?, &path);
        let read = ModelFile::open(&path, ReadOptions::default()).unwrap();
        let read = read.config()["rope_scaling"]["mrope_section"].clone();
        Ok::<_, String>((file.header().get("qwen35.rope.dimension_sections").cloned(), read))
    };
    let rope = json!({ "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25 });
    let with = |sections: Json| {
        let mut rope = rope.clone();
        rope["mrope_section"] = sections;
        rope
    };
    let stored = |sections: [i32; 4]| Some(Value::Array(Array::I32(sections.to_vec())));
    assert_eq!(sections(with(json!([1, 2, 3]))), Ok((stored([1, 2, 3, 0]), json!([1, 2, 3]))));
    assert_eq!(sections(rope.clone()), Ok((stored([11, 11, 10, 0]), json!([11, 11, 10]))));
    for wrong in [json!([1, 2]), json!([1, 2, -3]), json!("all")] {
        let error = sections(with(wrong)).unwrap_err();
        assert!(error.contains("expected the numbers of pairs for time, height and width"), "{error}");
    }
}
