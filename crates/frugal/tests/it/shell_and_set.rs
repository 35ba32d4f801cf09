//! What shells and manuals know of the program, and values that are set by key.

use crate::tiny_folder::Tiny;

#[test]
fn shells_and_manuals_know_every_command() {
    let tiny = Tiny::new();
    for shell in ["bash", "zsh", "fish"] {
        let (out, _) = tiny.succeed(&format!("completions {shell}"));
        assert!(out.contains("finetune") && out.contains("evaluate-every"), "{shell}");
    }
    tiny.succeed("man pages");
    let page = String::from_utf8(tiny.bytes("pages/frugal-finetune.1")).unwrap();
    assert!(page.contains("\\-\\-evaluate\\-every"), "{page}");
    assert!(tiny.path("pages/frugal-runs-diff.1").is_file() && tiny.path("pages/frugal.1").is_file());
    assert!(!tiny.path("pages/frugal-help.1").exists());
}

#[test]
fn values_that_cannot_be_set_are_refused_before_anything_is_made() {
    let tiny = Tiny::new();
    let check = |arguments: &str, expected: &str| {
        let output = tiny.run(&format!("finetune --model model --data problems --out out {arguments}"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains(expected), "{said}");
        assert!(!tiny.path("out").exists());
    };
    check("--set optimizer.rl=1", "error: --set `optimizer.rl=1`: unknown field `rl`");
    check("--set optimizer.rl=1", "did you mean `lr`?");
    check("--set training.steps", "expected KEY=VALUE");
    check(
        "--patience 2",
        "`training.patience` (--patience) is 2; expected `training.evaluate_every` (--evaluate-every)",
    );
    check("--held-out 0.7", "`data.held_out` (--held-out) is 0.7; expected a share from 0 to 0.5");
    std::fs::write(tiny.path("bad.toml"), "[training]\nstep = 5\n").unwrap();
    check("--config bad.toml", "line 2 (`step = 5`): unknown field `step`");
}
