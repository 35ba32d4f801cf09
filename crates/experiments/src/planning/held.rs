//! `planning held`: trainings at their least budgets, whose memory is sampled from outside of the process.

use anyhow::{Context, ensure};
use models::DecoderConfig;
use report::cli::Scale;
use report::{Case, Metric};
use tch::Kind;

use super::sandbox::{Sampled, Sandbox};
use crate::driver::Bench;

/// Flags of trainings. `base` is in fp32, `narrow` in bf16; `rows.jsonl` has rows of one length, `longer.jsonl` longer ones.
const TRAININGS: [(&str, &str); 24] = [
    ("lora", "--model base --data rows.jsonl"),
    ("lora, all projections", "--model base --data rows.jsonl --targets all-linear --r 16"),
    ("lora, bf16", "--model narrow --data rows.jsonl"),
    ("lora, bf16 of fp32 files", "--model base --dtype bfloat16 --data rows.jsonl"),
    ("lora, nf4", "--model base --dtype nf4 --data rows.jsonl"),
    ("lora, nf4, text", "--model base --dtype nf4 --data text.txt --max-length 96"),
    ("lora, text", "--model base --data text.txt --max-length 96"),
    ("lora, packing", "--model base --data rows.jsonl --packing 128"),
    ("dora, packing", "--model base --method dora --data rows.jsonl --packing 128"),
    ("dora", "--model base --method dora --data rows.jsonl"),
    ("pissa", "--model base --init pissa --data rows.jsonl"),
    ("olora", "--model base --init olora --data rows.jsonl"),
    ("lora, amp", "--model base --precision bf16 --data rows.jsonl"),
    (
        "lora, longer validation",
        "--model base --data rows.jsonl --validation longer.jsonl --evaluate-every 2",
    ),
    ("lora, held out", "--model base --data text.txt --max-length 48 --evaluate-every 2"),
    ("lora, layers in files", "--model base --offload file --ring 1 --data rows.jsonl"),
    ("lora, layers in host memory", "--model base --offload host --ring 1 --data rows.jsonl"),
    ("full", "--model base --method full --data rows.jsonl"),
    ("full, bf16", "--model narrow --method full --data rows.jsonl"),
    ("full, text", "--model base --method full --data text.txt --max-length 96"),
    (
        "full, longer validation",
        "--model base --method full --data rows.jsonl --validation longer.jsonl --evaluate-every 2",
    ),
    (
        "full, accumulation, validation",
        "--model base --method full --data rows.jsonl --validation rows.jsonl --accumulation 8 --evaluate-every 1",
    ),
    ("full, recomputed", "--model base --method full --activations recompute --data rows.jsonl"),
    (
        "full, optimizer on the host",
        "--model base --method full --offload file --optimizer-on host --accumulation 1 --clip 0 --data rows.jsonl",
    ),
];

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let sandbox = Sandbox::new()?;
    let (config, trainings) = match bench.scale {
        Scale::Smoke => (DecoderConfig::llama(4096, 64, 176, 4, 2), &TRAININGS[..1]),
        _ => (DecoderConfig::llama(4096, 384, 1024, 8, 6), &TRAININGS[..]),
    };
    sandbox.write_model("base", &config, Kind::Float)?;
    sandbox.write_model("narrow", &config, Kind::BFloat16)?;
    sandbox.write_rows("rows.jsonl", 64, 96, bench.seed)?;
    sandbox.write_rows("longer.jsonl", 16, 192, bench.seed + 1)?;
    sandbox.write_text("text.txt", 4000)?;
    let label = |(name, _): &&(&str, &str)| (*name).to_owned();
    bench.each(trainings, label, |bench, (name, flags)| {
        let words = |budget: &str| -> Vec<String> {
            let rest = format!("--steps 4 --samples 0 --out out --budget {budget}");
            ["finetune"]
                .into_iter()
                .chain(flags.split(' '))
                .chain(rest.split(' '))
                .map(str::to_owned)
                .collect()
        };
        let stderr = sandbox.sampled(&words("20MiB"))?.stderr;
        let least =
            stderr.trim_end().rsplit_once("give --budget ").with_context(|| format!("{name}: {stderr}"))?.1;
        let bytes: u64 = least.strip_suffix("MiB").with_context(|| stderr.clone())?.parse::<u64>()? << 20;
        sandbox.remove_out()?;
        let Sampled { is_well, stderr, resident, anonymous } = sandbox.sampled(&words(least))?;
        ensure!(is_well, "{name} at {least}: {stderr}");
        sandbox.remove_out()?;
        let mut metrics = vec![Metric::exact("budget_bytes", "B", bytes as f64)];
        for (name, bytes_in_use) in [("resident", resident), ("held", anonymous)] {
            metrics.push(Metric::exact(&format!("{name}_bytes"), "B", bytes_in_use as f64));
            metrics.push(Metric::exact(
                &format!("{name}_ratio"),
                "ratio",
                bytes_in_use as f64 / bytes as f64,
            ));
        }
        bench.put(&Case::new().with("training", *name), metrics)
    })
}
