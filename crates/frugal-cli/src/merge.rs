//! `frugal merge`.

mod difference;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};

use crate::common_flags::Common;
use anyhow::bail;
use clap::Args;
use files::atomic_write;
use frugal::companion_files::{self, CompanionFiles};
use frugal::config::{Bytes, Dtype};
use frugal::run_folder::RECORD;
use kernels::nf4::Scales;
use models::hugging_face::{self, Folder};
use models::module::first_non_finite;
use models::state_dict::{load_state_dict, state_dict};
use models::tensors_file::TensorsFile;
use models::{DecoderConfig, Llama};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use difference::Difference;

use super::output::print_line;
use crate::flags::hub::same_folder;
use crate::flags::model::{Found, ModelArgs, load_adapter};
use crate::folder::model_folder::complete;
use crate::folder::output_folder::{self, Existing};
use crate::folder::signals;

#[derive(Args)]
pub(crate) struct Merge {
    #[command(flatten)]
    model: ModelArgs,
    /// The adapter's folder [default: that of the run in --model]
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Output folder of the merged model
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Overwrite --out
    #[arg(long)]
    overwrite: bool,
    /// Maximum size of a file of weights
    #[arg(long, value_name = "BYTES", default_value = "5GB")]
    max_shard_bytes: Bytes,
    /// Compare the merged model with the adapter over the model in NF4, on each line of this file
    #[arg(long, value_name = "FILE")]
    compare_nf4: Option<PathBuf>,
}

pub(crate) fn run(common: &Common, arguments: &Merge) -> anyhow::Result<()> {
    let device = common.device_of_weights()?;
    let out = &arguments.out;
    let Found { folder, adapter, data } = arguments.model.find(common, arguments.adapter.as_deref())?;
    let Some(adapter) = adapter.as_deref() else {
        bail!(
            "there is nothing to merge; give --adapter, or the output folder of a training of adapters as --model"
        )
    };
    let named = Path::new(&arguments.model.model);
    for (taken, what) in [(folder.path(), "the model's"), (adapter, "the adapter's"), (named, "the run's")] {
        if same_folder(taken, out) {
            bail!("--out {} is {what} own folder; give another", out.display());
        }
    }
    if out.exists() && atomic_write::parent(out).join(RECORD).is_file() {
        bail!("--out {} is a part of a training's output folder; give another", out.display());
    }
    output_folder::check(out, Existing::by_flag(arguments.overwrite))?;
    refuse_nf4(&folder, arguments.model.dtype)?;
    signals::remove_unfinished_files(out)?;
    let companions = CompanionFiles::of(&folder, Some(adapter), &data.unwrap_or_default())?;
    let model = arguments.model.load(&folder, device)?;
    into_folder((&folder, &companions), model, adapter, out, arguments.max_shard_bytes)?;
    let compared = arguments.compare_nf4.as_deref().map(|texts| {
        let merged = Folder::open(out)?.load(None, device)?;
        difference::measure((&folder, &companions), adapter, &merged, texts, device)
    });
    let compared = compared.transpose()?;
    if common.json {
        let mut result = json!({ "model": out });
        if let Some(Difference { positions, merged, without, same_token }) = compared {
            result["compared_with_nf4"] = json!({
                "positions": positions, "divergence": merged, "divergence_without_adapter": without, "same_token": same_token,
            });
        }
        print_line(&json!({ "result": result }));
        return Ok(());
    }
    common.note(&format!("the merged model is in {}", out.display()));
    if let Some(Difference { positions, merged, without, same_token }) = compared {
        common.note(&format!(
                "over {positions} positions its divergence from the adapter over NF4 is {merged:.4} nats, that of NF4 without the \
                 adapter {without:.4}; {:.1} % of the most likely tokens are the same",
                100.0 * same_token
            ),
        );
    }
    Ok(())
}

/// Refuses to merge into weights in NF4, whose steps are larger than what an adapter changes.
///
/// # Errors
/// A model in NF4.
pub(crate) fn refuse_nf4(folder: &Folder, dtype: Option<Dtype>) -> anyhow::Result<()> {
    let in_files = folder.kind().is_ok_and(|kind| Scales::of(kind).is_some());
    if dtype == Some(Dtype::Nf4) || dtype.is_none() && in_files {
        bail!(
            "an adapter is not merged into weights in NF4: their steps are larger than what it changes; give the original model's files as \
             --model, without --dtype nf4"
        );
    }
    Ok(())
}

/// Merges an adapter into a model, which is of `folder`, writes it to another, and reads that again.
pub(crate) fn into_folder(
    (folder, companions): (&Folder, &CompanionFiles),
    mut model: Llama,
    adapter: &Path,
    out: &Path,
    max_shard_bytes: Bytes,
) -> anyhow::Result<()> {
    let adapters = load_adapter(&mut model, adapter)?;
    if let Some(name) = first_non_finite(&model)? {
        bail!(
            "`{name}` has an infinity or a NaN, in {} or in the adapter's folder {}: nothing was merged; get the files again, or take \
             an earlier checkpoint's",
            folder.path().display(),
            adapter.display()
        );
    }
    let unloaded = adapters.merge_and_unload(&mut model)?;
    if !unloaded.untied.is_empty() {
        model = untied(&model)?;
    }
    let mut kept = Vec::new();
    hugging_face::save_with(&model, out, max_shard_bytes.0, |new| {
        complete(folder, companions, new).map_err(|error| std::io::Error::other(format!("{error:#}")))?;
        kept = companion_files::names(new);
        Ok(())
    })?;
    companion_files::remove_others(out, &kept)?;
    check(&model, out)
}

/// Reads a written model again, a tensor at a time, and compares it with the one in memory.
fn check(model: &Llama, out: &Path) -> anyhow::Result<()> {
    let written = Folder::open(out)?;
    let mut files: BTreeMap<PathBuf, TensorsFile> = BTreeMap::new();
    for (name, meant) in state_dict(model) {
        let Some(location) = written.location(&name) else {
            let is_dense = matches!(meant.kind(), Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double);
            let read = meant.f_empty_like()?.f_to_device(Device::Cpu)?;
            // A tied head has no values of its own.
            if is_dense && written.load_tensor(&name, &read)? && read != meant.f_to_device(Device::Cpu)? {
                bail!("{}: `{name}` is read differently than it was written, or not finite", out.display());
            }
            continue;
        };
        let file = match files.entry(location.path.clone()) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(free) => free.insert(TensorsFile::open(&location.path)?),
        };
        let read = Tensor::f_empty(&location.shape, (location.kind, Device::Cpu))?;
        let entry = file.entries().iter().find(|entry| file.location(entry) == location);
        let same = match entry {
            Some(entry) => {
                file.copy(entry, &read)?;
                read.kind() == meant.kind() && read == meant.f_to_device(Device::Cpu)?
            }
            None => false,
        };
        if !same {
            bail!("{}: `{name}` is read differently than it was written, or not finite", out.display());
        }
    }
    Ok(())
}

/// Returns the same model with its own head, whose values are no longer the embedding's.
fn untied(model: &Llama) -> anyhow::Result<Llama> {
    let config = DecoderConfig { tie_word_embeddings: false, ..model.decoder_config().clone() };
    let state = state_dict(model);
    let (kind, device) = state.first().map_or((Kind::Float, Device::Cpu), |(_, x)| (x.kind(), x.device()));
    let apart = Llama::new(&config, (kind, device))?;
    load_state_dict(&apart, &state, "the merged model")?;
    Ok(apart)
}
