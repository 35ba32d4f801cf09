//! Commands of `frugal` whose results are known, over a model and data that are made here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, ensure};
use models::module::tensors;
use models::{DecoderConfig, Llama};
use report::cli::Scale;
use runtime::random::Generator;
use serde_json::{Value, json};
use tch::Device;
use tempfile::TempDir;
use training::checkpoint;

use super::hub::Hub;
use super::scripts;
use crate::started_program;

/// A command of the program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// Its name in the report.
    pub(super) name: &'static str,
    /// Its arguments between blanks; `{out}` stands for the output's path.
    arguments: &'static str,
    /// Files below the output that must be the same at every end.
    results: &'static [&'static str],
    /// Whether it writes checkpoints and resumes from them.
    pub(super) resumes: bool,
    /// Whether it is one process.
    pub(super) alone: bool,
    pub(super) kind: Kind,
}

/// The kind of work that a command does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// `frugal`, without a network.
    Frugal,
    /// `frugal` with a hub, whose cache is the output.
    Download,
    /// `xtask` with experiments that are shell scripts.
    Xtask,
}

/// The results of a training of all weights.
const FULL_RESULTS: [&str; 3] = [
    "model/model.safetensors",
    "checkpoints/step-000000000040/model.safetensors",
    "checkpoints/step-000000000040/optimizer.safetensors",
];

/// Every command that is tried.
pub(super) const WORKS: [Work; 10] = [
    Work {
        name: "pretraining",
        arguments: "train --width 16 --heads 2 --vocabulary 32 --length 16 --dropout 0.1 --batch-size 4 --accumulation 2 --clip 1 \
                    --steps 60 --checkpoint-every 7 --log-every 1 --resume --out {out}",
        results: &[
            "checkpoints/step-000000000060/model.safetensors",
            "checkpoints/step-000000000060/optimizer.safetensors",
        ],
        resumes: true,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "LoRA with offloaded layers",
        arguments: "finetune --model model --data rows.jsonl --r 4 --dropout 0.1 --offload file --batch-size 4 --steps 40 \
                    --checkpoint-every 7 --log-every 1 --resume --out {out}",
        results: &[
            "adapter_model.safetensors",
            "checkpoints/step-000000000040/model.safetensors",
            "checkpoints/step-000000000040/optimizer.safetensors",
        ],
        resumes: true,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "full with AdamW on the host",
        arguments: "finetune --model model --data rows.jsonl --method full --optimizer-on host --offload host --batch-size 4 --steps 40 \
                    --checkpoint-every 7 --log-every 1 --resume --out {out}",
        results: &FULL_RESULTS,
        resumes: true,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "full with layers and AdamW in files",
        arguments: "finetune --model model --data rows.jsonl --method full --optimizer-on host --offload file --batch-size 4 --steps 40 \
                    --checkpoint-every 7 --log-every 1 --resume --out {out}",
        results: &FULL_RESULTS,
        resumes: true,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "LoRA over two ranks",
        arguments: "launch -n 2 -- finetune --model model --data rows.jsonl --r 4 --zero-stage 2 --batch-size 2 --accumulation 2 --steps 40 \
                    --checkpoint-every 7 --log-every 1 --resume --out {out}",
        results: &[
            "adapter_model.safetensors",
            "checkpoints/step-000000000040/model.safetensors",
            "checkpoints/step-000000000040/optimizer.safetensors",
        ],
        resumes: true,
        alone: false,
        kind: Kind::Frugal,
    },
    Work {
        name: "merging",
        arguments: "merge --model model --adapter adapter --overwrite --out {out}",
        results: &["model.safetensors", "config.json", "tokenizer.json"],
        resumes: false,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "export to GGUF",
        arguments: "export --format gguf --type f16 --model model --adapter adapter --overwrite --out {out}/tuned.gguf",
        results: &["tuned.gguf"],
        resumes: false,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "export to PEFT",
        arguments: "export --format peft --checkpoints trained --overwrite --out {out}",
        results: &["adapter_model.safetensors", "adapter_config.json"],
        resumes: false,
        alone: true,
        kind: Kind::Frugal,
    },
    Work {
        name: "downloading",
        arguments: "generate --model owner/small --prompt one --max-new-tokens 1 --quiet",
        results: &[
            "models--owner--small/snapshots/0123456789abcdef0123456789abcdef01234567/model.safetensors",
            "models--owner--small/snapshots/0123456789abcdef0123456789abcdef01234567/config.json",
            "models--owner--small/snapshots/0123456789abcdef0123456789abcdef01234567/tokenizer.json",
            "models--owner--small/refs/main",
        ],
        resumes: false,
        alone: true,
        kind: Kind::Download,
    },
    Work {
        name: "cargo xtask run-all",
        arguments: "run-all --scale smoke --resume --out {out}",
        results: &["records/first.jsonl", "records/second.jsonl", "records/third.jsonl"],
        resumes: false,
        alone: true,
        kind: Kind::Xtask,
    },
];

/// Commands for many steps, and how many at scale full. What a step takes must not grow, so the loss log is thin.
pub(super) const SOAKED: [(Work, u64); 2] = [
    (
        Work {
            name: "pretraining",
            arguments: "train --width 16 --heads 2 --vocabulary 32 --length 16 --dropout 0.1 --batch-size 4 --log-every 1000 --out {out}",
            results: &[],
            resumes: true,
            alone: true,
            kind: Kind::Frugal,
        },
        100_000,
    ),
    (
        Work {
            name: "full with offloading, checkpoints and evaluation",
            arguments: "finetune --model model --data rows.jsonl --validation rows.jsonl --method full --optimizer-on host --offload host \
                        --batch-size 4 --log-every 1000 --checkpoint-every 100 --evaluate-every 100 --out {out}",
            results: &[],
            resumes: true,
            alone: true,
            kind: Kind::Frugal,
        },
        10_000,
    ),
];

/// The commands that a run at scale smoke tries.
const SMOKE: [&str; 2] = ["pretraining", "merging"];

/// The commands with these names; those of the scale where none is named.
///
/// # Errors
/// An unknown name.
pub(super) fn named(only: &[String], scale: Scale) -> anyhow::Result<Vec<Work>> {
    for name in only {
        let known = || WORKS.map(|work| work.name).join(", ");
        ensure!(
            WORKS.iter().any(|work| work.name == name),
            "there is no command `{name}`; there are: {}",
            known()
        );
    }
    let possible = |work: &Work| work.kind != Kind::Xtask || xtask().is_some();
    let of_scale = |work: &Work| (scale != Scale::Smoke || SMOKE.contains(&work.name)) && possible(work);
    let wanted =
        |work: &Work| only.iter().any(|name| name == work.name) || (only.is_empty() && of_scale(work));
    Ok(WORKS.into_iter().filter(wanted).collect())
}

/// A folder with a model, data and an adapter, in which commands run.
pub(super) struct Sandbox {
    folder: TempDir,
    program: PathBuf,
    hub: Hub,
}

impl Sandbox {
    /// Makes the folder.
    ///
    /// # Errors
    /// No program `frugal` beside this one; one that cannot train the adapter.
    pub(super) fn new() -> anyhow::Result<Self> {
        let program = started_program::path()?;
        let folder = tempfile::Builder::new().prefix("robustness-").tempdir()?;
        let hub = Hub::start(&folder.path().join("model"))?;
        let sandbox = Self { folder, program, hub };
        std::fs::create_dir(sandbox.scratch())?;
        std::fs::create_dir(sandbox.outputs())?;
        sandbox.write_model()?;
        if let Some(xtask) = xtask() {
            scripts::write(&sandbox.path("scripts"), &xtask)?;
        }
        let mut rows = String::new();
        for (a, b) in (0..40).map(|n| (n % 9, n / 4)) {
            let question = format!("Ann has {a} pears and buys {b} more. How many has she?");
            writeln!(rows, "{}", json!({ "question": question, "answer": (a + b).to_string() }))?;
        }
        std::fs::write(sandbox.path("rows.jsonl"), rows)?;
        let train = "finetune --model model --data rows.jsonl --r 4 --batch-size 4 --steps 4 --checkpoint-every 2 --out trained";
        sandbox.succeed(sandbox.program(train))?;
        sandbox.succeed(sandbox.program("export --format peft --checkpoints trained --out adapter"))?;
        Ok(sandbox)
    }

    /// Writes a Qwen2 of two layers with the tokenizer of the embedded data.
    fn write_model(&self) -> anyhow::Result<()> {
        let config = DecoderConfig {
            num_key_value_heads: 2,
            max_position_embeddings: 200,
            tie_word_embeddings: true,
            ..DecoderConfig::qwen2(4096, 32, 48, 2, 4)
        };
        let model = Llama::new(&config, (tch::Kind::Float, Device::Cpu))?;
        let mut generator = Generator::new(1)?;
        for named in tensors(&model).into_iter().filter(|named| named.tensor.dim() == 2) {
            let noise = generator.normal(&named.tensor.size(), (tch::Kind::Float, Device::Cpu))? * 0.2;
            tch::no_grad(|| named.tensor.shallow_clone().f_copy_(&noise))?;
        }
        started_program::write_model(&model, &self.path("model"))
    }

    /// The folder of the outputs.
    pub(super) fn outputs(&self) -> PathBuf {
        self.path("outputs")
    }

    /// The path of the output of this name.
    pub(super) fn output(&self, name: &str) -> PathBuf {
        self.outputs().join(name)
    }

    /// A path in the folder.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder for the program's temporary files.
    fn scratch(&self) -> PathBuf {
        self.path("scratch")
    }

    fn program(&self, arguments: &str) -> Command {
        let mut command = self.start(&self.program, arguments, self.folder.path());
        command.args(["--device", "cpu"]);
        command
    }

    fn start(&self, program: &Path, arguments: &str, folder: &Path) -> Command {
        let mut command = Command::new(program);
        command.args(arguments.split_whitespace()).current_dir(folder);
        // A single thread: the same order of summation at each try.
        command.env("OMP_NUM_THREADS", "1").env("MKL_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1");
        command.env("FRUGAL_CACHE", self.path("cache")).env("TMPDIR", self.scratch());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// The command that writes to the output of this name.
    pub(super) fn command(&self, work: &Work, out: &str) -> Command {
        let out = self.output(out).display().to_string();
        let arguments = work.arguments.replace("{out}", &out);
        match work.kind {
            Kind::Frugal => self.program(&arguments),
            Kind::Download => {
                let mut command = self.program(&arguments);
                command.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN");
                command.env("HF_ENDPOINT", self.hub.address()).env("HF_HUB_CACHE", out);
                command
            }
            Kind::Xtask => {
                let folder = self.path("scripts");
                let mut command = self.start(&folder.join("bin/xtask"), &arguments, &folder);
                command.env_remove("CARGO_MANIFEST_DIR");
                command
            }
        }
    }

    /// Runs a command that has to end well, and returns what it wrote to standard error.
    ///
    /// # Errors
    /// A command that fails.
    pub(super) fn succeed(&self, mut command: Command) -> anyhow::Result<String> {
        let Output { status, stderr, .. } = command.output()?;
        let message = String::from_utf8_lossy(&stderr).into_owned();
        ensure!(status.success(), "{command:?} failed with {status}: {message}");
        Ok(message)
    }

    /// The results of a command that has ended: each file's bytes, and the losses by step.
    ///
    /// # Errors
    /// A missing file.
    pub(super) fn results(&self, work: &Work, out: &str) -> anyhow::Result<Results> {
        let out = self.output(out);
        let file = |name: &&str| {
            let path = out.join(name);
            std::fs::read(&path).with_context(|| path.display().to_string())
        };
        let files = work.results.iter().map(file).collect::<anyhow::Result<_>>()?;
        let losses = if work.resumes { losses(&out.join("losses.jsonl"))? } else { Vec::new() };
        Ok(Results { files, losses })
    }

    /// Describes the damage of an output whose command was stopped: a result that is neither complete nor missing, or a visible
    /// checkpoint that cannot be read.
    pub(super) fn damage(&self, work: &Work, out: &str, expected: &Results) -> Option<String> {
        let path = self.output(out);
        if work.resumes {
            let folder = path.join("checkpoints");
            return match checkpoint::latest(&folder) {
                Ok(checkpoints) => checkpoints.refused.first().cloned(),
                Err(error) => folder.exists().then(|| error.to_string()),
            };
        }
        work.results.iter().zip(&expected.files).find_map(|(name, expected)| {
            let file = path.join(name);
            let bytes = std::fs::read(&file).ok()?;
            (bytes != *expected)
                .then(|| format!("{} has {} of {} bytes", file.display(), bytes.len(), expected.len()))
        })
    }

    /// Temporary files that are left in an output and in the scratch folder.
    pub(super) fn left(&self, out: &str) -> Vec<PathBuf> {
        let mut left = entries(&self.scratch());
        let mut paths = entries(&self.outputs());
        let mut folders = vec![self.output(out)];
        while let Some(folder) = folders.pop() {
            let inside = entries(&folder);
            folders.extend(inside.iter().filter(|path| path.is_dir() && !path.is_symlink()).cloned());
            paths.extend(inside);
        }
        left.extend(paths.into_iter().filter(|path| is_temporary(path)));
        left
    }

    /// Removes an output.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub(super) fn remove(&self, out: &str) -> anyhow::Result<()> {
        let path = self.output(out);
        if path.is_dir() {
            std::fs::remove_dir_all(path)?
        } else if path.exists() {
            std::fs::remove_file(path)?
        }
        for path in entries(&self.scratch()) {
            if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
        }
        Ok(())
    }
}

/// The results of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Results {
    files: Vec<Vec<u8>>,
    /// Step and bits of the loss.
    losses: Vec<(u64, u64)>,
}

fn losses(path: &Path) -> anyhow::Result<Vec<(u64, u64)>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut losses = Vec::new();
    for line in text.lines() {
        let line: Value =
            serde_json::from_str(line).with_context(|| format!("{}: {line}", path.display()))?;
        if let (Some(step), Some(loss)) = (line["step"].as_u64(), line["loss"].as_f64()) {
            losses.push((step, loss.to_bits()));
        }
    }
    Ok(losses)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn is_temporary(path: &Path) -> bool {
    path.file_name()
        .map(|name| name.to_string_lossy())
        .is_some_and(|name| [".tmp", ".incomplete"].iter().any(|part| name.contains(part)))
}

/// The `xtask` that started this program, if one did.
fn xtask() -> Option<PathBuf> {
    std::env::var_os("FRUGAL_XTASK").map(PathBuf::from)
}
