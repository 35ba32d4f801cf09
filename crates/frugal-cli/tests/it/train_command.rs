//! `frugal train` as a process: a resume goes on.

use crate::tiny_folder::{Tiny, lines, losses};

fn train(tiny: &Tiny, arguments: &str) -> Vec<f64> {
    losses(&lines(&tiny.succeed(&format!("train --json --heads 2 {arguments}")).0))
}

#[test]
fn a_training_goes_on_from_its_folder_to_the_same_losses() {
    let tiny = Tiny::new();
    let common = "--width 16 --dropout 0.1 --log-every 1 --checkpoint-every 2";
    let whole = train(&tiny, &format!("{common} --steps 6 --out whole"));
    train(&tiny, &format!("{common} --steps 3 --out cut"));
    let again = tiny.run(&format!("train {common} --steps 6 --out cut --heads 2"));
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.code() == Some(1) && said.contains("cut holds a finished run; "), "{said}");
    let text = String::from_utf8(tiny.bytes("cut/config.toml")).unwrap();
    std::fs::write(tiny.path("cut/config.toml"), text.replace("steps = 3", "steps = 6")).unwrap();
    tiny.succeed("resume cut --json");
    let log = |out: &str| {
        let text = String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
        losses(&lines(&text))
    };
    assert_eq!(log("cut"), whole);
    assert_eq!(log("whole"), whole);
}
