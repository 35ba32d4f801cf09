//! The names of tensors in a GGUF file, and how their rows change.

use decoder::{NormPlacement, Sizes};

use super::family::Family;
use crate::conversion::Rows;

/// A tensor's name in the file, and the change of its rows.
#[derive(Debug, PartialEq)]
pub(crate) struct TensorName {
    pub(crate) name: String,
    pub(crate) transform: Rows,
}

/// Returns the name and the change of a tensor of a Hugging Face model; `None` for a tensor that the family does not have.
pub(crate) fn gguf_name(family: &Family, sizes: &Sizes, name: &str) -> Option<TensorName> {
    let (module, kind) = name.rsplit_once('.')?;
    let unchanged = |name: &str| Some(TensorName { name: name.to_owned(), transform: Rows::default() });
    match (module, kind) {
        ("model.embed_tokens", "weight") => return unchanged("token_embd.weight"),
        ("lm_head", "weight") => return unchanged("output.weight"),
        ("model.norm", "weight") => {
            let transform = Rows { add: norm_offset(family), ..Rows::default() };
            return Some(TensorName { name: "output_norm.weight".to_owned(), transform });
        }
        _ => {}
    }
    let (layer, module) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u64 = layer.parse().ok().filter(|layer| *layer < sizes.layers)?;
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
        scale: 1.0,
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
        // The same name is a norm before the MLP in some families, and one after attention in others.
        ("post_attention_layernorm", NormPlacement::Pre) => "ffn_norm",
        ("post_attention_layernorm", _) => "post_attention_norm",
        ("pre_feedforward_layernorm", _) => "ffn_norm",
        ("post_feedforward_layernorm", _) => "post_ffw_norm",
        _ => return None,
    };
    Some(TensorName { name: format!("blk.{layer}.{new}.{kind}"), transform })
}

fn norm_offset(family: &Family) -> f32 {
    if family.is_gemma { 1.0 } else { 0.0 }
}
