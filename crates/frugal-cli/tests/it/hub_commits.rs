//! A run on a model of the hub keeps to the commit that it was trained with: branches move.

use std::fs;
use std::path::Path;

use crate::tiny_folder::Tiny;

const FIRST: &str = "0123456789abcdef0123456789abcdef01234567";
const SECOND: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// Puts a model's folder into the cache of the hub, as its commit.
fn cache(tiny: &Tiny, model: &str, commit: &str) {
    let snapshot = tiny.path("no-cache/models--tiny--base/snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(tiny.path(model)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), snapshot.join(entry.file_name())).unwrap();
    }
}

fn point_main_to(tiny: &Tiny, commit: &str) {
    let refs = tiny.path("no-cache/models--tiny--base/refs");
    fs::create_dir_all(&refs).unwrap();
    fs::write(refs.join("main"), commit).unwrap();
}

fn weights(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn a_run_takes_its_commit_after_the_branch_has_moved() {
    let tiny = Tiny::new();
    tiny.write_model("other", 16, 2);
    cache(&tiny, "model", FIRST);
    cache(&tiny, "other", SECOND);
    point_main_to(&tiny, FIRST);
    let train =
        "finetune --model tiny/base --data problems --r 4 --batch-size 4 --accumulation 1 --samples 0";
    tiny.succeed(&format!("{train} --steps 2 --out run"));
    tiny.kill_at_step(&format!("{train} --steps 4 --checkpoint-every 1 --out killed --json"), 2);
    tiny.succeed("merge --model run --out before");
    tiny.succeed("export --model run --out adapter");
    let text = |name: &str| fs::read_to_string(tiny.path(name)).unwrap();
    assert!(text("run/config.toml").contains(&format!("revision = \"{FIRST}\"")));
    for name in ["run/adapter_config.json", "adapter/adapter_config.json"] {
        assert!(text(name).contains(&format!("\"revision\": \"{FIRST}\"")), "{name}: {}", text(name));
    }
    point_main_to(&tiny, SECOND);
    for (number, model) in ["run", "adapter"].into_iter().enumerate() {
        let out = format!("after-{number}");
        tiny.succeed(&format!("merge --model {model} --out {out}"));
        assert!(weights(&tiny.path(&out)) == weights(&tiny.path("before")), "{model}");
    }
    // Asked for, another commit is taken.
    tiny.succeed("merge --model run --revision main --out moved");
    assert!(weights(&tiny.path("moved")) != weights(&tiny.path("before")));
    // A training that is resumed is of its commit, too.
    tiny.succeed(&format!("{train} --steps 4 --out whole --revision {FIRST}"));
    tiny.succeed("resume killed");
    assert_eq!(tiny.losses("killed"), tiny.losses("whole"));
}
