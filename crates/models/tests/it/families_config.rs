//! `config.json` of published models of each family, in the forms that are on the hub, and what is refused by name.

use decoder::rope::Frequencies;
use models::llama::Family;
use models::{DecoderConfig, Llama};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn read(file: &Value) -> Result<DecoderConfig, String> {
    serde_json::from_value(file.clone()).map_err(|error: serde_json::Error| error.to_string())
}

/// The file with sizes: vocabulary, hidden, MLP, layers, heads and key heads.
fn file(family: &str, sizes: [i64; 6], fields: &Value) -> Value {
    let [vocabulary, hidden, inner, layers, heads, kv_heads] = sizes;
    let mut file = json!({
        "model_type": family, "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    });
    for (name, value) in fields.as_object().unwrap() {
        file[name] = value.clone();
    }
    file
}

fn tiny(family: &str, fields: &Value) -> Value {
    file(family, [40, 16, 24, 4, 4, 2], fields)
}

#[test]
fn published_files_are_read_as_transformers_reads_them() {
    let check = |family: Family, sizes, fields: Value, parameters: u64| {
        let written = file(family.model_type(), sizes, &fields);
        let config = read(&written).unwrap();
        assert_eq!((config.family, config.parameter_count()), (family, parameters));
        let again: DecoderConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again, config, "what is written is read as the same");
        config
    };
    // Qwen3-0.6B.
    let fields = json!({
        "head_dim": 128, "tie_word_embeddings": true, "rope_theta": 1_000_000, "sliding_window": null,
        "use_sliding_window": false, "max_window_layers": 28, "attention_bias": false, "rope_scaling": null,
    });
    let qwen3 = check(Family::Qwen3, [151_936, 1024, 3072, 28, 16, 8], fields, 596_049_920);
    assert!((0..28).all(|layer| qwen3.window(layer).is_none()));
    // Qwen3-30B-A3B.
    let fields = json!({
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1_000_000, "sliding_window": null, "output_router_logits": false,
    });
    let mixture = check(Family::Qwen3Moe, [151_936, 2048, 6144, 48, 32, 4], fields, 30_532_122_624);
    assert_eq!(mixture.mixture_layers(), 48);
    // gpt-oss-20b, as published: the count is that of transformers' `GptOssForCausalLM`.
    let fields = json!({
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": true,
        "rope_theta": 150_000, "swiglu_limit": 7.0, "sliding_window": 128, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096
        },
    });
    let gpt_oss = check(Family::GptOss, [201_088, 2880, 2880, 24, 64, 8], fields, 20_914_757_184);
    assert!((0..24).all(|layer| gpt_oss.window(layer) == (layer % 2 == 0).then_some(128)));
    // A file without a rotary embedding has that of the published models.
    let plain = read(&file("gpt_oss", [201_088, 2880, 2880, 24, 64, 8], &json!({ "num_local_experts": 32 })))
        .unwrap();
    assert_eq!((plain.rope, plain.parameter_count()), (gpt_oss.rope, 20_914_757_184));
    // The defaults of transformers' Qwen3_5TextConfig, which are those of Qwen3.5-9B; the count is that of its `Qwen3_5ForCausalLM`.
    let rope = json!({ "rope_type": "default", "rope_theta": 1e7, "mrope_section": [12, 11, 9], "mrope_interleaved": true });
    let fields = json!({ "rope_parameters": rope });
    let qwen35 = check(Family::Qwen35, [248_320, 4096, 12288, 32, 16, 4], fields, 8_953_803_264);
    assert_eq!((qwen35.rotary_dim(), qwen35.linear_layers()), (64, 24));
    let again = serde_json::to_value(&qwen35).unwrap();
    for name in ["mrope_section", "mrope_interleaved"] {
        assert_eq!((&again["rope_parameters"][name], again.get(name)), (&rope[name], None));
    }
    assert!((0..32).all(|layer| qwen35.is_linear(layer) == ((layer + 1) % 4 != 0)));
    // Qwen3_5MoeTextConfig, Qwen3.5-35B-A3B, without a width of an MLP.
    let mut written = file("qwen3_5_moe_text", [248_320, 2048, 0, 40, 16, 2], &json!({ "num_experts": 256 }));
    written.as_object_mut().unwrap().remove("intermediate_size");
    let config = read(&written).unwrap();
    assert_eq!((config.family, config.parameter_count()), (Family::Qwen35Moe, 34_660_610_688));
    assert_eq!((config.linear_layers(), config.mixture_layers()), (30, 40));
    let again = serde_json::to_value(&config).unwrap();
    assert!(again.get("intermediate_size").is_none() && again.get("norm_topk_prob").is_none());
    assert_eq!(serde_json::from_value::<DecoderConfig>(again).unwrap(), config);
    // Mistral-7B-v0.1, and v0.3 without a window.
    let sizes = [32000, 4096, 14336, 32, 32, 8];
    let mistral =
        check(Family::Mistral, sizes, json!({ "sliding_window": 4096, "rms_norm_eps": 1e-5 }), 7_241_732_096);
    assert_eq!((mistral.window(0), mistral.window(31)), (Some(4096), Some(4096)));
    let mistral = check(
        Family::Mistral,
        [32768, 4096, 14336, 32, 32, 8],
        json!({ "sliding_window": null, "rope_theta": 1e6 }),
        7_248_023_552,
    );
    assert_eq!(mistral.window(0), None);
    // SmolLM3-3B; the file does not say that the head is tied.
    let smollm3 = check(
        Family::SmolLm3,
        [128_256, 2048, 11008, 36, 16, 4],
        json!({ "no_rope_layer_interval": 4, "rope_theta": 5e6, "use_sliding_window": false, "sliding_window": null }),
        3_075_098_624,
    );
    assert!((0..36).all(|layer| smollm3.layer_rope(layer).is_none() == ((layer + 1) % 4 == 0)));
    // Granite-3.1-2B.
    let fields = json!({
        "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8.0,
        "tie_word_embeddings": true,
    });
    let granite = check(Family::Granite, [49155, 2048, 8192, 40, 32, 8], fields, 2_533_531_648);
    assert_eq!(granite.attention_scale(), Some(0.015625));
    // OLMo-2-1124-7B.
    check(Family::Olmo2, [100_352, 4096, 11008, 32, 32, 32], json!({ "rope_theta": 500_000 }), 7_298_617_344);
    // Gemma 3 1B in the form of the hub, with a pattern, another under the name that transformers writes and does not read, and two thetas.
    let fields = json!({
        "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "_sliding_window_pattern": 2, "rope_local_base_freq": 10000,
        "rope_theta": 1_000_000, "rope_scaling": null, "query_pre_attn_scalar": 256, "final_logit_softcapping": null,
        "attn_logit_softcapping": null, "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
    });
    let gemma3 = check(Family::Gemma3, [262_144, 1152, 6912, 26, 4, 1], fields, 999_885_952);
    for layer in 0..26 {
        let full = (layer + 1) % 6 == 0;
        assert_eq!(gemma3.window(layer), (!full).then_some(512));
        let theta = if full { 1e6 } else { 1e4 };
        assert_eq!(gemma3.layer_rope(layer), Some(&Frequencies { theta, ..Frequencies::default() }));
    }
    assert_eq!(gemma3.attention_scale(), Some(1.0 / 16.0));
    // Gemma 2 2B, whose older files leave the caps out.
    let gemma2 = check(
        Family::Gemma2,
        [256_000, 2304, 9216, 26, 8, 4],
        json!({ "head_dim": 256, "hidden_act": "gelu_pytorch_tanh" }),
        2_614_341_888,
    );
    assert_eq!((gemma2.window(0), gemma2.window(1)), (Some(4096), None));
    assert_eq!((gemma2.attn_logit_softcapping, gemma2.final_logit_softcapping), (Some(50.0), Some(30.0)));
    // Gemma 4 E2B, whose file nests its text model's. Counts are those of transformers' `Gemma4ForCausalLM`.
    let types: Vec<&str> =
        (1..=35).map(|layer| if layer % 5 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let fields = json!({
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": null, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": true, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "sliding_window": 512,
        "layer_types": types, "final_logit_softcapping": 30.0, "use_bidirectional_attention": null, "enable_moe_block": false,
        "hidden_activation": "gelu_pytorch_tanh",
    });
    let gemma4 = check(Family::Gemma4, [262_144, 1536, 6144, 35, 8, 1], fields, 4_628_569_344);
    assert_eq!(
        [0, 13, 14, 15, 19, 34].map(|layer| gemma4.key_layer(layer)),
        [0, 13, 14, 13, 14, 14],
        "the last layers of each type before the 20 that share"
    );
    assert_eq!((0..35).filter(|&layer| gemma4.gives_keys(layer)).collect::<Vec<_>>(), [13, 14]);
    assert_eq!([13, 14, 15, 34].map(|layer| gemma4.layer_head_dim(layer)), [256, 512, 256, 512]);
    assert_eq!([14, 15].map(|layer| gemma4.layer_intermediate_size(layer)), [6144, 12288]);
    assert_eq!(
        (gemma4.attention_scale(), gemma4.window(13), gemma4.window(14)),
        (Some(1.0), Some(512), None)
    );
    // transformers' `_compute_proportional_rope_parameters`: 64 pairs of 256 rotate.
    let angles = gemma4.layer_rope(14).unwrap().angles(512).unwrap();
    assert!((angles[63] / 1e6f64.powf(-126.0 / 512.0) - 1.0).abs() < 1e-12);
    assert!(angles[63] > 0.0 && angles[64..].iter().all(|angle| *angle == 0.0));
    // Gemma 4 31B: values that are keys, and no second embedding.
    let fields = json!({
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": true,
        "hidden_size_per_layer_input": null, "sliding_window": 1024, "use_bidirectional_attention": "vision",
    });
    let gemma4 = check(Family::Gemma4, [262_144, 5376, 21504, 60, 32, 16], fields, 30_697_345_280);
    assert_eq!([4, 5].map(|layer| gemma4.layer_kv_heads(layer)), [16, 4]);
    assert_eq!([4, 5].map(|layer| gemma4.has_value_projection(layer)), [true, false]);
    // The last layer attends in full, whatever the list has; the form of transformers 5.
    let fields = json!({
        "layer_types": vec!["sliding_attention"; 4], "per_layer_config": { "3": { "head_dim": 64 } }, "head_dim": 8,
        "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8,
    });
    let last = read(&tiny("gemma4_text", &fields)).unwrap();
    assert_eq!([2, 3].map(|layer| last.layer_head_dim(layer)), [8, 64]);
    // Phi-3-mini-128k, in the older form.
    let factors = |first: f64| (0..48).map(|pair| first + f64::from(pair)).collect::<Vec<_>>();
    let fields = json!({
        "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "sliding_window": 262_144,
        "rope_scaling": { "type": "su", "short_factor": factors(1.0), "long_factor": factors(1.5) },
    });
    let phi3 = check(Family::Phi3, [32064, 3072, 8192, 32, 32, 32], fields, 3_821_079_552);
    let long = phi3.long_rope.unwrap();
    assert_eq!((long.original_positions, long.long_factor[47]), (4096, 48.5));
    assert!((long.amplitude(131_072) - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-15);
    // Phi-4-mini rotates three quarters of a head.
    let fields = json!({ "partial_rotary_factor": 0.75, "tie_word_embeddings": true });
    let phi4 = check(Family::Phi3, [200_064, 3072, 8192, 32, 24, 8], fields, 3_836_021_760);
    assert_eq!(phi4.rotary_dim(), 96);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let long = |short: &[f64]| {
        json!({ "rope_type": "longrope", "short_factor": short, "long_factor": [1.0, 2.0],
                "original_max_position_embeddings": 8 })
    };
    for (family, fields, expected) in [
        (
            "qwen2_moe",
            json!({}),
            "`model_type` is `qwen2_moe` (of the mixtures of experts, qwen3_moe, qwen3_5_moe_text and gpt_oss are supported); expected one of llama,",
        ),
        (
            "qwen3_moe",
            json!({ "num_experts": 4, "num_local_experts": 8 }),
            "`num_local_experts` is 8 and `num_experts` 4; they must agree",
        ),
        (
            "qwen3_moe",
            json!({ "num_experts": 4 }),
            "`num_experts_per_tok` is 8; expected a number from 1 to 4",
        ),
        (
            "qwen3_moe",
            json!({ "num_experts": 1_000_000 }),
            "`num_experts` is 1000000; expected a number from 1 to 2048",
        ),
        (
            "qwen3_moe",
            json!({ "output_router_logits": true }),
            "`output_router_logits` is true, which adds the load-balancing loss to every loss",
        ),
        (
            "gpt_oss",
            json!({ "swiglu_limit": 0.0 }),
            "`swiglu_limit` is 0.0; expected a number from 1e-9 to 1e9",
        ),
        (
            "gpt_oss",
            json!({ "layer_types": ["sliding_attention"] }),
            "`layer_types` has 1 entries for 4 layers",
        ),
        (
            "qwen3_next",
            json!({}),
            "`model_type` is `qwen3_next` (the projections of its linear attention are grouped by key head, which is not supported;",
        ),
        (
            "qwen3_5_text",
            json!({ "linear_num_key_heads": 3, "linear_num_value_heads": 4 }),
            "`linear_num_key_heads` 3 does not divide `linear_num_value_heads` 4; take a divisor",
        ),
        (
            "qwen3_5_text",
            json!({ "linear_conv_kernel_dim": 65 }),
            "`linear_conv_kernel_dim` is 65; expected a number from 1 to 64",
        ),
        (
            "qwen3_5_text",
            json!({ "layer_types": vec!["sliding_attention"; 4] }),
            "attention has a sliding window, which `qwen3_5_text` does not have",
        ),
        (
            "qwen3_5_text",
            json!({ "full_attention_interval": 0 }),
            "`full_attention_interval` is 0; expected at least 1",
        ),
        (
            "qwen3_5_text",
            json!({ "attn_output_gate": false }),
            "`attn_output_gate` is false; expected true, since the output of attention has a gate",
        ),
        (
            "gemma3",
            json!({}),
            "`model_type` is `gemma3` (it also reads images; its text model alone is supported); expected",
        ),
        (
            "granitemoehybrid",
            json!({}),
            "(of the mixtures of experts, qwen3_moe, qwen3_5_moe_text and gpt_oss are supported)",
        ),
        (
            "qwen3",
            json!({ "rope_scaling": { "rope_type": "proportional", "factor": 4.0 } }),
            "has the scaling `proportional`; expected default,",
        ),
        (
            "qwen3",
            json!({ "partial_rotary_factor": 0.5 }),
            "`partial_rotary_factor` is 0.5; expected 1, since heads",
        ),
        (
            "qwen3",
            json!({ "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"] }),
            "`layer_types` has a `linear_attention` layer, which `qwen3` does not have; expected full_attention or sliding_attention",
        ),
        (
            "qwen3",
            json!({ "layer_types": vec!["chunked_attention"; 4] }),
            "`layer_types` has a `chunked_attention` layer; expected full_attention, sliding_attention or linear_attention",
        ),
        (
            "qwen3",
            json!({ "layer_types": vec!["sliding_attention"; 4], "sliding_window": 8 }),
            "but `use_sliding_window` is not true; they must agree",
        ),
        (
            "mistral",
            json!({ "layer_types": vec!["full_attention"; 4], "sliding_window": 8 }),
            "but every layer of `mistral` has the `sliding_window`; leave one of them out",
        ),
        (
            "mistral",
            json!({ "sliding_window": 0 }),
            "`sliding_window` is 0; expected at least 1, or null for no window",
        ),
        ("mistral", json!({ "hidden_act": "relu" }), "`hidden_act` is `relu`; expected silu"),
        ("olmo2", json!({ "use_sliding_window": true }), "which `olmo2` does not have"),
        (
            "smollm3",
            json!({ "no_rope_layers": [1, 0] }),
            "`no_rope_layers` has 2 entries for 4 layers; give each layer one",
        ),
        (
            "smollm3",
            json!({ "no_rope_layers": "all" }),
            "`no_rope_layers` is \"all\"; expected a list of 1 (rotates) and 0",
        ),
        (
            "granite",
            json!({ "residual_multiplier": 0.0 }),
            "`residual_multiplier` is 0.0; expected a number from 1e-9 to 1e9",
        ),
        ("granite", json!({ "logits_scaling": "8" }), "`logits_scaling`: invalid type"),
        (
            "gemma3_text",
            json!({ "hidden_activation": "silu" }),
            "`hidden_activation` is `silu`; expected gelu_pytorch_tanh",
        ),
        ("gemma3_text", json!({ "use_bidirectional_attention": true }), "expected causal attention"),
        (
            "gemma4_text",
            json!({ "enable_moe_block": true }),
            "`enable_moe_block` is true: the mixture of experts of a Gemma 4 is not supported; its dense models are",
        ),
        (
            "gemma4_text",
            json!({ "num_kv_shared_layers": 4 }),
            "`num_kv_shared_layers` is 4; expected a number from 0 to 3",
        ),
        (
            "gemma4_text",
            json!({ "num_kv_shared_layers": 1 }),
            "layer 3 is a full_attention layer among the last 1 of `num_kv_shared_layers`, and no layer of its type is before them",
        ),
        (
            "gemma4_text",
            json!({ "vocab_size_per_layer_input": 39 }),
            "`vocab_size_per_layer_input` is 39 and `vocab_size` 40; expected a row for each token",
        ),
        (
            "gemma4_text",
            json!({ "per_layer_config": { "3": { "intermediate_size": 8 } } }),
            "`per_layer_config`: layer 3 has `intermediate_size` 8; expected `head_dim` and `num_key_value_heads` alone",
        ),
        (
            "gemma4_text",
            json!({ "per_layer_config": { "1": { "head_dim": 8 } } }),
            "`per_layer_config`: layer 1 has heads of 8 and 2 key-value heads, and other sliding_attention layers 256 and 2",
        ),
        (
            "gemma4_text",
            json!({ "use_bidirectional_attention": "all" }),
            "is \"all\"; expected causal attention",
        ),
        ("gemma4_text", json!({ "global_head_dim": 7 }), "`global_head_dim` is 7; expected an even width"),
        (
            "gemma2",
            json!({ "layer_types": ["sliding_attention"] }),
            "`layer_types` has 1 entries for 4 layers",
        ),
        (
            "phi3",
            json!({ "resid_pdrop": 0.1 }),
            "`resid_pdrop` is 0.1; expected 0, since only attention has dropout",
        ),
        (
            "phi3",
            json!({ "rope_scaling": long(&[1.0]) }),
            "`short_factor` has 1 numbers; expected 2, one for each pair",
        ),
        (
            "phi3",
            json!({ "rope_scaling": long(&[1.0, 0.0]) }),
            "`short_factor` has 0.0; expected numbers from 1e-6 to 1e6",
        ),
        (
            "phi3",
            json!({ "partial_rotary_factor": 0.3 }),
            "`partial_rotary_factor` 0.3 rotates 1 of a head's 4 columns",
        ),
    ] {
        let error = read(&tiny(family, &fields)).unwrap_err();
        assert!(error.starts_with("decoder: ") && error.contains(expected), "{family}: {error}");
    }
}

/// transformers multiplies by √hidden in the weights' dtype: 55.4256 becomes 55.5 in bf16.
#[test]
fn a_gemma_rounds_the_scale_of_its_embedding() {
    use models::module::{Input, LanguageModel, parameters};
    let config = read(&file("gemma3_text", [8, 3072, 8, 1, 1, 1], &json!({ "head_dim": 2 }))).unwrap();
    let model = Llama::new(&config, (Kind::BFloat16, Device::Cpu)).unwrap();
    let embedding = parameters(&model).into_iter().find(|(name, _)| name == "embed_tokens.weight").unwrap().1;
    let scaled = |scale: f64| (embedding.detach().to_kind(Kind::Float) * scale).to_kind(Kind::BFloat16);
    // With blocks that add nothing, the final norm shows how the embedding was rounded after its scale.
    let _no_grad = tch::no_grad_guard();
    for (name, tensor) in parameters(&model) {
        if name.ends_with("proj.weight") {
            let _ = tensor.shallow_clone().zero_();
        }
    }
    let tokens = Tensor::from_slice(&[1i64, 5]).view([1, 2]);
    let hidden = model.hidden(&Input::new(&tokens)).unwrap().to_kind(Kind::Float).squeeze_dim(0);
    let distance = |scale: f64| {
        let x = scaled(scale).index_select(0, &tokens.view([-1])).to_kind(Kind::Float);
        let norm = (x.square().mean_dim([-1i64].as_slice(), true, Kind::Float) + 1e-6).rsqrt();
        let expected = (x * norm).to_kind(Kind::BFloat16).to_kind(Kind::Float);
        (&hidden - expected).abs().mean(Kind::Float).double_value(&[])
    };
    let (rounded, exact) = (distance(55.5), distance(3072f64.sqrt()));
    assert!(rounded < exact / 10.0, "{rounded} {exact}");
}
