//! PEFT's LoRA adapters as GGUF files, which llama.cpp applies to a model while it runs.
//!
//! An adapted projection W + s·B·A, with A of shape `[r, in]` and B of `[out, r]`, becomes the tensors `NAME.lora_a` and `NAME.lora_b` in
//! fp32 beside `adapter.lora.alpha`; llama.cpp takes s = α/r with the rank r of each tensor. Other scales (rsLoRA's α/√r, and those of
//! `alpha_pattern`) are multiplied into B. The rows of B are ordered as those of W, so they are interleaved for q and k of llama.
//!
//! Of an adapted embedding E + s·(B·A)ᵀ, with A of shape `[r, vocabulary]` and B of `[hidden, r]`, llama.cpp looks up rows of Aᵀ, which is
//! what the file has. Where the head is tied to the embedding, llama.cpp multiplies by this A for the logits too, and aborts: refused.
//!
//! Of the experts of a mixture, the file has A and B by expert (`experts.rs`).
//!
//! Such a file holds products of two matrices on an unchanged base. Anything else is refused: DoRA, modules that are trained in full,
//! biases, and initialisations that change the base (PiSSA, OLoRA).

mod experts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use decoder::{DecoderConfig, PER_LAYER_EMBEDDING, PER_LAYER_MODEL_PROJECTION};
use serde_json::Value as Json;

use crate::conversion::{self, Conversion, Planned, Rows, Values};
use crate::error::{Result, file_error, unsupported};
use crate::file_type::FileType;
use crate::json::Fields;
use crate::model::{self, Family, gguf_name, tensor_shape, ties};
use crate::safetensors::{Location, Tensors};
use crate::tensor_type::TensorType;
use crate::value::Value;
use crate::writer::TensorInfo;

/// PEFT's prefix of tensors.
const PREFIX: &str = "base_model.model.";
/// The names of the embedding and of the head as modules.
const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";
const EXPORT_MERGED: &str = "merge it into the model, and export that as GGUF";

/// The scale of one adapted projection, as PEFT computes it: given its name, such as `model.layers.0.self_attn.q_proj`, and its rank.
pub type Scale<'a> = &'a dyn Fn(&str, u64) -> Result<f64, String>;

/// An open adapter folder: `adapter_config.json` and `adapter_model.safetensors`.
#[derive(Debug)]
pub struct Adapter {
    folder: PathBuf,
    name: String,
    alpha: f64,
    /// `target_parameters`.
    parameters: Vec<String>,
    family: &'static Family,
    decoder: DecoderConfig,
    tensors: Tensors,
}

impl Adapter {
    /// Opens an adapter's folder. Of its model's folder, `base`, the `config.json` is read, and for an adapter of the head whether the
    /// weights' files have a head.
    ///
    /// # Errors
    /// A missing or invalid file; a kind of adapter or of model that a GGUF file cannot hold, by name.
    pub fn open(folder: &Path, base: &Path) -> Result<Self> {
        let fields = Fields::read_config(&base.join("config.json"))?;
        let family = Family::from_config(&fields)?;
        let decoder = model::decoder(&fields)?;
        let config = Fields::read(&folder.join("adapter_config.json"))?;
        check(&config)?;
        let alpha = config.optional_number("lora_alpha")?.unwrap_or(8.0);
        let tensors = Tensors::of_file(&folder.join("adapter_model.safetensors"))?;
        let adapts = |module: &str| {
            let begin = format!("{module}.");
            tensors.names().any(|name| name.strip_prefix(PREFIX).unwrap_or(name).starts_with(&begin))
        };
        check_outer(&fields, family, base, &adapts)?;
        let texts = |value: &Json| value.as_str().map(str::to_owned);
        let parameters = config.get("target_parameters").and_then(Json::as_array);
        let parameters = parameters.into_iter().flatten().filter_map(texts).collect();
        Ok(Self {
            folder: folder.to_owned(),
            name: name_of(folder),
            alpha,
            parameters,
            family,
            decoder,
            tensors,
        })
    }

    /// Checks before a training whether its adapter can be converted: by the text of its `adapter_config.json`, whether it adapts a module
    /// (`lm_head`, `model.embed_tokens`), and the folder of its model.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn check_before(config: &str, adapts: &dyn Fn(&str) -> bool, base: &Path) -> Result<()> {
        let path = PathBuf::from("adapter_config.json");
        let fields = serde_json::from_str(config).map_err(|cause| file_error(&path, cause.to_string()))?;
        check(&Fields { path, fields })?;
        let fields = Fields::read_config(&base.join("config.json"))?;
        let family = Family::from_config(&fields)?;
        check_outer(&fields, family, base, adapts)
    }

    /// Sets the name in the file, `general.name`, which is the folder's otherwise.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Plans the conversion; `scale` gives the factor of each projection's product.
    ///
    /// # Errors
    /// Tensors that are not the A or B of a projection, or whose other half is missing; a projection that llama.cpp does not adapt.
    pub fn convert(&self, scale: Scale<'_>) -> Result<Conversion<'_>> {
        let mut pairs: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
        for name in self.tensors.names() {
            let module = name.strip_prefix(PREFIX).unwrap_or(name);
            if module.ends_with(".base_layer.weight") {
                // PEFT's copy of the base's weight beside an adapter of the head.
                continue;
            }
            let half = [".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"]
                .into_iter()
                .zip([0, 1, 0, 1])
                .find_map(|(suffix, half)| Some((module.strip_suffix(suffix)?, half)));
            let Some((module, half)) = half else {
                return Err(unsupported("a tensor of an adapter", format!("`{name}`"), EXPORT_MERGED));
            };
            pairs.entry(module).or_default()[half] = Some(name);
        }
        // llama.cpp takes no scale at all where α is 0.
        let alpha = if self.alpha == 0.0 { 1.0 } else { self.alpha };
        let mut plan = Vec::new();
        let has = |module: &str| pairs.contains_key(module);
        for (&module, &halves) in &pairs {
            let [Some(a), Some(b)] = halves else {
                return Err(file_error(
                    &self.folder,
                    format!("`{module}` has only one of lora_A and lora_B"),
                ));
            };
            match experts::tensor_of(module, &has, &self.parameters) {
                Some(tensor) => plan.extend(self.of_experts(tensor, (a, b), alpha, scale)?),
                None => plan.extend(self.pair(module, a, b, alpha, scale)?),
            }
        }
        if plan.is_empty() {
            return Err(file_error(&self.folder, "the adapter has no tensors"));
        }
        conversion::sort(&mut plan);
        let metadata = vec![
            ("general.architecture".to_owned(), self.family.architecture.into()),
            ("general.type".to_owned(), "adapter".into()),
            ("general.name".to_owned(), self.name.clone().into()),
            ("general.file_type".to_owned(), FileType::F32.number().into()),
            ("adapter.type".to_owned(), "lora".into()),
            ("adapter.lora.alpha".to_owned(), Value::F32(alpha as f32)),
        ];
        Ok(Conversion::new(metadata, plan, &self.tensors, Vec::new()))
    }

    fn pair(&self, module: &str, a: &str, b: &str, alpha: f64, scale: Scale<'_>) -> Result<[Planned; 2]> {
        let weight = format!("{module}.weight");
        let target = gguf_name(self.family, &self.decoder.sizes(), &weight);
        let (Some(target), Some(shape)) = (target, tensor_shape(&self.decoder, &weight)) else {
            return Err(unsupported("an adapter", format!("of `{module}`"), EXPORT_MERGED));
        };
        let (Some(first), Some(second)) = (self.tensors.get(a), self.tensors.get(b)) else {
            return Err(file_error(&self.folder, format!("`{module}` has only one of lora_A and lora_B")));
        };
        let rank = first.shape.first().copied().unwrap_or(0);
        let is_embedding = module == EMBEDDING;
        let [outputs, inputs] = if is_embedding { [shape[1], shape[0]] } else { [shape[0], shape[1]] };
        if rank == 0 || first.shape != [rank, inputs] || second.shape != [outputs, rank] {
            return Err(file_error(
                &self.folder,
                format!(
                    "`{module}` has A {:?} and B {:?}, which do not fit the base's {shape:?}; the base is another model",
                    first.shape, second.shape
                ),
            ));
        }
        let meant = scale(module, rank).map_err(|reason| file_error(&self.folder, reason))?;
        let factor = (meant * rank as f64 / alpha) as f32;
        let value_columns = target.transform.value_columns;
        // The columns of A are ordered as those of W, the rows of B as its rows.
        let mut a = planned(&target.name, "a", first, Rows { value_columns, ..Rows::default() });
        if is_embedding {
            a.info.shape = vec![inputs, rank];
            let values = self.tensors.values(first, 0..rank * inputs)?;
            let columns = 0..inputs as usize;
            a.values = Values::Computed(
                columns
                    .flat_map(|column| values[column..].iter().step_by(inputs as usize).copied())
                    .collect(),
            );
        }
        Ok([
            a,
            planned(
                &target.name,
                "b",
                second,
                Rows { scale: factor, value_columns: None, ..target.transform },
            ),
        ])
    }
}

/// Plans A or B of a tensor as it is stored.
fn planned(target: &str, suffix: &str, location: &Location, rows: Rows) -> Planned {
    Planned {
        info: TensorInfo {
            name: format!("{target}.lora_{suffix}"),
            shape: location.shape.clone(),
            kind: TensorType::F32,
        },
        values: Values::Stored { location: location.clone(), rows },
    }
}

fn name_of(folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    folder.file_name().map_or_else(|| "adapter".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Refuses an adapter of the head or of the embedding where the model's GGUF file has one matrix for both.
fn check_outer(config: &Fields, family: &Family, base: &Path, adapts: &dyn Fn(&str) -> bool) -> Result<()> {
    let of_gemma4 = [PER_LAYER_EMBEDDING, PER_LAYER_MODEL_PROJECTION];
    if let Some(module) = of_gemma4.into_iter().find(|module| adapts(&format!("model.{module}"))) {
        return Err(unsupported(
            "an adapter in GGUF",
            format!("of `{module}`, to which llama.cpp applies none"),
            EXPORT_MERGED,
        ));
    }
    let of_which = match (adapts(HEAD), adapts(EMBEDDING)) {
        (true, _) => "of `lm_head`, which is tied to the embedding",
        (_, true) => "of `embed_tokens`, to which the head is tied",
        _ => return Ok(()),
    };
    if family.head_required || !ties(config, family, &mut Tensors::of_model(base)?)? {
        return Ok(());
    }
    Err(unsupported("an adapter in GGUF", of_which, EXPORT_MERGED))
}

/// Refuses adapters that are more than two matrices for each projection.
fn check(config: &Fields) -> Result<()> {
    let refuse = |key: &str| {
        let value = config.get(key).map_or_else(String::new, Json::to_string);
        Err(unsupported(format!("`{key}` of an adapter in GGUF"), value, EXPORT_MERGED))
    };
    if config.get("peft_type").is_some_and(|kind| kind != "LORA") {
        return refuse("peft_type");
    }
    for key in ["use_dora", "lora_bias", "use_qalora", "use_bdlora", "fan_in_fan_out"] {
        if config.get(key).is_some_and(|value| *value != Json::Bool(false)) {
            return refuse(key);
        }
    }
    if config.get("bias").is_some_and(|bias| bias != "none") {
        return refuse("bias");
    }
    let is_set = |value: &Json| value.as_array().is_none_or(|all| !all.is_empty());
    for key in ["modules_to_save", "layer_replication", "trainable_token_indices"] {
        if config.get(key).is_some_and(is_set) {
            return refuse(key);
        }
    }
    // These subtract the adapter's first values from the base.
    let init = config.get("init_lora_weights").and_then(Json::as_str).unwrap_or_default().to_lowercase();
    if ["pissa", "olora", "corda", "loftq"].iter().any(|name| init.starts_with(name)) {
        return refuse("init_lora_weights");
    }
    Ok(())
}
