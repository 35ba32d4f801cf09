//! The note of the device that is chosen.

use super::session::Session;

#[test]
fn the_device_is_chosen_and_said_first() {
    let tiny = Session::new();
    std::fs::write(tiny.path("my.jsonl"), "{\"text\": \"one two three\"}\n".repeat(4)).unwrap();
    let first = "device: cpu (no CUDA device is usable: ";
    for command in [
        "finetune --model model --data my.jsonl --steps 1 --out run",
        "train --heads 2 --width 16 --steps 1",
        "generate --model model --prompt a --max-new-tokens 2",
        "eval --model model --data my.jsonl",
        "resume run --set training.steps=2",
    ] {
        let (_, said) = tiny.succeed(command);
        // A run that is resumed keeps its device.
        assert_eq!(said.starts_with(first), !command.starts_with("resume"), "{command}: {said}");
    }
    let text = String::from_utf8(tiny.bytes("run/config.toml")).unwrap();
    assert!(text.contains("device = \"cpu\" # default\n"), "{text}");
    let (_, said) = tiny.succeed("generate --model model --prompt a --max-new-tokens 2 --device cpu");
    assert!(!said.contains("device"), "{said}");
}
