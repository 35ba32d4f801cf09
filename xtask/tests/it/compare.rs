//! `compare` as a process of its own, with shell scripts as our program, as Python and as the peer.

use crate::bundle;
use crate::bundle::{Bundle, RECORD};
use report::Case;

const COMPARISON: &str = r#"
[[comparison]]
name = "time"
title = "Time"
about = ""
package = "ours"
peer = "peer.py"
rounds = 3

[[comparison.ratio]]
metric = "seconds"
ours = { impl = "frugal" }
theirs = { impl = "pytorch" }
as = "time_ratio"
per = ["batch"]

[[claim]]
name = "time/ratio"
what = "time against the peer's"
experiment = "time"
metric = "time_ratio"
op = "<="
limit = 1.0
run = "cargo xtask compare"
"#;

/// Ours takes 1.5 s and the peer 2 s; both note their turn.
fn bundle() -> Bundle {
    let mut bundle = Bundle::new();
    bundle.register(COMPARISON);
    bundle.program("ours", &format!("echo ours $OMP_NUM_THREADS >> turns\nTORCH=2.11.0{RECORD}"));
    let peer = format!("echo peer $OMP_NUM_THREADS >> turns\nVALUE=2 TORCH=2.11.0{RECORD}");
    bundle.script("xtask/peers/peer.py", &peer);
    bundle.script("python", "if [ \"$1\" = -c ]; then echo 2.11.0+cu130; else exec sh \"$@\"; fi\n");
    bundle
}

#[test]
fn the_two_take_turns_and_the_ratio_is_claimed() {
    let bundle = bundle();
    let ran =
        bundle.xtask(&["compare", "--python", "./python"]).env("OMP_NUM_THREADS", "3").output().unwrap();
    let ran = bundle::Ran::new(ran);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(bundle.read("turns"), "ours 3\npeer 3\npeer 3\nours 3\nours 3\npeer 3\n");
    assert!(
        ran.out.contains("claim time/ratio 0.75 <= 1.00 holds (against PyTorch 2.11.0)\n"),
        "{}",
        ran.out
    );
    let records = report::read_records(&bundle.path("reports/records/time.jsonl")).unwrap();
    assert_eq!(records.len(), 6);
    assert_eq!(records[2].experiment, "time");
    assert_eq!(records[2].case, Case::new().with("impl", "pytorch").with("batch", 8).with("round", 1));
}

#[test]
fn a_peer_that_fails_or_says_nothing_fails_the_comparison() {
    let bundle = bundle();
    bundle.script("xtask/peers/peer.py", "echo 'MemoryError' >&2; exit 1\n");
    let ran = bundle.run(&["compare", "--python", "./python"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("round 1 of 3: pytorch: ended with exit status 1"), "{}", ran.err);
    assert!(ran.err.contains("    MemoryError\n"), "{}", ran.err);
    bundle.script("xtask/peers/peer.py", "");
    let ran = bundle.run(&["compare", "--python", "./python"]);
    assert!(ran.err.contains("round 1 of 3: pytorch: no record was written"), "{}", ran.err);
}

#[test]
fn the_newest_pytorch_is_a_peer_and_the_claim_says_so() {
    let bundle = bundle();
    bundle.script("python", "if [ \"$1\" = -c ]; then echo 2.15.0; else exec sh \"$@\"; fi\n");
    bundle.script("xtask/peers/peer.py", &format!("VALUE=2 TORCH=2.15.0{RECORD}"));
    let ran = bundle.run(&["compare", "--python", "./python"]);
    let line = "claim time/ratio 0.75 <= 1.00 holds (against PyTorch 2.15.0; ours links libtorch 2.11.0)\n";
    assert!(ran.out.contains(line), "{ran:?}");
    // A comparison of the same kernels is with the libtorch that our programs link alone.
    bundle.register(&COMPARISON.replace("rounds = 3", "rounds = 3\npeer_torch = \"linked\""));
    let ran = bundle.run(&["compare", "--python", "./python"]);
    assert_eq!(
        ran.err,
        "error: ./python has torch 2.15.0, and the comparison time needs 2.11.0, which our programs link, so that both \
         run the same kernels; give --python one that has it, or leave the comparison out with --only\n"
    );
}

#[test]
fn a_python_with_another_torch_is_refused() {
    let bundle = bundle();
    bundle.script("python", "echo 2.9.1\n");
    let ran = bundle.run(&["compare", "--python", "./python"]);
    assert_eq!(
        ran.err,
        "error: ./python has torch 2.9.1, and the comparison time needs 2.15.0, the newest, or 2.11.0, which our programs \
         link; give --python one that has it, or leave the comparison out with --only\n"
    );
    bundle.script("python", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n");
    let ran = bundle.run(&["compare", "--python", "./python"]);
    assert!(
        ran.err.ends_with("give another with --python: ModuleNotFoundError: No module named 'torch'\n"),
        "{}",
        ran.err
    );
}
