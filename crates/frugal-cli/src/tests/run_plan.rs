//! The plan at the head of a training: what it says, where nothing fits, and the default budget.

use serde_json::Value;

use super::Tiny;
use super::session::Session;

const TRAIN: &str = "finetune --model model --data problems --steps 2 --accumulation 1";

#[test]
fn a_training_tells_its_plan() {
    let tiny = Session::new();
    let (_, said) = tiny.succeed(&format!("{TRAIN} --out given --budget 2GiB"));
    assert!(
        said.contains("budget 2.00 GiB; peaks include ") && said.contains("for the program and a reserve"),
        "{said}"
    );
    assert!(said.contains("▸ keep all") && said.contains("chosen: the fastest that fits"), "{said}");
    assert!(said.contains("  recompute all"), "{said}");
    assert!(said.contains("the peak is in the ") && said.contains(", batch "), "{said}");
    assert!(said.contains("less memory, "), "{said}");
    let (_, said) = tiny.succeed(&format!("{TRAIN} --out default --capture off --dry-run"));
    assert!(said.contains("steps are not captured: capture is off"), "{said}");
    let (_, said) = tiny.succeed(&format!("{TRAIN} --out default"));
    assert!(said.contains(" (80 % of the free memory); "), "{said}");
    // What is named restricts the search.
    let (_, said) =
        tiny.succeed(&format!("{TRAIN} --out named --activations recompute --micro-batch-size 2"));
    assert!(said.contains("▸ recompute all, 2 rows at a time"), "{said}");
    assert!(!said.contains("keep all") && !said.contains("in files"), "{said}");
    let (_, said) = tiny.succeed(&format!("{TRAIN} --out unknown --targets q_proj,lm_head"));
    assert!(said.contains("the memory of a step is not predicted for an adapter on `lm_head`"), "{said}");
    for method in ["--method dora", "--init pissa", "--dora --lora-dropout 0.1"] {
        let (_, said) = tiny.succeed(&format!("{TRAIN} --out known {method} --dry-run"));
        assert!(said.contains("▸ keep all"), "{method}: {said}");
        assert!(said.contains("steps are not captured: on a CPU a launch is a call"), "{method}: {said}");
    }

    // A budget below what the program takes names the least, too, and that suffices.
    let small = format!("{TRAIN} --out small --budget");
    let told = tiny.run(&format!("{small} 20MiB"));
    assert_eq!(told.status, 3, "{}", told.err);
    let least = |said: &str| -> String {
        let (_, least) = said.trim_end().rsplit_once("give --budget ").unwrap_or_else(|| panic!("{said}"));
        least.to_owned()
    };
    let budget = least(&told.err);
    let ended = tiny.run(&format!("{small} {budget}"));
    assert!(ended.err.contains("chosen: the fastest that fits"), "{budget}: {}", ended.err);

    let (_, said) = tiny.succeed(&format!("{} --out timed", TRAIN.replace("--steps 2", "--steps 8")));
    assert!(said.contains("a step takes ") && said.contains("an epoch "), "{said}");
    assert!(said.contains("the 5 steps left "), "{said}");

    let (out, said) = tiny.succeed(&format!("{TRAIN} --out json --budget 2GiB --json"));
    assert!(!said.contains("keep all"), "{said}");
    let told: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    let plan = &told["plan"];
    assert_eq!((&plan["chosen"], &plan["budget_bytes"]), (&"keep all".into(), &(2u64 << 30).into()));
    for variant in plan["variants"].as_array().unwrap() {
        let parts = variant["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
        assert_eq!(variant["peak_bytes"].as_u64(), Some(parts.sum::<u64>()), "{variant}");
    }
    assert!(plan["largest_batch"]["positions"].as_u64().unwrap() > 10, "{plan}");
}

/// Makes every width of the model 1024 times as large. The weights are a file of holes.
fn enlarge(tiny: &Tiny) {
    let mut shape: Value = serde_json::from_slice(&tiny.bytes("model/config.json")).unwrap();
    let wide = |size: &Value| size.as_u64().map_or(size.clone(), |size| (size * 1024).into());
    for key in ["hidden_size", "intermediate_size"] {
        shape[key] = wide(&shape[key]);
    }
    shape.as_object_mut().unwrap().remove("head_dim");
    std::fs::write(tiny.path("model/config.json"), shape.to_string()).unwrap();
    let weights = tiny.bytes("model/model.safetensors");
    let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
    let mut end = 0;
    for (name, tensor) in header.as_object_mut().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        for size in tensor["shape"].as_array_mut().unwrap() {
            // The vocabulary stays.
            if *size != 4096 {
                *size = wide(size);
            }
        }
        let sizes = tensor["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap());
        let begin = end;
        end += 4 * sizes.product::<u64>();
        tensor["data_offsets"] = serde_json::json!([begin, end]);
    }
    let header = header.to_string();
    let start = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(tiny.path("model/model.safetensors"), &start).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(tiny.path("model/model.safetensors")).unwrap();
    file.set_len(start.len() as u64 + end).unwrap();
}

#[test]
fn nothing_that_fits_ends_with_status_3_before_a_weight_is_read() {
    let tiny = Session::new();
    enlarge(&tiny);
    let ended = tiny.run(&format!("{TRAIN} --out out --dtype float32 --budget 1GiB --batch-size 8"));
    let said = ended.err;
    assert_eq!(ended.status, 3, "{said}");
    let error = said.lines().last().unwrap();
    assert!(error.starts_with("error: nothing fits a budget of 1.00 GiB; the least is "), "{error}");
    assert!(error.contains("layers in files, ring 1, 1 row at a time"), "{error}");
    assert!(error.contains("; less would take, but still too much: --dtype bfloat16 ("), "{error}");
    let ended = tiny.run(&format!("{TRAIN} --out out --dtype float32 --budget 5GiB --batch-size 8"));
    assert_eq!(ended.status, 3);
    assert!(ended.err.contains("; less would take: --dtype bfloat16 ("), "{}", ended.err);
    assert!(error.contains("; or give --budget "), "{error}");
    assert!(!tiny.path("out").exists());
    // The least that it names suffices for the plan.
    let ended = tiny.run("plan --model qwen2.5-7b --method full --budget 1GiB --hardware rtx4090");
    assert_eq!(ended.status, 3);
}

/// The ways to run a step and their bytes.
fn peaks(plan: &Value) -> Vec<(String, u64)> {
    let of = |variant: &Value| {
        (variant["variant"].as_str().unwrap().to_owned(), variant["peak_bytes"].as_u64().unwrap())
    };
    plan["variants"].as_array().unwrap().iter().map(of).collect()
}

#[test]
fn plan_dry_run_and_run_agree_for_every_method_and_dtype() {
    let tiny = Session::new();
    std::fs::write(tiny.path("text.txt"), "Ann has 5 pears and buys 3 more.\n".repeat(200)).unwrap();
    for (number, (method, dtype)) in [
        ("lora", "float32"),
        ("lora", "bfloat16"),
        ("lora", "nf4"),
        ("dora", "float32"),
        ("dora", "nf4"),
        ("full", "float32"),
        ("full", "bfloat16"),
        ("full --loss-chunk 16", "float32"),
    ]
    .into_iter()
    .enumerate()
    {
        let flags = format!(
            "--model model --method {method} --dtype {dtype} --batch-size 2 --accumulation 2 --budget 4GiB"
        );
        let (out, _) = tiny.succeed(&format!("plan {flags} --length 24 --json"));
        let planned: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        let finetune = format!("finetune {flags} --max-length 24 --data text.txt --held-out 0 --steps 1");
        let (out, _) = tiny.succeed(&format!("{finetune} --dry-run --json"));
        let dry = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let dry = dry.into_iter().find(|line| !line["plan"].is_null()).unwrap();
        assert_eq!(peaks(&planned), peaks(&dry["plan"]), "{method}, {dtype}");
        assert_eq!(planned["chosen"], dry["plan"]["chosen"], "{method}, {dtype}");

        // The flags of the plan make the same plan.
        let repeated = planned["flags"].as_str().unwrap();
        let (out, _) = tiny.succeed(&format!(
            "finetune --model model --data text.txt --held-out 0 --steps 1 {repeated} --dry-run --json"
        ));
        let dry = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let dry = dry.into_iter().find(|line| !line["plan"].is_null()).unwrap();
        let chosen = planned["chosen"].as_str().unwrap();
        let bytes = |plan: &Value| peaks(plan).into_iter().find(|(name, _)| name == chosen);
        assert_eq!(bytes(&planned), bytes(&dry["plan"]), "{repeated}");

        // The least budget that is named suffices.
        let small = finetune.replace("--budget 4GiB", "--budget 20MiB");
        let ended = tiny.run(&format!("{small} --out small-{number}"));
        assert_eq!(ended.status, 3, "{method}, {dtype}: {}", ended.err);
        let (_, least) = ended.err.trim_end().rsplit_once("give --budget ").unwrap();
        tiny.succeed(&format!("{} --out least-{number}", small.replace("20MiB", least)));
    }
    // Layers in files of another dtype than the model's.
    let converted = "--model model --dtype bfloat16 --offload file --ring 1";
    tiny.succeed(&format!("finetune {converted} --data text.txt --max-length 24 --steps 1 --out converted"));
    tiny.succeed(&format!("generate {converted} --prompt Ann --max-new-tokens 2"));
}
