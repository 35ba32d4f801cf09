//! `frugal launch` of trainings: interrupted, killed and started again, with other settings, by torchrun, and fine-tunings.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::tiny_folder::Tiny;

const STEPS: usize = 40;
const TRAIN: &str = "train --width 16 --heads 2 --vocabulary 32 --length 16 --dropout 0.1 --accumulation 3 --batch-size 2 --clip 1 \
                     --log-every 1 --checkpoint-every 4 --steps 40";

/// The program as `count` ranks.
fn launch(tiny: &Tiny, count: usize, arguments: &str) -> Command {
    let mut command = tiny.command(&format!("launch -n {count} -- {arguments}"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Ranks of a shell's script, in which `$FRUGAL` is the program.
fn shell(tiny: &Tiny, options: &str, script: &str) -> Output {
    let mut command = tiny.command(&format!("launch {options} -- sh -c"));
    command.arg(script).env("FRUGAL", crate::program()).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

#[track_caller]
fn fails(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// The weights, the optimizer's state and the losses at the end of a training.
fn trained(out: &Path, steps: usize) -> [Vec<u8>; 3] {
    let newest = out.join(format!("checkpoints/step-{steps:012}"));
    let losses = std::fs::read_to_string(out.join("losses.jsonl")).unwrap();
    let losses: Vec<String> = losses
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            format!("{} {} {} {}", line["step"], line["loss"], line["gradient_norm"], line["validation_loss"])
        })
        .collect();
    [
        std::fs::read(newest.join("model.safetensors")).unwrap(),
        std::fs::read(newest.join("optimizer.safetensors")).unwrap(),
        losses.join("\n").into_bytes(),
    ]
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

/// Waits until a training has done so many steps.
fn wait_for(child: &mut Child, log: &Path, steps: usize) {
    while lines(log) < steps {
        assert!(child.try_wait().unwrap().is_none(), "it ended early");
        std::thread::yield_now();
    }
}

#[test]
fn interrupted_and_killed_ranks_go_on_to_the_same_bits() {
    let tiny = Tiny::new();
    succeeds(&launch(&tiny, 1, &format!("{TRAIN} --out whole")).output().unwrap());
    let whole = trained(&tiny.path("whole"), STEPS);

    let mut child = launch(&tiny, 2, &format!("{TRAIN} --out cut")).spawn().unwrap();
    wait_for(&mut child, &tiny.path("cut/losses.jsonl"), 6);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    let step = lines(&tiny.path("cut/losses.jsonl"));
    let told = format!(
        "[0] error: interrupted after step {step} of {STEPS}, which is saved; resume with `frugal launch -n 2 -- resume cut`\n"
    );
    assert!(said.contains(&told) && !said.contains("[1]"), "{said}");
    succeeds(&launch(&tiny, 2, "resume cut").output().unwrap());
    assert!(trained(&tiny.path("cut"), STEPS) == whole, "after an interruption");

    // A rank is stopped after six steps for longer than the time between checkpoints, and killed as soon as one has been written; the
    // launcher starts all again.
    let kill = "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \
                (until [ \"$(cat killed/losses.jsonl 2> /dev/null | wc -l)\" -ge 6 ]; do sleep 0.02; done; \
                kill -STOP $$; sleep 1.1; kill -CONT $$; \
                until ls killed/checkpoints | grep -q ^step; do sleep 0.01; done; kill -9 $$) & fi; ";
    let timed = TRAIN.replace("--checkpoint-every 4", "--checkpoint-every 1s");
    let said =
        shell(&tiny, "-n 2 --restarts 1", &format!("{kill} exec $FRUGAL {timed} --resume --out killed"));
    let said = succeeds(&said);
    assert!(said.contains("rank 1 of 2 was ended by signal 9; restart 1 of 1"), "{said}");
    assert!(said.contains("[0] resumes after step "), "{said}");
    assert!(trained(&tiny.path("killed"), STEPS) == whole, "after a restart");

    // Ranks on machines that do not share the folder.
    let copied =
        Command::new("cp").args(["-r", "killed", "own"]).current_dir(tiny.path("")).status().unwrap();
    assert!(copied.success());
    std::fs::remove_dir_all(tiny.path(&format!("own/checkpoints/step-{STEPS:012}"))).unwrap();
    let resume =
        "[ $RANK = 0 ] && folder=killed || folder=own; exec $FRUGAL resume $folder --set training.steps=44";
    let said = fails(&shell(&tiny, "-n 2 --patience 1", resume));
    let expected = format!("(each machine needs a copy)` is {STEPS} on rank 0 and ");
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn ranks_that_differ_are_told_in_what_before_they_train() {
    let tiny = Tiny::new();
    let check = |script: &str, expected: &str| {
        let said = fails(&shell(&tiny, "-n 2 --patience 1", script));
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(!tiny.path("out/checkpoints/step-000000000040").exists());
    };
    check(
        &format!("exec $FRUGAL {TRAIN} --out out --lr 0.$((RANK + 1))"),
        "`optimizer.lr` is 0.1 on rank 0 and 0.2 on rank 1",
    );
    check(
        &format!("WORLD_SIZE=$((2 + RANK)) exec $FRUGAL {TRAIN} --out out"),
        "WORLD_SIZE is 2 on rank 0 and 3 on rank 1; start all ranks with the same: as many on each machine",
    );
    check(
        &format!("export FRUGAL_LISTEN_FD=999; exec $FRUGAL {TRAIN} --out out"),
        "has closed the launcher's socket, FRUGAL_LISTEN_FD; let it pass file descriptors on",
    );
    std::fs::write(tiny.path("0.txt"), "one two three four five six seven\n").unwrap();
    std::fs::write(tiny.path("1.txt"), "seven six five four three two one\n").unwrap();
    check(
        "exec $FRUGAL finetune --model model --data $RANK.txt --out out --accumulation 2 --steps 2",
        "`data.rows (each machine needs the same data)` is \"",
    );
}

/// The weights of the adapter or model that a fine-tuning has made.
fn made(out: &Path) -> Vec<u8> {
    let adapter = out.join("adapter_model.safetensors");
    std::fs::read(if adapter.is_file() { adapter } else { out.join("model/model.safetensors") }).unwrap()
}

#[test]
fn a_fine_tuning_has_the_same_files_and_lines_with_two_ranks() {
    let tiny = Tiny::new();
    let common = "finetune --json --model model --data problems --batch-size 2 --accumulation 2 --limit 8 --evaluate-every 1 \
                  --steps 2 --log-every 1";
    // `techniques_over_ranks` crosses the techniques with the stages.
    for (flags, plans) in [("--method dora --precision fp16", 0), ("--method full --zero-stage 3", 1)] {
        let run = |count: usize| {
            let out = format!("out-{count}");
            let _ = std::fs::remove_dir_all(tiny.path(&out));
            let output =
                launch(&tiny, count, &format!("{common} {flags} --out {out} --records records-{count}"));
            let output = { output }.output().unwrap();
            succeeds(&output);
            // The plan where it is predicted, two steps, an evaluation before and after each, and the result, once.
            let printed = String::from_utf8(output.stdout).unwrap();
            assert_eq!(printed.lines().count(), 6 + plans, "{printed}");
            (trained(&tiny.path(&out), 2), made(&tiny.path(&out)))
        };
        assert!(run(1) == run(2), "{flags}");
        let records = |count: usize| lines(&tiny.path(&format!("records-{count}")));
        assert_eq!(records(1), records(2));
        std::fs::remove_file(tiny.path("records-1")).unwrap();
        std::fs::remove_file(tiny.path("records-2")).unwrap();
        if flags == "--method full --zero-stage 3" {
            let _ = std::fs::remove_dir_all(tiny.path("alone"));
            tiny.succeed(&format!("{common} --method full --clip 0 --out alone"));
            tiny.succeed(&format!("launch -n 2 -- {common} {flags} --clip 0 --out unclipped"));
            assert!(made(&tiny.path("unclipped")) == made(&tiny.path("alone")), "without ranks");
        }
    }
}

/// A decoder of 29 million parameters, which a training makes.
const MIDDLING: &str = r#"{"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": false, "hidden_act": "silu"}"#;

/// Without a stage the plan chooses it, for the budget of each rank.
#[test]
fn ranks_plan_the_same_way_within_a_budget() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("middling.json"), MIDDLING).unwrap();
    let planned = |budget: &str, flags: &str| {
        let arguments = format!(
            "train --model middling.json --data embedded --batch-size 4 --accumulation 2 --length 512 --steps 2 --dry-run \
             --budget {budget} {flags}"
        );
        let output = launch(&tiny, 2, &arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, ample) = planned("3GiB", "");
    assert_eq!(status, Some(0), "{ample}");
    assert!(ample.contains("[0] budget 3.00 GiB of each rank; ") && !ample.contains("[1] budget"), "{ample}");
    let chosen = |said: &str| {
        let line =
            said.lines().find_map(|line| line.strip_prefix("[0] ▸ ")).unwrap_or_else(|| panic!("{said}"));
        line.split("  ").next().unwrap().to_owned()
    };
    assert!(["ZeRO-1, keep all", "ZeRO-2, keep all"].contains(&&*chosen(&ample)), "{ample}");
    // A stage that is named is kept.
    assert_eq!(chosen(&planned("3GiB", "--zero-stage 3 --activations keep").1), "ZeRO-3, keep all");
    assert_eq!(chosen(&planned("3GiB", "--activations recompute --zero-stage 2").1), "ZeRO-2, recompute all");
    let (status, short) = planned("320MiB", "");
    assert_eq!(status, Some(3), "{short}");
    assert_eq!(short.matches("nothing fits a budget of 320 MiB").count(), 1, "{short}");
    assert!(short.contains("[1] error: nothing fits the budget, as rank 0 says"), "{short}");
    // What it names suffices, with all divided, in files.
    let least = short.rsplit_once("give --budget ").unwrap().1.split_once("MiB").unwrap().0;
    let least: u64 = least.parse().unwrap();
    let (status, least) = planned(&format!("{}MiB", least + 16), "");
    assert_eq!(status, Some(0), "{least}");
    assert!(chosen(&least).starts_with("ZeRO-3 in files, recompute"), "{least}");
}

#[test]
fn a_full_disk_of_rank_0_is_an_error_on_every_rank_and_the_last_checkpoint_stays() {
    let tiny = Tiny::new();
    let common = "finetune --model model --data problems --batch-size 2 --accumulation 2 --limit 32 --zero-stage 3 --log-every 1 \
                  --checkpoint-every 2 --out out --resume --steps";
    succeeds(&launch(&tiny, 2, &format!("{common} 4 --method full")).output().unwrap());
    let before = trained(&tiny.path("out"), 4);
    // Blocks of 512 or 1024 bytes, as the shell counts: more than the log, less than the weights.
    let limit = "if [ $RANK = 0 ]; then trap '' XFSZ; ulimit -f 100; fi; ";
    let began = std::time::Instant::now();
    let said = fails(&shell(&tiny, "-n 2", &format!("{limit} exec $FRUGAL {common} 8 --method full")));
    assert!(began.elapsed() < std::time::Duration::from_secs(30), "long before the ranks' deadline");
    for rank in 0..2 {
        let told = format!(
            "[{rank}] error: the checkpoint of step 6 was not written: out/checkpoints/.tmp-step-000000000006: "
        );
        assert!(said.contains(&told), "{said}");
    }
    assert_eq!(said.matches("raise the limit on the size of files (`ulimit -f`)").count(), 2, "{said}");
    assert!(trained(&tiny.path("out"), 4)[..2] == before[..2]);
    let mut names: Vec<_> = std::fs::read_dir(tiny.path("out/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "step-000000000002", "step-000000000004"]);
    // The model at the end cannot be written: its folder's name is a file's.
    let script =
        format!("mkdir -p taken/checkpoints; touch taken/model; exec $FRUGAL {common} 2 --method full");
    let said = fails(&shell(&tiny, "-n 2", &script.replace("--out out", "--out taken")));
    assert_eq!(
        said.matches("taken/model: cannot be written: a file; expected a folder").count(),
        2,
        "{said}"
    );
    assert!(said.contains("[1] error: rank 0: "), "{said}");
}

#[test]
fn a_failure_is_told_in_the_file_that_torchrun_names() {
    let tiny = Tiny::new();
    let path = tiny.path("error.json");
    let output = tiny.command("train --length 0x").env("TORCHELASTIC_ERROR_FILE", &path).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "a mistake in the arguments is the user's");
    let output = tiny
        .command("train --device cpu --data none.txt")
        .env("TORCHELASTIC_ERROR_FILE", &path)
        .output()
        .unwrap();
    let said = fails(&output);
    let told: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let message = told["message"]["message"].as_str().unwrap();
    assert_eq!(said, format!("error: {message}\n"));
    let extra = &told["message"]["extraInfo"];
    assert_eq!(extra["py_callstack"], message);
    assert!(extra["timestamp"].as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000);
}

/// `torchrun` of a full torch, which `cargo xtask compare` installs.
fn torchrun() -> Option<PathBuf> {
    let cache = std::env::var_os("FRUGAL_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/frugal")))?;
    let folders = std::fs::read_dir(cache).ok()?.flatten().map(|entry| entry.path());
    let peers = folders.filter(|path| path.to_string_lossy().contains("/peers-torch-"));
    peers.map(|path| path.join("bin/torchrun")).find(|path| path.is_file())
}

#[test]
fn torchrun_starts_a_training_with_the_same_bits() {
    let Some(torchrun) = torchrun() else {
        eprintln!("skipped: no torchrun; `cargo xtask compare` installs a full torch");
        return;
    };
    let tiny = Tiny::new();
    let short = format!("{TRAIN} --steps 4");
    let short = short.replacen("--steps 40", "", 1);
    succeeds(&launch(&tiny, 1, &format!("{short} --out whole")).output().unwrap());
    let mut command = Command::new(torchrun);
    command.args(["--no-python", "--standalone", "--nproc-per-node", "2"]).arg(crate::program());
    command
        .args(short.split_whitespace())
        .args(["--out", "ranks"])
        .current_dir(tiny.path(""))
        .env("OMP_NUM_THREADS", "1");
    succeeds(&command.output().unwrap());
    assert!(trained(&tiny.path("ranks"), 4) == trained(&tiny.path("whole"), 4));
}
