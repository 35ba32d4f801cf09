//! The page of a training: one HTML file without scripts, which a browser loads again by itself while the training runs.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

use accounting::quantity::{bytes_text, grouped};
use anyhow::Context;
use report::plot::curves::{self, Curve, CurveAxes};
use report::plot::escape;
use serde_json::Value;

use super::points::Points;
use super::progress_bar::duration;
use frugal::config::CONFIG_FILE;
use frugal::loss_log::Losses;
use frugal::run_folder::{CHECKPOINTS, LOSSES, PAGE, RunRecord, SAMPLES, State};

/// Seconds after which a browser loads the page of a running training again.
const RELOAD: u32 = 10;
/// Size of a drawing in its own units.
const SIZE: (f64, f64) = (960.0, 360.0);

const STYLE: &str = "\
:root{color-scheme:light dark}\
body{margin:0;font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",\"Liberation Sans\",Arial,sans-serif;background:#fff;color:#1f2328}\
main{max-width:64rem;margin:0 auto;padding:1.2rem 1.5rem 4rem}\
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.6rem 1rem;margin:1rem 0}\
dt{font-size:.8rem;opacity:.7}dd{margin:0;font-size:1.1rem;font-variant-numeric:tabular-nums}\
svg{width:100%;height:auto}\
pre{overflow-x:auto;padding:.8rem;background:#f4f6f8;border-radius:6px;font-size:.8rem;line-height:1.4;white-space:pre-wrap}\
table{border-collapse:collapse;width:100%;font-size:.9rem}td,th{text-align:left;vertical-align:top;padding:.4rem .6rem;\
border-top:1px solid #d5dae0;overflow-wrap:anywhere;white-space:pre-wrap}\
@media screen and (prefers-color-scheme:dark){body{background:#12161b;color:#e4e7eb}pre{background:#1c2128}\
td,th{border-color:#363d46}}";

/// Writes the page of an output folder. Without a state it is what the folder shows.
///
/// # Errors
/// A folder that cannot be read or written.
pub(crate) fn write(folder: &Path, state: Option<State>) -> anyhow::Result<()> {
    let path = folder.join(PAGE);
    let text = html(folder, state)?;
    files::atomic_write::unsynced(&path, text.as_bytes()).with_context(|| path.display().to_string())
}

/// Returns the text of the page.
///
/// # Errors
/// A folder that cannot be read.
pub(crate) fn html(folder: &Path, state: Option<State>) -> anyhow::Result<String> {
    let record = RunRecord::read(folder)?.unwrap_or_default();
    let state = state.unwrap_or_else(|| record.state(folder));
    let log = Log::read(&folder.join(LOSSES));
    let losses = Losses::read(&folder.join(LOSSES))?;
    let name = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let reload = match state {
        State::Running => format!("<meta http-equiv=\"refresh\" content=\"{RELOAD}\">\n"),
        _ => String::new(),
    };
    let mut body = format!(
        "<h1>{}</h1>\n<p>{} · {} · {}</p>\n",
        escape(&name),
        escape(&record.model),
        escape(&record.method),
        state.name()
    );
    body += &figures(&record, &log, losses);
    let axes = |title, y| CurveAxes { title, x: "step", y };
    for (title, y, lines) in [
        ("Loss", "loss (nats)", vec![("training", &log.loss), ("validation", &log.validation)]),
        ("Rewards", "reward", vec![("chosen", &log.rewards[0]), ("rejected", &log.rewards[1])]),
        ("Accuracy", "fraction", vec![("chosen above rejected", &log.rewards[2])]),
        ("Mean reward", "reward", vec![("training", &log.policy[0]), ("validation", &log.policy[1])]),
        ("Answers", "tokens", vec![("mean length", &log.policy[2])]),
        ("Divergence", "nats", vec![("from the reference", &log.policy[3])]),
        (
            "Divergence from the teacher",
            "nats",
            vec![("training", &log.of_teacher[0]), ("validation", &log.of_teacher[1])],
        ),
        (
            "Loss of the labels",
            "loss (nats)",
            vec![("training", &log.of_teacher[2]), ("validation", &log.of_teacher[3])],
        ),
        ("Reference point", "nats", vec![("divergence from the reference", &log.rewards[3])]),
        ("Learning rate", "learning rate", vec![("learning rate", &log.learning_rate)]),
        ("Gradient norm", "norm before clipping", vec![("gradient norm", &log.norm)]),
        ("Speed", "tokens/s", vec![("tokens per second", &log.rate)]),
    ] {
        let lines: Vec<Curve> = lines
            .into_iter()
            .map(|(name, points)| Curve { name: name.to_owned(), points: points.means() })
            .collect();
        if let Some(svg) = curves::draw(axes(title, y), &lines, SIZE) {
            let _ = write!(body, "<h2>{title}</h2>\n{}", report::plot::without_style(&svg));
        }
    }
    body += &samples(&folder.join(SAMPLES));
    body += &data(&record);
    if let Ok(text) = fs::read_to_string(folder.join(CONFIG_FILE)) {
        let _ = write!(body, "<h2>{CONFIG_FILE}</h2>\n<pre>{}</pre>\n", lines(&text));
    }
    let _ = writeln!(
        body,
        "<p>frugal {}, libtorch {}; <code>{CHECKPOINTS}/</code> has what a resume needs.</p>",
        escape(&record.frugal),
        escape(&record.torch)
    );
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n{reload}<title>{}</title>\n<style>{STYLE}\n{}</style>\n</head>\n<body>\n\
         <main>\n{body}</main>\n</body>\n</html>\n",
        escape(&name),
        report::plot::style_sheet(),
    ))
}

/// The curves of the loss log.
#[derive(Default)]
struct Log {
    loss: Points,
    validation: Points,
    learning_rate: Points,
    norm: Points,
    /// Rewards of chosen and of rejected answers, the fraction that is right, and z₀ of rated answers.
    rewards: [Points; 4],
    /// Of answers: their mean reward, that of the validation data, their mean length, and the divergence.
    policy: [Points; 4],
    /// With a teacher: the divergence and that of the validation data, and the loss of the labels and that of the validation data.
    of_teacher: [Points; 4],
    rate: Points,
    /// The latest tokens per second.
    latest_rate: Option<f64>,
    seconds: f64,
    steps: u64,
    step: u64,
}

impl Log {
    /// Reads what there is, line by line: the page of a long training takes no more memory than that of a short one.
    fn read(path: &Path) -> Self {
        let mut log = Self::default();
        let Ok(file) = fs::File::open(path) else { return log };
        let lines = BufReader::new(file).lines().map_while(Result::ok);
        for value in lines.filter_map(|line| serde_json::from_str::<Value>(&line).ok()) {
            let Some(step) = value["step"].as_u64() else { continue };
            let number = |key: &str| value[key].as_f64();
            let push = |points: &mut Points, y: Option<f64>| {
                if let Some(y) = y {
                    points.push(step as f64, y);
                }
            };
            push(&mut log.loss, number("loss"));
            push(&mut log.validation, number("validation_loss"));
            push(&mut log.learning_rate, number("learning_rate"));
            push(&mut log.norm, number("gradient_norm"));
            let keys = ["chosen_reward", "rejected_reward", "accuracy", "reference_point"];
            let of_policy = ["reward", "validation_reward", "answer_tokens", "divergence"];
            for (points, key) in log.policy.iter_mut().zip(of_policy) {
                push(points, number(key));
            }
            let of_teacher = [
                "teacher_divergence",
                "validation_teacher_divergence",
                "cross_entropy",
                "validation_cross_entropy",
            ];
            for (points, key) in log.of_teacher.iter_mut().zip(of_teacher) {
                push(points, number(key));
            }
            for (points, key) in log.rewards.iter_mut().zip(keys) {
                push(points, number(key));
            }
            if let (Some(tokens), Some(seconds)) = (number("tokens"), number("seconds")) {
                log.latest_rate = Some(tokens / seconds.max(1e-9));
                push(&mut log.rate, log.latest_rate);
                log.seconds += seconds;
                log.steps += 1;
            }
            log.step = step;
        }
        log
    }
}

/// The key figures.
fn figures(record: &RunRecord, log: &Log, losses: Losses) -> String {
    let loss = |loss: f64| format!("{loss:.4}");
    let mut all: Vec<(&str, String)> = Vec::new();
    let of = if record.steps > 0 { format!(" of {}", grouped(record.steps.into())) } else { String::new() };
    all.push(("step", format!("{}{of}", grouped(log.step.into()))));
    if let Some([first, last]) = losses.rewards {
        all.push(("mean reward", format!("{first:.3} → {last:.3}")));
    } else if let (Some(first), Some(last)) = (losses.first, losses.last) {
        all.push(("training loss", format!("{} → {}", loss(first), loss(last))));
    }
    let (sign, of_validation) = match losses.rewards {
        Some(_) => (-1.0, ["validation reward", "best validation reward"]),
        None => (1.0, ["validation loss", "best validation loss"]),
    };
    let loss = |value: f64| loss(sign * value);
    if let Some(after) = losses.validation {
        let before = losses.before.map_or_else(String::new, |before| format!("{} → ", loss(before)));
        all.push((of_validation[0], format!("{before}{}", loss(after))));
    }
    if let Some((best, step)) = losses.best {
        all.push((of_validation[1], format!("{} at step {step}", loss(best))));
    }
    if let Some(rate) = log.latest_rate {
        all.push(("speed", format!("{rate:.0} tokens/s")));
    }
    if log.seconds > 0.0 {
        all.push(("time of the steps", duration(log.seconds)));
        let left = record.steps.saturating_sub(log.step);
        if left > 0 && log.step > 0 {
            let per_step = log.seconds / log.steps.max(1) as f64;
            all.push(("left", duration(per_step * left as f64)));
        }
    }
    if let Some(outcome) = record.outcome.as_ref().filter(|outcome| outcome.peak_bytes > 0) {
        all.push(("peak memory", bytes_text(outcome.peak_bytes)));
    }
    if record.trainable > 0 {
        all.push(("trained parameters", grouped(record.trainable.into())));
    }
    let items =
        all.iter().map(|(name, text)| format!("<div><dt>{name}</dt><dd>{}</dd></div>\n", escape(text)));
    format!("<dl>\n{}</dl>\n", items.collect::<String>())
}

/// Answers before and after.
fn samples(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let rows: String = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .map(|value| {
            let cell = |key: &str| format!("<td>{}</td>", lines(value[key].as_str().unwrap_or("–")));
            format!("<tr>{}{}{}</tr>\n", cell("prompt"), cell("base"), cell("tuned"))
        })
        .collect();
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<h2>Samples</h2>\n<table>\n<tr><th>prompt</th><th>before</th><th>after</th></tr>\n{rows}</table>\n"
    )
}

/// The data and their digests.
fn data(record: &RunRecord) -> String {
    let mut rows = String::new();
    for (name, split) in [("training", &record.train), ("validation", &record.validation)] {
        if split.rows > 0 {
            let _ = writeln!(
                rows,
                "<tr><td>{name}</td><td>{} rows</td><td></td></tr>",
                grouped(split.rows as u128)
            );
        }
        for file in &split.files {
            let _ = writeln!(
                rows,
                "<tr><td>{name}</td><td>{}</td><td>{} bytes, SHA-256 {}</td></tr>",
                escape(&file.path.display().to_string()),
                grouped(file.bytes.into()),
                file.sha256.as_deref().unwrap_or("–")
            );
        }
    }
    if rows.is_empty() { rows } else { format!("<h2>Data</h2>\n<table>\n{rows}</table>\n") }
}

/// A text of several lines, escaped.
fn lines(text: &str) -> String {
    text.lines().map(escape).collect::<Vec<_>>().join("\n")
}
