//! `frugal runs diff`.

use std::path::PathBuf;

use clap::Args;
use frugal::config::origins::values;
use frugal::run_folder::SplitRecord;
use serde_json::{Map, Value, json};

use super::{Summary, loss_text};
use crate::common_flags::Common;
use crate::output::{print_line, print_text};

#[derive(Args)]
pub(super) struct Diff {
    /// The output folder of a training
    #[arg(value_name = "ONE")]
    one: PathBuf,
    /// That of another
    #[arg(value_name = "OTHER")]
    other: PathBuf,
}

/// A name, and a value of each training.
type Row = (String, [Value; 2]);

pub(super) fn run(common: &Common, arguments: &Diff) -> anyhow::Result<()> {
    let runs = [Summary::read(&arguments.one)?, Summary::read(&arguments.other)?];
    let settings = differences(settings(&runs[0])?, settings(&runs[1])?);
    let results: Vec<Row> = [
        ("first training loss", runs.each_ref().map(|run| json!(run.losses.first))),
        ("last training loss", runs.each_ref().map(|run| json!(run.losses.last))),
        ("validation loss before", runs.each_ref().map(|run| json!(run.losses.before))),
        ("validation loss", runs.each_ref().map(|run| json!(run.losses.validation))),
        ("best validation loss", runs.each_ref().map(|run| json!(run.losses.best.map(|(loss, _)| loss)))),
    ]
    .into_iter()
    .map(|(name, values)| (name.to_owned(), values))
    .filter(|(_, values)| values.iter().any(|value| !value.is_null()))
    .collect();
    if common.json {
        let object = |rows: Vec<Row>| {
            Value::Object(rows.into_iter().map(|(name, of)| (name, json!(of))).collect::<Map<_, _>>())
        };
        print_line(&json!({ "settings": object(settings), "losses": object(results) }));
        return Ok(());
    }
    let names = [&arguments.one, &arguments.other].map(|path| path.display().to_string());
    let mut rows: Vec<[String; 3]> = vec![[String::new(), names[0].clone(), names[1].clone()]];
    if settings.is_empty() {
        rows.push(["the settings and the data are equal".to_owned(), String::new(), String::new()]);
    }
    rows.extend(settings.into_iter().map(|(name, of)| [name, text(&of[0]), text(&of[1])]));
    rows.extend(
        results.into_iter().map(|(name, of)| [name, loss_text(of[0].as_f64()), loss_text(of[1].as_f64())]),
    );
    print_text(&columns(&rows));
    Ok(())
}

/// The settings of a training, and the identity of its data and programs.
fn settings(run: &Summary) -> anyhow::Result<Vec<(String, Value)>> {
    let mut all = values(&run.config)?;
    let digests = |split: &SplitRecord| -> Vec<String> {
        split
            .files
            .iter()
            .map(|file| file.sha256.clone().unwrap_or_else(|| format!("{} bytes", file.bytes)))
            .collect()
    };
    let record = &run.record;
    for (name, value) in [
        ("steps", json!(record.steps)),
        ("data of training", json!(digests(&record.train))),
        ("data of validation", json!(digests(&record.validation))),
        ("frugal", json!(record.frugal)),
        ("libtorch", json!(record.torch)),
    ] {
        all.push((name.to_owned(), value));
    }
    Ok(all)
}

/// Values that differ, in the order of the first run, and then values that only the other has.
fn differences(one: Vec<(String, Value)>, other: Vec<(String, Value)>) -> Vec<Row> {
    let find = |all: &[(String, Value)], name: &str| {
        all.iter().find(|(own, _)| own == name).map_or(Value::Null, |(_, value)| value.clone())
    };
    let only: Vec<String> =
        other.iter().map(|(name, _)| name.clone()).filter(|name| find(&one, name).is_null()).collect();
    let names = one.iter().map(|(name, _)| name.clone()).chain(only);
    names
        .map(|name| {
            let values = [find(&one, &name), find(&other, &name)];
            (name, values)
        })
        .filter(|(_, [one, other])| one != other)
        .collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn columns(rows: &[[String; 3]]) -> String {
    let width = |column: usize| {
        rows.iter().filter(|row| !row[2].is_empty()).map(|row| row[column].chars().count()).max().unwrap_or(0)
    };
    let (first, second) = (width(0), width(1));
    let line = |[name, one, other]: &[String; 3]| {
        format!("{}\n", format!("{name:first$}  {one:second$}  {other}").trim_end())
    };
    rows.iter().map(line).collect()
}
