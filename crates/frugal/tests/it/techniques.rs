//! The techniques that are crossed, and what each promises.

use frugal::Config;
use frugal::config::{
    ActivationPlan, Bytes, Compute, LossHeadKind, OffloadConfig, OffloadMethod, OffloadTier, OptimizerPlace,
    Recomputed, ScalerConfig,
};
use frugal::lora::{LoraConfig, TokenIndices};

use crate::pairs::ROWS;

/// What a technique promises of losses, gradient norms and weights, compared with training without it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Promise {
    /// The same bits.
    Bits,
    /// Losses and gradient norms within this share.
    Within(f64),
    /// It computes something else.
    Nothing,
}

pub(crate) struct Technique {
    pub(crate) name: &'static str,
    /// Two techniques of a group are two values of one setting.
    pub(crate) group: &'static str,
    pub(crate) promise: Promise,
    pub(crate) set: fn(&mut Config, Family),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Family {
    Llama,
    /// Its matrices have 4096 numbers or more, so that an 8-bit state has 8 bits.
    Wide,
    Gpt2,
    /// Layers that share keys, and a second embedding.
    Gemma4,
}

fn adapter(family: Family, dora: bool) -> LoraConfig {
    let targets = match family {
        Family::Llama | Family::Wide | Family::Gemma4 => vec!["q_proj", "v_proj", "o_proj"],
        Family::Gpt2 => vec!["c_attn"],
    };
    LoraConfig {
        r: 2,
        use_dora: dora,
        // B is not 0, so that A has a gradient from the first step on.
        init_lora_weights: false.into(),
        target_modules: Some(frugal::lora::Names::List(targets.into_iter().map(str::to_owned).collect())),
        ..LoraConfig::default()
    }
}

fn recompute(config: &mut Config, recompute: Recomputed) {
    (config.activations.plan, config.activations.recompute) = (ActivationPlan::Recompute, recompute);
}

fn offloaded(config: &mut Config, method: OffloadMethod) {
    config.offload = Some(OffloadConfig { method, ring: 2, ..OffloadConfig::default() });
}

/// The group of the technique that gives rows other weights.
pub(crate) const WEIGHTS: &str = "weights";

pub(crate) const TECHNIQUES: [Technique; 35] = [
    Technique {
        name: "LoRA",
        group: "adapter",
        promise: Promise::Nothing,
        set: |config, family| config.adapter = Some(adapter(family, false)),
    },
    Technique {
        name: "DoRA",
        group: "adapter",
        promise: Promise::Nothing,
        set: |config, family| config.adapter = Some(adapter(family, true)),
    },
    Technique {
        name: "LoRA and rows of tokens",
        group: "adapter",
        promise: Promise::Nothing,
        set: |config, family| {
            let trainable_token_indices = Some(TokenIndices::Embedding(vec![10, 3, 60]));
            config.adapter = Some(LoraConfig { trainable_token_indices, ..adapter(family, false) });
        },
    },
    Technique {
        name: "LoRA on the embedding",
        group: "adapter",
        promise: Promise::Nothing,
        set: |config, family| {
            let (embedding, other) = match family {
                Family::Llama | Family::Wide | Family::Gemma4 => ("embed_tokens", "v_proj"),
                Family::Gpt2 => ("wte", "c_attn"),
            };
            let target_modules = Some([embedding, other].into());
            config.adapter = Some(LoraConfig { target_modules, ..adapter(family, false) });
        },
    },
    Technique {
        name: "fused loss",
        group: "loss",
        promise: Promise::Within(1e-5),
        set: |config, _| {
            (config.loss.head, config.loss.chunk_tokens) = (LossHeadKind::Fused, Some(32));
        },
    },
    Technique {
        name: "fused loss, gradients in backward",
        group: "loss",
        promise: Promise::Within(1e-5),
        set: |config, _| {
            (config.loss.head, config.loss.gradients_in_backward) = (LossHeadKind::Fused, true);
        },
    },
    Technique {
        name: "recompute layers",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| recompute(config, Recomputed::Layer),
    },
    Technique {
        name: "recompute elementwise",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| recompute(config, Recomputed::Elementwise),
    },
    Technique {
        name: "recompute MLPs",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| recompute(config, Recomputed::Mlp),
    },
    Technique {
        name: "recompute attention",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| recompute(config, Recomputed::Attention),
    },
    Technique {
        name: "offload inputs",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| recompute(config, Recomputed::Offload),
    },
    Technique {
        name: "recompute every second layer",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| config.activations.plan = ActivationPlan::EveryK,
    },
    Technique {
        name: "keep activations",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| config.activations.plan = ActivationPlan::Keep,
    },
    Technique {
        name: "activation plan",
        group: "activations",
        promise: Promise::Bits,
        set: |config, _| {
            config.activations.plan = ActivationPlan::Plan;
            config.activations.budget = Some(Bytes(1 << 30));
        },
    },
    Technique {
        name: "MLP level input-only",
        group: "mlp",
        // Its products are not libtorch's.
        promise: Promise::Within(1e-5),
        set: |config, _| config.mlp.level = Some("input-only".to_owned()),
    },
    Technique {
        name: "MLP level save-one",
        group: "mlp",
        promise: Promise::Within(1e-5),
        set: |config, _| config.mlp.level = Some("save-one".to_owned()),
    },
    Technique {
        name: "MLP level input-only-tiled",
        group: "mlp",
        promise: Promise::Within(1e-5),
        set: |config, family| {
            // An MLP of two layers has no tiles.
            let level = if family != Family::Gpt2 { "input-only-tiled:1KiB" } else { "input-only" };
            config.mlp.level = Some(level.to_owned());
        },
    },
    Technique {
        name: "offload, overlap",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| offloaded(config, OffloadMethod::Overlap),
    },
    Technique {
        name: "offload, function",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| offloaded(config, OffloadMethod::Function),
    },
    Technique {
        name: "offload, checkpointing",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| offloaded(config, OffloadMethod::Checkpointing),
    },
    Technique {
        name: "offload, a resident layer",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| {
            config.offload = Some(OffloadConfig { resident: vec![1], ..OffloadConfig::default() });
        },
    },
    Technique {
        name: "offload to files",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| {
            config.offload = Some(OffloadConfig { tier: OffloadTier::File, ..OffloadConfig::default() });
        },
    },
    Technique {
        name: "layers and optimizer in files",
        group: "offload",
        promise: Promise::Bits,
        set: |config, _| {
            config.offload = Some(OffloadConfig { tier: OffloadTier::File, ..OffloadConfig::default() });
            config.optimizer.place = OptimizerPlace::Host;
        },
    },
    Technique {
        name: "bf16",
        group: "precision",
        promise: Promise::Nothing,
        set: |config, _| config.precision.compute = Compute::Bf16,
    },
    Technique {
        name: "fp16",
        group: "precision",
        promise: Promise::Nothing,
        set: |config, _| {
            config.precision.compute = Compute::Fp16;
            config.precision.scaler = Some(ScalerConfig::Static { scale: 1024.0 });
        },
    },
    Technique {
        name: "fp8",
        group: "precision",
        promise: Promise::Nothing,
        set: |config, _| config.precision.compute = Compute::Fp8,
    },
    Technique {
        name: "optimizer on the host",
        group: "optimizer",
        promise: Promise::Bits,
        set: |config, _| config.optimizer.place = OptimizerPlace::Host,
    },
    Technique {
        name: "accumulation",
        group: "accumulation",
        promise: Promise::Within(1e-5),
        set: |config, _| (config.training.batch, config.training.accumulation) = (ROWS / 2, 2),
    },
    Technique {
        name: "fewer rows at a time",
        group: "rows",
        promise: Promise::Within(1e-5),
        set: |config, _| config.training.micro_batch_size = Some(3),
    },
    Technique {
        name: "no clipping",
        group: "clipping",
        // Others must do the same with it and without: an update on the host may begin before backward ends.
        promise: Promise::Nothing,
        set: |config, _| config.optimizer.clip = 0.0,
    },
    Technique {
        name: "a frozen layer",
        group: "freezing",
        promise: Promise::Nothing,
        set: |config, family| {
            config.model.freeze = Some(
                match family {
                    Family::Llama | Family::Wide | Family::Gemma4 => r"layers\.1\..*",
                    Family::Gpt2 => r"h\.1\..*",
                }
                .to_owned(),
            );
        },
    },
    Technique {
        name: "noise of embeddings",
        group: "noise",
        promise: Promise::Nothing,
        set: |config, _| config.training.neftune_noise_alpha = Some(5.0),
    },
    // Of the data: the rows of every training that has this technique.
    Technique { name: "weights of examples", group: WEIGHTS, promise: Promise::Nothing, set: |_, _| {} },
    Technique {
        name: "packing",
        group: "packing",
        promise: Promise::Within(1e-5),
        set: |config, _| config.data.packing = Some(24),
    },
    Technique {
        name: "padded rows",
        group: "packing",
        promise: Promise::Within(1e-5),
        set: |config, _| config.data.padding_free = false,
    },
];
