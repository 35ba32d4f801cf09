//! Parameters of published models, and of lists against counts.

use crate::model::{Decoder, ExpertSizes, Family, Gemma4Sizes, LinearSizes, Sizes, WindowedLayers};
use crate::presets;

#[test]
fn published_parameter_counts() {
    // transformers' `num_parameters()` and the safetensors totals of the model pages on the Hugging Face hub; the
    // cs336 rows from the course's "transformer accounting" with d_ff = 4 d.
    let published = [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("cs336-xl", 2_127_057_600),
    ];
    for (name, parameters) in published {
        assert_eq!(presets::find(name).unwrap().parameters().unwrap(), parameters, "{name}");
    }
}

/// As [`published_parameter_counts`], for one model of each other family.
#[test]
fn published_parameter_counts_of_other_families() {
    use Family::{Gemma2, Gemma3, Mistral, Olmo2, Phi3, Qwen3, SmolLm3};
    // Family, vocabulary, hidden, layers, heads, key-value heads, head size, feed-forward, tied.
    for (family, [vocabulary, hidden, layers, heads, kv_heads, head_dim, feed_forward], tied, parameters) in [
        (Qwen3, [151_936, 1024, 28, 16, 8, 128, 3072], true, 596_049_920),
        (Mistral, [32000, 4096, 32, 32, 8, 128, 14336], false, 7_241_732_096),
        (SmolLm3, [128_256, 2048, 36, 16, 4, 128, 11008], true, 3_075_098_624),
        (Olmo2, [100_352, 4096, 32, 32, 32, 128, 11008], false, 7_298_617_344),
        (Gemma3, [262_144, 1152, 26, 4, 1, 256, 6912], true, 999_885_952),
        (Gemma2, [256_000, 2304, 26, 8, 4, 256, 9216], true, 2_614_341_888),
        (Phi3, [32064, 3072, 32, 32, 32, 96, 8192], false, 3_821_079_552),
        (Phi3, [200_064, 3072, 32, 24, 8, 128, 8192], true, 3_836_021_760),
    ] {
        let model = Decoder::new(Sizes {
            family,
            vocabulary,
            context: 4096,
            embedding: hidden,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            feed_forward,
            tied,
            attention_bias: false,
            mlp_bias: false,
            experts: None,
            linear: None,
            windows: None,
            gemma4: None,
        });
        assert_eq!(model.unwrap().parameters().unwrap(), parameters, "{family:?}");
    }
}

/// Qwen3-30B-A3B and Qwen3-235B-A22B: totals of the safetensors files, and the active parameters of the model cards, which round
/// 3.3 and 22 billion.
#[test]
fn published_parameter_counts_of_mixtures() {
    for (sizes, experts, total, active) in [
        ([2048, 48, 32, 4, 6144], [128, 8, 768], 30_532_122_624_u64, 3_353_032_704_u64),
        ([4096, 94, 64, 4, 12288], [128, 8, 1536], 235_093_634_560, 22_190_763_520),
    ] {
        let [hidden, layers, heads, kv_heads, feed_forward] = sizes;
        let [count, per_token, inner] = experts;
        let qwen3 = presets::find("qwen3-0.6b").unwrap();
        let mixture =
            |layers| ExpertSizes { layers, count, per_token, feed_forward: inner, shared: 0, biases: false };
        let sizes = Sizes {
            family: Family::Qwen3Moe,
            embedding: hidden,
            hidden,
            layers,
            heads,
            kv_heads,
            feed_forward,
            tied: false,
            experts: Some(mixture(layers)),
            ..*qwen3
        };
        let model = Decoder::new(sizes).unwrap();
        assert_eq!((model.parameters().unwrap(), model.active_parameters().unwrap()), (total, active));
        let listed = model.parameter_tensors().unwrap();
        assert_eq!(listed.iter().map(|tensor| tensor.elements().unwrap()).sum::<u64>(), total);
        assert_eq!(model.product_parameters().unwrap(), {
            let norms = layers * (2 * hidden + 2 * 128) + hidden;
            active - norms - model.vocabulary * hidden
        });
        let some = Decoder::new(Sizes { experts: Some(mixture(layers - 1)), ..sizes }).unwrap();
        let difference = hidden * (count + 3 * count * inner) - 3 * hidden * feed_forward;
        assert_eq!(total - some.parameters().unwrap(), difference);
        assert!(some.block_linears().unwrap_err().to_string().contains("layers have experts"));
        assert!(model.check_passes(8, false).is_ok());
    }
}

/// gpt-oss-20b and -120b: the counts of transformers' `GptOssForCausalLM`, in all and without the experts that a token does not have.
#[test]
fn parameter_counts_of_gpt_oss() {
    for (layers, count, total, active) in
        [(24, 32, 20_914_757_184_u64, 4_187_440_704_u64), (36, 128, 116_829_156_672, 5_711_982_912)]
    {
        let experts =
            ExpertSizes { layers, count, per_token: 4, feed_forward: 2880, shared: 0, biases: true };
        let sizes = Sizes {
            family: Family::GptOss,
            vocabulary: 201_088,
            embedding: 2880,
            hidden: 2880,
            layers,
            heads: 64,
            kv_heads: 8,
            head_dim: 64,
            feed_forward: 2880,
            tied: false,
            attention_bias: true,
            experts: Some(experts),
            ..*presets::find("qwen3-0.6b").unwrap()
        };
        let model = Decoder::new(sizes).unwrap();
        assert_eq!((model.parameters().unwrap(), model.active_parameters().unwrap()), (total, active));
        let parts: u64 = model.parameters_by_part().unwrap().iter().map(|(_, n)| n).sum();
        assert_eq!(parts, total);
        let listed = model.parameter_tensors().unwrap();
        assert_eq!(listed.iter().map(|tensor| tensor.elements().unwrap()).sum::<u64>(), total);
        assert!(model.check_passes(4096, true).is_ok());
        let error = model.check_passes(8, false).unwrap_err().to_string();
        assert!(error.contains("gpt_oss, whose attention has sinks, are not modelled on a GPU"), "{error}");
    }
}

/// Those that transformers counts for the defaults of `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`, Qwen3.5-9B and -35B-A3B.
#[test]
fn parameter_counts_of_linear_attention() {
    let linear =
        |layers| LinearSizes { layers, key_heads: 16, value_heads: 32, key: 128, value: 128, window: 4 };
    let dense = Sizes {
        family: Family::Qwen35,
        vocabulary: 248_320,
        embedding: 4096,
        hidden: 4096,
        layers: 32,
        heads: 16,
        kv_heads: 4,
        head_dim: 256,
        feed_forward: 12288,
        tied: false,
        linear: Some(linear(24)),
        ..*presets::find("qwen3-0.6b").unwrap()
    };
    let experts =
        ExpertSizes { layers: 40, count: 256, per_token: 8, feed_forward: 512, shared: 512, biases: false };
    let mixture = Sizes {
        family: Family::Qwen35Moe,
        embedding: 2048,
        hidden: 2048,
        layers: 40,
        kv_heads: 2,
        feed_forward: 512,
        linear: Some(linear(30)),
        experts: Some(experts),
        ..dense
    };
    for (sizes, total, active) in [
        (dense, 8_953_803_264_u64, 8_953_803_264_u64),
        (mixture, 34_660_610_688, 34_660_610_688 - 40 * 248 * 3 * 2048 * 512),
    ] {
        let model = Decoder::new(sizes).unwrap();
        assert_eq!((model.parameters().unwrap(), model.active_parameters().unwrap()), (total, active));
        let parts: u64 = model.parameters_by_part().unwrap().iter().map(|(_, n)| n).sum();
        assert_eq!(parts, total);
        // Without the embedding, norms, convolutions and decays.
        let (full, layers) = (sizes.layers - sizes.linear.unwrap().layers, sizes.linear.unwrap().layers);
        let norms = sizes.layers * 2 * sizes.hidden + sizes.hidden + full * 2 * 256 + layers * 128;
        let others = layers * (8192 * 4 + 2 * 32);
        let products = model.product_parameters().unwrap();
        assert_eq!(active - products, sizes.vocabulary * sizes.hidden + norms + others);
        assert!(model.check_passes(8, false).is_ok());
        let listed = model.parameter_tensors().unwrap();
        assert_eq!(listed.iter().map(|tensor| tensor.elements().unwrap()).sum::<u64>(), total);
        let of_linear = listed.iter().filter(|tensor| tensor.name.ends_with("linear_attn.A_log")).count();
        assert_eq!(of_linear as u64, layers);
    }
}

/// Those that transformers counts of Gemma 4 E2B, E4B and 31B.
#[test]
fn parameter_counts_of_gemma4() {
    let e2b = Gemma4Sizes {
        full: 7,
        head_dim: 512,
        kv_heads: 1,
        keys_are_values: false,
        shared: 20,
        shared_full: 4,
        shared_feed_forward: 2,
        per_layer_input: 256,
        per_layer_vocabulary: 262_144,
    };
    let e4b = Gemma4Sizes { kv_heads: 2, shared: 18, shared_full: 3, shared_feed_forward: 1, ..e2b };
    let large = Gemma4Sizes {
        full: 10,
        kv_heads: 4,
        keys_are_values: true,
        shared: 0,
        shared_full: 0,
        shared_feed_forward: 1,
        per_layer_input: 0,
        ..e2b
    };
    // Hidden, layers, heads, key-value heads, feed-forward; window.
    for (gemma4, [hidden, layers, heads, kv_heads, feed_forward], tokens, total) in [
        (e2b, [1536, 35, 8, 1, 6144], 512, 4_628_569_344_u64),
        (e4b, [2560, 42, 8, 2, 10240], 512, 7_463_013_376),
        (large, [5376, 60, 32, 16, 21504], 1024, 30_697_345_280),
    ] {
        let sizes = Sizes {
            family: Family::Gemma4,
            embedding: hidden,
            hidden,
            layers,
            heads,
            kv_heads,
            feed_forward,
            windows: Some(WindowedLayers { layers: layers - gemma4.full, tokens }),
            gemma4: Some(gemma4),
            ..*presets::find("gemma-3-1b").unwrap()
        };
        let model = Decoder::new(sizes).unwrap();
        assert_eq!((model.parameters().unwrap(), model.active_parameters().unwrap()), (total, total));
        let parts: u64 = model.parameters_by_part().unwrap().iter().map(|(_, n)| n).sum();
        assert_eq!(parts, total);
        let error = model.check_passes(8, true).unwrap_err().to_string();
        assert!(error.contains("the activations of gemma4_text are not modelled"), "{error}");
        let error = model.parameter_tensors().unwrap_err().to_string();
        assert!(error.contains("the layers of gemma4_text differ"), "{error}");
        // Keys and values of the layers that have some.
        let own =
            [layers - gemma4.full - (gemma4.shared - gemma4.shared_full), gemma4.full - gemma4.shared_full];
        let token = 2 * 2 * (own[0] * kv_heads * 256 + own[1] * gemma4.kv_heads * 512);
        assert_eq!(crate::memory::kv_cache::token_bytes(&model, crate::Dtype::Bf16).unwrap(), token);
        let wrong = Gemma4Sizes { shared: layers, ..gemma4 };
        let error = Decoder::new(Sizes { gemma4: Some(wrong), ..sizes }).unwrap_err().to_string();
        assert!(error.contains("share keys"), "{error}");
        let error = Decoder::new(Sizes { gemma4: None, ..sizes }).unwrap_err().to_string();
        assert!(error.contains("gemma4_text has no sizes"), "{error}");
    }
}

#[test]
fn parameter_list_parts_and_count_agree() {
    for name in presets::names() {
        let model = presets::find(name).unwrap();
        let listed: u64 = model.parameter_tensors().unwrap().iter().map(|t| t.elements().unwrap()).sum();
        let parts: u64 = model.parameters_by_part().unwrap().iter().map(|(_, n)| n).sum();
        let grouped: u64 =
            model.tensor_groups().unwrap().iter().map(|(n, t)| n * t.elements().unwrap()).sum();
        let total = model.parameters().unwrap();
        assert_eq!((listed, parts, grouped), (total, total, total), "{name}");
    }
}
