//! Adapters on the experts of a mixture and the load-balancing loss, crossed with recomputation, streamed experts, offloaded layers, packing
//! and dtypes: the same bits. Training saves, resumes and reports both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use frugal::models;
use kernels::nf4::Scales;
use lora::LoraConfig;
use models::hugging_face::Folder;
use models::module::{Context, Input, LanguageModel, trainable};
use models::{Documents, Llama, RouterBalance};
use offload::{ExpertConfig, Method, OffloadConfig};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};
use training::Batches;
use training::accumulation::{forward, forward_with_balance};
use training::activations::{Activations, LayerPlan};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::trainer::{Capture, Trainer, TrainerConfig};

const FAMILIES: [&str; 3] = ["qwen3_moe", "qwen3_5_moe", "gpt_oss"];

fn folder(name: &str) -> Folder {
    let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/families");
    Folder::open(&PathBuf::from(cases).join(name)).unwrap()
}

/// A model with adapters on its experts and its attention.
fn adapted(name: &str, kind: Kind) -> Llama {
    let mut model = folder(name).load(Some(kind), Device::Cpu).unwrap();
    install(&mut model);
    model
}

fn lora() -> LoraConfig {
    LoraConfig {
        r: 2,
        seed: 3,
        init_lora_weights: false.into(),
        target_modules: Some(["q_proj", "v_proj"].into()),
        target_parameters: Some(vec!["experts.gate_up_proj".to_owned(), "experts.down_proj".to_owned()]),
        ..LoraConfig::default()
    }
}

fn install(model: &mut Llama) {
    lora().install(model).unwrap();
}

/// The losses and the gradient of each trained parameter.
type Step = ([f64; 2], BTreeMap<String, Tensor>);

/// Two packed rows, the second with padding.
fn step(model: &Llama) -> Step {
    let lengths = [[9usize, 3, 8], [4, 13, 3]];
    let tokens = (Tensor::arange(40, (Kind::Int64, Device::Cpu)) * 7).remainder(37).view([2, 20]);
    let positions: Vec<i64> = lengths.iter().flatten().flat_map(|&length| 0..length as i64).collect();
    let positions = Tensor::from_slice(&positions).view([2, 20]);
    let documents = Documents::new(&lengths, Device::Cpu).unwrap();
    let balance = RouterBalance::new(&[0, 3], 20, Device::Cpu).unwrap();
    let context = Context {
        documents: Some(&documents),
        balance: Some(&balance),
        training: true,
        ..Context::default()
    };
    let input = Input { tokens: &tokens, positions: Some(&positions), context };
    let labels = (&tokens + 5).remainder(40);
    let loss = model.loss(&input, &labels).unwrap().sum / 40.0;
    let [total, aux] = balance.add_to(&loss, 0.5).unwrap();
    backward(&[&total]).unwrap();
    let mut gradients = BTreeMap::new();
    for (name, tensor) in trainable(model) {
        gradients.insert(name, tensor.grad().copy());
        set_grad(tensor, None).unwrap();
    }
    ([loss.double_value(&[]), aux.double_value(&[])], gradients)
}

fn check(what: &str, found: &Step, expected: &Step) {
    assert_eq!(found.0.map(f64::to_bits), expected.0.map(f64::to_bits), "{what}: losses");
    assert_eq!(found.1.keys().collect::<Vec<_>>(), expected.1.keys().collect::<Vec<_>>(), "{what}");
    for (name, gradient) in &expected.1 {
        assert_eq!(found.1[name], *gradient, "{what}: {name}");
    }
}

#[test]
fn plans_offloading_and_streaming_give_the_same_bits_in_every_dtype() {
    let temporary = tempfile::tempdir().unwrap();
    for name in FAMILIES {
        for kind in [Kind::Float, Kind::BFloat16, Scales::Nested.kind()] {
            let expected = step(&adapted(name, kind));
            assert!(expected.1.iter().any(|(name, grad)| {
                name.contains("experts.down_proj.lora_A") && grad.abs().max().double_value(&[]) > 0.0
            }));
            for plan in LayerPlan::ALL {
                for streams in [false, true] {
                    let what = format!("{name}, {kind:?}, {plan:?}, streamed: {streams}");
                    let mut model = adapted(name, kind);
                    let layers = model.decoder_config().num_hidden_layers as usize;
                    if streams {
                        let options = ExpertConfig { cache: 16 << 10, folder: temporary.path().to_owned() };
                        options.install(&mut model).unwrap();
                    }
                    let _plan = Activations::install(&mut model, &vec![plan; layers]).unwrap();
                    check(&what, &step(&model), &expected);
                }
            }
            // The first method is for inference only.
            for method in Method::ALL.into_iter().filter(|&method| method != Method::OneLayer) {
                let mut model = adapted(name, kind);
                OffloadConfig { method, ..OffloadConfig::default() }.install(&mut model).unwrap();
                check(&format!("{name}, {kind:?}, {method:?}"), &step(&model), &expected);
            }
        }
    }
}

/// Experts that are opened in their files have adapters, too, and are not merged there.
#[test]
fn adapters_over_experts_in_files_have_the_same_bits_and_are_not_merged() {
    let expected = step(&adapted("qwen3_moe", Kind::BFloat16));
    let options = ExpertConfig { cache: 16 << 10, ..ExpertConfig::default() };
    let (mut model, _experts) = options.open(&folder("qwen3_moe"), None).unwrap();
    let adapters = lora().install(&mut model).unwrap();
    check("in files", &step(&model), &expected);
    let error = adapters.merge().unwrap_err().to_string();
    assert!(error.contains("are streamed from files, which a merge does not change"), "{error}");
    check("after a refused merge", &step(&model), &expected);
}

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<StepRecord>>>);

impl Observer for Seen {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        self.0.lock().unwrap().push(record.clone());
        Ok(())
    }
}

/// A training of the experts' adapters with the load-balancing loss, over two padded micro-batches a step.
fn trainer(checkpoints: &Path, steps: u64, seen: &Seen) -> (Trainer, Synthetic) {
    runtime::random::seed(1).unwrap();
    let model = adapted("qwen3_moe", Kind::Float);
    let groups = vec![Group::new(trainable(&model), 1e-2)];
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let options = TrainerConfig {
        steps,
        accumulation: 2,
        router_aux_loss: 0.5,
        log_every: 1,
        capture: Capture::Off,
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.checkpoints = Some(Checkpoints::open(checkpoints, 2).unwrap());
    trainer.observers.push(Box::new(seen.clone()));
    (trainer, synthetic())
}

/// Batches of two rows; one has padding at least.
fn synthetic() -> Synthetic {
    Synthetic {
        seed: 3,
        vocabulary: 37,
        rows: 2,
        length: 12,
        noise: 3,
        batches: None,
        device: Device::Cpu,
        position: 0,
    }
}

fn weights(trainer: &Trainer) -> Vec<(String, Tensor)> {
    trainable(trainer.model.as_ref()).into_iter().map(|(name, tensor)| (name, tensor.copy())).collect()
}

#[test]
fn a_training_reports_the_load_balancing_loss_and_resumes_with_the_same_bits() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (whole, halves) = (Seen::default(), Seen::default());
    let (mut expected, mut data) = trainer(one.path(), 4, &whole);
    expected.run(&mut data, None).unwrap();
    let (mut first, mut data) = trainer(two.path(), 2, &halves);
    first.run(&mut data, None).unwrap();
    drop(first);
    let (mut second, mut data) = trainer(two.path(), 4, &halves);
    assert_eq!(second.resume(&mut data).unwrap(), Some(2));
    second.run(&mut data, None).unwrap();
    assert_eq!(weights(&second), weights(&expected));
    let figures = |seen: &Seen| -> Vec<[u64; 2]> {
        let records = seen.0.lock().unwrap();
        records.iter().map(|one| [one.loss, one.router_aux_loss.unwrap()].map(f64::to_bits)).collect()
    };
    assert_eq!(figures(&halves), figures(&whole));
    // From k where the experts get as many tokens to E where one gets all of them.
    let records = whole.0.lock().unwrap();
    assert!(records.iter().all(|one| (1.5..4.0).contains(&one.router_aux_loss.unwrap())), "{records:?}");
    // The loss is the cross-entropy alone.
    let plain = {
        let model = adapted("qwen3_moe", Kind::Float);
        let mut data = synthetic();
        let batches = [data.next().unwrap().unwrap(), data.next().unwrap().unwrap()];
        let targets: usize = batches.iter().map(|batch| batch.counts.targets).sum();
        let sums = batches.map(|batch| forward(&model, &batch, true, false).unwrap().sum.double_value(&[]));
        sums.iter().sum::<f64>() / targets as f64
    };
    assert!((records[0].loss - plain).abs() < 1e-6, "{} {plain}", records[0].loss);
}

/// Each of m micro-batches has a share of 1/m in the loss' gradient, with padding left out.
#[test]
fn micro_batches_share_the_coefficient() {
    let folder = tempfile::tempdir().unwrap();
    let seen = Seen::default();
    let (mut trained, mut train) = trainer(folder.path(), 1, &seen);
    let mut data = synthetic();
    let batches = [data.next().unwrap().unwrap(), data.next().unwrap().unwrap()];
    assert!(batches.iter().all(|batch| !batch.padding.is_empty()));
    let targets: usize = batches.iter().map(|batch| batch.counts.targets).sum();
    let model = adapted("qwen3_moe", Kind::Float);
    for batch in &batches {
        let balance = RouterBalance::new(&batch.padding, 12, Device::Cpu).unwrap();
        let sum = forward_with_balance(&model, batch, (true, false), Some(&balance)).unwrap().sum;
        let [total, _] = balance.add_to(&(sum / targets as f64), 0.5 / 2.0).unwrap();
        backward(&[&total]).unwrap();
    }
    let norm =
        trainable(&model).iter().map(|(_, one)| one.grad().norm().double_value(&[]).powi(2)).sum::<f64>();
    trained.options.clip = Some(1e9);
    trained.run(&mut train, None).unwrap();
    let found = seen.0.lock().unwrap()[0].gradient_norm.unwrap();
    assert!((found / norm.sqrt() - 1.0).abs() < 1e-5, "{found} {}", norm.sqrt());
}
