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
