//! Fine-tuning on conversations: the program from the file to the adapter.

use crate::conversations::conversations;
use crate::tiny_folder::Tiny;
use lora::peft::TENSORS_FILE;
use serde_json::Value;

const TRAIN: &str = "finetune --model model --data chat.jsonl --r 4 --batch-size 2 --accumulation 2 --lr 0.03 --seed 3 \
                     --packing 100 --dropout 0.2 --steps 12 --checkpoint-every 3 --json";

/// Conversations × packing × accumulation × a kill.
#[test]
fn a_killed_training_on_conversations_goes_on_to_the_same_bytes() {
    let tiny = Tiny::new();
    conversations(&tiny);
    let (_, err) = tiny.succeed(&format!("{TRAIN} --out unbroken"));
    assert!(err.contains("data: chat.jsonl (messages; not read: id)\n"), "{err}");
    tiny.kill_at_step(&format!("{TRAIN} --out broken"), 4);
    assert!(!tiny.path("broken").join(TENSORS_FILE).exists(), "it was not done");

    // The date of the first start is that of the resumed one.
    let config = String::from_utf8(tiny.bytes("broken/config.toml")).unwrap();
    assert!(config.contains("\ndate = \"20"), "{config}");
    tiny.succeed("resume broken");
    assert!(tiny.bytes(&format!("unbroken/{TENSORS_FILE}")) == tiny.bytes(&format!("broken/{TENSORS_FILE}")));
    let losses = |out: &str| String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
    let of = |text: String| -> Vec<(Value, Value)> {
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| (line["step"].clone(), line["loss"].clone())).collect()
    };
    let (one, other) = (of(losses("unbroken")), of(losses("broken")));
    assert_eq!(one, other);
    assert_eq!(one.iter().filter(|(step, _)| step.is_u64()).count(), 12);
}
