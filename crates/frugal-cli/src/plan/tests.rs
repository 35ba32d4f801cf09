//! `frugal plan` refuses wrong flags and says what to give.

use clap::Parser;

use crate::{Cli, Command};

/// Runs `frugal plan`, which must fail; returns its exit status and the first line of its error.
fn run(arguments: &str) -> (i32, String) {
    let words = ["frugal", "plan"].into_iter().chain(arguments.split_whitespace());
    let (status, error) = match Cli::try_parse_from(words) {
        Err(error) => (error.exit_code(), error.to_string()),
        Ok(Cli { command: Command::Plan(plan), common }) => {
            (1, format!("error: {:#}", super::run(&common, &plan).expect_err(arguments)))
        }
        Ok(_) => unreachable!("it is a plan"),
    };
    (status, error.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn command_lines() {
    let table = [
        ("memory", 2, "error: the following required arguments were not provided:"),
        ("memory --model gpt9", 1, "error: unknown model `gpt9`; known are: gpt2, gpt2-medium, "),
        ("memory --model qwen2.5-7b --batch-size 0", 2, "0 is not in 1.."),
        ("memory --model qwen2.5-7b --ranks 0", 2, "0 is not in 1.."),
        ("memory --model qwen2.5-7b --hardware gtx", 2, "unknown hardware `gtx`; known are: b200, h200, "),
        (
            "memory --model qwen2.5-7b --hardware h100 --ranks 2",
            1,
            "this is answered for a training in one process",
        ),
        ("fit --model qwen2.5-7b --hardware h100 --method inference", 1, "for a training in one process"),
        ("memory --model gpt2 --hardware h100", 1, "gpt2 has no projections q, k, v, o"),
        (
            "memory --model gpt2 --hardware h100 --method full",
            1,
            "the working memory of gpt2's forward is not",
        ),
        ("memory --model nowhere.json", 1, "error: nowhere.json: No such file"),
        ("memory --family llama --hidden 64", 1, "error: --family llama needs --heads"),
        ("fit --model qwen2.5-7b --budget 3apples", 2, "write for example 80GB or 24GiB"),
        ("flops --model gpt2 --length 0", 2, "cannot read `0` as a whole number of 1 to 2^64 - 1"),
        ("flops --model gpt2 --batch-size -3", 2, "cannot read `-3` as a whole number of 1 to 2^64 - 1"),
        ("flops --model gpt2 --batch-size 1e3", 2, "cannot read `1e3` as a whole number"),
        ("flops --model gpt2 --mlp 9", 2, "unknown SwiGLU level `9`; known are: eager, save-all, "),
        ("flops --model gpt2 --length 2048", 1, "error: a sequence of 2048 tokens has no position vectors"),
        (
            "time --parameters 7B --tokens 1T --mfu 1.5",
            1,
            "error: the model FLOPs utilization is 1.5, outside 0",
        ),
        ("time --parameters 7B --tokens 1T --mfu 0", 1, "error: the model FLOPs utilization is 0, outside 0"),
        (
            "time --parameters 7B --tokens 1T --dtype int4",
            1,
            "error: no rate of h100 is known for int4; give",
        ),
        (
            "--model qwen2.5-7b --length 200000",
            1,
            "error: --length 200000: the model takes rows of 131072 at most",
        ),
        ("--model qwen2.5-7b --budget 10Gi", 2, "write for example 80GB or 24GiB"),
        (
            "flops --model qwen2.5-0.5b --method full --r 4",
            1,
            "--r is of adapters, and --method full trains all weights; leave one of them out",
        ),
        (
            "--model qwen2.5-7b --hardware gtx",
            2,
            "unknown hardware `gtx`; known are: b200, h200, h100, mi300x, ",
        ),
        ("--model qwen2.5-7b --hardware 4090 --flops 0", 1, "error: --flops is 0; give a rate above 0"),
        (
            "--model qwen2.5-7b --dtype float16",
            1,
            "error: --dtype: a plan is made for float32, bfloat16, nf4 and gguf",
        ),
        (
            "--model qwen2.5-7b --ranks 4 --nodes 2",
            2,
            "error: the following required arguments were not provided:",
        ),
        (
            "--model qwen2.5-7b --ranks 3 --nodes 2 --network 10GB",
            1,
            "error: --ranks 3 are not a multiple of --nodes 2; give as many ranks to each",
        ),
        (
            "--model qwen2.5-7b --ranks 2 --method inference",
            1,
            "error: --ranks applies to training only; give --method",
        ),
        ("", 2, "error: the following required arguments were not provided:"),
    ];
    for (arguments, status, words) in table {
        let (code, line) = run(arguments);
        assert_eq!(code, status, "{arguments}: {line}");
        assert!(line.contains(words), "{arguments}: {line}");
    }
}
