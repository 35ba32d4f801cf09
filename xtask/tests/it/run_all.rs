//! `run-all` as a process of its own, with shell scripts as experiments.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bundle::{Bundle, RECORD, Ran};

/// An experiment as it is registered.
fn experiment(name: &str) -> String {
    format!("[[experiment]]\nname = \"{name}\"\ntitle = \"{name}\"\nabout = \"\"\npackage = \"{name}\"\n")
}

/// Three experiments: one works, one fails, one crashes; each notes that it ran.
fn three() -> Bundle {
    let mut bundle = Bundle::new();
    bundle.register(&["fine", "fails", "crashes"].map(experiment).concat());
    bundle.program(
        "fine",
        &format!("echo fine >> ran; echo \"$@\" > flags; echo '@progress 1 2 half' >&2{RECORD}"),
    );
    bundle.program("fails", "echo fails >> ran; echo 'error: no such level: 7; give 0 or 1' >&2; exit 1\n");
    bundle.program("crashes", "echo crashes >> ran; echo 'just before' >&2; kill -SEGV $$\n");
    bundle
}

/// The lines of the file `ran`; at scale smoke experiments run beside each other, in any order.
fn sorted(bundle: &Bundle) -> Vec<String> {
    let mut lines: Vec<String> = bundle.read("ran").lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn one_that_fails_does_not_keep_the_rest_from_running() {
    let bundle = three();
    let ran = bundle.run(&["run-all", "--scale", "smoke", "--seed", "7"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(sorted(&bundle), ["crashes", "fails", "fine"]);
    assert!(bundle.read("flags").starts_with("--scale smoke --device cpu --seed 7 --records /"));
    assert!(ran.err.contains("fails failed: no such level: 7; give 0 or 1; the end of"), "{}", ran.err);
    assert!(ran.err.contains("crashes failed: ended by SIGSEGV (a crash in native code)"), "{}", ran.err);
    assert!(ran.err.contains("    just before\n"), "{}", ran.err);
    assert!(ran.err.ends_with("error: 2 of 3 experiments failed: fails, crashes\n"), "{}", ran.err);
    assert!(!ran.err.contains("@progress"), "{}", ran.err);
    let page = bundle.path("target/smoke-report/index.html").canonicalize().unwrap();
    assert!(ran.out.ends_with(&format!("report: {}\n", page.display())), "{}", ran.out);
    let records = report::read_records(&bundle.path("target/smoke-report/records/fine.jsonl")).unwrap();
    assert_eq!(records[0].environment.revision, "abc1234");
    assert!(!bundle.path("target/smoke-report/records/fails.jsonl").exists());
}

#[test]
fn only_a_smoke_run_runs_several_beside_each_other() {
    let mut bundle = Bundle::new();
    bundle.register(&["first", "second"].map(experiment).concat());
    // Each waits until the other has begun, and fails if it does not.
    let waits = |mine: &str, other: &str, tenths: u32| {
        format!(
            "touch {mine}; for _ in $(seq {tenths}); do [ -e {other} ] && break; sleep 0.1; done; [ -e {other} ] || exit 3\n\
             echo \"threads $OMP_NUM_THREADS\" >> ran{RECORD}"
        )
    };
    bundle.program("first", &waits("a", "b", 200));
    bundle.program("second", &waits("b", "a", 200));
    let processors = std::thread::available_parallelism().unwrap().get();
    if processors > 1 {
        let together = bundle.run(&["run-all", "--scale", "smoke"]);
        assert_eq!(together.code, Some(0), "{together:?}");
        let threads = format!("threads {}", processors / processors.min(4));
        assert_eq!(sorted(&bundle), [&*threads, &*threads]);
        std::fs::remove_file(bundle.path("a")).unwrap();
        std::fs::remove_file(bundle.path("b")).unwrap();
    }
    bundle.script("bin/first", &waits("a", "b", 5));
    let one_by_one = bundle.run(&["run-all", "--scale", "laptop"]);
    assert!(one_by_one.err.ends_with("error: 1 of 2 experiments failed: first\n"), "{one_by_one:?}");
}

#[test]
fn an_experiment_of_one_size_gets_no_scale() {
    let mut bundle = Bundle::new();
    bundle.register(&(experiment("fine") + "one_size = true\n"));
    bundle.program("fine", &format!("echo fine >> ran; echo \"$@\" > flags{RECORD}"));
    assert_eq!(bundle.run(&["run-all", "--scale", "laptop"]).code, Some(0));
    assert!(bundle.read("flags").starts_with("--device cpu --seed 0 --records /"));
    // It is done for every scale.
    bundle.run(&["run-all", "--scale", "full", "--resume"]);
    assert_eq!(bundle.read("ran"), "fine\n");
}

#[test]
fn resume_runs_what_is_not_done() {
    let bundle = three();
    bundle.run(&["run-all", "--scale", "smoke"]);
    let ran = bundle.run(&["run-all", "--scale", "smoke", "--resume"]);
    assert!(ran.err.contains("fine: already done, skipped"), "{}", ran.err);
    assert_eq!(sorted(&bundle), ["crashes", "crashes", "fails", "fails", "fine"]);
    // Another scale, seed or program is another measurement.
    bundle.run(&["run-all", "--scale", "laptop", "--resume", "--only", "fine"]);
    bundle.run(&["run-all", "--scale", "laptop", "--resume", "--only", "fine", "--seed", "1"]);
    assert_eq!(bundle.read("ran").matches("fine").count(), 3);
    bundle.script("bin/fine", &format!("echo changed >> ran{RECORD}"));
    bundle.run(&["run-all", "--scale", "laptop", "--resume", "--only", "fine", "--seed", "1"]);
    assert_eq!(bundle.read("ran").matches("changed").count(), 1);
}

#[test]
fn a_failure_leaves_the_records_of_the_run_before() {
    let mut bundle = three();
    assert_eq!(bundle.run(&["run-all", "--only", "fine"]).code, Some(0));
    let before = bundle.read("reports/records/fine.jsonl");
    bundle.program("fine", &format!("VALUE=9{RECORD}\nexit 3\n"));
    assert_eq!(bundle.run(&["run-all", "--only", "fine"]).code, Some(1));
    assert_eq!(bundle.read("reports/records/fine.jsonl"), before);
}

#[test]
fn the_duration_is_predicted_from_the_run_before() {
    let bundle = three();
    let first = bundle.run(&["run-all", "--only", "fine"]);
    assert!(first.err.contains("[1/1] fine\n"), "{}", first.err);
    let second = bundle.run(&["run-all", "--only", "fine"]);
    assert!(second.err.contains("[1/1] fine (about 0."), "{}", second.err);
}

#[test]
fn claims_are_printed_with_their_verdict() {
    let bundle = three();
    let claim = |name: &str, limit: f64| {
        format!(
            "[[claim]]\nname = \"{name}\"\nwhat = \"time\"\nexperiment = \"fine\"\nmetric = \"seconds\"\nop = \"<=\"\nlimit = \
             {limit}\nrun = \"cargo xtask run-all\"\n"
        )
    };
    bundle.register(&[experiment("fine"), claim("fine/slow", 2.0), claim("fine/fast", 1.0)].concat());
    let ran = bundle.run(&["run-all"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let verdicts: Vec<&str> = ran.out.lines().filter_map(|line| line.strip_prefix("claim fine/")).collect();
    assert_eq!(verdicts.len(), 2, "{}", ran.out);
    assert!(verdicts[0].starts_with("slow") && verdicts[0].ends_with(" holds"), "{}", ran.out);
    assert!(verdicts[1].starts_with("fast") && verdicts[1].ends_with(" falls short"), "{}", ran.out);
    assert_eq!(bundle.run(&["report"]).out, ran.out, "`report` renders the same again");
}

#[test]
fn two_runs_are_compared() {
    let mut bundle = three();
    bundle.run(&["run-all", "--only", "fine", "--out", "before"]);
    bundle.program("fine", &format!("VALUE=3{RECORD}"));
    bundle.run(&["run-all", "--only", "fine", "--out", "after"]);
    let ran = bundle.run(&["report", "--out", "after", "--against", "before"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("100"), "from 1.5 s to 3 s: {}", ran.out);
    let ran = bundle.run(&["report", "--out", "after", "--against", "nowhere"]);
    assert!(ran.err.starts_with("error: there are no records in nowhere"), "{}", ran.err);
}

#[test]
fn ctrl_c_stops_cleanly_and_resume_goes_on() {
    let mut bundle = three();
    bundle.program("fails", "echo fails >> ran; touch started; exec sleep 60\n");
    let mut command = bundle.xtask(&["run-all"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while !bundle.path("started").exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "the second experiment did not start");
        std::thread::yield_now();
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let ran = Ran::new(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(start.elapsed() < Duration::from_secs(30), "it waited for the experiment to end");
    assert!(ran.err.contains("fails: interrupted"), "{}", ran.err);
    assert!(ran.err.contains("error: interrupted; `cargo xtask run-all --resume`"), "{}", ran.err);
    assert_eq!(bundle.read("ran"), "fine\nfails\n", "nothing starts after Ctrl-C");
    bundle.program("fails", "echo fails >> ran\n");
    bundle.run(&["run-all", "--resume"]);
    assert_eq!(bundle.read("ran"), "fine\nfails\nfails\ncrashes\n");
}

#[test]
fn wrong_flags_and_places_are_refused() {
    let bundle = three();
    let check = |args: &[&str], code: i32, says: &str| {
        let ran = bundle.run(args);
        assert_eq!(ran.code, Some(code), "{args:?}: {ran:?}");
        assert!(ran.err.contains(says), "{args:?}: {}", ran.err);
    };
    check(
        &["run-all", "--only", "fine,fin"],
        1,
        "error: there is no experiment `fin`; there are: fine, fails, crashes",
    );
    check(&["run-all", "--scale", "huge"], 2, "smoke, laptop, full, paper");
    check(&["run-all", "--device", "gpu"], 2, "expected cpu, cuda or cuda:N");
    check(&["run-all", "--seed", "first"], 2, "--seed");
    check(&["run-all", "--out", "/proc/nowhere"], 1, "give --out a folder that you may write");
    check(&["setup"], 1, "a bundle has only run-all, test, compare, gpu-day and report");
    check(&["report", "--out", "empty"], 1, "there are no records in");
    bundle.register("[[experiment]]\nnam = \"x\"\n");
    check(&["run-all"], 1, "crates/experiments/experiments/sample.toml:");
}

#[test]
fn bundled_tests_find_their_fixtures_and_say_what_they_skip() {
    let bundle = three();
    let test = "pwd > where; echo \"$FRUGAL_FIXTURES\" >> where; echo 'test a ... ignored, wants a GPU'\n\
                echo 'test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured'\n";
    bundle.script("bin/traces", test);
    let ran = bundle.run(&["test"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.out.ends_with("1 test was skipped:\n    a: wants a GPU\n4 passed, 0 failed\n"),
        "{}",
        ran.out
    );
    let root = bundle.path("").canonicalize().unwrap();
    let output = bundle.read("crates/sample/where");
    assert_eq!(output, format!("{0}/crates/sample\n{0}/data/fixtures\n", root.display()));
    bundle.script("bin/traces", "exit 101\n");
    let ran = bundle.run(&["test"]);
    assert!(ran.err.ends_with("error: failed: traces of sample\n"), "{}", ran.err);
}
