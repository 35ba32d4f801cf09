//! `frugal generate` within a budget: what fits stays on the device, and the text is that of the whole model.

use serde_json::Value;

use crate::tiny_folder::Tiny;

const PROMPT: &str = "generate --model model --prompt The --max-new-tokens 12";

#[test]
fn a_budget_changes_no_token() {
    let tiny = Tiny::new();
    let (whole, _) = tiny.succeed(PROMPT);
    let (within, said) = tiny.succeed(&format!("{PROMPT} --budget 2GiB"));
    assert_eq!(within, whole);
    assert!(said.contains(" of 2 layers resident, ring of ") && said.contains(" held"), "{said}");
    for flags in ["--offload file", "--offload file --ring 1", "--offload host --ring 2"] {
        let (text, said) = tiny.succeed(&format!("{PROMPT} {flags}"));
        assert_eq!(text, whole, "{flags}");
        assert!(said.contains("; 0 of 2 layers resident"), "{said}");
    }
    let (line, _) = tiny.succeed(&format!("{PROMPT} --budget 2GiB --offload host --json"));
    let told: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(told["tokens"], 12);
}
