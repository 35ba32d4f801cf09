//! Trainings of the program over models with random weights.

use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use frugal::run_folder::RunRecord;
use models::hugging_face::{self, ModelFiles};
use models::tensors_file::LazyTensor;
use models::{DecoderConfig, Llama};
use report::Record;
use runtime::random::Generator;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::started_program;

/// Exit status of a training for which nothing fits its budget.
const NOTHING_FITS: i32 = 3;

/// Steps whose times are left out of the median: the first allocates, and the program calibrates with three.
const WARM_UP: usize = 3;

/// The time between two samples of a process's memory.
const SAMPLED: Duration = Duration::from_millis(4);

/// A folder with models and data.
pub(super) struct Sandbox {
    folder: TempDir,
    program: PathBuf,
}

/// A training to the end.
#[derive(Debug)]
pub(super) struct Trained {
    /// Median over the steps after the first three.
    pub(super) step_seconds: f64,
    /// The activation plan that the program chose; `None` without a prediction.
    pub(super) chosen: Option<String>,
    /// The predicted seconds of a step, before the first and after three; `None` without kept rates.
    pub(super) predicted: Option<(f64, f64)>,
    /// The most bytes that it held, as its budget counts them.
    pub(super) held_bytes: f64,
    /// Seconds from the process's start to its end.
    pub(super) seconds: f64,
    /// Losses of the first and of the last step.
    pub(super) losses: (f64, f64),
}

/// A process whose memory was sampled.
pub(super) struct Sampled {
    /// Whether it ended well.
    pub(super) is_well: bool,
    /// Standard error.
    pub(super) stderr: String,
    /// The most bytes of it that were in RAM, those of its program, of libraries and of mapped weights included.
    pub(super) resident: u64,
    /// The most bytes of it that were in no file.
    pub(super) anonymous: u64,
}

impl Sandbox {
    /// Makes the folder, and has the program measure this machine.
    ///
    /// # Errors
    /// No program `frugal` beside this one.
    pub(super) fn new() -> anyhow::Result<Self> {
        let program = started_program::path()?;
        let folder = tempfile::Builder::new().prefix("planning-").tempdir()?;
        let sandbox = Self { folder, program };
        let Output { status, stderr, .. } = sandbox.command().arg("doctor").stdout(Stdio::null()).output()?;
        ensure!(status.success(), "doctor failed: {}", String::from_utf8_lossy(&stderr));
        Ok(sandbox)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command.env("FRUGAL_CACHE", self.folder.path().join("cache")).env("HF_HUB_OFFLINE", "1");
        command
    }

    /// Writes a model with random weights to the folder of this name.
    ///
    /// # Errors
    /// A full disk.
    pub(super) fn write_model(&self, name: &str, config: &DecoderConfig, kind: Kind) -> anyhow::Result<()> {
        let folder = self.folder.path().join(name);
        let model = Llama::new(config, (kind, Device::Cpu))?;
        started_program::write_model(&model, &folder)
    }

    /// Writes a model with random weights tensor by tensor, in the memory of one.
    ///
    /// # Errors
    /// A full disk.
    pub(super) fn write_random_model(
        &self,
        name: &str,
        config: &DecoderConfig,
        kind: Kind,
    ) -> anyhow::Result<()> {
        let random = |(name, shape): (String, Vec<i64>)| {
            let is_matrix = shape.len() > 1;
            LazyTensor::new(name, kind, &shape, move |range| {
                let piece = [range.end - range.start];
                let of = |value: f64| Tensor::f_full(piece, value, (kind, Device::Cpu));
                Ok(Some(if is_matrix { of(0.0)?.f_normal_(0.0, 0.02)? } else { of(1.0)? }))
            })
        };
        let tensors = config.shapes().into_iter().map(random).collect();
        let files = ModelFiles::new(config, tensors, hugging_face::SHARD_BYTES)?;
        let folder = self.folder.path().join(name);
        files.write(&folder, |_| Ok(()))?;
        started_program::add_tokenizer(&folder)
    }

    /// Removes a model.
    ///
    /// # Errors
    /// A folder that is not there.
    pub(super) fn remove(&self, name: &str) -> anyhow::Result<()> {
        Ok(std::fs::remove_dir_all(self.folder.path().join(name))?)
    }

    /// Writes `count` rows of `length` random tokens, all learned.
    ///
    /// # Errors
    /// A full disk.
    pub(super) fn write_rows(
        &self,
        name: &str,
        count: usize,
        length: usize,
        seed: u64,
    ) -> anyhow::Result<()> {
        let mut generator = Generator::new(seed)?;
        let mut text = String::new();
        for _ in 0..count {
            let drawn = generator.uniform(&[length as i64], (10.0, 4000.0), (Kind::Float, Device::Cpu))?;
            let tokens: Vec<i64> = Vec::try_from(drawn.f_to_kind(Kind::Int64)?)?;
            writeln!(text, "{}", json!({ "input_ids": tokens, "labels": tokens }))?;
        }
        Ok(std::fs::write(self.folder.path().join(name), text)?)
    }

    /// Runs a training, `words` of the program's command line, without the variables in `without` and with `with`, and returns the
    /// mean time of the steps after the first three.
    ///
    /// # Errors
    /// A training that fails or is too short.
    pub(super) fn mean_step_seconds(
        &self,
        words: &[String],
        without: &[&str],
        with: Option<(&str, &str)>,
    ) -> anyhow::Result<f64> {
        let out = self.folder.path().join("out");
        let mut command = self.command();
        command.args(words).args(["--out", "out"]);
        for name in without {
            command.env_remove(name);
        }
        command.envs(with);
        let Output { status, stderr, .. } = command.output()?;
        ensure!(status.success(), "{command:?} failed with {status}: {}", String::from_utf8_lossy(&stderr));
        let losses = std::fs::read_to_string(out.join("losses.jsonl"))?;
        std::fs::remove_dir_all(&out)?;
        let mut seconds = Vec::new();
        for line in losses.lines() {
            let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            seconds.extend(value["seconds"].as_f64());
        }
        let measured = seconds.get(WARM_UP..).unwrap_or_default();
        ensure!(!measured.is_empty(), "{command:?} recorded {} steps", seconds.len());
        Ok(measured.iter().sum::<f64>() / measured.len() as f64)
    }

    /// Runs the program, and samples its memory from outside, in `/proc`.
    ///
    /// # Errors
    /// A system that does not count.
    pub(super) fn sampled(&self, arguments: &[String]) -> anyhow::Result<Sampled> {
        let stderr = self.folder.path().join("stderr");
        let mut command = self.command();
        command.args(arguments).stdout(Stdio::null()).stderr(File::create(&stderr)?);
        let mut child = command.spawn()?;
        let memory = PathBuf::from(format!("/proc/{}/smaps_rollup", child.id()));
        let (mut resident, mut anonymous) = (0, 0);
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            // A process that is ending has no such file.
            let text = std::fs::read_to_string(&memory).unwrap_or_default();
            let of = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name));
                let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
                kibibytes.unwrap_or(0) << 10
            };
            resident = resident.max(of("Rss:"));
            anonymous = anonymous.max(of("Anonymous:"));
            std::thread::sleep(SAMPLED);
        };
        Ok(Sampled {
            is_well: status.success(),
            stderr: std::fs::read_to_string(&stderr)?,
            resident,
            anonymous,
        })
    }

    /// Writes `count` sentences of random lengths as a text file.
    ///
    /// # Errors
    /// A full disk.
    pub(super) fn write_text(&self, name: &str, count: usize) -> anyhow::Result<()> {
        let sentence =
            |number: usize| format!("Ann has {number} pears{}.\n", " and buys more".repeat(number % 9));
        Ok(std::fs::write(self.folder.path().join(name), (0..count).map(sentence).collect::<String>())?)
    }

    /// Copies a file of the embedded data.
    ///
    /// # Errors
    /// A full disk.
    pub(super) fn copy_data(&self, name: &str, from: &str) -> anyhow::Result<()> {
        let from = dataloading::embedded::folder()?.join(from);
        std::fs::copy(&from, self.folder.path().join(name)).with_context(|| from.display().to_string())?;
        Ok(())
    }

    /// Runs a training of all weights and returns its validation losses, from before the first step to after the last. The model is kept
    /// under the given name.
    ///
    /// # Errors
    /// A training that fails.
    pub(super) fn losses(&self, words: &[String], keep: Option<&str>) -> anyhow::Result<Vec<f64>> {
        let out = self.folder.path().join("out");
        let mut command = self.command();
        command.args(words).args(["--out", "out"]);
        let Output { status, stderr, .. } = command.output()?;
        ensure!(status.success(), "{command:?} failed with {status}: {}", String::from_utf8_lossy(&stderr));
        let mut losses = Vec::new();
        for line in std::fs::read_to_string(out.join("losses.jsonl"))?.lines() {
            let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            losses.extend(value["validation_loss"].as_f64());
        }
        if let Some(name) = keep {
            std::fs::rename(out.join("model"), self.folder.path().join(name))?;
        }
        std::fs::remove_dir_all(&out)?;
        Ok(losses)
    }

    /// Removes the output folder of a run.
    ///
    /// # Errors
    /// A folder that cannot be removed.
    pub(super) fn remove_out(&self) -> anyhow::Result<()> {
        let out = self.folder.path().join("out");
        if out.exists() { Ok(std::fs::remove_dir_all(out)?) } else { Ok(()) }
    }

    /// Fine-tunes with these arguments; `None` where the budget does not suffice.
    ///
    /// # Errors
    /// Any other failure.
    pub(super) fn train(&self, arguments: &[String]) -> anyhow::Result<Option<Trained>> {
        self.train_over(arguments, 1)
    }

    /// [`Sandbox::train`] over so many processes.
    ///
    /// # Errors
    /// As [`Sandbox::train`].
    pub(super) fn train_over(&self, arguments: &[String], ranks: usize) -> anyhow::Result<Option<Trained>> {
        let records = self.folder.path().join("records.jsonl");
        let out = self.folder.path().join("out");
        let mut command = self.command();
        if ranks > 1 {
            command.args(["launch", "-n", &ranks.to_string(), "--"]);
        }
        command.arg("finetune").args(arguments).args([
            "--device",
            "cpu",
            "--json",
            "--records",
            "records.jsonl",
            "--out",
            "out",
        ]);
        let Output { status, stdout, stderr } = command.output()?;
        let message = String::from_utf8_lossy(&stderr);
        let lines = std::fs::read_to_string(&records).unwrap_or_default();
        let outcome = RunRecord::read(&out).ok().flatten().and_then(|record| record.outcome);
        for path in [&records, &out] {
            if path.is_dir() {
                std::fs::remove_dir_all(path)?;
            } else if path.exists() {
                std::fs::remove_file(path)?;
            }
        }
        // The allocator's words for what a budget refuses.
        if status.code() == Some(NOTHING_FITS) || !status.success() && message.contains("out of memory") {
            return Ok(None);
        }
        ensure!(status.success(), "{command:?} failed with {status}: {message}");
        let (mut seconds, mut losses) = (Vec::new(), Vec::new());
        for line in lines.lines() {
            let record: Record = serde_json::from_str(line).with_context(|| line.to_owned())?;
            seconds.extend(record.metric.value.filter(|_| record.metric.name == "step_seconds"));
            losses.extend(record.metric.value.filter(|_| record.metric.name == "loss"));
        }
        ensure!(seconds.len() > WARM_UP, "{command:?} recorded {} steps", seconds.len());
        let outcome = outcome.with_context(|| format!("{command:?} left no outcome"))?;
        let mut trained = Trained {
            step_seconds: median(&mut seconds.split_off(WARM_UP)),
            chosen: None,
            predicted: None,
            held_bytes: outcome.peak_bytes as f64,
            seconds: outcome.seconds,
            losses: (losses[0], losses[losses.len() - 1]),
        };
        for line in String::from_utf8_lossy(&stdout).lines() {
            // `frugal launch` says whose line it is.
            let line = line.strip_prefix("[0] ").unwrap_or(line);
            let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            if let Some(chosen) = value["plan"]["chosen"].as_str() {
                trained.chosen = Some(chosen.to_owned());
            }
            let calibration = &value["calibration"];
            let pair =
                calibration["predicted_step_seconds"].as_f64().zip(calibration["step_seconds"].as_f64());
            trained.predicted = trained.predicted.or(pair);
        }
        Ok(Some(trained))
    }
}

/// The median.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
