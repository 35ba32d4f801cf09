//! What people see who give the binary something wrong.

/// Runs the binary; gives its exit status and the first line of standard error.
fn run(arguments: &str) -> (Option<i32>, String) {
    let output = crate::program("accounting").args(arguments.split_whitespace()).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), errors.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn command_lines() {
    let table = [
        ("estimate", 2, "error: the following required arguments were not provided:"),
        ("estimate --model gpt9", 2, "unknown model `gpt9`; known are: gpt2, gpt2-medium, "),
        ("estimate --model gpt2 --batch 0", 2, "cannot read `0` as a whole number of 1 to 2^64 - 1"),
        ("estimate --model gpt2 --batch -3", 2, "cannot read `-3` as a whole number of 1 to 2^64 - 1"),
        ("estimate --model gpt2 --batch 1e3", 2, "cannot read `1e3` as a whole number"),
        ("estimate --model gpt2 --zero 4", 2, "ZeRO stage 4 does not exist"),
        (
            "estimate --model gpt2 --loss liger",
            2,
            "known are: naive, chunked-recompute, grad-in-forward, linear",
        ),
        (
            "estimate --model gpt2 --loss naive --loss-chunk 8",
            1,
            "`naive` has no chunks; leave out --loss-chunk",
        ),
        ("estimate --model gpt2 --on-host gradients,weights", 1, "unknown thing on the host `weights`"),
        ("estimate --model gpt2 --on-host block-inputs", 1, "recompute in full, or keep the activations"),
        ("estimate --model gpt2 --devices 0", 2, "for '--devices <N>': cannot read `0`"),
        ("estimate --model gpt2 --optimizer lion", 2, "unknown optimizer `lion`; known are: sgd, momentum, "),
        ("estimate --model gpt2 --recipe int3", 2, "unknown recipe `int3`; known are: fp32, amp-fp16, "),
        ("estimate --model gpt2 --hardware gtx", 2, "unknown hardware `gtx`; known are: b200, h200, "),
        ("estimate --model gpt2 --swiglu 9", 2, "unknown SwiGLU level `9`; known are: eager, save-all, "),
        (
            "estimate --model gpt2 --sequence 2048",
            1,
            "error: a sequence of 2048 tokens has no position vectors",
        ),
        ("estimate --config nowhere.json", 1, "error: cannot read nowhere.json: No such file"),
        ("estimate --family llama --hidden 64", 1, "error: --family llama needs --heads"),
        ("dtypes --dtype fp12", 2, "unknown dtype `fp12`; known are: fp64, fp32, "),
        (
            "dtypes --shape 9999999999,9999999999",
            1,
            "error: elements of a tensor: 9999999999 × 9999999999 does not",
        ),
        ("fit --model gpt2", 1, "error: how much has to fit is not given; give --memory, for example 24GiB"),
        ("fit --model gpt2 --memory 3apples", 2, "cannot read `3apples` as a number of bytes"),
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
        ("dtypes --device tpu", 1, "error: unknown device `tpu`; give cpu, cuda or cuda:N"),
        ("dtypes --records /nowhere/records", 1, "error: cannot open the records file /nowhere/records"),
    ];
    for (arguments, status, words) in table {
        let (code, line) = run(arguments);
        assert_eq!(code, Some(status), "{arguments}: {line}");
        assert!(line.contains(words), "{arguments}: {line}");
    }
}
