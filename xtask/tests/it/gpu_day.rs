//! `gpu-day` as a process of its own, on a bundle of shell scripts.

use crate::bundle::{Bundle, RECORD, Ran};

const PLANS: &str = r#"
background = [{ name = "compile", compiles = "time", seconds = 20 }]
part = [
    { name = "fine", work = "experiment", seconds = 20, waits_for = "compile" },
    { name = "hangs", work = "experiment", seconds = 8 },
    { name = "time", work = "comparison", seconds = SECONDS, waits_for = "compile" },
    { name = "lacks", work = "comparison", seconds = 20 },
    { name = "last", work = "experiment", of = "fine", seconds = 20 },
]
plan = [{ name = "next", about = "all", minutes = 3, background = ["compile"], parts = ["fine", "hangs", "time", "lacks", "last"] }]
"#;

const EXPERIMENTS: &str = r#"
[[experiment]]
name = "fine"
title = "Fine"
about = ""
package = "fine"

[[experiment]]
name = "hangs"
title = "Hangs"
about = ""
package = "hangs"

[[comparison]]
name = "time"
title = "Time"
about = ""
package = "ours"
peer = "peer.py"
rounds = 4
needed_rounds = NEEDED
in_turns = true

[[comparison]]
name = "lacks"
title = "Lacks"
about = ""
package = "ours"
peer = "peer.py"
peer_modules = ["peft"]
rounds = 1
"#;

/// A program that takes its turns; it hangs in the third.
const TAKES_TURNS: &str = r#"
while [ $# -gt 0 ]; do case $1 in --records) records=$2;; --compile-only) echo compiled >> compiled; exit;; esac; shift; done
for i in 0 1 2 3; do
    echo "@turn $i 4" >&2
    read -r line || exit 9
    if [ $i = 2 ]; then HANG; fi
    echo "{\"experiment\":\"x\",\"case\":{\"round\":$i},\"metric\":{\"name\":\"seconds\",\"unit\":\"s\",\"value\":1,\"n\":1},\"environment\":{\"device\":\"cpu\",\"cpu\":\"x\",\"threads\":2,\"memory_bytes\":1,\"revision\":\"r\",\"unix_time\":1}}" >> "$records"
done
"#;

/// The Python of the peers: torch is there, and `peft` is not.
const PYTHON: &str = "if [ \"$1\" = -c ]; then case $2 in *find_spec*) echo peft;; *) echo 2.11.0;; esac; else exec sh \"$@\"; fi\n";

fn day(needed: &str, seconds: &str, hang: &str) -> Bundle {
    let mut bundle = Bundle::new();
    bundle.register(&EXPERIMENTS.replace("NEEDED", needed));
    std::fs::write(bundle.path("plans.toml"), PLANS.replace("SECONDS", seconds)).unwrap();
    bundle.program("fine", RECORD);
    // It keeps the name of the file that the records go to, and tears its last line.
    bundle.program("hangs", &format!("{RECORD}\nprintf '{{\"torn' >> \"$records\"\nsleep 1000\n"));
    bundle.program("ours", &TAKES_TURNS.replace("HANG", hang));
    bundle.script("xtask/peers/peer.py", &TAKES_TURNS.replace("HANG", ":"));
    bundle.script("python", PYTHON);
    bundle
}

fn run(bundle: &Bundle, more: &[&str]) -> Ran {
    let args = ["gpu-day", "--device", "cpu", "--plans", "plans.toml", "--out", "day"];
    let mut command = bundle.xtask(&[&args, more].concat());
    Ran::new(command.env("FRUGAL_PYTHON", "./python").output().unwrap())
}

/// The verdict of a row of the table.
fn verdict(ran: &Ran, name: &str) -> String {
    let line = ran.out.lines().find(|line| line.split_whitespace().next() == Some(name));
    let verdict = line.and_then(|line| line.split(" s  ").nth(1));
    verdict.unwrap_or_else(|| panic!("{name} is not in the table: {ran:?}")).to_owned()
}

#[test]
fn what_was_measured_before_a_deadline_stays_and_the_other_parts_run() {
    let bundle = day("3", "10", "sleep 1000");
    let ran = run(&bundle, &[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(verdict(&ran, "fine"), "passed");
    assert_eq!(verdict(&ran, "hangs"), "LATE: ended after 4 s; 1 records are kept");
    assert_eq!(verdict(&ran, "time"), "LATE: ended after 5 s; 2 of 4 rounds, 3 needed");
    let lacks = verdict(&ran, "lacks");
    assert!(
        lacks.starts_with("skipped: ") && lacks.contains("has no peft, which the comparison lacks"),
        "{lacks}"
    );
    assert_eq!(verdict(&ran, "last"), "passed");
    assert!(ran.err.ends_with("error: 2 of 6 parts failed: hangs, time\n"), "{ran:?}");
    let records =
        |name: &str| report::read_records(&bundle.path(&format!("day/cpu/records/{name}.jsonl"))).unwrap();
    assert_eq!(records("hangs").len(), 1, "the torn record is left out");
    assert_eq!(records("time").len(), 4, "two rounds of two sides");
    assert_eq!(bundle.read("day/cpu/gpu-day.txt").lines().count(), 6);
}

#[test]
fn enough_rounds_are_no_failure() {
    let bundle = day("2", "10", "sleep 1000");
    let ran = run(&bundle, &["--only", "time"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(verdict(&ran, "time"), "2 of 4 rounds, 2 needed (ended after 5 s)");
}

#[test]
fn a_part_that_is_killed_costs_its_remaining_rounds_only() {
    let bundle = day("4", "40", "sleep 2");
    let ran = run(&bundle, &["--only", "fine,time,last", "--kill", "time"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let killed = verdict(&ran, "time");
    assert!(killed.starts_with("FAILED: ended by SIGKILL"), "{killed}");
    assert!(ran.out.contains("rehearsed: time was killed, and kept its "), "{ran:?}");
    // An experiment is killed after its first record, and keeps it.
    let ran = run(&bundle, &["--only", "fine,hangs,last", "--kill", "hangs"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("rehearsed: hangs was killed, and kept its 1 records"), "{ran:?}");
}

#[test]
fn the_peer_compiles_in_the_background_and_its_user_waits() {
    let bundle = day("4", "40", ":");
    let ran = run(&bundle, &["--only", "fine,time"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(verdict(&ran, "time"), "passed");
    if std::thread::available_parallelism().unwrap().get() > 1 {
        assert_eq!(verdict(&ran, "compile"), "passed");
        assert_eq!(bundle.read("compiled"), "compiled\n");
    }
}

#[test]
fn the_plans_are_listed_with_their_deadlines() {
    let bundle = Bundle::new();
    let ran = bundle.run(&["gpu-day", "--plan", "help"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let next = ran.out.split("\n\n").next().unwrap();
    assert!(next.starts_with("next: ") && next.contains("  nccl-tests\n"), "{next}");
    let seconds = |line: &str| line.split_whitespace().next()?.parse::<u64>().ok();
    let parts = next.lines().filter(|line| !line.contains("background") && !line.contains("in all"));
    let sum: u64 = parts.filter_map(seconds).sum();
    assert_eq!(next.lines().last().and_then(seconds), Some(sum), "{next}");
}
