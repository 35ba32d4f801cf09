//! The names of tensors in a GGUF file, and how their rows change.

use decoder::{
    LAYER_SCALAR, LINEAR_ATTENTION, NormPlacement, PER_LAYER_EMBEDDING, PER_LAYER_GATE,
    PER_LAYER_MODEL_PROJECTION, PER_LAYER_NORM, PER_LAYER_PROJECTION, POST_PER_LAYER_NORM, SINKS, Sizes,
};

use super::family::Family;
use crate::conversion::Rows;
use crate::experts::MixtureTensor;
use crate::value_heads::ValueHeads;

/// A tensor's name in the file, and the change of its rows.
#[derive(Debug, PartialEq)]
pub(crate) struct TensorName {
    pub(crate) name: String,
    pub(crate) transform: Rows,
    /// The number of the expert that it is of, in a tensor of all.
    pub(crate) expert: Option<u64>,
}

/// Returns the name and the change of a tensor of a Hugging Face model; `None` for a tensor that the family does not have.
pub(crate) fn gguf_name(family: &Family, sizes: &Sizes, name: &str) -> Option<TensorName> {
    if let Some((layer, tensor)) = of_linear_attention(name) {
        return linear_attention(layer, tensor, sizes);
    }
    if let Some((layer, tensor)) = MixtureTensor::parse(family.kind, name) {
        let experts = sizes.experts.filter(|_| layer < sizes.layers)?;
        let expert = match tensor {
            MixtureTensor::Expert { expert, .. } => Some(expert).filter(|expert| *expert < experts.count),
            _ => None,
        };
        let is_known = expert.is_some() || !matches!(tensor, MixtureTensor::Expert { .. });
        let name = format!("blk.{layer}.{}", tensor.gguf_name());
        return is_known.then(|| TensorName { name, transform: Rows::default(), expert });
    }
    let (module, kind) = name.rsplit_once('.')?;
    let unchanged =
        |name: &str| Some(TensorName { name: name.to_owned(), transform: Rows::default(), expert: None });
    if family.is_gemma4 && kind == LAYER_SCALAR {
        let layer: u64 = module.strip_prefix("model.layers.")?.parse().ok()?;
        return (layer < sizes.layers)
            .then_some(())
            .and(unchanged(&format!("blk.{layer}.layer_output_scale.weight")));
    }
    match (module, kind) {
        ("model.embed_tokens", "weight") => return unchanged("token_embd.weight"),
        ("lm_head", "weight") => return unchanged("output.weight"),
        (_, "weight") if family.is_gemma4 && module == format!("model.{PER_LAYER_EMBEDDING}") => {
            return unchanged("per_layer_token_embd.weight");
        }
        (_, "weight") if family.is_gemma4 && module == format!("model.{PER_LAYER_MODEL_PROJECTION}") => {
            return unchanged("per_layer_model_proj.weight");
        }
        (_, "weight") if family.is_gemma4 && module == format!("model.{PER_LAYER_NORM}") => {
            return unchanged("per_layer_proj_norm.weight");
        }
        ("model.norm", "weight") => {
            let transform = Rows { add: norm_offset(family), ..Rows::default() };
            return Some(TensorName { name: "output_norm.weight".to_owned(), transform, expert: None });
        }
        _ => {}
    }
    let (layer, module) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u64 = layer.parse().ok().filter(|layer| *layer < sizes.layers)?;
    if name.ends_with(SINKS) && family.has_sinks {
        return unchanged(&format!("blk.{layer}.attn_sinks.weight"));
    }
    if !family.modules().any(|known| known == module) {
        return None;
    }
    let last = module.rsplit('.').next()?;
    match kind {
        "weight" => {}
        "bias" if family.biases.contains(&last) => {}
        _ => return None,
    }
    let is_norm = last.ends_with("norm");
    let heads = match last {
        "q_proj" => sizes.heads,
        "k_proj" => sizes.kv_heads,
        _ => 0,
    };
    let transform = Rows {
        interleaved: (family.permuted && heads > 0).then_some(sizes.head_dim),
        add: if is_norm { norm_offset(family) } else { 0.0 },
        ..Rows::default()
    };
    let new = match (last, family.norms) {
        ("q_proj", _) => "attn_q",
        ("k_proj", _) => "attn_k",
        ("v_proj", _) => "attn_v",
        ("qkv_proj", _) => "attn_qkv",
        ("o_proj", _) => "attn_output",
        ("gate_proj", _) => "ffn_gate",
        // A fused matrix is that of the gate above that of `up`, which is how llama.cpp divides it.
        ("up_proj" | "gate_up_proj", _) => "ffn_up",
        ("down_proj", _) => "ffn_down",
        ("q_norm", _) => "attn_q_norm",
        ("k_norm", _) => "attn_k_norm",
        ("input_layernorm", _) => "attn_norm",
        ("post_attention_layernorm", _) if family.has_linear_layers || family.has_sinks => {
            "post_attention_norm"
        }
        // The same name is a norm before the MLP in some families, and one after attention in others.
        ("post_attention_layernorm", NormPlacement::Pre) => "ffn_norm",
        ("post_attention_layernorm", _) => "post_attention_norm",
        ("pre_feedforward_layernorm", _) => "ffn_norm",
        ("post_feedforward_layernorm", _) => "post_ffw_norm",
        (PER_LAYER_GATE, _) => "inp_gate",
        (PER_LAYER_PROJECTION, _) => "proj",
        (POST_PER_LAYER_NORM, _) => "post_norm",
        _ => return None,
    };
    Some(TensorName { name: format!("blk.{layer}.{new}.{kind}"), transform, expert: None })
}

fn norm_offset(family: &Family) -> f32 {
    if family.has_offset_norms { 1.0 } else { 0.0 }
}

/// Returns the layer and the tensor's name within linear attention, if it is of one.
pub(super) fn of_linear_attention(name: &str) -> Option<(u64, &str)> {
    let (layer, tensor) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let tensor = tensor.strip_prefix(LINEAR_ATTENTION)?.strip_prefix('.')?;
    Some((layer.parse().ok()?, tensor))
}

/// Returns the name and the change of a tensor of linear attention: the value heads have another order, and the convolution's middle dimension
/// of one is left out.
fn linear_attention(layer: u64, tensor: &str, sizes: &Sizes) -> Option<TensorName> {
    let linear = sizes.linear.filter(|_| layer < sizes.layers)?;
    let per_key = linear.value_heads / linear.key_heads.max(1);
    let heads =
        |start, width| (per_key > 1).then_some(ValueHeads { start, width, keys: linear.key_heads, per_key });
    let rows = |start, width| Rows { value_heads: heads(start, width), ..Rows::default() };
    // Rows of queries and keys, before those of values.
    let values_start = linear.key_heads.checked_mul(linear.key)?.checked_mul(2)?;
    let (new, transform) = match tensor {
        "in_proj_qkv.weight" => ("attn_qkv.weight", rows(values_start, linear.value)),
        "in_proj_z.weight" => ("attn_gate.weight", rows(0, linear.value)),
        "in_proj_b.weight" => ("ssm_beta.weight", rows(0, 1)),
        "in_proj_a.weight" => ("ssm_alpha.weight", rows(0, 1)),
        "conv1d.weight" => ("ssm_conv1d.weight", rows(values_start, linear.value)),
        "A_log" => ("ssm_a", Rows { is_decay: true, ..rows(0, 1) }),
        "dt_bias" => ("ssm_dt.bias", rows(0, 1)),
        "norm.weight" => ("ssm_norm.weight", Rows::default()),
        "out_proj.weight" => {
            ("ssm_out.weight", Rows { value_columns: heads(0, linear.value), ..Rows::default() })
        }
        _ => return None,
    };
    Some(TensorName { name: format!("blk.{layer}.{new}"), transform, expert: None })
}

/// Returns the shape of a tensor in the file, by its name there: a convolution's without its middle dimension of one, a gate's as a vector.
pub(crate) fn stored_shape(name: &str, shape: &[u64]) -> Vec<u64> {
    match *shape {
        [channels, 1, window] => vec![channels, window],
        [1, hidden] if name.ends_with("ffn_gate_inp_shexp.weight") => vec![hidden],
        _ => shape.to_vec(),
    }
}
