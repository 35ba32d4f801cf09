//! `accounting`: parameters, FLOPs, bytes and training time of language models, on paper.
#![allow(clippy::print_stdout, reason = "the binary's result goes to standard output")]

mod commands;

use std::process::ExitCode;

use clap::Parser;
use report::Environment;
use report::cli::CommonArgs;

use commands::Command;

/// Parameters, FLOPs, bytes and training time of language models, on paper.
#[derive(Parser)]
#[command(
    version,
    max_term_width = 110,
    after_help = "\
Examples:
  accounting estimate --model gpt2 --batch 8 --hardware rtx4090
  accounting fit --config path/to/config.json --recompute full --memory 24GiB
  accounting flops --model llama-3-8b --sequence 8192
  accounting offload --model qwen2.5-7b --budget 10GiB --tokens 2048 --card 4090
  accounting time --parameters 70B --tokens 15T --hardware h100 --devices 1024"
)]
struct Arguments {
    #[command(flatten)]
    common: CommonArgs,
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    report::cli::run(|| {
        let Arguments { common, command } = &arguments;
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
    })
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
