//! `frugal export --format peft`: adapters in PEFT's files.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use lora::peft::{self, CONFIG_FILE, PREFIX, TENSORS_FILE};
use lora::{DEFAULT, LoraConfig, field_prefix};
use models::{hugging_face, tensors_file};
use report::cli::without_controls;
use serde_json::{Map, Value, json};
use tch::{Device, Tensor};
use training::checkpoint::{self, Checkpoint};

use super::Export;
use crate::common_flags::Common;
use crate::flags::hub::same_folder;
use crate::output::print_line;
use frugal::companion_files;
use frugal::run_folder::CHECKPOINTS;

pub(super) fn run(common: &Common, arguments: &Export) -> anyhow::Result<()> {
    let (mut config, mut tensors) = match (&arguments.checkpoints, &arguments.adapter) {
        (Some(folder), _) => of_checkpoint(folder)?,
        (None, Some(folder)) => {
            if same_folder(folder, &arguments.out) {
                bail!("--out {} is the adapter's own folder; give another", folder.display());
            }
            let config = LoraConfig::read(&folder.join(CONFIG_FILE))?;
            (config, tensors_file::read(&folder.join(TENSORS_FILE), Device::Cpu)?)
        }
        (None, None) => bail!("give --checkpoints or --adapter"),
    };
    if let Some(base) = &arguments.base {
        config.base_model_name_or_path = Some(base.clone());
    }
    if let Some(dtype) = arguments.dtype {
        let cast = |(name, tensor): &(String, Tensor)| -> Result<_, tch::TchError> {
            Ok((name.clone(), tensor.f_to_kind(dtype.kind())?))
        };
        tensors = tensors.iter().map(cast).collect::<Result<_, _>>()?;
    }
    peft::write_folder(&arguments.out, &config, &tensors)?;
    let mut kept = Vec::new();
    if let Some(folder) = arguments.adapter_files() {
        companion_files::copy_between(folder, &arguments.out)?;
        kept = companion_files::names(folder);
    }
    companion_files::remove_others(&arguments.out, &kept)?;
    check(&arguments.out, &config, &tensors)?;
    let (count, out) = (tensors.len(), arguments.out.display());
    if common.json {
        print_line(&json!({ "result": { "adapter": arguments.out, "tensors": count } }));
    } else {
        common.note(&format!("the adapter, of {count} tensors, is in {out}"));
    }
    Ok(())
}

/// Reads the adapter again and compares it with what was written.
fn check(folder: &Path, config: &LoraConfig, tensors: &[(String, Tensor)]) -> anyhow::Result<()> {
    let path = folder.join(TENSORS_FILE);
    let found = tensors_file::read(&path, Device::Cpu)?;
    let same = |(name, tensor): &(String, Tensor)| {
        let read = found.iter().find(|(known, _)| known == name).map(|(_, read)| read);
        // NaN equals nothing, and is no value of an adapter.
        read.is_some_and(|read| read.kind() == tensor.kind() && *read == tensor.to_device(Device::Cpu))
    };
    if found.len() != tensors.len()
        || LoraConfig::read(&folder.join(CONFIG_FILE))?.to_json() != config.to_json()
    {
        bail!("{}: what was written is read differently; export it again", folder.display());
    }
    match tensors.iter().find(|tensor| !same(tensor)) {
        None => Ok(()),
        Some((name, _)) => {
            bail!("{}: `{name}` is read differently than it was written, or not finite", path.display())
        }
    }
}

/// Returns the adapter of the newest checkpoint, under PEFT's names.
pub(super) fn of_checkpoint(folder: &Path) -> anyhow::Result<(LoraConfig, Vec<(String, Tensor)>)> {
    let inner = folder.join(CHECKPOINTS);
    let folder = if inner.is_dir() { &inner } else { folder };
    let found = checkpoint::latest(folder)?;
    for reason in &found.refused {
        let warning = format!("warning: a checkpoint was passed over: {reason}");
        let _ = writeln!(std::io::stderr().lock(), "{}", without_controls(&warning));
    }
    let Some(Checkpoint { path, state, model, .. }) = found.checkpoint else {
        bail!("{}: no checkpoint in it; give the --out of a training", folder.display());
    };
    let foreign = || {
        anyhow!(
            "{}: not a checkpoint of adapters; what a full fine-tuning made is the folder `model` in its --out",
            path.display()
        )
    };
    let prefix = field_prefix(DEFAULT);
    let fields = state["run"]["model"].as_object().ok_or_else(foreign)?;
    let own = fields.iter().filter_map(|(name, text)| Some((name.strip_prefix(&prefix)?, text.as_str()?)));
    // A checkpoint keeps each setting as the text of its JSON.
    let own: Map<String, Value> = own
        .map(|(name, text)| Ok((name.to_owned(), serde_json::from_str(text)?)))
        .collect::<serde_json::Result<_>>()
        .with_context(|| foreign().to_string())?;
    if own.is_empty() {
        return Err(foreign());
    }
    let config = LoraConfig::from_json(&Value::Object(own).to_string())?;
    let names: BTreeSet<String> = model.iter().map(|(name, _)| name.clone()).collect();
    let of_peft = |name: &str| peft_name(&peft::name_of_experts(name, &|other| names.contains(other)));
    let tensors = model.into_iter().map(|(name, tensor)| (of_peft(&name), tensor)).collect();
    Ok((config, tensors))
}

/// `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` for `layers.0.self_attn.q_proj.lora_A.default.weight`.
fn peft_name(name: &str) -> String {
    let name = hugging_face::tensor_name(name);
    let name = match name.strip_suffix(".lora_magnitude_vector.default.weight") {
        Some(module) => format!("{module}.lora_magnitude_vector"),
        None => name.replace(".default.weight", ".weight"),
    };
    format!("{PREFIX}{name}")
}

#[cfg(test)]
mod tests {
    use super::peft_name;

    #[test]
    fn a_checkpoints_names_become_those_of_peft() {
        for (own, of_peft) in [
            (
                "layers.0.self_attn.q_proj.lora_A.default.weight",
                "model.layers.0.self_attn.q_proj.lora_A.weight",
            ),
            (
                "layers.1.mlp.up_proj.lora_magnitude_vector.default.weight",
                "model.layers.1.mlp.up_proj.lora_magnitude_vector",
            ),
            ("lm_head.lora_B.default.weight", "lm_head.lora_B.weight"),
        ] {
            assert_eq!(peft_name(own), format!("base_model.model.{of_peft}"));
        }
    }

    #[test]
    fn names_of_experts_depend_on_what_is_adapted() {
        let own = |of: &str| format!("layers.0.mlp.experts.{of}.lora_A.default.weight");
        let both = [own("gate_up_proj"), own("down_proj")];
        let named = |of: &str, known: &[String]| {
            peft_name(&super::peft::name_of_experts(&own(of), &|name| known.contains(&name.to_owned())))
        };
        let experts = "base_model.model.model.layers.0.mlp.experts";
        assert_eq!(named("gate_up_proj", &both), format!("{experts}.base_layer.lora_A.weight"));
        assert_eq!(named("down_proj", &both), format!("{experts}.lora_A.weight"));
        assert_eq!(named("gate_up_proj", &both[..1]), format!("{experts}.lora_A.weight"));
    }
}
