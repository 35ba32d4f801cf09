//! Configurations: what is written is read, and what is wrong is named.

use expect_test::{Expect, expect};
use frugal::config::{ActivationPlan, Bytes, Compute, OffloadConfig, OptimizerPlace, ScalerConfig};
use frugal::lora::LoraConfig;
use frugal::{Config, Recipe};
use testing::fuzz::{self, Outcome};

#[test]
fn what_is_written_is_read_again() {
    let mut config = Config::default();
    config.model.name = Some("Qwen/Qwen2.5-0.5B".to_owned());
    config.adapter = Some(LoraConfig { r: 3, ..Config::default_adapter() });
    config.activations.plan = ActivationPlan::Plan;
    config.offload = Some(OffloadConfig { resident: vec![0, 2], ..OffloadConfig::default() });
    config.precision.compute = Compute::Fp16;
    config.precision.scaler = Some(ScalerConfig::default());
    config.optimizer.clip = 0.0;
    config.training.budget = Some(Bytes(3 << 30));
    for config in [Config::default(), config] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        config.write(&path).unwrap();
        assert_eq!(Config::read(&path).unwrap(), config);
    }
}

/// Every technique, each with an option of its own.
const WHOLE: &str = r#"
task = "train"
[model]
name = "Qwen/Qwen2.5-0.5B"
[data]
packing = 128
max_length = 128
padding_free = false
mixture = ["a.jsonl=0.7", { source = "b.jsonl", weight = 0.3 }]
[adapter]
r = 8
lora_alpha = 16
target_modules = ["q_proj", "v_proj"]
[activations]
plan = "every-k"
every = 2
[offload]
ring = 2
resident = [0, 3]
[precision]
compute = "fp16"
[optimizer]
lr = 1e-3
clip = 1.0
[training]
steps = 40
budget = "3GiB"
seed = 7
neftune_noise_alpha = 5.0
"#;

#[test]
fn a_mutated_configuration_is_refused_or_written_as_it_is_read() {
    WHOLE.parse::<Config>().unwrap();
    fuzz::run("config.toml", |random| {
        let text = fuzz::text(random, WHOLE);
        let read = fuzz::within(2000 * text.len() + (64 << 10), || text.parse::<Config>().ok());
        let Some(config) = read else { return Outcome::Refused };
        let _ = Recipe::new(&config);
        // TOML has no numbers from 2⁶³ on.
        if let Ok(written) = config.to_toml() {
            assert_eq!(written.parse::<Config>().unwrap().to_toml().unwrap(), written);
        }
        Outcome::Read
    });
}

#[test]
fn bytes_have_units() {
    let config: Config = "[training]\nbudget = \"3GiB\"".parse().unwrap();
    assert_eq!(config.training.budget, Some(Bytes(3 << 30)));
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let check = |text: &str, expected: Expect| {
        expected.assert_eq(&text.parse::<Config>().unwrap_err().to_string());
    };
    check(
        "[trainin]\nsteps = 5",
        expect![
            "line 1 (`[trainin]`): unknown field `trainin`, expected one of `task`, `method`, `model`, `data`, `objective`, `rollout`, `adapter`, `mlp`, `loss`, `activations`, `offload`, `experts`, `precision`, `optimizer`, `training`; did you mean `training`?"
        ],
    );
    check(
        "[training]\n\nsteps = \"many\"",
        expect![[r#"line 3 (`steps = "many"`): invalid type: string "many", expected u64"#]],
    );
    check(
        "[adapter]\nrank = 8",
        expect![
            "line 1 (`[adapter]`): unknown field `rank`, expected one of `r`, `lora_alpha`, `lora_dropout`, `use_rslora`, `use_dora`, `init_lora_weights`, `target_modules`, `target_parameters`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `rank_pattern`, `alpha_pattern`, `bias`, `modules_to_save`, `trainable_token_indices`, `ensure_weight_tying`, `fan_in_fan_out`, `base_model_name_or_path`"
        ],
    );
    check(
        "[activations]\nplan = \"none\"",
        expect![[
            r#"line 2 (`plan = "none"`): unknown variant `none`, expected one of `auto`, `keep`, `recompute`, `every-k`, `plan`"#
        ]],
    );
    check(
        "[training]\nbudget = \"much\"",
        expect![[
            r#"line 2 (`budget = "much"`): cannot read `much` as a number of bytes of 1 to 2^64 - 1; write for example 80GB or 24GiB"#
        ]],
    );
    check(
        "[precision.scaler]\nkind = \"static\"",
        expect!["line 1 (`[precision.scaler]`): missing field `scale`"],
    );
}

#[test]
fn values_outside_their_range_are_refused() {
    let check = |text: &str, expected: Expect| {
        let config: Config = text.parse().unwrap();
        expected.assert_eq(&Recipe::new(&config).unwrap_err().to_string());
    };
    check("[training]\nbatch = 0", expect!["`training.batch` is 0; expected 1 or more"]);
    check("[optimizer]\nlr = -1.0", expect!["`optimizer.lr` is -1; expected a finite number, 0 or more"]);
    check(
        "[mlp]\nlevel = \"some\"",
        expect![
            "unknown checkpoint level `some`; expected save-all (or 0), save-gate-up, save-one, input-only (or 1), or input-only-tiled:BYTES (for example input-only-tiled:16MiB)"
        ],
    );
    check("[adapter]\nr = 0", expect!["`r` is 0; expected a rank of at least 1"]);
}

#[test]
fn the_optimizers_place_depends_on_offload() {
    let mut config = Config::default();
    config.optimizer.place = OptimizerPlace::Host;
    expect![[r#"`optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&Recipe::new(&config).unwrap_err().to_string());
}

#[test]
fn a_file_without_an_adapter_is_lora_unless_it_names_another_method() {
    let read = |text: &str| text.parse::<Config>().unwrap();
    let adapter = |config: &Config| {
        config.adapter.as_ref().map(|adapter| (adapter.r, adapter.lora_alpha, adapter.use_dora))
    };
    for (text, expected, rate) in [
        ("", Some((8, 16.0, false)), 2e-4),
        ("[adapter]\nr = 4", Some((4, 16.0, false)), 2e-4),
        ("method = \"dora\"", Some((8, 16.0, true)), 2e-4),
        ("[adapter]\nuse_dora = true", Some((8, 16.0, true)), 2e-4),
        ("method = \"full\"", None, 2e-5),
        ("method = \"full\"\n[optimizer]\nlr = 1e-3", None, 1e-3),
        ("task = \"train\"", None, 1e-3),
        // Lion's steps are a fifth of AdamW's.
        ("[optimizer]\nrule = \"lion\"", Some((8, 16.0, false)), 4e-5),
        ("method = \"full\"\n[optimizer]\nrule = \"lion\"", None, 4e-6),
        ("method = \"full\"\n[optimizer]\nrule = \"lion\"\nlr = 2e-5", None, 2e-5),
        ("task = \"train\"\n[optimizer]\nrule = \"lion\"", None, 2e-4),
        ("[objective]\nkind = \"dpo\"\n[optimizer]\nrule = \"lion\"", Some((8, 16.0, false)), 2e-6),
        ("[optimizer]\nrule = \"muon\"", Some((8, 16.0, false)), 2e-4),
    ] {
        let config = read(text);
        assert_eq!((adapter(&config), config.optimizer.lr), (expected, rate), "{text}");
        assert_eq!(read(&config.to_toml().unwrap()), config, "{text}");
    }
    for (text, words) in [
        ("method = \"full\"\n[adapter]\nr = 4", "`adapter.r` and `method = \"full\"` cannot be combined"),
        ("method = \"dora\"\n[adapter]\nuse_dora = false", "`adapter.use_dora = false` cannot be combined"),
        ("method = \"ful\"", "did you mean `full`?"),
        ("task = \"train\"\nmethod = \"full\"", "`method` applies to fine-tuning only"),
        ("[optimizer]\nlr = inf", "`optimizer.lr` is inf; expected a finite number"),
    ] {
        let error = text.parse::<Config>().unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    assert!(Config::default().with("adapter.r=4").unwrap_err().to_string().contains("cannot be combined"));
}

#[test]
fn a_default_that_a_training_wrote_is_still_one() {
    use frugal::config::origins::Origins;
    use frugal::config::{Given, Method, Task};
    let mut lora = Config::defaults(Task::Finetune, Method::Lora);
    lora.optimizer.clip = 0.5;
    let mut origins = Origins::default();
    origins.set("optimizer.clip", "--clip");
    let text = origins.annotate(&lora).unwrap();
    let with = |text: &str, method: Option<&str>| {
        let mut given = Given::default();
        given.text(text, "file").unwrap();
        if let Some(method) = method {
            given.set("method", method.into(), "--method").unwrap();
        }
        (given.config(Task::Finetune).unwrap(), given)
    };
    let (config, given) = with(&text, None);
    assert_eq!(config, lora);
    assert_eq!(
        (given.origins().get("optimizer.clip"), given.origins().get("optimizer.lr")),
        ("file", "default")
    );
    let (config, _) = with(&text, Some("full"));
    assert_eq!((config.optimizer.lr, config.optimizer.clip, config.adapter), (2e-5, 0.5, None));
    // One that a person has changed is none, whatever stands beside it.
    let (config, _) = with(&text.replace("lr = 0.0002 #", "lr = 0.0003 #"), Some("full"));
    assert_eq!(config.optimizer.lr, 3e-4);
}
