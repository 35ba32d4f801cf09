//! `lora assignment`: the assignment's fine-tuning with pretrained weights, by the program that a user has.
//!
//! Accuracy on GSM8K with three solved examples and with none, one epoch of LoRA in bf16, and the same accuracies after it. The weights
//! and the problems are not part of the project; without them the experiment says what is missing and leaves its records as they are.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Args;
use frugal::run_folder::{LOSSES, RunRecord};
use report::{Case, Metric};
use serde_json::{Value, json};

use crate::driver::Bench;
use crate::{installed, started_program};

#[derive(Args)]
pub(crate) struct Assignment {
    /// The model that is adapted [default: Qwen2.5-Coder-0.5B-Instruct in the folder FRUGAL_MODELS]
    #[arg(long, value_name = "FILE_OR_FOLDER")]
    model: Option<PathBuf>,
    /// A folder with GSM8K's train.jsonl and test.jsonl [default: the folder FRUGAL_GSM8K]
    #[arg(long, value_name = "FOLDER")]
    problems: Option<PathBuf>,
    /// Grade the first N problems
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Train for N steps instead of an epoch
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// Keep the answers and the run's folder here, and go on with those that an interrupted run has left here [default: a folder beside
    /// the records, removed at the end]
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// More flags of `frugal finetune`, after `--`
    #[arg(last = true)]
    finetune: Vec<String>,
}

impl Assignment {
    /// The model and the problems, or what is missing.
    fn inputs(&self) -> Result<(PathBuf, PathBuf), String> {
        let model = self.model.as_deref().unwrap_or(Path::new(installed::ASSIGNMENT));
        let model = installed::find(model).ok_or_else(|| installed::missing(model))?;
        let problems = installed::gsm8k(self.problems.as_deref())?;
        Ok((model, problems))
    }
}

/// The program with what all its runs share.
struct Program<'a> {
    path: PathBuf,
    problems: &'a Path,
    folder: &'a Path,
    limit: Option<usize>,
}

impl Program<'_> {
    /// Runs the program with these words, and returns the last line of its standard output.
    fn run(&self, words: &[&str]) -> anyhow::Result<Value> {
        let mut command = Command::new(&self.path);
        command.args(words).args(["--device", "cpu", "--json"]).arg("--data").arg(self.problems);
        let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{command:?} failed with {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next_back().unwrap_or_default();
        serde_json::from_str(line).with_context(|| format!("{command:?} printed {line}"))
    }

    /// Grades the model's answers with this number of solved examples before each question.
    fn grade(&self, bench: &mut Bench, model: &Path, stage: &str, shots: u32) -> anyhow::Result<()> {
        let out = self.folder.join(format!("answers-{stage}-{shots}.jsonl"));
        let (model, out, shots_flag) =
            (model.display().to_string(), out.display().to_string(), shots.to_string());
        let mut words = vec![
            "eval",
            "--model",
            &model,
            "--shots",
            &shots_flag,
            "--batch-size",
            "8",
            "--out",
            &out,
            "--overwrite",
        ];
        let limit = self.limit.map(|limit| limit.to_string());
        words.extend(limit.iter().flat_map(|limit| ["--limit", limit]));
        // An evaluation that was made with the same words before an interruption is not repeated.
        let path = self.folder.join(format!("evaluation-{stage}-{shots}.json"));
        let kept = std::fs::read_to_string(&path).ok();
        let kept = kept.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        let evaluation = match kept.filter(|kept| kept["words"] == json!(words)) {
            Some(mut kept) => kept["result"].take(),
            None => {
                let evaluation = self.run(&words)?;
                std::fs::write(&path, json!({ "words": words, "result": evaluation }).to_string())?;
                evaluation
            }
        };
        let number = |value: &Value| value.as_f64().with_context(|| format!("{value} is no number"));
        for (grader, figures) in evaluation["graders"].as_object().context("no graders")? {
            let case = Case::new().with("stage", stage).with("shots", shots).with("grader", grader.as_str());
            let metrics = vec![
                Metric::exact("accuracy", "ratio", number(&figures["accuracy"])?),
                Metric::exact("accuracy_from", "ratio", number(&figures["low"])?),
                Metric::exact("accuracy_to", "ratio", number(&figures["high"])?),
                Metric::exact("right", "count", number(&figures["right"])?),
                Metric::exact("problems", "count", number(&figures["of"])?),
            ];
            bench.put(&case, metrics)?;
        }
        let rate =
            Metric::of_samples("tokens_per_second", "tokens/s", &[number(&evaluation["tokens_per_second"])?]);
        bench.put(&Case::new().with("stage", stage).with("shots", shots), vec![rate])
    }
}

pub(crate) fn run(bench: &mut Bench, arguments: &Assignment) -> anyhow::Result<()> {
    let (model, problems) = match arguments.inputs() {
        Ok(inputs) => inputs,
        Err(missing) => {
            bench.print(&format!("skipped: {missing}"));
            return Ok(());
        }
    };
    // Hours of work: what an interrupted run has left is beside the records, also for a process with another number.
    let beside = bench.records().and_then(Path::parent).map(|folder| folder.join("lora-assignment"));
    let temporary = tempfile::tempdir()?;
    let folder = arguments.keep.as_deref().or(beside.as_deref()).unwrap_or(temporary.path()).to_owned();
    std::fs::create_dir_all(&folder)?;
    let program = Program {
        path: started_program::path()?,
        problems: &problems,
        folder: &folder,
        limit: arguments.limit,
    };
    bench.expect(5);

    for shots in [3, 0] {
        bench.message(&format!("accuracy before, {shots} examples"));
        program.grade(bench, &model, "before", shots)?;
        bench.step();
    }
    bench.message("training");
    let out = folder.join("run");
    train(bench, &program, arguments, &model, &out)?;
    bench.step();
    for shots in [3, 0] {
        bench.message(&format!("accuracy after, {shots} examples"));
        program.grade(bench, &out, "after", shots)?;
        bench.step();
    }
    if arguments.keep.is_none() {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}

/// Fine-tunes with the assignment's adapters, and records the curve and the cost.
fn train(
    bench: &mut Bench,
    program: &Program,
    arguments: &Assignment,
    model: &Path,
    out: &Path,
) -> anyhow::Result<()> {
    let (model, out_flag) = (model.display().to_string(), out.display().to_string());
    let mut words = vec!["finetune", "--model", &model, "--out", &out_flag, "--dtype", "bfloat16"];
    words.extend([
        "--r",
        "8",
        "--alpha",
        "16",
        "--targets",
        "q_proj,k_proj,v_proj,o_proj",
        "--evaluate-every",
        "60",
        // About 16 problems in a step, without padding.
        "--packing",
        "1024",
        "--batch-size",
        "3",
        "--accumulation",
        "1",
    ]);
    let steps = arguments.steps.map(|steps| steps.to_string());
    match &steps {
        Some(steps) => words.extend(["--steps", steps]),
        None => words.extend(["--epochs", "1"]),
    }
    words.extend(arguments.finetune.iter().map(String::as_str));
    words.push("--resume");
    program.run(&words)?;

    let record = RunRecord::read(out)?.context("the run left no record")?;
    let outcome = record.outcome.clone().context("the run left no outcome")?;
    let mut seconds = Vec::new();
    for line in std::fs::read_to_string(out.join(LOSSES))?.lines() {
        let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let Some(step) = value["step"].as_u64() else { continue };
        let case = Case::new().with("stage", "training").with("step", step);
        let curve = [("loss", "training_loss"), ("validation_loss", "validation_loss")];
        let metrics =
            curve.iter().filter_map(|(key, name)| Some(Metric::exact(name, "nat", value[*key].as_f64()?)));
        bench.put(&case, metrics.collect())?;
        // Those of an evaluation are not a step's.
        seconds.extend(value["seconds"].as_f64().filter(|_| value["loss"].is_number()));
    }
    let metrics = vec![
        Metric::exact("parameters", "count", record.parameters as f64),
        Metric::exact("trainable_parameters", "count", record.trainable as f64),
        Metric::exact("rows", "count", record.train.rows as f64),
        Metric::exact("steps", "count", outcome.step as f64),
        Metric::of_samples("step_seconds", "s", &seconds),
        Metric::exact("training_seconds", "s", seconds.iter().sum()),
        Metric::exact("peak_bytes", "B", outcome.peak_bytes as f64),
    ];
    bench.put(&Case::new().with("stage", "training"), metrics)
}
