//! A base in NF4 through the program: training, export, generation, the merge into the original, and what is refused.

use serde_json::Value;

use super::session::Session;

const TRAIN: &str = "finetune --model model --dtype nf4 --data problems --r 4 --batch-size 4 --accumulation 1 --lr 0.03 --seed 3 \
                     --lora-dropout 0.1 --steps 6 --log-every 1";

#[test]
fn an_adapter_of_a_base_in_nf4_generates_and_is_merged_into_the_original() {
    let tiny = Session::new();
    tiny.succeed(&format!("{TRAIN} --out whole"));
    let (quantized, _) = tiny.succeed("export --format nf4 --model model --out quantized --json");
    assert!(quantized.contains("quantized"));
    let (info, _) = tiny.succeed("info quantized --json");
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["dtype"], "nf4");
    let generate = |flags: &str| {
        tiny.succeed(&format!("generate --prompt Ann --max-new-tokens 8 --adapter whole {flags}")).0
    };
    let text = generate("--model model --dtype nf4");
    assert_eq!(generate("--model quantized"), text);
    for flags in ["--offload host", "--offload file", "--budget 2GiB"] {
        assert_eq!(generate(&format!("--model quantized {flags}")), text, "{flags}");
    }

    let (merged, _) = tiny
        .succeed("merge --model model --adapter whole --out merged --compare-nf4 problems/test.jsonl --json");
    let merged: Value = serde_json::from_str(&merged).unwrap();
    let figure = |name: &str| merged["result"]["compared_with_nf4"][name].as_f64().unwrap();
    // The adapter does more than the base's rounding to four bits.
    assert!(figure("divergence") < figure("divergence_without_adapter"), "{merged}");
    assert!(figure("same_token") > 0.5 && figure("positions") > 100.0, "{merged}");
    for flags in ["--model quantized", "--model model --dtype nf4"] {
        let ended = tiny.run(&format!("merge {flags} --adapter whole --out refused"));
        let said = ended.err;
        assert!(ended.status == 1 && said.contains("give the original model's files as --model"), "{said}");
    }
    for (arguments, words) in [
        (
            "finetune --model quantized --method full --data problems --out x",
            "and full fine-tuning cannot be combined",
        ),
        ("export --format gguf --model quantized --out x.gguf", ""),
    ] {
        let ended = tiny.run(arguments);
        let said = ended.err;
        assert!(ended.status == 1 && said.contains(words), "{arguments}: {said}");
    }
}
