//! Trainings of adapters over bases in bf16 and in NF4, as on a CPU and as on a GPU, beside PEFT's in bf16: 20 steps of AdamW on three
//! batches. Both are compared with the same training in fp64. `xtask/peers/low_precision_adapters.py` made the cases; the base is that of
//! the tests of `models`.
//!
//! Rounding errors are random, so they are compared as root mean squares: of the losses of all steps, and of the relative errors of the
//! gradients of all adapters at the first and at the last step. PEFT with autocast and PEFT with products of the adapters in fp32 differ by
//! up to 1.2 in these figures; ours may be larger than the smaller of the two by [`FACTOR`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kernels::gpu;
use lora::Adapters;
use models::hugging_face::{self, Folder};
use models::module::{IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{Llama, tensors_file};
use runtime::autograd::backward;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

const FACTOR: f64 = 1.25;
const STEPS: usize = 20;
const BATCHES: i64 = 3;
/// The roundings to bf16 in series of a gradient: in each of 2 layers, forward and backward, those of two norms, three products,
/// attention, SwiGLU and two sums, and those of the loss.
const ROUNDINGS: f64 = 2.0 * 2.0 * 9.0 + 4.0;

fn fixtures(folder: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(folder)
}

fn read(path: &Path) -> BTreeMap<String, Tensor> {
    tensors_file::read(path, Device::Cpu).unwrap().into_iter().collect()
}

fn base(name: &str) -> Llama {
    let folder = fixtures("models/tests/fixtures/nf4");
    let stored = Folder::open(&folder.join("model")).unwrap();
    if name == "nf4" {
        return stored.load(None, Device::Cpu).unwrap();
    }
    let model = Llama::new(stored.config(), (Kind::BFloat16, Device::Cpu)).unwrap();
    hugging_face::load_weights(&model, &folder.join("original.safetensors")).unwrap();
    model
}

fn mean(values: &Tensor) -> f64 {
    values.square().mean(Kind::Double).sqrt().double_value(&[])
}

/// Squared errors, summed over batches.
#[derive(Debug, Default, Clone, Copy)]
struct Errors {
    losses: f64,
    first: f64,
    last: f64,
}

impl Errors {
    fn add(&mut self, losses: f64, [first, last]: [f64; 2]) {
        let add = |sum: &mut f64, error: f64| *sum += error * error / BATCHES as f64;
        add(&mut self.losses, losses);
        add(&mut self.first, first);
        add(&mut self.last, last);
    }

    fn roots(self) -> [f64; 3] {
        [self.losses, self.first, self.last].map(f64::sqrt)
    }
}

/// Trains the adapter on one batch; returns the losses, and at the first and last step the relative error of each gradient.
fn train(name: &str, batch: i64, cases: &BTreeMap<String, Tensor>) -> (Tensor, [Tensor; 2]) {
    let mut model = base(name);
    let _adapters =
        Adapters::load(&mut model, &fixtures("lora/tests/fixtures/low_precision/adapter")).unwrap();
    // In the order of PEFT's names.
    let weights: BTreeMap<String, Tensor> = trainable(&model)
        .into_iter()
        .map(|(name, tensor)| {
            (hugging_face::tensor_name(&name).replace(".default", ""), tensor.shallow_clone())
        })
        .collect();
    assert!(weights.values().all(|tensor| tensor.kind() == Kind::Float), "{name}");
    let group = Group { weight_decay: 0.01, ..Group::new(trainable(&model), 2e-3) };
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![group]).unwrap();

    let tokens = cases["tokens"].get(batch);
    let last = Tensor::full([tokens.size()[0], 1], IGNORE_INDEX, (Kind::Int64, Device::Cpu));
    let labels = Tensor::cat(&[tokens.narrow(1, 1, tokens.size()[1] - 1), last], 1);
    let targets = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
    let (mut losses, mut errors) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss = model.loss(&Input::new(&tokens), &labels).unwrap().sum / targets;
        backward(&[&loss]).unwrap();
        losses.push(loss.double_value(&[]));
        let at = [(0, "first"), (STEPS - 1, "last")].into_iter().find(|(at, _)| *at == step);
        if let Some((_, at)) = at {
            let expected = &cases[&format!("{name}.{batch}.{at}")];
            let mut start = 0;
            let of_each = weights.values().map(|tensor| {
                let expected = expected.narrow(0, start, tensor.numel() as i64);
                start += tensor.numel() as i64;
                let error = tensor.grad().view([-1]) - &expected;
                (error.norm() / expected.norm()).double_value(&[])
            });
            errors.push(Tensor::from_slice(&of_each.collect::<Vec<f64>>()));
            assert_eq!(start, expected.numel() as i64, "{name}: every gradient, and no other");
        }
        optimizer.step().unwrap();
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
    }
    (Tensor::from_slice(&losses), errors.try_into().unwrap())
}

#[test]
fn fixtures_trainings_are_as_near_to_the_exact_one_as_pefts() {
    let cases = read(&fixtures("lora/tests/fixtures/low_precision/cases.safetensors"));
    for name in ["bf16", "nf4"] {
        let mut least = [f64::INFINITY; 3];
        for how in ["autocast", "fp32_adapters"] {
            let mut theirs = Errors::default();
            for batch in 0..BATCHES {
                let case = |what: &str| &cases[&format!("{name}.{batch}.{what}")];
                let errors = case(&format!("{how}.errors"));
                let losses = mean(&(case(&format!("{how}.losses")) - case("losses")));
                theirs.add(losses, [0, 1].map(|step| mean(&errors.get(step))));
            }
            let theirs = theirs.roots();
            eprintln!(
                "{name}: PEFT, {how}: losses {:.2e}, gradients {:.4}, {:.4}",
                theirs[0], theirs[1], theirs[2]
            );
            least = [0, 1, 2].map(|index| least[index].min(theirs[index]));
        }
        for as_on_gpu in [false, true] {
            let _gpu = as_on_gpu.then(gpu::assume);
            let mut ours = Errors::default();
            for batch in 0..BATCHES {
                let (losses, errors) = train(name, batch, &cases);
                let exact = &cases[&format!("{name}.{batch}.losses")];
                assert!(exact.double_value(&[19]) < 0.7 * exact.double_value(&[0]), "the training learns");
                ours.add(mean(&(losses - exact)), errors.each_ref().map(mean));
            }
            let ours = ours.roots();
            eprintln!(
                "{name}: as on a GPU {as_on_gpu}: losses {:.2e}, gradients {:.4}, {:.4}",
                ours[0], ours[1], ours[2]
            );
            for (what, (ours, theirs)) in
                ["losses", "first gradients", "last gradients"].iter().zip(ours.iter().zip(least))
            {
                assert!(*ours <= FACTOR * theirs, "{name} {as_on_gpu} {what}: {ours}, PEFT's {theirs}");
            }
            // Independent roundings of at most 2⁻⁸ each.
            let bound = 2f64.powi(-8) * ROUNDINGS.sqrt();
            assert!(ours[1] <= 2.0 * bound, "{name} {as_on_gpu}: {} of {bound}", ours[1]);
        }
    }
}
