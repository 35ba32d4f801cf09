//! Adapters of the experts of a mixture.
//!
//! PEFT adapts the tensors that hold all E experts of a layer: gate and up as one, and down. A is `[E·r, in]`, whose rows e·r to e·r + r − 1
//! are those of expert e, and B `[out, r·E]`, whose column j·E + e is column j of expert e. llama.cpp multiplies a token's rows by its experts'
//! matrices (`ggml_mul_mat_id`), those of an adapter too (`build_lora_mm_id`), so the file has them by expert:
//!
//! | tensor | shape | values of expert e |
//! |---|---|---|
//! | `blk.N.ffn_gate_exps.weight.lora_a`, `ffn_up_exps` | `[E, r, hidden]` | the rows of A, in both |
//! | `blk.N.ffn_gate_exps.weight.lora_b`, `ffn_up_exps` | `[E, inner, r]` | the columns of B, and its rows of gate or of up |
//! | `blk.N.ffn_down_exps.weight.lora_a`, `.lora_b` | `[E, r, inner]`, `[E, hidden, r]` | likewise |
//!
//! In a file of PEFT an adapter of one tensor is called `experts`; of both, that of gate and up is `experts.base_layer`, and that of down
//! `experts`.

use super::{Adapter, Scale, planned};
use crate::conversion::{ExpertColumns, Planned, Rows, Values};
use crate::error::{Result, file_error, unsupported};
use crate::experts::MixtureTensor;
use crate::safetensors::Location;
use crate::tensor_type::TensorType;
use crate::writer::TensorInfo;

/// The end of a module's name that has all experts of a layer.
const EXPERTS: &str = ".mlp.experts";
const INNER: &str = ".base_layer";
const NAMES: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Returns the tensor of all experts that a module's A and B are of, with the name of that tensor's layer's experts; `None` for another
/// module. `parameters` are the configuration's `target_parameters`.
pub(super) fn tensor_of<'a>(
    module: &'a str,
    has: &dyn Fn(&str) -> bool,
    parameters: &[String],
) -> Option<(&'a str, &'static str)> {
    if let Some(experts) = module.strip_suffix(INNER).filter(|experts| experts.ends_with(EXPERTS)) {
        return Some((experts, NAMES[0]));
    }
    if !module.ends_with(EXPERTS) {
        return None;
    }
    if has(&format!("{module}{INNER}")) {
        return Some((module, NAMES[1]));
    }
    let is_named = |name: &str| {
        let whole = format!("{module}.{name}");
        parameters.iter().any(|entry| {
            whole.strip_suffix(entry.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    };
    NAMES.into_iter().find(|name| is_named(name)).map(|name| (module, name))
}

impl Adapter {
    /// Plans the tensors of the adapter of `tensor` of the experts of a layer called `module`.
    pub(super) fn of_experts(
        &self,
        (module, tensor): (&str, &str),
        (a, b): (&str, &str),
        alpha: f64,
        scale: Scale<'_>,
    ) -> Result<Vec<Planned>> {
        let unknown = || unsupported("an adapter", format!("of `{module}.{tensor}`"), super::EXPORT_MERGED);
        let sizes = self.decoder.sizes();
        let Some(experts) = sizes.experts else { return Err(unknown()) };
        let is_down = tensor == NAMES[1];
        let (hidden, inner) = (sizes.hidden, experts.feed_forward);
        let [inputs, outputs] = if is_down { [inner, hidden] } else { [hidden, 2 * inner] };
        let (Some(first), Some(second)) = (self.tensors.get(a), self.tensors.get(b)) else {
            return Err(file_error(&self.folder, format!("`{module}` has only one of lora_A and lora_B")));
        };
        let rank = first.shape.first().map_or(0, |rows| rows / experts.count);
        let rows = rank * experts.count;
        if rank == 0 || first.shape != [rows, inputs] || second.shape != [outputs, rows] {
            return Err(file_error(
                &self.folder,
                format!(
                    "`{module}.{tensor}` has A {:?} and B {:?}, which do not fit {} experts of {inputs} to {outputs}; the base is another \
                     model",
                    first.shape, second.shape, experts.count
                ),
            ));
        }
        let named = format!("{module}.{tensor}");
        let meant = scale(&named, rank).map_err(|reason| file_error(&self.folder, reason))?;
        let factor = (meant * rank as f64 / alpha) as f32;
        // Of gate and up, rows of B are those of gate, then those of up; of gpt-oss in turns.
        let in_turns = self.family.kind.facts().has_clamped_experts;
        let parts: &[(&str, u64, u64)] = match (is_down, in_turns) {
            (true, _) => &[("down_proj", 0, 1)],
            (false, false) => &[("gate_proj", 0, 1), ("up_proj", inner, 1)],
            (false, true) => &[("gate_proj", 0, 2), ("up_proj", 1, 2)],
        };
        let mut plan = Vec::new();
        for &(projection, first_row, step) in parts {
            let weight = format!("{module}.0.{projection}.weight");
            let parsed = MixtureTensor::parse(self.family.kind, &weight);
            let Some((layer, of_layer)) = parsed.filter(|(layer, _)| *layer < sizes.layers) else {
                return Err(unknown());
            };
            let target = format!("blk.{layer}.{}", of_layer.gguf_name());
            let out = if is_down { hidden } else { inner };
            plan.push(Planned {
                info: info(&target, "a", [experts.count, rank, inputs]),
                ..planned(&target, "a", first, Rows::default())
            });
            let columns = ExpertColumns {
                location: Location::clone(second),
                experts: experts.count,
                rank,
                rows: out,
                first_row,
                step,
                scale: factor,
            };
            plan.push(Planned {
                info: info(&target, "b", [experts.count, out, rank]),
                values: Values::ExpertColumns(columns),
            });
        }
        Ok(plan)
    }
}

fn info(target: &str, suffix: &str, shape: [u64; 3]) -> TensorInfo {
    TensorInfo { name: format!("{target}.lora_{suffix}"), shape: shape.to_vec(), kind: TensorType::F32 }
}
