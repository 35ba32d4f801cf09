//! Model folders that are made here: every family in a few kilobytes, without libtorch.

use std::fs;
use std::path::{Path, PathBuf};

use gguf::{Conversion, Reader};
use serde_json::{Map, Value, json};

/// Sizes of all models here.
pub(crate) const HIDDEN: u64 = 64;
pub(crate) const HEADS: u64 = 4;
pub(crate) const KEYS: u64 = 2;
pub(crate) const HEAD: u64 = 16;
pub(crate) const WIDE: u64 = 96;
pub(crate) const ROWS: u64 = 300;
pub(crate) const LAYERS: u64 = 2;
/// Width of a head of linear attention, which has [`KEYS`] key heads and [`HEADS`] value heads, and the window of its convolution.
pub(crate) const LINEAR: u64 = 8;
pub(crate) const WINDOW: u64 = 4;
/// Experts of a mixture, and their width.
pub(crate) const EXPERTS: u64 = 11;
pub(crate) const INNER: u64 = 32;

/// The families with what their configurations have besides the sizes.
pub(crate) fn families() -> Vec<(&'static str, Value)> {
    let kinds = ["sliding_attention", "sliding_attention"];
    let kinds_in_turns = ["sliding_attention", "full_attention"];
    vec![
        ("llama", json!({ "rope_theta": 500_000.0 })),
        ("mistral", json!({ "head_dim": HEAD, "sliding_window": null })),
        (
            "granite",
            json!({
                "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0
            }),
        ),
        ("smollm3", json!({ "no_rope_layers": [1, 1], "tie_word_embeddings": true })),
        ("qwen2", json!({ "tie_word_embeddings": true })),
        ("qwen3", json!({ "head_dim": HEAD })),
        (
            "qwen3_5_text",
            json!({
                "head_dim": HEAD, "full_attention_interval": 2, "linear_num_key_heads": KEYS, "linear_num_value_heads": HEADS,
                "linear_key_head_dim": LINEAR, "linear_value_head_dim": LINEAR, "linear_conv_kernel_dim": WINDOW
            }),
        ),
        (
            "qwen3_moe",
            json!({
                "head_dim": HEAD, "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": INNER,
                "norm_topk_prob": true
            }),
        ),
        (
            "gpt_oss",
            json!({
                "head_dim": HEAD, "num_local_experts": EXPERTS, "num_experts_per_tok": 3, "intermediate_size": INNER,
                "layer_types": kinds_in_turns, "sliding_window": 8, "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                    "beta_slow": 1.0, "truncate": false
                }
            }),
        ),
        (
            "qwen3_5_moe_text",
            json!({
                "head_dim": HEAD, "full_attention_interval": 2, "linear_num_key_heads": KEYS, "linear_num_value_heads": HEADS,
                "linear_key_head_dim": LINEAR, "linear_value_head_dim": LINEAR, "linear_conv_kernel_dim": WINDOW,
                "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": INNER,
                "shared_expert_intermediate_size": INNER
            }),
        ),
        ("olmo2", json!({})),
        ("phi3", json!({ "sliding_window": null, "original_max_position_embeddings": 256 })),
        (
            "gemma2",
            json!({
                "head_dim": HEAD, "query_pre_attn_scalar": HEAD, "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["sliding_attention", "full_attention"]
            }),
        ),
        (
            "gemma3_text",
            json!({
                "head_dim": HEAD, "query_pre_attn_scalar": HEAD, "hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds,
                "sliding_window": 8
            }),
        ),
    ]
}

/// A folder with a model of a family.
pub(crate) struct Tiny {
    pub(crate) folder: tempfile::TempDir,
}

impl Tiny {
    /// A family with its usual options.
    pub(crate) fn of(family: &str) -> Self {
        let own = families().into_iter().find(|(name, _)| *name == family).unwrap().1;
        Self::with(family, own)
    }

    /// A family with other options.
    pub(crate) fn with(family: &str, own: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({
            "model_type": family, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "vocab_size": ROWS, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6, "eos_token_id": 257, "bos_token_id": 256, "tie_word_embeddings": false
        });
        if family.starts_with("gemma") {
            config["tie_word_embeddings"] = true.into();
        }
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let tiny = Self { folder };
        tiny.write("config.json", &config.to_string());
        tiny.write("tokenizer.json", &byte_level_tokenizer().to_string());
        let tensors = tensors(family, config["tie_word_embeddings"] == json!(true));
        write_tensors(&tiny.path("model.safetensors"), &tensors);
        tiny
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// The names and shapes of the tensors, in the order of [`value`]'s seeds.
    pub(crate) fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
        header
            .into_iter()
            .map(|(name, entry)| (name, serde_json::from_value(entry["shape"].clone()).unwrap()))
            .collect()
    }

    /// Writes the tensors again without those whose names end so.
    pub(crate) fn without(&self, ending: &str) {
        let mut tensors = self.tensors();
        tensors.retain(|(name, _)| !name.ends_with(ending));
        write_tensors(&self.path("model.safetensors"), &tensors);
    }

    /// Changes a JSON file.
    pub(crate) fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_str(&fs::read_to_string(self.path(name)).unwrap()).unwrap();
        change(&mut value);
        self.write(name, &value.to_string());
    }
}

/// Writes a conversion to a file, checks it, and opens it.
pub(crate) fn written(conversion: &Conversion<'_>, path: &Path) -> Reader {
    let mut bytes = Vec::new();
    conversion.write(&mut bytes).unwrap();
    fs::write(path, bytes).unwrap();
    conversion.check(path).unwrap();
    Reader::open(path).unwrap()
}

/// Reads a whole tensor.
pub(crate) fn values(file: &Reader, name: &str) -> Vec<f32> {
    let at = file.position(name).unwrap_or_else(|| panic!("no {name}"));
    let shape = &file.header().tensors[at].shape;
    file.rows(at, 0..shape[..shape.len() - 1].iter().product()).unwrap()
}

/// Names and shapes of a family's tensors.
fn tensors(family: &str, tied: bool) -> Vec<(String, Vec<u64>)> {
    let (queries, keys) = (HEADS * HEAD, KEYS * HEAD);
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![ROWS, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    if !tied {
        all.push(("lm_head.weight".to_owned(), vec![ROWS, HIDDEN]));
    }
    for layer in 0..LAYERS {
        let mut put = |name: &str, shape: &[u64]| {
            all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        if family.starts_with("qwen3_5") && layer == 0 {
            let (values, channels) = (HEADS * LINEAR, (2 * KEYS + HEADS) * LINEAR);
            put("linear_attn.in_proj_qkv.weight", &[channels, HIDDEN]);
            put("linear_attn.in_proj_z.weight", &[values, HIDDEN]);
            put("linear_attn.in_proj_b.weight", &[HEADS, HIDDEN]);
            put("linear_attn.in_proj_a.weight", &[HEADS, HIDDEN]);
            put("linear_attn.conv1d.weight", &[channels, 1, WINDOW]);
            put("linear_attn.A_log", &[HEADS]);
            put("linear_attn.dt_bias", &[HEADS]);
            put("linear_attn.norm.weight", &[LINEAR]);
            put("linear_attn.out_proj.weight", &[HIDDEN, values]);
            mlp(family, &mut put);
            put("input_layernorm.weight", &[HIDDEN]);
            put("post_attention_layernorm.weight", &[HIDDEN]);
            continue;
        }
        if family == "phi3" {
            put("self_attn.qkv_proj.weight", &[queries + 2 * keys, HIDDEN]);
        } else {
            let gates = if family.starts_with("qwen3_5") { 2 } else { 1 };
            put("self_attn.q_proj.weight", &[gates * queries, HIDDEN]);
            put("self_attn.k_proj.weight", &[keys, HIDDEN]);
            put("self_attn.v_proj.weight", &[keys, HIDDEN]);
        }
        mlp(family, &mut put);
        if ["qwen2", "llama", "gpt_oss"].contains(&family) {
            put("self_attn.q_proj.bias", &[queries]);
            put("self_attn.k_proj.bias", &[keys]);
            put("self_attn.v_proj.bias", &[keys]);
        }
        put("self_attn.o_proj.weight", &[HIDDEN, queries]);
        if family == "gpt_oss" {
            put("self_attn.o_proj.bias", &[HIDDEN]);
            put("self_attn.sinks", &[HEADS]);
        }
        match family {
            "qwen3" | "qwen3_moe" | "qwen3_5_text" | "qwen3_5_moe_text" | "gemma3_text" => {
                put("self_attn.q_norm.weight", &[HEAD]);
                put("self_attn.k_norm.weight", &[HEAD]);
            }
            "olmo2" => {
                put("self_attn.q_norm.weight", &[queries]);
                put("self_attn.k_norm.weight", &[keys]);
            }
            _ => {}
        }
        if family != "olmo2" {
            put("input_layernorm.weight", &[HIDDEN]);
        }
        put("post_attention_layernorm.weight", &[HIDDEN]);
        if family == "olmo2" || family.starts_with("gemma") {
            put("post_feedforward_layernorm.weight", &[HIDDEN]);
        }
        if family.starts_with("gemma") {
            put("pre_feedforward_layernorm.weight", &[HIDDEN]);
        }
    }
    all
}

/// The MLP of a layer, or its mixture.
fn mlp(family: &str, put: &mut impl FnMut(&str, &[u64])) {
    let has_biases = family == "gpt_oss";
    let matrices = |name: &str, inner: u64| {
        [("gate_proj", inner, HIDDEN), ("up_proj", inner, HIDDEN), ("down_proj", HIDDEN, inner)]
            .map(|(projection, rows, columns)| (format!("mlp.{name}{projection}"), [rows, columns]))
    };
    if family == "phi3" {
        put("mlp.gate_up_proj.weight", &[2 * WIDE, HIDDEN]);
        put("mlp.down_proj.weight", &[HIDDEN, WIDE]);
        return;
    }
    if !["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"].contains(&family) {
        matrices("", WIDE).iter().for_each(|(name, shape)| put(&format!("{name}.weight"), shape));
        return;
    }
    put(if has_biases { "mlp.router.weight" } else { "mlp.gate.weight" }, &[EXPERTS, HIDDEN]);
    if has_biases {
        put("mlp.router.bias", &[EXPERTS]);
    }
    for expert in 0..EXPERTS {
        for (name, shape) in matrices(&format!("experts.{expert}."), INNER) {
            put(&format!("{name}.weight"), &shape);
            if has_biases {
                put(&format!("{name}.bias"), &shape[..1]);
            }
        }
    }
    if family == "qwen3_5_moe_text" {
        matrices("shared_expert.", INNER)
            .iter()
            .for_each(|(name, shape)| put(&format!("{name}.weight"), shape));
        put("mlp.shared_expert_gate.weight", &[1, HIDDEN]);
    }
}

/// The value at a place of a tensor: different for every row and column, and exact in fp32.
pub(crate) fn value(seed: usize, at: u64) -> f32 {
    ((at * 31 + seed as u64 * 17) % 4093) as f32 / 1024.0 - 2.0
}

/// Writes fp32 tensors, whose values [`value`] gives.
pub(crate) fn write_tensors(path: &Path, tensors: &[(String, Vec<u64>)]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (seed, (name, shape)) in tensors.iter().enumerate() {
        let start = data.len();
        let numel: u64 = shape.iter().product();
        data.extend((0..numel).flat_map(|at| value(seed, at).to_le_bytes()));
        header.insert(
            name.clone(),
            json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] }),
        );
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()).unwrap();
}

/// A byte-level tokenizer: 256 bytes, two special tokens, one merge, and one added token that is not a control token.
pub(crate) fn byte_level_tokenizer() -> Value {
    let mut alphabet: Vec<char> = ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').collect();
    alphabet.extend((0..256 - alphabet.len() as u32).map(|n| char::from_u32(256 + n).unwrap()));
    let mut vocab: Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, text)| (text.to_string(), id.into())).collect();
    vocab.insert("he".to_owned(), 258.into());
    let added = |id: u32, text: &str, special: bool| {
        json!({
            "id": id, "content": text, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false
        })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [added(256, "<s>", true), added(257, "<|im_end|>", true), added(259, "▁tool", false)],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [["h", "e"]]
        }
    })
}
