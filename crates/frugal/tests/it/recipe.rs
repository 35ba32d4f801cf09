//! A recipe's model is trained: adapters, or all of it; opened from a folder, with its layers offloaded as they are read.

use frugal::config::{ActivationPlan, Bytes, OffloadConfig};
use frugal::lora::LoraConfig;
use frugal::loss_log::LossSummary;
use frugal::models::hugging_face::{self, Folder};
use frugal::models::module::{self, ParameterCount};
use frugal::models::{DecoderConfig, Llama};
use frugal::runtime::random::Generator;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches, MaskedRow};
use frugal::training::trainer::StopReason;
use frugal::{Config, Recipe};
use tch::{Device, Kind, Tensor};

/// What follows a token is the token and one, over answers of three.
fn rows() -> Vec<MaskedRow> {
    let row = |first: i64| {
        let tokens: Vec<i64> = (first..first + 6).collect();
        let labels = tokens.iter().map(|id| if *id < first + 3 { -100 } else { *id }).collect();
        MaskedRow::new(tokens, labels)
    };
    (0..12).map(row).collect()
}

fn batches() -> MaskedBatches {
    let layout = Layout { batch: 4, shuffle: Some(0), ..Layout::default() };
    MaskedBatches::new(rows(), layout, Device::Cpu).unwrap()
}

fn model() -> Box<Llama> {
    let model = Llama::new(&DecoderConfig::llama(24, 16, 24, 2, 4), (Kind::Float, Device::Cpu)).unwrap();
    let mut generator = Generator::new(5).unwrap();
    for named in module::tensors(&model).into_iter().filter(|named| named.tensor.dim() == 2) {
        let noise = generator.normal(&named.tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.3;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&noise));
    }
    Box::new(model)
}

fn config(adapted: bool) -> Config {
    let adapter = adapted.then(|| LoraConfig {
        target_modules: Some(["q_proj", "v_proj", "up_proj", "down_proj"].into()),
        ..LoraConfig::default()
    });
    let mut config = Config { adapter, ..Config::default() };
    config.optimizer.lr = 1e-2;
    config.training.accumulation = 1;
    config
}

#[test]
fn a_whole_model_and_its_adapters_are_trained() {
    for adapted in [false, true] {
        let prepared = Recipe::new(&config(adapted)).unwrap().apply(model()).unwrap();
        let (mut trainer, handles) = prepared.trainer(30).unwrap();
        let ParameterCount { total, trainable } = module::parameter_count(trainer.model.as_ref());
        assert_eq!((trainable < total, handles.adapters.is_some()), (adapted, adapted));
        let summary = LossSummary::default();
        trainer.observers.push(Box::new(summary.clone()));
        let ordered = Layout { batch: 4, epochs: Some(1), ..Layout::default() };
        let mut validation = MaskedBatches::new(rows(), ordered, Device::Cpu).unwrap();
        assert_eq!(trainer.run(&mut batches(), None).unwrap(), StopReason::Completed);
        trainer.evaluate(&mut validation).unwrap();
        let losses = summary.get();
        let (first, last) = (losses.first.unwrap(), losses.last.unwrap());
        assert!(last < first - 0.3 && losses.validation.unwrap() < first - 0.3, "{losses:?}");
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let mut frozen = config(false);
    frozen.model.freeze = Some(".*".to_owned());
    let prepared = Recipe::new(&frozen).unwrap().apply(model()).unwrap();
    let error = prepared.trainer(1).unwrap_err().to_string();
    assert!(error.contains("a parameter that requires a gradient"), "{error}");
    let prepared = Recipe::new(&config(false)).unwrap().apply(model()).unwrap();
    assert!(prepared.trainer(0).unwrap_err().to_string().contains("1 step or epoch at least"));
}

fn weights(config: &Config, folder: &Folder) -> Vec<(String, Tensor)> {
    frugal::runtime::random::seed(3).unwrap();
    let prepared = Recipe::new(config).unwrap().open(folder, Device::Cpu).unwrap();
    let (mut trainer, _handles) = prepared.trainer(3).unwrap();
    trainer.run(&mut batches(), None).unwrap();
    let tensors = module::tensors(trainer.model.as_ref());
    tensors.into_iter().map(|named| (named.name, named.tensor.detach().copy())).collect()
}

#[test]
fn a_model_that_is_offloaded_as_it_is_read_trains_to_the_same_bits() {
    let written = tempfile::tempdir().unwrap();
    hugging_face::save(model().as_ref(), written.path(), hugging_face::SHARD_BYTES).unwrap();
    let folder = Folder::open(written.path()).unwrap();
    for adapted in [false, true] {
        let resident = config(adapted);
        let expected = weights(&resident, &folder);
        let mut offloaded = resident.clone();
        offloaded.offload = Some(OffloadConfig { ring: 1, ..OffloadConfig::default() });
        assert_eq!(weights(&offloaded, &folder), expected, "adapted: {adapted}");
        let files = OffloadConfig { tier: frugal::config::OffloadTier::File, ..OffloadConfig::default() };
        offloaded.offload = Some(files);
        if !adapted {
            offloaded.optimizer.place = frugal::config::OptimizerPlace::Host;
        }
        assert_eq!(weights(&offloaded, &folder), expected, "in files, adapted: {adapted}");
    }
}

#[test]
fn a_plan_is_chosen_under_a_budget() {
    let mut config = config(false);
    config.activations.plan = ActivationPlan::Plan;
    config.activations.budget = Some(Bytes(1 << 30));
    let mut prepared = Recipe::new(&config).unwrap().apply(model()).unwrap();
    let batch = batches().next().unwrap().unwrap();
    let chosen = prepared.plan_activations(&batch).unwrap().unwrap();
    assert!(chosen.layers.len() == 2 && chosen.peak_bytes < 1 << 30, "{chosen:?}");
    config.activations.budget = Some(Bytes(1));
    let mut prepared = Recipe::new(&config).unwrap().apply(model()).unwrap();
    let error = prepared.plan_activations(&batch).unwrap_err().to_string();
    assert!(error.starts_with("`activations.budget` is 1 B; expected more than the weights"), "{error}");
}
