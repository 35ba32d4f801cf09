//! `frugal info`.

mod gguf_file;
pub(crate) mod training;

use std::path::Path;

use crate::common_flags::Common;
use accounting::Decoder;
use accounting::memory::quantized;
use clap::Args;
use frugal::planning;
use lora::LoraConfig;
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use models::hugging_face::Folder;
use models::tensors_file::{TensorsFile, dtype_name};
use report::unit::human;
use serde_json::{Value, json};

use super::flags::table::ADAPTERS;
use super::flags::{Flags, named};
use super::output::print_fields;
use crate::flags::hub::HubArgs;
use crate::flags::no_effect;
use crate::output::figures::{grouped, share};

#[derive(Args)]
pub(crate) struct Info {
    /// A run's output folder, a model's folder, GGUF file or name on the hub, or an adapter's folder
    #[arg(value_name = "NAME_OR_FOLDER")]
    folder: String,
    /// Base model of an adapter, to show the share of trainable parameters
    #[arg(long, value_name = "NAME_OR_FOLDER")]
    model: Option<String>,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten, next_help_heading = "Adapter (for a model: counts its trainable parameters)")]
    adapter: Flags<ADAPTERS>,
}

pub(crate) fn run(common: &Common, arguments: &Info) -> anyhow::Result<()> {
    let path = Path::new(&arguments.folder);
    let mut lines = if training::is_output(path) { training::lines(path)? } else { Vec::new() };
    if path.join(CONFIG_FILE).is_file() {
        // The adapter of a training says its base, too.
        let known: Vec<&str> = lines.iter().map(|(name, ..)| *name).collect();
        let adapter = of_adapter(arguments, path)?;
        let rest: Vec<Line> = adapter.into_iter().filter(|(name, ..)| !known.contains(name)).collect();
        lines.extend(rest);
    } else if lines.is_empty() {
        lines = of_model(common, arguments, &arguments.hub.open(&arguments.folder)?)?;
    }
    print_fields(common.json, lines);
    Ok(())
}

/// A name, its text, and its JSON value.
type Line = (&'static str, String, Value);

fn of_model(common: &Common, arguments: &Info, folder: &Folder) -> anyhow::Result<Vec<Line>> {
    let config = folder.config();
    let parameters = config.parameter_count();
    let kind = folder.kind().ok();
    let recipe = kind.map(planning::recipe).filter(|recipe| recipe.is_quantized());
    let dtype = match (kind, recipe) {
        (_, Some(recipe)) => recipe.name.to_owned(),
        (kind, None) => kind.map_or_else(|| "several".to_owned(), dtype_name),
    };
    let bytes = match recipe {
        Some(recipe) => Some(quantized::model_bytes(&Decoder::from_config(config)?, &recipe)?),
        None => kind.map(|kind| parameters * kind.elt_size_in_bytes() as u64),
    };
    let adapter = arguments.adapter.adapter(&arguments.folder)?;
    if arguments.adapter.has_adapter() {
        adapter.check_matches(config).map_err(|error| named(frugal::Error::from(error).into()))?;
        no_effect::note_pattern(common, &adapter, config)?;
    }
    let trained = adapter.trainable_parameters(config)?;
    let all = parameters + trained;
    let heads = format!("{} query, {} key-value", config.num_attention_heads, config.num_key_value_heads);
    let tied = if config.tie_word_embeddings { "tied to the embedding" } else { "of its own" };
    let targets = targets(&adapter);
    let file = folder.gguf_file().map(gguf_file::lines).transpose()?.unwrap_or_default();
    let has_tokenizer = folder.tokenizer().is_some();
    let own = vec![
        ("model", config.family.architecture().to_owned(), json!(config.family.architecture())),
        ("parameters", grouped(parameters), json!(parameters)),
        ("dtype", dtype.clone(), json!(dtype)),
        ("bytes", bytes.map_or_else(|| "–".to_owned(), |bytes| human(bytes as f64, "B")), json!(bytes)),
        ("layers", config.num_hidden_layers.to_string(), json!(config.num_hidden_layers)),
        ("hidden size", config.hidden_size.to_string(), json!(config.hidden_size)),
        ("heads", heads, json!([config.num_attention_heads, config.num_key_value_heads])),
        ("output head", tied.to_owned(), json!(if config.tie_word_embeddings { "tied" } else { "own" })),
        ("vocabulary", grouped(config.vocab_size.cast_unsigned()), json!(config.vocab_size)),
        (
            "context",
            grouped(config.max_position_embeddings.cast_unsigned()),
            json!(config.max_position_embeddings),
        ),
        ("tokenizer", if has_tokenizer { "yes" } else { "no" }.to_owned(), json!(has_tokenizer)),
        (
            "trainable",
            format!("{} with adapters of rank {} on {targets}", share(trained, all), adapter.r),
            json!(trained),
        ),
    ];
    // What a GGUF file says about itself comes first, and in place of what a folder says.
    let known: Vec<&str> = file.iter().map(|(name, ..)| *name).collect();
    let rest: Vec<Line> = own.into_iter().filter(|(name, ..)| !known.contains(name)).collect();
    Ok([file, rest].concat())
}

fn of_adapter(arguments: &Info, path: &Path) -> anyhow::Result<Vec<Line>> {
    let config = LoraConfig::read(&path.join(CONFIG_FILE))?;
    let file = TensorsFile::open(&path.join(TENSORS_FILE))?;
    let numel = |shape: &[i64]| shape.iter().product::<i64>().cast_unsigned();
    let (mut numbers, mut bytes) = (0, 0);
    for entry in file.entries() {
        numbers += numel(&entry.shape);
        bytes += numel(&entry.shape) * entry.kind.elt_size_in_bytes() as u64;
    }
    let kinds: std::collections::BTreeSet<String> =
        file.entries().iter().map(|entry| dtype_name(entry.kind)).collect();
    let dtype = kinds.into_iter().collect::<Vec<_>>().join(", ");
    let kind = match (config.use_dora, config.use_rslora) {
        (true, true) => "DoRA, rank-stabilised",
        (true, false) => "DoRA",
        (false, true) => "LoRA, rank-stabilised",
        (false, false) => "LoRA",
    };
    let base = config.base_model_name_or_path.clone();
    let targets = targets(&config);
    let mut lines = vec![
        ("adapter", kind.to_owned(), json!(kind)),
        ("base", base.clone().unwrap_or_else(|| "unknown".to_owned()), json!(base)),
        ("rank", config.r.to_string(), json!(config.r)),
        ("alpha", config.lora_alpha.to_string(), json!(config.lora_alpha)),
        ("dropout", config.lora_dropout.to_string(), json!(config.lora_dropout)),
        ("targets", targets, serde_json::to_value(&config.target_modules)?),
        ("tensors", file.entries().len().to_string(), json!(file.entries().len())),
        ("parameters", grouped(numbers), json!(numbers)),
        ("dtype", dtype.clone(), json!(dtype)),
        ("bytes", human(bytes as f64, "B"), json!(bytes)),
    ];
    if let Some(model) = &arguments.model {
        let folder = arguments.hub.open(model)?;
        let all = numbers + folder.config().parameter_count();
        lines.push(("trainable", share(numbers, all), json!({ "of": all })));
    }
    Ok(lines)
}

/// Targets as text.
fn targets(config: &LoraConfig) -> String {
    let parameters = config.target_parameters.clone().unwrap_or_default();
    let modules = match &config.target_modules {
        None if parameters.is_empty() => vec!["q_proj, v_proj".to_owned()],
        None => Vec::new(),
        Some(lora::Names::Pattern(pattern)) => vec![format!("`{pattern}`")],
        Some(lora::Names::List(names)) => names.clone(),
    };
    modules.into_iter().chain(parameters).collect::<Vec<_>>().join(", ")
}
