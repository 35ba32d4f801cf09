//! `lora interchange`: adapters that PEFT wrote, and others for PEFT to read.
//!
//! With `--folder`, the middle of `xtask/peers/peft_interchange.py`: each adapter that PEFT wrote there is read and compared, and an
//! adapter of our own is written beside it. Without it, the adapters among the fixtures are read, compared and written back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::hugging_face::Folder;
use models::module::{Input, LanguageModel};
use models::{Llama, tensors_file};
use report::{Case, Metric};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;

#[derive(Args)]
pub(crate) struct Interchange {
    /// Folders that PEFT wrote, one for each case
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
}

/// Reads and compares each adapter that PEFT wrote in `root`, and writes one of our own beside it.
pub(crate) fn exchange(root: &Path) -> anyhow::Result<()> {
    for folder in super::folders(root)? {
        beside(&folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// The committed adapters.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let label = |name: &&str| format!("adapter of {name}");
    bench.each(["qwen2", "llama"], label, |bench, name| {
        let folder = Path::new("data/fixtures").join(name);
        let tensors = |file: &str| -> anyhow::Result<BTreeMap<String, Tensor>> {
            Ok(tensors_file::read(&folder.join(file), Device::Cpu)?.into_iter().collect())
        };
        let (cases, adapted) = (tensors("cases.safetensors")?, tensors("adapter_cases.safetensors")?);
        let mut model = Folder::open(&folder)?.load(Some(Kind::Float), Device::Cpu)?;
        let adapters = Adapters::load(&mut model, &folder.join("adapter"))?;
        // The row without padding.
        let row =
            |tensors: &BTreeMap<String, Tensor>, key: &str| tensors.get(key).map(|all| all.narrow(0, 1, 1));
        let tokens = row(&cases, "input_ids").context("no input_ids among the cases")?;
        let expected = row(&adapted, "logits").context("no logits among the adapter's cases")?;
        let difference = (model.logits(&Input::new(&tokens))? - expected).abs().max().double_value(&[]);
        let again = tempfile::tempdir()?;
        adapters.save(again.path())?;
        same_files(&folder.join("adapter"), again.path())?;
        let case =
            Case::new().with("adapter", format!("{name} fixture")).with("direction", "PEFT writes, we read");
        bench.put(&case, vec![Metric::exact("largest_logit_difference", "", difference)])
    })
}

fn same_files(theirs: &Path, again: &Path) -> anyhow::Result<()> {
    for file in [CONFIG_FILE, TENSORS_FILE] {
        if std::fs::read(theirs.join(file))? != std::fs::read(again.join(file))? {
            bail!("{file} is written differently than it was read");
        }
    }
    Ok(())
}

fn base(folder: &Path) -> models::Result<Llama> {
    Folder::open(&folder.join("base"))?.load(Some(Kind::Float), Device::Cpu)
}

/// Reads the adapter in `theirs`, and writes `ours`.
fn beside(folder: &Path) -> anyhow::Result<()> {
    let read = tensors_file::read(&folder.join("theirs.safetensors"), Device::Cpu)?;
    let named = |wanted: &str| read.iter().find(|(name, _)| name == wanted).map(|(_, tensor)| tensor);
    let (tokens, expected) = (named("tokens").context("no tokens")?, named("logits").context("no logits")?);

    let mut model = base(folder)?;
    let adapters = Adapters::load(&mut model, &folder.join("theirs"))?;
    let difference = { (model.logits(&Input::new(tokens))? - expected).abs().max() };

    adapters.save(&folder.join("again"))?;
    same_files(&folder.join("theirs"), &folder.join("again"))?;

    let theirs = LoraConfig::read(&folder.join("theirs").join(CONFIG_FILE))?;
    let config = LoraConfig { read: serde_json::Map::new(), ..theirs };
    let mut model = base(folder)?;
    let adapters = LoraConfig { seed: 3, ..config.clone() }.install(&mut model)?;
    let mut generator = Generator::new(4)?;
    for (_, tensor) in adapters.tensors("default")? {
        let _no_grad = tch::no_grad_guard();
        let noise = generator.normal(&tensor.size(), (tensor.kind(), Device::Cpu))? * 0.3;
        let _ = tensor.shallow_clone().f_add_(&noise)?;
    }
    adapters.save(&folder.join("ours"))?;
    let logits = model.logits(&Input::new(tokens))?.detach();
    let ours: [(String, Tensor); 2] =
        [("logits".to_owned(), logits), ("difference".to_owned(), difference.detach())];
    tensors_file::write(&folder.join("ours.safetensors"), &ours)?;
    Ok(())
}
