//! Our figures beside published ones.
//!
//! A published figure has so many digits; ours agrees if it rounds to them: the difference is at most half a unit of
//! the last one. `error_in_half_units` is the difference in such halves; for an exact integer it is 0 or it is wrong.

use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::memory::kv_cache;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::recompute::Recompute;
use accounting::textbook::korthikanti;
use accounting::training_time::{Run, SECONDS_PER_DAY, naive_largest_model, promised_flops, six_n_d};
use accounting::{Dtype, Error, hardware, presets};
use report::{Case, Environment, Metric, Record};

use super::record;
use crate::accounting::number_limits::Limits;

/// A published figure: its name, its source, the unit, the value, the unit of its last digit, and our value.
type Figure = (String, &'static str, &'static str, f64, f64, f64);

/// A published value with the unit of its last digit, and ours.
pub(crate) struct Value {
    pub(crate) published: f64,
    pub(crate) last_digit: f64,
    pub(crate) ours: f64,
}

/// FLOPs of training GPT-3, 6·N·D.
pub(crate) fn training_gpt3() -> Result<Value, Error> {
    let ours = six_n_d(174_600_000_000, 300_000_000_000)? as f64;
    Ok(Value { published: 3.14e23, last_digit: 1e21, ours })
}

/// Published figures and ours.
pub(crate) fn published(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut figures = parameters()?;
    figures.extend(flops()?);
    figures.extend(times()?);
    figures.extend(bytes()?);
    figures.extend(numbers()?);
    let mut records = Vec::new();
    for (what, source, unit, published, last_digit, ours) in figures {
        let kind = match unit {
            "" => "number",
            "B" => "bytes",
            "FLOP" => "FLOPs",
            unit => unit,
        };
        let case = Case::new().with("kind", kind).with("what", what).with("source", source);
        let metrics = [
            Metric::exact("published", unit, published),
            Metric::exact("ours", unit, ours),
            Metric::exact("error_in_half_units", "ratio", (ours - published).abs() / (last_digit / 2.0)),
        ];
        records.extend(metrics.map(|metric| record("accounting-published", &case, metric, environment)));
    }
    Ok(records)
}

fn parameters() -> Result<Vec<Figure>, Error> {
    const HUB: &str = "Hugging Face model page";
    let published = [
        ("gpt2", HUB, 124_439_808u64),
        ("gpt2-xl", HUB, 1_557_611_200),
        ("qwen2.5-0.5b", HUB, 494_032_768),
        ("qwen2.5-7b", HUB, 7_615_616_512),
        ("llama-2-7b", HUB, 6_738_415_616),
        ("llama-2-70b", HUB, 68_976_648_192),
        ("llama-3-8b", HUB, 8_030_261_248),
        ("llama-3-70b", HUB, 70_553_706_496),
        ("cs336-xl", "CS336 assignment 1", 2_127_057_600),
    ];
    let figure = |(name, source, count): (&str, &'static str, u64)| {
        let ours = presets::find(name)?.parameters()? as f64;
        Ok((format!("parameters of {name}"), source, "count", count as f64, 1.0, ours))
    };
    published.into_iter().map(figure).collect()
}

fn flops() -> Result<Vec<Figure>, Error> {
    let published = [
        ("cs336-small", 1024, 3.4963e11, 1e7),
        ("cs336-medium", 1024, 1.0331e12, 1e8),
        ("cs336-large", 1024, 2.2578e12, 1e8),
        ("cs336-xl", 1024, 4.5133e12, 1e8),
        ("cs336-xl", 16384, 1.4952e14, 1e10),
    ];
    let figure = |(name, sequence, value, last_digit): (&str, u64, f64, f64)| {
        let ours = forward(name, sequence)?;
        let what = format!("forward of {name}, {sequence} tokens");
        Ok((what, "CS336 assignment 1", "FLOP", value, last_digit, ours as f64))
    };
    let mut figures: Vec<Figure> = published.into_iter().map(figure).collect::<Result<_, Error>>()?;
    let Value { published, last_digit, ours } = training_gpt3()?;
    figures.push(("training GPT-3: 6·N·D".into(), "Brown et al. 2020", "FLOP", published, last_digit, ours));
    // Speculation of 2023: 25,000 A100, 90 to 100 days, an MFU of 0.32 to 0.36.
    let gpt4 = promised_flops(hardware::find("a100")?.bf16, 25_000, 95.0 * SECONDS_PER_DAY)? * 0.34;
    figures.push(("training GPT-4, speculated".into(), "CS336 lecture 2: 2e25", "FLOP", 2e25, 1e25, gpt4));
    Ok(figures)
}

fn forward(name: &str, sequence: u64) -> Result<u128, Error> {
    let work = Workload { batch: 1, sequence };
    Ok(step(&presets::find(name)?, work, &Recomputation::default())?.forward.dense)
}

fn times() -> Result<Vec<Figure>, Error> {
    const LECTURE: &str = "CS336 lecture 2";
    let (h100, a100) = (hardware::find("h100")?, hardware::find("a100")?);
    let flops = six_n_d(70_000_000_000, 15_000_000_000_000)?;
    let lecture = Run { flops, peak: h100.bf16, utilization: 0.5, devices: 1024 };
    let flops = forward("cs336-xl", 1024)? * 3 * 1024 * 400_000;
    let assignment = Run { flops, peak: a100.fp32, utilization: 0.5, devices: 1 };
    let bytes = Recipe::FP32.bytes_per_parameter(Optimizer::AdamW);
    let model = naive_largest_model(8, h100.memory, bytes)? as f64;
    let two_weeks = promised_flops(h100.bf16, 8, 14.0 * SECONDS_PER_DAY)?;
    Ok(vec![
        (
            "70B parameters, 15T tokens, 1024 H100, MFU 0.5".into(),
            "CS336 lecture 2: 143.93",
            "days",
            143.93,
            0.01,
            lecture.days()?,
        ),
        ("largest model on 8 H100, AdamW, naively".into(), LECTURE, "count", 40e9, 1.0, model),
        ("8 H100 for two weeks".into(), "CS336 lecture 2, corrected", "FLOP", 9.575e21, 1e18, two_weeks),
        (
            "cs336-xl, 400K steps of 1024, one A100 in fp32, MFU 0.5".into(),
            "CS336 assignment 1: 6583.6",
            "days",
            6583.6,
            0.1,
            assignment.days()?,
        ),
    ])
}

fn bytes() -> Result<Vec<Figure>, Error> {
    const GIB: f64 = (1u64 << 30) as f64;
    let cache = |name, sequence| -> Result<f64, Error> {
        let work = Workload { batch: 1, sequence };
        Ok(kv_cache::bytes(&presets::find(name)?, work, Dtype::Fp16)? as f64)
    };
    let matrix = Dtype::Fp32.tensor_bytes(&[4 * 12288, 12288])? as f64;
    let figure = |what: &str, source, published, ours| (what.to_owned(), source, "B", published, 1.0, ours);
    // The assignment's [2, 32678, 128256], in units of 1024³ bytes that it calls GB.
    let logits = |what: &str, published: f64, dtype: Dtype| -> Result<Figure, Error> {
        let ours = dtype.tensor_bytes(&[2, 32_678, 128_256])? as f64;
        let source = "pytorch/pytorch#124480, the fused-loss assignment";
        Ok((what.to_owned(), source, "B", published * GIB, 0.01 * GIB, ours))
    };
    Ok(vec![
        figure("GPT-3's feed-forward matrix in fp32", "CS336 lecture 2", 2.25 * GIB, matrix),
        figure("KV cache of llama-2-7b, 4096 tokens", "2·L·s·n·k", 2.0 * GIB, cache("llama-2-7b", 4096)?),
        figure("KV cache of llama-3-8b per token", "2·L·s·n·k", 131_072.0, cache("llama-3-8b", 1)?),
        logits("logits of Llama-3 in bf16", 15.61, Dtype::Bf16)?,
        logits("the same in fp32", 31.23, Dtype::Fp32)?,
        logits("their gradient in fp32", 31.23, Dtype::Fp32)?,
        (
            "activations of GPT-2 XL, 12·H·B·T·L numbers of 2 bytes, batch 32 of 1024".to_owned(),
            "Rajbhandari et al. 2020: about 60 GB",
            "B",
            60e9,
            1e9,
            2.0 * 12.0 * 1600.0 * 32.0 * 1024.0 * 48.0,
        ),
    ])
}

fn numbers() -> Result<Vec<Figure>, Error> {
    const FP8: &str = "arXiv:2209.05433";
    const KORTHIKANTI: &str = "Korthikanti et al. 2022";
    let core = |heads, hidden| -> Result<f64, Error> {
        let work = Workload { batch: 1, sequence: 2048 };
        let block = |choice| korthikanti(work, hidden, heads, choice);
        Ok(100.0 * (1.0 - block(Recompute::Selective)? as f64 / block(Recompute::None)? as f64))
    };
    let limit = |dtype: Dtype| Limits::new(dtype).max;
    let figure = |what: &str, source, published, ours| (what.to_owned(), source, "", published, 1.0, ours);
    Ok(vec![
        figure("largest fp8 e4m3", FP8, 448.0, limit(Dtype::Fp8E4m3)),
        figure("largest fp8 e5m2", FP8, 57344.0, limit(Dtype::Fp8E5m2)),
        figure("attention core's share of GPT-3's activations, %", KORTHIKANTI, 70.0, core(96, 12288)?),
        figure("attention core's share of MT-NLG's activations, %", KORTHIKANTI, 65.0, core(128, 20480)?),
    ])
}
