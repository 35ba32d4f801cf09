//! Nothing that exists is replaced without being asked for.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::session::Session;

const TRAIN: &str = "finetune --model model --data problems --r 4 --batch-size 4 --accumulation 1 --lr 0.03 --samples 0 --steps 2";

/// Every file below a path, and its bytes.
fn files(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in path.read_dir().into_iter().flatten().flatten() {
        match entry.path() {
            folder if folder.is_dir() => all.extend(files(&folder)),
            file => drop(all.insert(file.clone(), fs::read(file).unwrap())),
        }
    }
    all
}

/// Checks that a command fails with these words, and that nothing in the folder is another than before.
#[track_caller]
fn keeps(session: &Session, arguments: &str, words: &str) {
    let before = files(&session.path(""));
    let said = session.fail(arguments);
    assert!(said.contains(words), "{arguments}: {said}");
    let is_cache = |path: &&PathBuf| path.starts_with(session.path("cache"));
    let after = files(&session.path(""));
    let names = |all: &BTreeMap<PathBuf, Vec<u8>>| -> Vec<PathBuf> {
        all.keys().filter(|path| !is_cache(path)).cloned().collect()
    };
    assert_eq!(names(&before), names(&after), "{arguments}");
    let changed: Vec<&PathBuf> =
        before.keys().filter(|path| !is_cache(path) && before[*path] != after[*path]).collect();
    assert!(changed.is_empty(), "{arguments}: {changed:?}");
}

#[test]
fn a_run_whose_checkpoints_were_removed_stays() {
    let session = Session::new();
    session.succeed(&format!("{TRAIN} --evaluate-every 1 --out run"));
    fs::remove_dir_all(session.path("run/checkpoints")).unwrap();
    let other = format!("{TRAIN} --seed 9 --out run");
    let words = "run holds adapter_model.safetensors of an earlier run, whose checkpoints are gone";
    keeps(&session, &other, words);
    keeps(&session, &format!("{other} --resume"), "so it cannot be resumed; give another --out");
    keeps(&session, "resume run --set training.steps=4", "so it cannot be resumed; give another --out");
    // A model of another training, or of any program.
    fs::create_dir_all(session.path("full/checkpoints")).unwrap();
    fs::create_dir(session.path("full/model")).unwrap();
    fs::write(session.path("full/model/config.json"), "{}").unwrap();
    let full = TRAIN.replace(" --r 4", " --method full --out full");
    keeps(&session, &full, "full holds model of an earlier run");

    // One that was killed before its first checkpoint has a best adapter, which is not the next one's.
    for file in ["adapter_model.safetensors", "adapter_config.json"] {
        fs::remove_file(session.path("run").join(file)).unwrap();
    }
    keeps(&session, &other, "run holds an earlier run without a checkpoint; start it again");
    session.succeed(&format!("{TRAIN} --resume --out run"));
    assert!(!session.path("run/best").exists() && !session.path("run/best.json").exists());
    assert!(session.succeed("info run").1.is_empty());
}

#[test]
fn a_configuration_that_a_person_wrote_stays() {
    let session = Session::new();
    fs::create_dir(session.path("exp")).unwrap();
    let text = "# Why: see the notes.\n[model]\nname = \"model\"\n[data]\nsource = \"problems\"\n[adapter]\nr = 4\n[training]\nsteps = 1\n";
    fs::write(session.path("exp/config.toml"), text).unwrap();
    for resume in ["", " --resume"] {
        let command = format!("finetune --config exp/config.toml --out exp{resume}");
        keeps(&session, &command, "exp holds a config.toml that no run wrote");
    }
    session.succeed("finetune --config exp/config.toml --samples 0 --out exp/run");
    // A start that ends before its first step leaves a folder that the next one takes.
    session.fail("finetune --config exp/config.toml --samples 0 --out again --budget 20MiB");
    session.succeed("finetune --config exp/config.toml --samples 0 --out again");
}

#[test]
fn answers_replace_no_file_unasked_and_never_their_questions() {
    let session = Session::new();
    let questions = "{\"question\": \"1 + 1\", \"answer\": \"2\"}\n";
    fs::write(session.path("qa.jsonl"), questions).unwrap();
    fs::write(session.path("notes.txt"), "mine").unwrap();
    fs::create_dir(session.path("folder")).unwrap();
    for command in [
        "eval --model model --questions qa.jsonl --max-new-tokens 2",
        "eval --model model --data problems --limit 1 --max-new-tokens 2",
    ] {
        keeps(
            &session,
            &format!("{command} --out notes.txt"),
            "--out notes.txt exists; give another, or --overwrite",
        );
        keeps(&session, &format!("{command} --transcript folder"), "--out folder is a folder; give a file");
        keeps(&session, &format!("{command} --out none/a.jsonl"), "--out none/a.jsonl cannot be written");
    }
    for overwrite in ["", " --overwrite"] {
        let command = format!("eval --model model --questions qa.jsonl --out ./qa.jsonl{overwrite}");
        keeps(&session, &command, "--out ./qa.jsonl is qa.jsonl, which is read; give another");
        let command = format!("eval --model model --data problems --out problems/test.jsonl{overwrite}");
        keeps(&session, &command, "--out problems/test.jsonl is problems/test.jsonl, which is read");
    }
    let command = "eval --model model --questions qa.jsonl --max-new-tokens 2 --out";
    session.succeed(&format!("{command} answers.jsonl"));
    assert_eq!(String::from_utf8(session.bytes("answers.jsonl")).unwrap().lines().count(), 1);
    session.succeed(&format!("{command} notes.txt --overwrite"));
    assert!(session.bytes("notes.txt") == session.bytes("answers.jsonl"));
}

#[test]
fn what_is_exported_replaces_no_input() {
    let session = Session::new();
    session.succeed(&format!("{TRAIN} --out run"));
    let gguf = "export --format gguf --model model --overwrite --out";
    keeps(&session, &format!("{gguf} model/model.safetensors"), "is a file of what is exported");
    keeps(
        &session,
        "export --format ollama --model model --overwrite --out ./model",
        "which is read; give another",
    );
    session.succeed(&format!("{gguf} model/tuned.gguf"));
    session.succeed(&format!("{gguf} model/tuned.gguf"));

    session.succeed("man pages");
    session.succeed("man pages");
    fs::write(session.path("pages/frugal-eval.1"), "mine").unwrap();
    keeps(&session, "man pages", "pages/frugal-eval.1 exists; give another folder, or --overwrite");
    session.succeed("man pages --overwrite");

    let train = "train --data synthetic --steps 1 --width 8 --batch-size 2 --quiet";
    fs::write(session.path("notes.txt"), "mine").unwrap();
    keeps(&session, &format!("{train} --records notes.txt"), "notes.txt: its first line is not a record");
    keeps(
        &session,
        &format!("{train} --diagnose --trace notes.txt"),
        "--trace notes.txt exists; give another",
    );
    session.succeed(&format!("{train} --records records.jsonl"));
    session.succeed(&format!("{train} --records records.jsonl"));
}

/// What is printed to be typed can be typed.
#[test]
fn commands_that_are_printed_are_quoted() {
    let session = Session::new();
    let words: Vec<&str> = TRAIN.split(' ').chain(["--out", "my run"]).collect();
    let said = session.run_words(&words).err;
    for command in [
        "tensorboard --logdir 'my run'",
        "frugal generate --model 'my run' --prompt TEXT",
        "frugal export --model 'my run' --format gguf --type q8_0 --out 'my run.gguf'",
        "frugal runs show 'my run'",
    ] {
        assert!(said.contains(command), "{command}: {said}");
    }
    assert!(session.run_words(&["info", "my run"]).out.contains("frugal generate --model 'my run'"));
    assert!(session.run_words(&words).err.contains("`frugal resume 'my run' --set training.steps=N`"));
    let ollama = ["export", "--format", "ollama", "--model", "my run", "--out", "my chat"];
    assert!(session.run_words(&ollama).err.contains("cd 'my chat' && ollama create"));
}

/// Names of fields and of files come from others, and may command a terminal.
#[test]
fn control_characters_of_data_are_not_printed() {
    let session = Session::new();
    let title = "\u{1b}]0;PWNED\u{7}\u{9b}31m";
    let record = serde_json::json!({ "text": "one", (format!("x{title}")): 1 }).to_string();
    let (good, wrong) = (format!("good{title}.jsonl"), format!("wrong{title}.jsonl"));
    fs::write(session.path(&good), format!("{record}\n")).unwrap();
    fs::write(session.path(&wrong), format!("{{\"a{title}\": 1}}\n")).unwrap();
    fs::create_dir(session.path("odd")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&session.bytes("model/config.json")).unwrap();
    config["model_type"] = title.into();
    fs::write(session.path("odd/config.json"), config.to_string()).unwrap();
    for (words, expected) in [
        (vec!["data", "check", &good, "--model", "model"], "x]0;PWNED31m"),
        (vec!["data", "show", &good, "--model", "model"], "x]0;PWNED31m"),
        (vec!["data", "check", &wrong, "--model", "model"], "wrong]0;PWNED31m.jsonl"),
        (vec!["info", "odd"], "]0;PWNED31m"),
    ] {
        let ended = session.run_words(&words);
        let is_control = |char: char| char.is_control() && char != '\n';
        assert!(!ended.err.contains(is_control), "{words:?}: {:?}", ended.err);
        assert!(ended.err.contains(expected), "{words:?}: {:?}", ended.err);
    }
    let ended = session.run_words(&["data", "check", &good, "--model", "model", "--json"]);
    assert!(!ended.out.contains(|char: char| char.is_control() && char != '\n'), "{:?}", ended.out);
}

/// What a command reads besides its data: the model, the run, and the run's parts.
#[test]
fn a_model_is_not_replaced_by_its_answers_nor_a_runs_best_by_a_merged_model() {
    let session = Session::new();
    session.succeed(&format!("{TRAIN} --evaluate-every 1 --out run"));
    fs::write(session.path("asked.jsonl"), "{\"question\":\"2+2?\",\"answer\":\"4\"}\n").unwrap();
    let eval = "eval --questions asked.jsonl --overwrite --model";
    keeps(&session, &format!("{eval} model --out model/config.json"), "which is read; give another");
    keeps(&session, &format!("{eval} run --out run/config.toml"), "which is read; give another");
    let merge = "merge --model model --adapter run --overwrite --out run/best";
    keeps(&session, merge, "is a part of a training's output folder; give another");
}

#[test]
fn flags_of_one_method_that_contradict_each_other_are_refused() {
    let session = Session::new();
    for (flags, words) in [
        ("--method lora --dora", "--method lora and --dora contradict each other"),
        (
            "--method lora --set adapter.use_dora=true",
            "--method lora and --set adapter.use_dora=true contradict",
        ),
        (
            "--method dora --set adapter.use_dora=false",
            "--method dora and --set adapter.use_dora=false contradict",
        ),
    ] {
        keeps(&session, &format!("{TRAIN} {flags} --out run"), words);
    }
    session.succeed(&format!("{TRAIN} --method dora --set adapter.use_dora=true --out run"));
    keeps(
        &session,
        "eval --model model --revision main --data problems",
        "is a folder, which has no revision main",
    );
}
