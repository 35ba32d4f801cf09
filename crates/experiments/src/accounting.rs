//! `accounting`: parameters, FLOPs, bytes and training time of language models, on paper.

mod commands;
mod sections;

use report::Environment;
use report::cli::CommonArgs;

pub(crate) use commands::Command as Verb;

#[allow(clippy::print_stdout, reason = "the program's result goes to standard output")]
pub(crate) fn run(common: &CommonArgs, command: &Verb) -> anyhow::Result<()> {
    check_device(&common.device)?;
    // Opened first, so that a path that cannot be written is an error before anything is computed.
    let writer = common.open_records()?;
    let output = command.run(&Environment::detect("cpu", None))?;
    if let Some(mut writer) = writer {
        for record in &output.records {
            writer.write(record)?;
        }
    }
    if common.json {
        println!("{}", serde_json::to_string_pretty(&output.json)?);
    } else {
        print!("{}", output.text);
    }
    Ok(())
}

/// Nothing is computed on a device here, but a name that no binary of the house takes is still refused.
fn check_device(device: &str) -> anyhow::Result<()> {
    let index = device.strip_prefix("cuda:");
    let known = device == "cpu" || device == "cuda" || index.is_some_and(|n| n.parse::<u16>().is_ok());
    anyhow::ensure!(
        known,
        "unknown device `{device}`; give cpu, cuda or cuda:N (accounting itself needs no device)"
    );
    Ok(())
}
