//! `frugal launch`: ranks start, print, fail, restart and end together.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use expect_test::{Expect, expect};

use crate::texts::write_texts;

fn launch(options: &[&str], command: &[&str]) -> Command {
    let mut launcher = Command::new(crate::program());
    launcher.arg("launch").args(options).arg("--").args(command).env_remove("OMP_NUM_THREADS");
    launcher.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    launcher
}

/// Runs a shell's script as ranks.
fn shell(options: &[&str], script: &str) -> Output {
    launch(options, &["sh", "-c", script]).output().unwrap()
}

/// The lines in the order of ranks; those of two ranks come in any.
fn sorted(bytes: &[u8]) -> String {
    let mut lines: Vec<String> =
        String::from_utf8_lossy(bytes).lines().map(|line| line.to_owned() + "\n").collect();
    lines.sort();
    lines.concat()
}

fn check(output: &Output, code: i32, out: Expect, err: Expect) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    out.assert_eq(&sorted(&output.stdout));
    err.assert_eq(&sorted(&output.stderr));
}

#[test]
fn each_rank_gets_the_variables_of_torchrun_and_its_lines_begin_with_its_number() {
    let script = "echo $RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT; \
                  echo at $MASTER_ADDR >&2; test $MASTER_PORT -gt 0 && test $OMP_NUM_THREADS -gt 0 && test \
                  -n \"$TORCHELASTIC_RUN_ID\"";
    let out = expect![[r#"
        [0] 0 0 of 3 3, restart 0
        [1] 1 1 of 3 3, restart 0
        [2] 2 2 of 3 3, restart 0
    "#]];
    let err = expect![[r#"
        [0] at 127.0.0.1
        [1] at 127.0.0.1
        [2] at 127.0.0.1
    "#]];
    check(&shell(&["-n", "3"], script), 0, out, err);
}

/// What rank 0 prints for a program is JSON.
#[test]
fn the_result_of_rank_0_has_no_number_before_it() {
    let script = "echo \"{\\\"rank\\\": $RANK}\"; echo at $RANK >&2";
    let output = launch(&["-n", "2"], &["sh", "-c", script, "sh", "--json"]).output().unwrap();
    let out = expect![[r#"
        {"rank": 0}
    "#]];
    let err = expect![[r#"
        [0] at 0
        [1] at 1
        [1] {"rank": 1}
    "#]];
    check(&output, 0, out, err);
}

#[test]
fn a_rank_that_fails_ends_the_others_and_is_named() {
    let output = shell(&["-n", "3", "--patience", "0"], "test $RANK = 1 && exit 7; sleep 600");
    check(
        &output,
        1,
        expect![""],
        expect![[r#"
        error: rank 1 of 3 ended with exit status 7
    "#]],
    );
    let output = shell(&["-n", "2", "--patience", "0"], "test $RANK = 0 && kill -9 $$; sleep 600");
    check(
        &output,
        1,
        expect![""],
        expect![[r#"
        error: rank 0 of 2 was ended by signal 9
    "#]],
    );
}

#[test]
fn the_others_may_say_what_they_saw() {
    let output = shell(&["-n", "2"], "test $RANK = 1 && exit 7; sleep 0.3; echo rank 1 is gone >&2; exit 1");
    check(
        &output,
        1,
        expect![""],
        expect![[r#"
        [0] rank 1 is gone
        error: rank 1 of 2 ended with exit status 7
    "#]],
    );
}

#[test]
fn the_ranks_are_started_again_as_often_as_that() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 2";
    let output = shell(&["-n", "1", "--restarts", "3"], script);
    let out = expect![[r#"
        [0] 0
        [0] 1
        [0] 2
    "#]];
    let err = expect![[r#"
        rank 0 of 1 ended with exit status 1; restart 1 of 3
        rank 0 of 1 ended with exit status 1; restart 2 of 3
    "#]];
    check(&output, 0, out, err);
    let output = shell(&["-n", "1", "--restarts", "1", "--quiet"], script);
    let out = expect![[r#"
        [0] 0
        [0] 1
    "#]];
    check(
        &output,
        1,
        out,
        expect![[r#"
        error: rank 0 of 1 ended with exit status 1
    "#]],
    );
}

/// Starts a script, and waits until each of two ranks has printed a line.
fn start(script: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = launch(&["-n", "2"], &["sh", "-c", script]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..2 {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert!(line.ends_with("] ready\n"), "{line}");
    }
    (child, out)
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn an_interruption_is_passed_on_and_a_second_one_kills() {
    let (child, mut out) = start("trap 'echo saved; exit 1' INT; echo ready; while :; do sleep 0.05; done");
    interrupt(&child);
    let mut rest = String::new();
    while out.read_line(&mut rest).unwrap() > 0 {}
    assert_eq!(sorted(rest.as_bytes()), "[0] saved\n[1] saved\n");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.starts_with("interrupted; waiting for the ranks, a second Ctrl-C kills them\n"), "{said}");
    assert!(
        said.contains("error: interrupted; rank ") && said.ends_with(" of 2 ended with exit status 1\n"),
        "{said}"
    );

    let (child, mut out) = start("trap 'echo not yet' INT; echo ready; while :; do sleep 0.05; done");
    interrupt(&child);
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.ends_with("] not yet\n"), "{line}");
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.ends_with("error: interrupted twice; the ranks were killed\n"), "{said}");
}

/// Whether a process is there, and has not ended.
fn is_running(process: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
    // The state is behind the name.
    status.is_ok_and(|text| !text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

#[test]
fn the_ranks_end_with_a_launcher_that_is_killed() {
    let script = "echo $$; while :; do sleep 0.05; done";
    let mut child = launch(&["-n", "2"], &["sh", "-c", script]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let ranks = [(); 2].map(|()| {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        line.trim().split_once("] ").unwrap().1.to_owned()
    });
    assert!(ranks.iter().all(|rank| is_running(rank)), "{ranks:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while ranks.iter().any(|rank| is_running(rank)) {
        assert!(Instant::now() < until, "{ranks:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One of two machines; nothing is connected by these scripts.
const MACHINE_1: [&str; 8] = ["--nodes", "2", "--node-rank", "1", "--master", "192.0.2.7:29400", "-n", "2"];

#[test]
fn a_machine_says_its_ranks_and_where_rank_0_is() {
    check(
        &shell(&MACHINE_1, "echo $RANK of $WORLD_SIZE, $LOCAL_RANK here, for $MASTER_ADDR:$MASTER_PORT"),
        0,
        expect![[r#"
            [2] 2 of 4, 0 here, for 192.0.2.7:29400
            [3] 3 of 4, 1 here, for 192.0.2.7:29400
        "#]],
        expect![[r#"
            machine 1 of 2: ranks 2 to 3; rank 0, which prints the progress and writes the output, is on 192.0.2.7
        "#]],
    );
}

#[test]
fn a_machine_that_is_interrupted_ends_with_its_status() {
    let script = "trap 'exit 0' INT; echo ready; while :; do sleep 0.05; done";
    let mut child = launch(&MACHINE_1, &["sh", "-c", script]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..2 {
        out.read_line(&mut String::new()).unwrap();
    }
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.ends_with("error: interrupted\n"), "{said}");
}

/// Trains a small model from scratch with `count` ranks in a stage, or without a launcher, and returns the folder's files.
fn trained(count: usize, stage: &[&str]) -> std::collections::BTreeMap<String, Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    // Documents of many lengths, in rows that are packed.
    write_texts(folder.path());
    let (data, out) = (folder.path().join("store"), folder.path().join("run"));
    let common = [
        "train",
        "--data",
        data.to_str().unwrap(),
        "--width",
        "16",
        "--heads",
        "2",
        "--steps",
        "3",
        "--accumulation",
        "3",
    ];
    let mut words: Vec<&str> = common.to_vec();
    words.extend(["--log-every", "1", "--checkpoint-every", "2", "--out", out.to_str().unwrap()]);
    words.extend(stage);
    let mut command = match count {
        0 => {
            let mut alone = Command::new(crate::program());
            alone.args(&words);
            alone
        }
        _ => launch(&["-n", &count.to_string()], &words),
    };
    // The bits are the same for the same number of threads of each process.
    let output = command.env("OMP_NUM_THREADS", "1").output().unwrap();
    assert!(output.status.success(), "{count} ranks: {}", String::from_utf8_lossy(&output.stderr));
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!said.contains("[1]"), "only the first rank prints: {said}");
    let newest = out.join("checkpoints/step-000000000003");
    let mut files = std::collections::BTreeMap::new();
    for name in ["model.safetensors", "optimizer.safetensors"] {
        files.insert(name.to_owned(), std::fs::read(newest.join(name)).unwrap());
    }
    let losses = std::fs::read_to_string(out.join("losses.jsonl")).unwrap();
    let losses = losses.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {}\n", line["step"], line["loss"])
    });
    files.insert("losses".to_owned(), losses.collect::<String>().into_bytes());
    files
}

#[test]
fn a_training_has_the_same_files_with_any_number_of_ranks() {
    let alone = trained(0, &[]);
    assert_eq!(alone["losses"].iter().filter(|byte| **byte == b'\n').count(), 3);
    // Clipped, one rank and two are compared in `launch_training`.
    for (count, stage) in [(2, "2"), (3, "1")] {
        assert!(trained(count, &["--zero-stage", stage]) == alone, "{count} ranks, stage {stage}");
    }
}

#[test]
fn the_progress_of_rank_0_is_that_of_the_launcher() {
    let script = "echo mode $FRUGAL_PROGRESS >&2; echo \"@progress $RANK 2 half\" >&2; echo '@progress 1 2'";
    let output =
        launch(&["-n", "2"], &["sh", "-c", script]).env("FRUGAL_PROGRESS", "lines").output().unwrap();
    let err = expect![[r#"
        @progress 0 2 half
        [0] mode lines
        [1] @progress 1 2 half
        [1] mode
    "#]];
    check(&output, 0, out_of_two(), err);
    // Without a terminal there is none.
    let err = expect![[r#"
        [0] @progress 0 2 half
        [0] mode
        [1] @progress 1 2 half
        [1] mode
    "#]];
    check(&shell(&["-n", "2"], script), 0, out_of_two(), err);
    let words = ["train", "--steps", "3", "--accumulation", "2", "--log-every", "1"];
    let output = launch(&["-n", "2"], &words).env("FRUGAL_PROGRESS", "lines").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("\n@progress 3 3 loss ") && !said.contains("] @progress"), "{said}");
}

fn out_of_two() -> Expect {
    expect![[r#"
        [0] @progress 1 2
        [1] @progress 1 2
    "#]]
}

#[test]
fn what_does_not_go_with_several_ranks_is_refused_by_name() {
    let told = |words: &[&str]| {
        let output = launch(&["-n", "2"], words).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        sorted(&output.stderr)
    };
    let few = told(&["train", "--steps", "1"]);
    assert!(few.contains("training.accumulation") || few.contains("--accumulation"), "{few}");
    assert!(few.contains("at least one batch for each rank"), "{few}");
    // `techniques_over_ranks` has the techniques.
    let diagnose = told(&["train", "--steps", "1", "--accumulation", "2", "--diagnose"]);
    assert!(diagnose.contains("--diagnose works in one process only"), "{diagnose}");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let output = launch(&["-n", "2"], &["no-such-program-anywhere"]).output().unwrap();
    check(
        &output,
        1,
        expect![""],
        expect![[r#"
        error: no-such-program-anywhere: No such file or directory (os error 2)
    "#]],
    );
}
