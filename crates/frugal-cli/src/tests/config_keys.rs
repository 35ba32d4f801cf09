//! Every key of a configuration, whichever way its value comes.

use std::collections::BTreeSet;

use clap::CommandFactory;
use frugal::config::origins::{Origins, values};
use frugal::config::{Config, Method, Task};
use serde_json::Value;

use super::Tiny;
use super::session::Session;

/// A key, a value that is not its default, as TOML has it, and the flags that give the same; none where a key has no flag.
type Case = (&'static str, &'static str, &'static str);

const BASE: [Case; 2] =
    [("model.name", "\"@model\"", "--model @model"), ("data.source", "\"@my\"", "--data @my")];

const FINETUNE: [Case; 112] = [
    ("method", "\"dora\"", "--method dora"),
    ("model.revision", "\"v1\"", "--revision v1"),
    ("model.offline", "true", "--offline"),
    ("model.untied", "true", "--untied"),
    ("model.dtype", "\"bfloat16\"", "--dtype bf16"),
    ("model.freeze", "\"embed.*\"", ""),
    ("model.new_tokens", "[\"<a>\"]", ""),
    ("model.new_token_init", "\"pieces\"", "--new-token-init pieces"),
    ("model.pad_vocabulary_to", "64", "--pad-vocabulary-to 64"),
    ("data.mixture", "[\"a.jsonl=0.7\", \"b.jsonl=0.3\"]", "--mixture a.jsonl=0.7 --mixture b.jsonl=0.3"),
    ("data.format", "\"rows\"", "--format rows"),
    ("data.validation", "\"v.jsonl\"", "--validation v.jsonl"),
    ("data.held_out", "0.1", "--held-out 0.1"),
    ("data.field", "\"body\"", "--field body"),
    ("data.tokenizer", "\"t.json\"", ""),
    ("data.end_token", "\"</s>\"", "--end-token </s>"),
    ("data.max_length", "64", "--max-length 64"),
    ("data.overlong", "\"skip\"", "--overlong skip"),
    ("data.mask", "\"last\"", "--mask last"),
    ("data.chat_template", "\"t.jinja\"", "--chat-template t.jinja"),
    ("data.date", "\"2026-11-23\"", ""),
    ("data.limit", "3", "--limit 3"),
    ("data.packing", "128", "--packing 128"),
    ("data.padding_free", "false", "--padded"),
    ("data.shots", "2", "--shots 2"),
    ("data.strip_annotations", "true", "--strip-annotations"),
    ("data.split_seed", "7", "--split-seed 7"),
    ("data.template_arguments", "{ thinking = false }", ""),
    ("objective.kind", "\"dpo\"", "--objective dpo"),
    ("objective.beta", "0.2", "--beta 0.2"),
    ("objective.reference", "\"adapters-off\"", "--reference adapters-off"),
    ("objective.reference_model", "\"other\"", "--reference-model other"),
    ("objective.label_smoothing", "0.1", ""),
    ("objective.gamma", "0.5", ""),
    ("objective.alpha", "0.5", ""),
    ("objective.desirable_weight", "0.5", ""),
    ("objective.undesirable_weight", "0.5", ""),
    ("objective.teacher", "\"big\"", "--teacher big"),
    ("objective.teacher_dtype", "\"bfloat16\"", "--teacher-dtype bf16"),
    ("objective.teacher_place", "\"offloaded\"", "--teacher-place offloaded"),
    ("objective.teacher_top_k", "8", "--teacher-top-k 8"),
    ("objective.teacher_files", "\"answers\"", "--teacher-files answers"),
    ("objective.divergence", "\"reverse-kl\"", "--divergence reverse-kl"),
    ("objective.temperature", "2.0", "--distillation-temperature 2"),
    ("objective.label_weight", "0.3", "--label-weight 0.3"),
    ("rollout.grader", "\"number\"", "--grader number"),
    ("rollout.grader_seconds", "5.0", ""),
    ("rollout.samples", "4", "--group-size 4"),
    ("rollout.max_new_tokens", "9", "--max-new-tokens 9"),
    ("rollout.temperature", "0.9", ""),
    ("rollout.at_once", "3", ""),
    ("rollout.clip", "0.1", ""),
    ("rollout.clip_high", "0.3", ""),
    ("rollout.ratio", "\"sequence\"", ""),
    ("rollout.aggregate", "\"dr-grpo\"", ""),
    ("rollout.scale", "\"none\"", ""),
    ("rollout.updates", "2", ""),
    ("rollout.mask_truncated", "true", ""),
    ("adapter.r", "4", "--r 4"),
    ("adapter.lora_alpha", "32.0", "--alpha 32"),
    ("adapter.lora_dropout", "0.1", "--dropout 0.1"),
    ("adapter.use_rslora", "true", "--rslora"),
    ("adapter.use_dora", "true", "--dora"),
    ("adapter.init_lora_weights", "\"gaussian\"", "--init gaussian"),
    ("adapter.target_modules", "[\"up_proj\"]", "--targets up_proj"),
    ("adapter.target_parameters", "[\"gate_up_proj\"]", "--target-parameters gate_up_proj"),
    ("adapter.exclude_modules", "[\"q_proj\"]", ""),
    ("adapter.layers_to_transform", "[1]", ""),
    ("adapter.layers_pattern", "[\"layers\"]", ""),
    ("adapter.rank_pattern", "{ q_proj = 2 }", ""),
    ("adapter.alpha_pattern", "{ q_proj = 2 }", ""),
    ("adapter.bias", "\"all\"", ""),
    ("adapter.modules_to_save", "[\"lm_head\"]", ""),
    ("adapter.trainable_token_indices", "[5]", ""),
    ("adapter.ensure_weight_tying", "true", ""),
    ("adapter.fan_in_fan_out", "true", ""),
    ("mlp.level", "\"save-one\"", "--mlp save-one"),
    ("loss.head", "\"plain\"", "--loss plain"),
    ("loss.chunk_tokens", "64", "--loss-chunk 64"),
    ("loss.chunk_bytes", "1048576", ""),
    ("loss.gradients_in_backward", "true", ""),
    ("loss.router_aux_loss", "0.01", "--router-aux-loss 0.01"),
    ("activations.plan", "\"recompute\"", "--activations recompute"),
    ("activations.recompute", "\"mlp\"", "--recompute-what mlp"),
    ("activations.every", "3", ""),
    ("activations.budget", "1073741824", ""),
    ("offload.tier", "\"file\"", "--offload file"),
    ("offload.pinned", "false", ""),
    ("experts.cache", "1048576", "--offload-experts 1MiB"),
    ("experts.folder", "\"folder\"", ""),
    ("precision.compute", "\"bf16\"", "--precision bf16"),
    ("precision.scaler", "{ kind = \"static\", scale = 8.0 }", ""),
    ("optimizer.rule", "\"sgd\"", "--optimizer sgd"),
    ("optimizer.lr", "0.001", "--lr 1e-3"),
    ("optimizer.schedule", "\"linear\"", "--schedule linear"),
    ("optimizer.warmup", "0.5", "--warmup 0.5"),
    ("optimizer.weight_decay", "0.5", "--weight-decay 0.5"),
    ("optimizer.clip", "0.5", "--clip 0.5"),
    ("optimizer.place", "\"host\"", "--optimizer-on host"),
    ("optimizer.in_backward", "true", "--fused-optimizer"),
    ("optimizer.master_weights", "true", ""),
    ("optimizer.zero_stage", "2", ""),
    ("optimizer.replicas", "2", ""),
    ("optimizer.frozen_weights", "\"whole\"", ""),
    ("optimizer.reduction", "\"native\"", ""),
    ("training.steps", "9", "--steps 9"),
    ("training.epochs", "2", "--epochs 2"),
    ("training.batch", "3", "--batch-size 3"),
    ("training.accumulation", "2", "--accumulation 2"),
    ("training.micro_batch_size", "2", "--micro-batch-size 2"),
    ("training.neftune_noise_alpha", "5.0", "--neftune-noise-alpha 5"),
    ("training.sequence_parallel_size", "2", ""),
];
const LOOP: [Case; 13] = [
    ("training.checkpoint_every", "7", "--checkpoint-every 7"),
    ("training.keep", "9", "--keep 9"),
    ("training.ignore_failed_checkpoints", "true", ""),
    ("training.evaluate_every", "3", "--evaluate-every 3"),
    ("training.patience", "3", "--patience 3"),
    ("training.baseline", "false", "--no-baseline"),
    ("training.samples", "2", "--samples 2"),
    ("training.log_every", "3", "--log-every 3"),
    ("training.capture", "\"off\"", "--capture off"),
    ("training.seed", "3", "--seed 3"),
    ("training.device", "\"cpu\"", "--device cpu"),
    ("training.budget", "1073741824", "--budget 1GiB"),
    ("adapter.base_model_name_or_path", "\"another\"", ""),
];
/// Keys of offloaded layers.
const OFFLOAD: [Case; 5] = [
    ("offload.method", "\"function\"", "--offload-method function"),
    ("offload.ring", "2", "--ring 2"),
    ("offload.resident", "[1]", "--resident 1"),
    ("offload.keep", "[0]", ""),
    ("offload.folder", "\"folder\"", ""),
];
/// Other rules, two of whose defaults depend on the rule.
const RULES: [Case; 4] = [
    ("optimizer.rule", "\"lion\"", "--optimizer lion"),
    ("optimizer.rule", "\"muon\"", "--optimizer muon"),
    ("optimizer.rule", "\"adafactor\"", "--optimizer adafactor"),
    ("optimizer.rule", "\"adamw8bit\"", "--optimizer adamw8bit"),
];
/// Two keys that belong together, so that neither has a flag alone.
const TEMPLATES: [Case; 2] =
    [("data.prompt_template", "\"{a}\"", ""), ("data.completion_template", "\"{b}\"", "")];
const TRAIN: [Case; 9] = [
    ("data.vocabulary", "64", "--vocabulary 64"),
    ("data.strategy", "\"base\"", "--strategy base"),
    ("data.workers", "0", "--workers 0"),
    ("data.max_length", "16", "--length 16"),
    ("model.shape.width", "32", "--width 32"),
    ("model.shape.heads", "2", "--heads 2"),
    ("model.shape.layers", "3", "--layers 3"),
    ("model.shape.dropout", "0.5", "--dropout 0.5"),
    ("model.shape.family", "\"gpt2\"", "--model gpt2"),
];

/// The configuration of a command line, and its origins.
fn configured(tiny: &Tiny, arguments: &str, last: &[&str]) -> (Config, Origins) {
    let words = std::iter::once("frugal").chain(arguments.split_whitespace()).chain(last.iter().copied());
    let words: Vec<String> = words.map(|word| word.replace('@', &tiny.path("").to_string_lossy())).collect();
    let cli = crate::parse(words).unwrap_or_else(|error| panic!("{error}"));
    match &cli.command {
        crate::Command::Train(train) => crate::train::configured(&cli.common, train),
        crate::Command::Finetune(tune) => crate::finetune::configured(&cli.common, tune),
        _ => panic!("{arguments}"),
    }
    .unwrap_or_else(|error| panic!("{arguments}: {error:#}"))
}

/// The values that differ from those of another configuration, by key.
fn changes(config: &Config, from: &Config) -> BTreeSet<String> {
    let (of, before) = (values(config).unwrap(), values(from).unwrap());
    let differing = |one: &[(String, Value)], other: &[(String, Value)]| -> Vec<String> {
        one.iter().filter(|value| !other.contains(value)).map(|(key, _)| key.clone()).collect()
    };
    differing(&of, &before).into_iter().chain(differing(&before, &of)).collect()
}

/// Keys that follow from another one.
fn follows(key: &str) -> &'static [&'static str] {
    match key {
        "method" => &["adapter.use_dora"],
        "objective.kind" => &["optimizer.lr"],
        "optimizer.rule" => &["optimizer.lr", "optimizer.weight_decay"],
        "adapter.use_dora" => &["method"],
        "model.name" => &["adapter.base_model_name_or_path"],
        "offload.tier" | "offload.pinned" => &["offload"],
        "experts.cache" => &["experts"],
        "experts.folder" => &["experts", "experts.cache"],
        "model.shape.family" | "model.shape.width" => &["model.shape"],
        _ => &[],
    }
}

fn check(tiny: &Tiny, command: &str, others: &str, (key, value, flags): Case) {
    let file = tiny.path("one.toml");
    let text = match key.rsplit_once('.') {
        Some((section, name)) => format!("[{section}]\n{name} = {value}\n"),
        None => format!("{key} = {value}\n"),
    };
    std::fs::write(&file, text.replace('@', &tiny.path("").to_string_lossy())).unwrap();
    let (base, _) = match others {
        "" => (Config::default(), Origins::default()),
        _ => configured(tiny, &format!("{command} {others}"), &[]),
    };
    let set = value.replace('"', "");
    let set = if value.starts_with(['[', '{']) { value.replace('"', "'") } else { set };
    let mut ways = vec![
        ("--set", configured(tiny, &format!("{command} {others}"), &["--set", &format!("{key}={set}")])),
        ("file", configured(tiny, &format!("{command} {others} --config {}", file.display()), &[])),
    ];
    if !flags.is_empty() {
        ways.push(("flag", configured(tiny, &format!("{command} {others} {flags}"), &[])));
    }
    let first = ways[0].1.0.clone();
    for (way, (config, origins)) in ways {
        assert_eq!(config, first, "{key} by {way}");
        let text = origins.annotate(&config).unwrap();
        assert_eq!(text.parse::<Config>().unwrap(), config, "{key} by {way}: as it is written");
        for (changed, _) in values(&config).unwrap() {
            let is_own = changed == key || changed.starts_with(&format!("{key}."));
            let origin = origins.get(&changed);
            if is_own {
                let expected = match way {
                    "flag" => origin.starts_with("--") && origin != "--set",
                    "file" => origin == format!("file {}", file.display()),
                    way => origin == way,
                };
                assert!(expected, "{key} by {way}: {changed} comes from {origin}");
                assert!(text.contains(&format!(" # {origin}\n")), "{text}");
            } else if !follows(key).contains(&&*changed) {
                let is_given = others.contains(origin)
                    && [
                        "model.name",
                        "data.source",
                        "adapter.base_model_name_or_path",
                        "offload.tier",
                        "training.keep",
                    ]
                    .contains(&&*changed);
                assert!(origin == "default" || is_given, "{key} by {way}: {changed} comes from {origin}");
            }
        }
        if !others.is_empty() {
            let changed = changes(&config, &base);
            assert!(!changed.is_empty(), "{key} by {way}: nothing is changed");
            for other in changed {
                let is_own = other == key || other.starts_with(&format!("{key}."));
                let follows = follows(key).iter().any(|own| other.starts_with(own));
                assert!(is_own || follows, "{key} by {way} changes {other}");
            }
        }
    }
}

/// The keys that a configuration has, as its reader lists them.
fn keys_of(section: &str) -> Vec<String> {
    let text = match section {
        "" => "? = 1".replace('?', "no_such_key"),
        section => format!("[{section}]\nno_such_key = 1"),
    };
    let error = text.parse::<Config>().unwrap_err().to_string();
    let Some((_, list)) = error.split_once("expected one of ").or_else(|| error.split_once("expected "))
    else {
        return Vec::new();
    };
    let list = list.split(';').next().unwrap();
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_key_is_the_same_by_flag_by_set_and_in_a_file() {
    let tiny = Tiny::new();
    std::fs::write(tiny.path("my"), "a pear\n").unwrap();
    let given: Vec<&str> = BASE.iter().map(|(.., flags)| *flags).collect();
    let given = given.join(" ") + " --out run";
    for case in FINETUNE.into_iter().chain(LOOP) {
        check(&tiny, "finetune", &given, case);
    }
    for (case, others) in BASE.into_iter().zip(["--data @my", "--model @model"]) {
        // With `--set`, neither has to be a flag.
        check(&tiny, "finetune --out run", &format!("{others} --set training.keep=2"), case);
    }
    for case in TEMPLATES {
        check(&tiny, "finetune", &given, case);
    }
    for case in OFFLOAD {
        check(&tiny, "finetune", &format!("{given} --offload file"), case);
    }
    for case in TRAIN {
        check(&tiny, "train", "--out run", case);
    }
    for case in RULES {
        check(&tiny, "train", "--out run", case);
        check(&tiny, "finetune", &given, case);
    }
    // None is forgotten.
    let cases = [&FINETUNE[..], &LOOP, &BASE, &TRAIN, &OFFLOAD, &TEMPLATES].concat();
    let known: BTreeSet<&str> = cases.iter().map(|(key, ..)| *key).collect();
    for section in keys_of("") {
        let keys = keys_of(&section);
        if keys.is_empty() || ["task", "method"].contains(&&*section) {
            assert!(["task", "method"].contains(&&*section), "{section}");
            continue;
        }
        for key in keys {
            let key = format!("{section}.{key}");
            let within: Vec<String> = if key == "model.shape" { keys_of(&key) } else { Vec::new() };
            let all = if within.is_empty() {
                vec![key]
            } else {
                within.iter().map(|name| format!("{key}.{name}")).collect()
            };
            let is_earlier = |key: &str| ["training.read_every", "training.rows_at_once"].contains(&key);
            for key in all.into_iter().filter(|key| !is_earlier(key)) {
                assert!(known.contains(&*key), "{key} is in no case");
            }
        }
    }
}

#[test]
fn a_partial_section_keeps_the_defaults_of_its_command() {
    let tiny = Tiny::new();
    let file = |text: &str| {
        std::fs::write(tiny.path("part.toml"), text).unwrap();
        tiny.path("part.toml").display().to_string()
    };
    let path = file("[training]\nbatch = 2\n[optimizer]\nclip = 0.5\n");
    let (config, origins) = configured(&tiny, &format!("train --config {path}"), &[]);
    let defaults = Config::defaults(Task::Train, Method::Full);
    assert_eq!(config.training.log_every, defaults.training.log_every);
    assert_eq!((config.optimizer.lr, config.optimizer.weight_decay), (1e-3, 0.1));
    assert_eq!(origins.get("optimizer.weight_decay"), "default");
    let full = format!("finetune --method full --model @model --data @my --out run --config {path}");
    let (config, _) = configured(&tiny, &full, &[]);
    assert_eq!((config.optimizer.lr, config.optimizer.clip, config.adapter), (2e-5, 0.5, None));
}

/// What `--help` states in brackets is what a configuration has.
#[test]
fn the_defaults_of_the_help_are_those_of_the_configuration() {
    let command = crate::Cli::command();
    let mut compared = 0;
    for (name, task) in [("finetune", Task::Finetune), ("train", Task::Train)] {
        let all = [Method::Lora, Method::Full].map(|method| values(&Config::defaults(task, method)).unwrap());
        let subcommand = command.find_subcommand(name).unwrap();
        for argument in subcommand.get_arguments().chain(command.get_arguments()) {
            let (Some(long), Some(help)) = (argument.get_long(), argument.get_help()) else { continue };
            let help = help.to_string();
            let Some((_, stated)) = help.split_once("[default: ") else { continue };
            let stated = stated.trim_end_matches(']');
            let (own, of_train) = stated.split_once("; for train: ").unwrap_or((stated, stated));
            let stated = if task == Task::Train { of_train } else { own };
            let (of_lora, of_full) = stated.split_once(", with --method full ").unwrap_or((stated, stated));
            let flag = format!("--{long}");
            let keys = crate::flags::keys_of(&flag);
            for (values, stated) in all.iter().zip([of_lora, of_full]) {
                for (_, value) in values.iter().filter(|(key, _)| keys.contains(&&**key)) {
                    let is_equal = match value {
                        Value::Number(number) => stated.parse().ok() == number.as_f64(),
                        Value::Array(names) => {
                            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
                            names.join(",") == stated
                        }
                        Value::Bool(value) => stated == value.to_string(),
                        Value::String(value) if value == "auto" && long == "format" => true,
                        // That of all weights has no method of its own to state.
                        Value::String(value) if value == "full" => stated == "lora",
                        value => stated.split(", ").next() == value.as_str(),
                    };
                    assert!(is_equal, "{name} {flag}: {stated}, and {value}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 60, "{compared}");
}

/// What is trained is the same, too.
#[test]
fn parameters_are_the_same_by_flag_by_set_and_in_a_file() {
    let tiny = Session::new();
    std::fs::write(
        tiny.path("my.jsonl"),
        "{\"prompt\": \"one\", \"completion\": \" two three\"}\n".repeat(4),
    )
    .unwrap();
    let train = "finetune --model model --data my.jsonl --batch-size 2 --accumulation 1 --steps 2 --samples 0 --quiet --out";
    let plain = {
        tiny.succeed(&format!("{train} plain"));
        tiny.bytes("plain/adapter_model.safetensors")
    };
    for (number, (key, value, flag)) in [
        ("adapter.r", "4", "--r 4"),
        ("adapter.use_rslora", "true", "--rslora"),
        ("adapter.target_modules", "['up_proj']", "--targets up_proj"),
        ("optimizer.lr", "0.01", "--lr 0.01"),
        ("training.seed", "5", "--seed 5"),
        ("method", "'dora'", "--method dora"),
        ("method", "'full'", "--method full"),
    ]
    .into_iter()
    .enumerate()
    {
        let text = match key.split_once('.') {
            Some((section, name)) => format!("[{section}]\n{name} = {value}\n"),
            None => format!("{key} = {value}\n"),
        };
        std::fs::write(tiny.path("one.toml"), text).unwrap();
        let file = if value == "'full'" { "model/model.safetensors" } else { "adapter_model.safetensors" };
        let trained = [
            ("flag", flag.to_owned()),
            ("set", format!("--set {key}={value}")),
            ("file", "--config one.toml".to_owned()),
        ]
        .map(|(way, flags)| {
            tiny.succeed(&format!("{train} {way}{number} {flags}"));
            tiny.bytes(&format!("{way}{number}/{file}"))
        });
        assert!(trained[0] == trained[1] && trained[0] == trained[2], "{key}");
        assert!(trained[0] != plain, "{key} changes nothing");
    }
    let text = String::from_utf8(tiny.bytes("set6/config.toml")).unwrap();
    assert!(
        text.contains("method = \"full\" # --set\n") && text.contains("lr = 0.00002 # default\n"),
        "{text}"
    );
}

#[test]
fn runs_of_earlier_versions_keep_their_method() {
    let tiny = Session::new();
    std::fs::write(tiny.path("my.jsonl"), "{\"text\": \"one two three\"}\n".repeat(4)).unwrap();
    let train =
        "finetune --model model --data my.jsonl --batch-size 2 --accumulation 1 --steps 1 --samples 0";
    for (method, trained) in [("full", "(100.00 %)"), ("lora", "(")] {
        tiny.succeed(&format!("{train} --method {method} --out {method}"));
        let path = tiny.path(&format!("{method}/config.toml"));
        let text = std::fs::read_to_string(&path).unwrap();
        let older: String =
            text.lines().filter(|line| !line.starts_with("method")).map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, older).unwrap();
        let (_, said) = tiny.succeed(&format!("finetune --config {method}/config.toml --out again-{method}"));
        assert!(said.contains(trained), "{said}");
        let (_, said) = tiny.succeed(&format!("resume {method} --set training.steps=2"));
        assert!(said.contains("resumes after step 1 of 2"), "{said}");
        let text = String::from_utf8(tiny.bytes(&format!("{method}/config.toml"))).unwrap();
        assert!(text.contains(&format!("method = \"{method}\"")), "{text}");
    }
    // A run of LoRA, as it is and with a rank of its own, becomes one of all weights at that method's rate.
    for (flags, name) in [("", "a"), ("--r 4", "b")] {
        tiny.succeed(&format!("{train} {flags} --out {name}"));
        tiny.succeed(&format!("finetune --config {name}/config.toml --method full --out {name}-full"));
        let text = String::from_utf8(tiny.bytes(&format!("{name}-full/config.toml"))).unwrap();
        assert!(text.contains("lr = 0.00002 # default\n") && !text.contains("[adapter]"), "{text}");
    }
    tiny.succeed(&format!("{train} --lr 0.01 --out rate"));
    tiny.succeed("finetune --config rate/config.toml --method full --out rate-full");
    let text = String::from_utf8(tiny.bytes("rate-full/config.toml")).unwrap();
    assert!(text.contains("lr = 0.01 # file rate/config.toml\n"), "{text}");
    assert!(tiny.fail("resume rate --set method=full").contains("stay as they are in a run that is resumed"));
}
