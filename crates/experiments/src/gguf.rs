//! `gguf`: conversions for llama.cpp, and how fast they are.
//!
//! With `--folder`, the middle of `xtask/peers/llama_cpp.py`: each model and adapter that transformers and PEFT wrote there is converted.
//! Without it, a model with random weights is converted to every type.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use ::gguf::{Adapter, Conversion, FileType, Model};
use anyhow::Context;
use clap::{Args, Subcommand};
use lora::LoraConfig;
use lora::peft::CONFIG_FILE;
use models::{DecoderConfig, Llama, hugging_face};
use report::{Case, Metric};
use tch::{Device, Kind};

use crate::driver::{Bench, Driver};

/// The group of figures to measure.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Convert models and adapters to GGUF
    Convert(Convert),
}

#[derive(Args)]
pub(crate) struct Convert {
    /// Folders that transformers and PEFT wrote, one for each case
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

impl Verb {
    pub(crate) fn run(&self, driver: &Driver) -> anyhow::Result<()> {
        let Self::Convert(Convert { folder }) = self;
        let Some(root) = folder else { return driver.one_size().on_cpu().run("gguf-llama-cpp", speed) };
        let entries = std::fs::read_dir(root).with_context(|| format!("cannot read {}", root.display()))?;
        for entry in entries {
            let folder = entry?.path();
            converted(&folder).with_context(|| folder.display().to_string())?;
        }
        Ok(())
    }
}

/// Converts `model` to each type, and `adapter`, if there is one.
fn converted(folder: &Path) -> anyhow::Result<()> {
    let base = folder.join("model");
    let model = Model::open(&base)?;
    for kind in FileType::ALL {
        write(&model.convert(kind)?, &folder.join(format!("{kind}.gguf")))?;
    }
    let adapter = folder.join("adapter");
    if adapter.is_dir() {
        let config = LoraConfig::read(&adapter.join(CONFIG_FILE))?;
        let scale = |module: &str, _: u64| {
            config.options(module).map(|options| options.scaling()).map_err(|error| error.to_string())
        };
        write(&Adapter::open(&adapter, &base)?.convert(&scale)?, &folder.join("adapter.gguf"))?;
    }
    Ok(())
}

fn write(conversion: &Conversion<'_>, path: &Path) -> anyhow::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    conversion.write(&mut out)?;
    out.flush()?;
    Ok(conversion.check(path)?)
}

/// Measures the conversion of a model with 29 million parameters in bf16, from files to a file, and reading that again.
fn speed(bench: &mut Bench) -> anyhow::Result<()> {
    let place = tempfile::tempdir()?;
    let folder = place.path().join("model");
    let config = DecoderConfig::llama(4096, 512, 1536, 8, 8);
    let weights = Llama::new(&config, (Kind::BFloat16, Device::Cpu))?;
    hugging_face::save(&weights, &folder, hugging_face::SHARD_BYTES)?;
    std::fs::copy(dataloading::embedded::folder()?.join("tokenizer.json"), folder.join("tokenizer.json"))?;
    let bytes = std::fs::metadata(folder.join("model.safetensors"))?.len() as f64;
    bench.each(FileType::ALL, FileType::to_string, |bench, kind| {
        let start = Instant::now();
        let model = Model::open(&folder)?;
        write(&model.convert(kind)?, &place.path().join("out.gguf"))?;
        let seconds = start.elapsed().as_secs_f64();
        let metrics = vec![
            Metric::exact("conversion_seconds", "s", seconds),
            Metric::exact("source_bytes_per_second", "bytes/s", bytes / seconds),
        ];
        bench.put(&Case::new().with("type", kind.to_string()), metrics)
    })
}
