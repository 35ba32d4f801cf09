//! The program as its user has it: a folder in, an adapter out, and what is done with both.

use std::path::Path;

use crate::tiny_folder::{FINETUNE, Tiny, lines};
use expect_test::expect;
use lora::peft::{CONFIG_FILE, TENSORS_FILE};
use lora::{Adapters, LoraConfig};
use models::tensors_file;
use tch::{Device, Kind};

#[test]
fn a_training_ends_in_an_adapter_with_its_log() {
    let tiny = Tiny::new();
    let (out, err) = tiny.succeed(&format!("{FINETUNE} --out adapter --steps 20 --evaluate-every 10 --json"));
    // The only line with a measured time.
    let lines_of = |timed: bool| -> String {
        err.lines()
            .filter(|line| line.starts_with("a step takes ") == timed && !line.starts_with("device: "))
            .flat_map(|line| [line, "\n"])
            .collect()
    };
    expect![[r#"
        data: problems/train.jsonl (GSM8K: question and answer)
        trains 896 of 70,416 (1.27 %) parameters; an epoch is 1,476 tokens in 9 batches; 20 steps
    "#]]
    .assert_eq(&lines_of(false));
    let timed = lines_of(true);
    assert!(timed.starts_with("a step takes ") && timed.contains(", the 17 steps left "), "{err}");
    let all = lines(&out);
    let result = &all[all.len() - 1]["result"];
    assert_eq!((&result["steps"], &result["trainable"]), (&20.into(), &896.into()));
    let losses = tiny.losses("adapter");
    assert!(losses.iter().map(|(step, _)| *step).eq(1..=20), "{losses:?}");
    let mean = |part: &[(u64, f64)]| part.iter().map(|(_, loss)| loss).sum::<f64>() / part.len() as f64;
    assert!(mean(&losses[15..]) < mean(&losses[..5]) - 0.4, "{losses:?}");
    let log = String::from_utf8(tiny.bytes("adapter/losses.jsonl")).unwrap();
    let measured: Vec<f64> = lines(&log).iter().filter_map(|line| line["validation_loss"].as_f64()).collect();
    assert!(measured.len() == 3 && measured.is_sorted_by(|one, next| next < one), "{measured:?}");
    assert_eq!(result["validation_loss"], measured[2]);

    let config = LoraConfig::read(&tiny.path("adapter").join(CONFIG_FILE)).unwrap();
    let base = tiny.path("model").canonicalize().unwrap();
    assert_eq!(config.base_model_name_or_path.as_deref().map(Path::new), Some(&*base));
    assert_eq!((config.r, config.lora_alpha, config.lora_dropout), (4, 16.0, 0.05));
    let tensors = tensors_file::read(&tiny.path("adapter").join(TENSORS_FILE), Device::Cpu).unwrap();
    assert_eq!(tensors.len(), 2 * 4 * 2);
    assert!(
        tensors
            .iter()
            .all(|(name, x)| name.starts_with("base_model.model.model.layers.") && x.kind() == Kind::Float)
    );

    // The base is in no file of the training.
    let checkpoint = tiny.path("adapter/checkpoints/step-000000000020/model.safetensors");
    let kept = tensors_file::read(&checkpoint, Device::Cpu).unwrap();
    assert!(kept.iter().all(|(name, _)| name.contains(".lora_")) && kept.len() == tensors.len());
}

#[test]
fn recomputation_packing_and_dora_train_too() {
    let tiny = Tiny::new();
    let plain = format!("{FINETUNE} --steps 4 --out plain");
    tiny.succeed(&plain);
    tiny.succeed(&format!("{FINETUNE} --steps 4 --out recomputed --recompute"));
    let tensors = |out: &str| tiny.bytes(&format!("{out}/{TENSORS_FILE}"));
    assert!(tensors("plain") == tensors("recomputed"), "recomputation changes no bit");
    let (_, err) = tiny.succeed(&format!("{FINETUNE} --steps 4 --out packed --packing 150 --shots 1"));
    assert!(err.contains("positions of padding; 4 steps"), "{err}");
    let first = tiny.losses("plain")[0].1;
    for (out, flags) in [
        ("dora", "--dora --targets all-linear"),
        ("head", "--targets q_proj,lm_head --dtype bf16"),
        ("pissa", "--init pissa --rslora --target-pattern .*\\.(k|v)_proj"),
    ] {
        tiny.succeed(&format!("{FINETUNE} --steps 6 --out {out} {flags}"));
        let losses = tiny.losses(out);
        assert!(losses.len() == 6 && (losses[0].1 - first).abs() < 0.1, "begins as the base: {losses:?}");
        assert!(losses[5].1 < losses[0].1, "{out}: {losses:?}");
        Adapters::load(&mut tiny.load("model"), &tiny.path(out)).unwrap();
    }
}

#[test]
fn a_training_that_was_killed_goes_on_to_the_same_bytes() {
    let tiny = Tiny::new();
    let train = format!("{FINETUNE} --dropout 0.2 --steps 40 --checkpoint-every 4 --json");
    tiny.succeed(&format!("{train} --out unbroken"));
    tiny.kill_at_step(&format!("{train} --out broken"), 6);
    assert!(!tiny.path("broken").join(TENSORS_FILE).exists(), "it was not done");

    let again = tiny.run(&format!("{train} --out broken"));
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(
        again.status.code() == Some(1) && said.contains("resume it with `frugal resume broken`"),
        "{said}"
    );
    tiny.succeed(&format!("{train} --out broken --resume"));
    for file in [TENSORS_FILE, CONFIG_FILE] {
        let of = |out: &str| tiny.bytes(&format!("{out}/{file}"));
        assert!(of("broken") == of("unbroken"), "{file}");
    }
    assert_eq!(tiny.losses("broken"), tiny.losses("unbroken"));

    // Another base of the same shapes, and other data, are other trainings.
    tiny.write_model("other", 16, 2);
    for (flags, said) in [
        ("--model other", "the frozen parameters was "),
        (
            "--alpha 32",
            "it is of another model: adapter `default`: lora_alpha was 16 and is now 32; resume with",
        ),
        ("--batch-size 3", "over other rows, in other batches or in another order"),
    ] {
        let with = match flags.split_once(' ') {
            Some((flag, value)) if train.contains(flag) => {
                let at = train.find(flag).unwrap();
                let end = train[at + flag.len() + 1..].find(' ').unwrap() + at + flag.len() + 1;
                format!("{}{flag} {value}{}", &train[..at], &train[end..])
            }
            _ => format!("{train} {flags}"),
        };
        let output = tiny.run(&format!("{with} --out broken --resume"));
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && err.contains(said), "{flags}: {err}");
    }
}

#[test]
fn the_doctor_tells_what_the_machine_offers() {
    let tiny = Tiny::new();
    let (out, _) = tiny.succeed("doctor --fast --offline --json");
    let told = &lines(&out)[0];
    assert!(told["libtorch"].as_str().is_some_and(|version| version.starts_with("2.")), "{told}");
    assert!(told["memory_of_cpu"]["free"].as_u64().unwrap() > 0, "{told}");
    assert!(told["free_disk"].as_u64().unwrap() > 0, "{told}");
    let output = tiny.command("doctor --fast --offline").env("OMP_NUM_THREADS", "1").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(" 1 (OMP_NUM_THREADS=1; "), "{text}");
    let (out, _) = tiny.succeed("doctor --measure --offline --json");
    let date = lines(&out)[0]["rates_of_cpu"].as_str().unwrap().parse::<dataloading::chat::Date>();
    assert!(date.unwrap() <= dataloading::chat::Date::today(), "{out}");
    assert!(tiny.succeed("doctor --fast --offline").0.contains("hub"), "{told}");
}
