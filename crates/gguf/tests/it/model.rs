//! Conversions of every family: names, shapes, types, metadata, and what happens to rows.

use expect_test::expect;
use gguf::{FileType, Model, Reader, TensorType, Value};
use serde_json::json;

use crate::tiny_model::{HEAD, HIDDEN, LAYERS, Tiny, families, value, values, written};

fn converted(tiny: &Tiny, kind: FileType) -> Reader {
    let model = Model::open(tiny.folder.path()).unwrap();
    written(&model.convert(kind).unwrap(), &tiny.path("out.gguf"))
}

/// The tensors outside of blocks and of block 1, with their shapes.
fn listed(file: &Reader) -> String {
    let one = |tensor: &&gguf::TensorInfo| !tensor.name.starts_with("blk.0.");
    let line = |tensor: &gguf::TensorInfo| format!("{} {:?} {}\n", tensor.name, tensor.shape, tensor.kind);
    file.header().tensors.iter().filter(one).map(line).collect()
}

#[test]
fn every_family_is_converted_to_every_type() {
    for (family, _) in families() {
        let tiny = Tiny::of(family);
        for kind in FileType::ALL {
            let file = converted(&tiny, kind);
            let architecture = file.header().metadata[0].clone();
            let expected = family.trim_end_matches("_text").replace("mistral", "llama");
            let expected =
                expected.replace("qwen3_5", "qwen35").replace("_moe", "moe").replace("gpt_oss", "gpt-oss");
            assert_eq!(architecture, ("general.architecture".to_owned(), expected.as_str().into()));
            let blocks = (0..LAYERS).map(|layer| {
                let own = format!("blk.{layer}.");
                file.header().tensors.iter().filter(|tensor| tensor.name.starts_with(&own)).count()
            });
            let blocks: Vec<usize> = blocks.collect();
            assert!(
                blocks
                    .iter()
                    .all(|count| (family.starts_with("qwen3_5") || *count == blocks[0]) && *count >= 6),
                "{family}: {blocks:?}"
            );
            for tensor in &file.header().tensors {
                // Rows of 64 and 96 are no whole blocks of 256.
                let expected = match (tensor.shape.len(), kind) {
                    (1, _) => TensorType::F32,
                    _ if ["ssm_conv1d.weight", "ffn_gate_inp.weight", "_exps.bias"]
                        .iter()
                        .any(|end| tensor.name.ends_with(end)) =>
                    {
                        TensorType::F32
                    }
                    (3, FileType::Mxfp4Moe) => TensorType::MXFP4,
                    (_, FileType::Q6K) => TensorType::Q8_0,
                    (_, FileType::Q4KM | FileType::Q5KM | FileType::Q4_0) => continue,
                    _ => kind.base(),
                };
                assert_eq!(tensor.kind, expected, "{family}: {}", tensor.name);
            }
        }
    }
}

#[test]
fn the_names_of_llama_phi_olmo_and_gemma_are_those_of_llama_cpp() {
    let of = |family| listed(&converted(&Tiny::of(family), FileType::Q8_0));
    expect![[r#"
        token_embd.weight [300, 64] q8_0
        blk.1.attn_k.bias [32] f32
        blk.1.attn_k.weight [32, 64] q8_0
        blk.1.attn_norm.weight [64] f32
        blk.1.attn_output.weight [64, 64] q8_0
        blk.1.attn_q.bias [64] f32
        blk.1.attn_q.weight [64, 64] q8_0
        blk.1.attn_v.bias [32] f32
        blk.1.attn_v.weight [32, 64] q8_0
        blk.1.ffn_down.weight [64, 96] q8_0
        blk.1.ffn_gate.weight [96, 64] q8_0
        blk.1.ffn_norm.weight [64] f32
        blk.1.ffn_up.weight [96, 64] q8_0
        output.weight [300, 64] q8_0
        output_norm.weight [64] f32
    "#]]
    .assert_eq(&of("llama"));
    expect![[r#"
        token_embd.weight [300, 64] q8_0
        blk.1.attn_norm.weight [64] f32
        blk.1.attn_output.weight [64, 64] q8_0
        blk.1.attn_qkv.weight [128, 64] q8_0
        blk.1.ffn_down.weight [64, 96] q8_0
        blk.1.ffn_norm.weight [64] f32
        blk.1.ffn_up.weight [192, 64] q8_0
        output.weight [300, 64] q8_0
        output_norm.weight [64] f32
    "#]]
    .assert_eq(&of("phi3"));
    expect![[r#"
        token_embd.weight [300, 64] q8_0
        blk.1.attn_k.weight [32, 64] q8_0
        blk.1.attn_k_norm.weight [32] f32
        blk.1.attn_output.weight [64, 64] q8_0
        blk.1.attn_q.weight [64, 64] q8_0
        blk.1.attn_q_norm.weight [64] f32
        blk.1.attn_v.weight [32, 64] q8_0
        blk.1.ffn_down.weight [64, 96] q8_0
        blk.1.ffn_gate.weight [96, 64] q8_0
        blk.1.ffn_up.weight [96, 64] q8_0
        blk.1.post_attention_norm.weight [64] f32
        blk.1.post_ffw_norm.weight [64] f32
        output.weight [300, 64] q8_0
        output_norm.weight [64] f32
    "#]]
    .assert_eq(&of("olmo2"));
    expect![[r#"
        token_embd.weight [300, 64] q8_0
        blk.1.attn_k.weight [32, 64] q8_0
        blk.1.attn_k_norm.weight [16] f32
        blk.1.attn_norm.weight [64] f32
        blk.1.attn_output.weight [64, 64] q8_0
        blk.1.attn_q.weight [64, 64] q8_0
        blk.1.attn_q_norm.weight [16] f32
        blk.1.attn_v.weight [32, 64] q8_0
        blk.1.ffn_down.weight [64, 96] q8_0
        blk.1.ffn_gate.weight [96, 64] q8_0
        blk.1.ffn_norm.weight [64] f32
        blk.1.ffn_up.weight [96, 64] q8_0
        blk.1.post_attention_norm.weight [64] f32
        blk.1.post_ffw_norm.weight [64] f32
        output_norm.weight [64] f32
    "#]]
    .assert_eq(&of("gemma3_text"));
}

/// The place of a tensor among the files' tensors, which its values depend on.
fn seed(tiny: &Tiny, name: &str) -> usize {
    let bytes = std::fs::read(tiny.path("model.safetensors")).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let mut starts: Vec<(u64, String)> = header
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, entry)| (entry["data_offsets"][0].as_u64().unwrap(), name.clone()))
        .collect();
    starts.sort();
    starts.iter().position(|(_, known)| known == name).unwrap()
}

/// Head by head, rows 0, 8, 1, 9, … of 16; biases alike. v and the rest keep their order, and so do the families that rotate halves.
#[test]
fn the_rows_of_q_and_k_are_interleaved_for_llama_alone() {
    for (family, is_interleaved) in [("llama", true), ("qwen2", false)] {
        let tiny = Tiny::of(family);
        let file = converted(&tiny, FileType::F32);
        for (name, new, permuted) in
            [("q_proj", "attn_q", true), ("k_proj", "attn_k", true), ("v_proj", "attn_v", false)]
        {
            for (kind, columns) in [("weight", HIDDEN), ("bias", 1)] {
                let seed = seed(&tiny, &format!("model.layers.1.self_attn.{name}.{kind}"));
                let found = values(&file, &format!("blk.1.{new}.{kind}"));
                for (at, x) in (0u64..).zip(&found) {
                    let (row, column) = (at / columns, at % columns);
                    let within = row % HEAD;
                    let source = match permuted && is_interleaved {
                        true => row - within + within / 2 + (within % 2) * (HEAD / 2),
                        false => row,
                    };
                    assert_eq!(*x, value(seed, source * columns + column), "{family} {name}.{kind} {row}");
                }
            }
        }
    }
}

#[test]
fn gemmas_norms_are_stored_with_one_added() {
    let tiny = Tiny::of("gemma3_text");
    let file = converted(&tiny, FileType::BF16);
    for (name, new) in [
        ("model.norm", "output_norm"),
        ("model.layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm"),
    ] {
        let seed = seed(&tiny, &format!("{name}.weight"));
        for (at, x) in (0u64..).zip(values(&file, &format!("{new}.weight"))) {
            assert_eq!(x, value(seed, at) + 1.0, "{name}");
        }
    }
}

#[test]
fn a_tied_head_is_left_out_except_where_llama_cpp_needs_it() {
    let has_head = |family, tied: bool| {
        let tiny = Tiny::with(family, json!({ "tie_word_embeddings": tied }));
        converted(&tiny, FileType::F16).position("output.weight").is_some()
    };
    assert!(!has_head("llama", true) && has_head("llama", false));
    assert!(has_head("olmo2", true));
}

/// As transformers 5 does. llama.cpp refuses a file of a Gemma 2 with a head ("wrong number of tensors").
#[test]
fn a_head_with_other_values_is_kept_though_the_configuration_ties_it() {
    for family in ["llama", "qwen2", "smollm3", "olmo2", "gemma2", "gemma3_text"] {
        let mut own = families().into_iter().find(|(name, _)| *name == family).unwrap().1;
        own["tie_word_embeddings"] = false.into();
        let tiny = Tiny::with(family, own);
        tiny.change("config.json", |config| config["tie_word_embeddings"] = true.into());
        let model = Model::open(tiny.folder.path());
        if family == "gemma2" {
            let error = model.unwrap_err().to_string();
            assert!(error.starts_with("the output head of a `gemma2` is not supported"), "{error}");
            continue;
        }
        let model = model.unwrap();
        let conversion = model.convert(FileType::F32).unwrap();
        let note =
            "config.json ties the head to the embedding, but the files have another head, which is used";
        assert!(conversion.notes().iter().any(|known| known == note), "{family}");
        let file = written(&conversion, &tiny.path("model.gguf"));
        let seed = seed(&tiny, "lm_head.weight");
        for (at, x) in (0u64..).zip(values(&file, "output.weight")) {
            assert_eq!(x, value(seed, at), "{family}");
        }
    }
}

fn metadata(file: &Reader, prefix: &str) -> String {
    let own = file.header().metadata.iter().filter(|(key, _)| key.starts_with(prefix));
    own.map(|(key, value)| format!("{key} {value:?}\n")).collect()
}

#[test]
fn the_metadata_has_what_llama_cpp_reads() {
    expect![[r#"
        llama.vocab_size U32(300)
        llama.context_length U32(256)
        llama.embedding_length U32(64)
        llama.block_count U32(2)
        llama.feed_forward_length U32(96)
        llama.attention.head_count U32(4)
        llama.attention.head_count_kv U32(2)
        llama.attention.key_length U32(16)
        llama.attention.value_length U32(16)
        llama.attention.layer_norm_rms_epsilon F32(1e-6)
        llama.rope.dimension_count U32(16)
        llama.rope.freq_base F32(500000.0)
    "#]]
    .assert_eq(&metadata(&converted(&Tiny::of("llama"), FileType::F16), "llama."));
    expect![[r#"
        granite.attention.scale F32(0.25)
        granite.attention.layer_norm_rms_epsilon F32(1e-6)
        granite.embedding_scale F32(12.0)
        granite.residual_scale F32(0.22)
        granite.logit_scale F32(8.0)
    "#]]
    .assert_eq(&{
        let all = metadata(&converted(&Tiny::of("granite"), FileType::F16), "granite.");
        let mut lines: Vec<&str> =
            all.lines().filter(|line| line.contains("scale") || line.contains("epsilon")).collect();
        lines.sort_by_key(|line| !line.contains("attention.scale"));
        lines.join("\n") + "\n"
    });
    let general = metadata(&converted(&Tiny::of("llama"), FileType::Q8_0), "general.file_type");
    assert_eq!(general, "general.file_type U32(7)\n");
}

/// The factors of Llama 3.1 at its own sizes: 1 for high frequencies, 8 for low ones. The two between are computed by hand from the
/// formula of transformers' `_compute_llama3_parameters`.
#[test]
fn llama_3_scaling_is_a_tensor_of_factors() {
    let rope = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500_000.0
    });
    for form in [json!({ "rope_parameters": rope }), json!({ "rope_scaling": rope, "rope_theta": 500_000.0 })]
    {
        let file = converted(&Tiny::with("llama", form), FileType::F16);
        let factors = values(&file, "rope_freqs.weight");
        assert_eq!(factors.len() as u64, HEAD / 2);
        for (pair, factor) in factors.iter().enumerate() {
            let wavelength = std::f64::consts::TAU * 500_000f64.powf(pair as f64 / 8.0);
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            let expected = match wavelength {
                short if short < 2048.0 => 1.0,
                long if long > 8192.0 => 8.0,
                _ => 1.0 / ((1.0 - smooth) / 8.0 + smooth),
            };
            assert!((f64::from(*factor) - expected).abs() < 1e-6, "{pair}: {factor} and {expected}");
        }
        assert_eq!((factors[0], factors[7]), (1.0, 8.0));
        assert_eq!(file.header().get("llama.rope.freq_base"), Some(&Value::F32(500_000.0)));
        assert_eq!(file.header().get("llama.rope.scaling.type"), None);
    }
}

#[test]
fn linear_yarn_and_long_rope_are_metadata() {
    let scaling = |family, own| {
        metadata(&converted(&Tiny::with(family, own), FileType::F16), &format!("{family}.rope"))
    };
    expect![[r#"
        qwen2.rope.dimension_count U32(16)
        qwen2.rope.freq_base F32(1000000.0)
        qwen2.rope.scaling.type String("yarn")
        qwen2.rope.scaling.factor F32(4.0)
        qwen2.rope.scaling.original_context_length U32(64)
    "#]]
    .assert_eq(&scaling(
        "qwen2",
        json!({
            "rope_theta": 1e6, "rope_scaling": { "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 }
        }),
    ));
    let long = json!({
        "rope_scaling": { "type": "longrope", "long_factor": vec![2.0; 8], "short_factor": vec![1.0; 8] },
        "original_max_position_embeddings": 64
    });
    // √(1 + ln(256/64) / ln 64) = √(4/3).
    expect![[r#"
        phi3.rope.dimension_count U32(16)
        phi3.rope.freq_base F32(10000.0)
        phi3.rope.scaling.original_context_length U32(64)
        phi3.rope.scaling.attn_factor F32(1.1547005)
    "#]]
    .assert_eq(&scaling("phi3", long.clone()));
    let file = converted(&Tiny::with("phi3", long), FileType::F16);
    assert_eq!(values(&file, "rope_factors_long.weight"), [2.0; 8]);
    assert_eq!(values(&file, "rope_factors_short.weight"), [1.0; 8]);
    let own = json!({
        "head_dim": 16, "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 }
        }
    });
    let file = converted(&Tiny::with("gemma3_text", own), FileType::F16);
    expect![[r#"
        gemma3.rope.dimension_count U32(16)
        gemma3.rope.freq_base F32(1000000.0)
        gemma3.rope.freq_base_swa F32(10000.0)
        gemma3.rope.scaling.type String("linear")
        gemma3.rope.scaling.factor F32(8.0)
    "#]]
    .assert_eq(&metadata(&file, "gemma3.rope"));
}

#[test]
fn rows_that_are_no_whole_blocks_become_f16_and_a_note_says_so() {
    let tiny = Tiny::of("llama");
    tiny.change("config.json", |config| config["intermediate_size"] = 40.into());
    let names = ["gate_proj", "up_proj"].map(|name| (name, vec![40, HIDDEN])).into_iter();
    let names = names.chain([("down_proj", vec![HIDDEN, 40])]);
    rewrite(&tiny, &names.map(|(name, shape)| (format!("mlp.{name}.weight"), shape)).collect::<Vec<_>>());
    let model = Model::open(tiny.folder.path()).unwrap();
    let conversion = model.convert(FileType::Q8_0).unwrap();
    expect!["2 matrices are stored as f16, because their rows are not a multiple of 32 long: blk.0.ffn_down.weight, …"]
        .assert_eq(&conversion.notes().join("\n"));
    let file = written(&conversion, &tiny.path("out.gguf"));
    let kind = |name: &str| file.header().tensors[file.position(name).unwrap()].kind;
    assert_eq!(
        (kind("blk.0.ffn_down.weight"), kind("blk.0.ffn_up.weight")),
        (TensorType::F16, TensorType::Q8_0)
    );
}

/// Down projections of 256 columns have K-quants, rows of 64 what stands for them.
#[test]
fn a_mixture_has_llama_cpps_types_and_is_checked() {
    let tiny = Tiny::of("llama");
    tiny.change("config.json", |config| config["intermediate_size"] = 256.into());
    let names = ["gate_proj", "up_proj"].map(|name| (name, vec![256, HIDDEN])).into_iter();
    let names = names.chain([("down_proj", vec![HIDDEN, 256])]);
    rewrite(&tiny, &names.map(|(name, shape)| (format!("mlp.{name}.weight"), shape)).collect::<Vec<_>>());
    let model = Model::open(tiny.folder.path()).unwrap();
    let conversion = model.convert(FileType::Q4KM).unwrap();
    expect![[r#"
        12 matrices are stored as q5_0, because their rows are not a multiple of 256 long: token_embd.weight, …
        1 matrix is stored as q8_0, because its rows are not a multiple of 256 long: blk.1.attn_v.weight"#]]
    .assert_eq(&conversion.notes().join("\n"));
    let path = tiny.path("out.gguf");
    let file = written(&conversion, &path);
    assert_eq!(file.header().get("general.file_type"), Some(&Value::U32(15)));
    let kind = |name: &str| file.header().tensors[file.position(name).unwrap()].kind.name();
    assert_eq!(
        ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight", "blk.0.attn_v.weight", "output.weight"].map(kind),
        ["q4_K", "q6_K", "q5_0", "q8_0"]
    );
    // The factor of one block's scales is doubled.
    let mut bytes = std::fs::read(&path).unwrap();
    let matrix = file.position("blk.0.ffn_down.weight").unwrap();
    let block = file.raw(matrix, 7..8).unwrap().to_vec();
    let at = bytes.windows(block.len()).position(|part| part == block).unwrap();
    bytes[at + 1] += 4;
    drop(file);
    std::fs::write(&path, bytes).unwrap();
    let error = conversion.check(&path).unwrap_err().to_string();
    assert!(error.contains("`blk.0.ffn_down.weight` was written wrongly"), "{error}");
}

/// Writes the weights again, with other shapes for some of a block's tensors.
fn rewrite(tiny: &Tiny, changed: &[(String, Vec<u64>)]) {
    let bytes = std::fs::read(tiny.path("model.safetensors")).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
    let tensors: Vec<(String, Vec<u64>)> = header
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, entry)| {
            let new = changed.iter().find(|(end, _)| name.ends_with(end)).map(|(_, shape)| shape.clone());
            let shape = new.unwrap_or_else(|| serde_json::from_value(entry["shape"].clone()).unwrap());
            (name.clone(), shape)
        })
        .collect();
    crate::tiny_model::write_tensors(&tiny.path("model.safetensors"), &tensors);
}

/// What is in the file is compared, so damage of a single value is found.
#[test]
fn a_wrong_value_in_the_file_is_found() {
    let tiny = Tiny::of("llama");
    let model = Model::open(tiny.folder.path()).unwrap();
    for kind in FileType::ALL {
        let conversion = model.convert(kind).unwrap();
        let path = tiny.path("out.gguf");
        drop(written(&conversion, &path));
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 100;
        bytes[last] ^= 0x40;
        std::fs::write(&path, bytes).unwrap();
        let error = conversion.check(&path).unwrap_err().to_string();
        assert!(error.contains("`output_norm.weight` was written wrongly"), "{kind}: {error}");
    }
}
