//! A teacher's distributions: the sums of a step in every layout of the batches, checkpoints, and evaluations.

use std::path::Path;

use models::distillation::{DistillationConfig, Divergence};
use models::module::{self, LanguageModel};
use models::{DecoderConfig, Llama};
use runtime::random::Generator;
use tch::{Device, Tensor, kind::FLOAT_CPU};
use training::Batches;
use training::accumulation::fetch;
use training::checkpoint::Checkpoints;
use training::distillation::{Distillation, write_top_k};
use training::evaluation::Evaluation;
use training::masked_rows::Arrangement::{self, Packed, Padded, PaddingFree};
use training::masked_rows::{Layout, MaskedBatches, MaskedRow, TopKFile, TopKHeader};
use training::observer::{Collect, Observer};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::trainer::{StopReason, Trainer, TrainerConfig};

const CONFIG: DistillationConfig = DistillationConfig {
    divergence: Divergence::JensenShannon { beta: 0.3 },
    temperature: 1.5,
    label_weight: 0.25,
};

fn model(hidden: i64, layers: i64, seed: u64) -> Llama {
    let model = Llama::new(&DecoderConfig::llama(16, hidden, 24, layers, 2), FLOAT_CPU).unwrap();
    let mut generator = Generator::new(seed).unwrap();
    for named in module::tensors(&model).into_iter().filter(|named| named.tensor.dim() == 2) {
        let noise = generator.normal(&named.tensor.size(), FLOAT_CPU).unwrap() * 0.4;
        tch::no_grad(|| named.tensor.shallow_clone().copy_(&noise));
    }
    model
}

fn distillation() -> Distillation {
    Distillation::new(Box::new(model(24, 2, 5)), CONFIG).unwrap()
}

fn rows() -> Vec<MaskedRow> {
    (0..8i64)
        .map(|row| {
            let tokens: Vec<i64> = (0..4 + row % 5).map(|at| (3 * row + at * at + 1) % 16).collect();
            let labels = (0..).zip(&tokens).map(|(at, id)| if at < 2 { -100 } else { *id }).collect();
            MaskedRow::new(tokens, labels)
        })
        .collect()
}

fn batches(batch: usize, arrangement: Arrangement) -> MaskedBatches {
    let layout = Layout { batch, arrangement, epochs: Some(1), ..Layout::default() };
    MaskedBatches::new(rows(), layout, Device::Cpu).unwrap()
}

/// The mean loss of all rows, its parts, and the gradients.
fn run(batch: usize, arrangement: Arrangement) -> ([f64; 3], Vec<Tensor>) {
    let (student, distillation) = (model(16, 1, 3), distillation());
    let step = fetch(&mut batches(batch, arrangement), usize::MAX).unwrap().unwrap();
    let mut sums = [0.0; 3];
    for batch in &step.batches {
        let loss = distillation.forward(&student, batch, (true, false), (None, None)).unwrap();
        runtime::autograd::backward(&[&(&loss.sum / step.targets as f64)]).unwrap();
        let parts = [&loss.sum, &loss.divergence, &loss.cross_entropy];
        sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part.double_value(&[]));
    }
    assert!(
        module::tensors(distillation.teacher().unwrap()).iter().all(|named| !named.tensor.grad().defined())
    );
    let gradients = module::trainable(&student).iter().map(|(_, tensor)| tensor.grad()).collect();
    (sums.map(|sum| sum / step.targets as f64), gradients)
}

#[test]
fn a_step_has_one_loss_in_every_layout() {
    let (whole, gradients) = run(8, Padded);
    assert!((whole[0] - (0.25 * whole[2] + 0.75 * whole[1])).abs() < 1e-6, "{whole:?}");
    assert!(whole[1] > 0.01, "{whole:?}");
    for (batch, arrangement) in [(1, Padded), (3, Padded), (3, PaddingFree), (2, Packed(16)), (1, Packed(40))]
    {
        let (sums, own) = run(batch, arrangement);
        for (own, whole) in sums.iter().zip(whole) {
            assert!((own - whole).abs() < 1e-6, "{batch} {arrangement:?}: {own} {whole}");
        }
        for (own, whole) in own.iter().zip(&gradients) {
            let error = (own - whole).abs().max().double_value(&[]);
            assert!(error < 1e-6, "{batch} {arrangement:?}: {error:e}");
        }
    }
}

#[derive(Clone, Default)]
struct Evaluations(std::sync::Arc<std::sync::Mutex<Vec<Evaluation>>>);

impl Observer for Evaluations {
    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.0.lock().unwrap().push(*evaluation);
        Ok(())
    }
}

fn trainer(folder: &Path, steps: u64) -> (Trainer, Collect, Evaluations) {
    let student = model(16, 1, 3);
    let groups = Group::by_dimension(module::trainable(&student), 1e-2, 0.1);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let options =
        TrainerConfig { steps, accuracy: true, evaluate_every: Some(3), ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(student), Box::new(optimizer), options).unwrap();
    trainer.distillation = Some(distillation());
    trainer.checkpoints = Some(Checkpoints::open(folder, 2).unwrap());
    let (records, evaluations) = (Collect::default(), Evaluations::default());
    trainer.observers.push(Box::new(records.clone()));
    trainer.observers.push(Box::new(evaluations.clone()));
    (trainer, records, evaluations)
}

fn endless() -> MaskedBatches {
    let layout = Layout { batch: 3, shuffle: Some(4), ..Layout::default() };
    MaskedBatches::new(rows(), layout, Device::Cpu).unwrap()
}

fn weights(model: &dyn LanguageModel) -> Vec<Tensor> {
    module::tensors(model).iter().map(|named| named.tensor.detach_copy()).collect()
}

#[test]
fn a_training_that_was_resumed_has_the_bits_of_one_that_was_not() {
    let [whole_folder, folder] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (mut whole, records, evaluations) = trainer(whole_folder.path(), 6);
    assert_eq!(whole.run(&mut endless(), Some(&mut batches(4, Padded))).unwrap(), StopReason::Completed);
    let records = records.take();
    for record in &records {
        let own = record.distilled.unwrap();
        let mixed = 0.25 * own.cross_entropy + 0.75 * own.divergence;
        assert!((record.loss - mixed).abs() < 1e-6 && record.accuracy.is_some(), "{record:?}");
    }
    assert!(records[5].loss < records[0].loss, "{records:?}");
    let evaluations = evaluations.0.lock().unwrap().clone();
    assert_eq!(evaluations.len(), 2);
    for evaluation in evaluations {
        let own = evaluation.distilled.unwrap();
        assert!((evaluation.perplexity.ln() - own.cross_entropy).abs() < 1e-9, "{evaluation:?}");
        let mixed = 0.25 * own.cross_entropy + 0.75 * own.divergence;
        assert!((evaluation.loss - mixed).abs() < 1e-6, "{evaluation:?}");
    }
    let (mut first, ..) = trainer(folder.path(), 3);
    first.run(&mut endless(), None).unwrap();
    drop(first);
    let (mut second, rest, _) = trainer(folder.path(), 6);
    let mut data = endless();
    assert_eq!(second.resume(&mut data).unwrap(), Some(3));
    second.run(&mut data, None).unwrap();
    let rest = rest.take();
    assert_eq!(
        rest.iter().map(|record| record.loss).collect::<Vec<_>>(),
        records[3..].iter().map(|record| record.loss).collect::<Vec<_>>()
    );
    for (own, expected) in weights(second.model.as_ref()).iter().zip(weights(whole.model.as_ref())) {
        assert_eq!(*own, expected);
    }
}

/// The forward divergence of a student from a teacher of the same weights has no gradient, and the labels alone have that of an ordinary step.
#[test]
fn the_ends_of_the_mixture_are_the_teacher_and_the_labels() {
    let mut source = batches(8, Padded);
    let batch = source.next().unwrap().unwrap();
    let of = |teacher: Llama, label_weight: f64| {
        let config = DistillationConfig { label_weight, ..DistillationConfig::default() };
        let student = model(16, 1, 3);
        let distillation = Distillation::new(Box::new(teacher), config).unwrap();
        let loss = distillation.forward(&student, &batch, (true, false), (None, None)).unwrap();
        runtime::autograd::backward(&[&loss.sum]).unwrap();
        let gradients: Vec<Tensor> = module::trainable(&student).iter().map(|(_, own)| own.grad()).collect();
        (loss.sum.double_value(&[]), gradients)
    };
    let (loss, gradients) = of(model(16, 1, 3), 0.0);
    assert!(loss.abs() < 1e-5, "{loss}");
    assert!(gradients.iter().all(|gradient| gradient.abs().max().double_value(&[]) < 1e-5));
    let (loss, gradients) = of(model(24, 2, 5), 1.0);
    let student = model(16, 1, 3);
    let output = training::accumulation::forward(&student, &batch, true, false).unwrap();
    runtime::autograd::backward(&[&output.sum]).unwrap();
    assert!((loss - output.sum.double_value(&[])).abs() < 1e-4 * loss.abs());
    for ((_, own), gradient) in module::trainable(&student).iter().zip(&gradients) {
        let error = (own.grad() - gradient).abs().max().double_value(&[]);
        assert!(error < 1e-5, "{error:e}");
    }
    let refused = Distillation::new(
        Box::new(model(16, 1, 3)),
        DistillationConfig { temperature: f64::NAN, ..DistillationConfig::default() },
    );
    assert!(
        refused.unwrap_err().to_string().contains("the temperature is NaN"),
        "an option outside its range"
    );
}

fn header(rows: &MaskedBatches, k: usize) -> TopKHeader {
    TopKHeader {
        tokenizer: "tokens".to_owned(),
        vocabulary: 16,
        temperature: 1.5,
        k,
        rows: format!("{:016x}", rows.content()),
        teacher: String::new(),
    }
}

/// The loss of all rows with the tokens of a file, and the gradients, over batches of so many rows.
fn run_with_file(k: usize, batch: usize, arrangement: Arrangement) -> (f64, Vec<Tensor>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.top-k");
    let mut source = batches(batch, arrangement);
    let header = header(&source, k);
    // Written from rows in other batches.
    write_top_k(&model(24, 2, 5), &batches(3, Padded), &path, &header).unwrap();
    source = source.with_top_k(TopKFile::open(&path, &header, 8).unwrap());
    let config = DistillationConfig { divergence: Divergence::ForwardKl, ..CONFIG };
    let (student, distillation) = (model(16, 1, 3), Distillation::from_files(config).unwrap());
    let step = fetch(&mut source, usize::MAX).unwrap().unwrap();
    let mut sum = 0.0;
    for batch in &step.batches {
        let loss = distillation.forward(&student, batch, (true, false), (None, None)).unwrap();
        runtime::autograd::backward(&[&(&loss.sum / step.targets as f64)]).unwrap();
        sum += loss.sum.double_value(&[]);
    }
    let gradients = module::trainable(&student).iter().map(|(_, tensor)| tensor.grad()).collect();
    (sum / step.targets as f64, gradients)
}

/// The same with the teacher at hand.
fn run_with_teacher() -> (f64, Vec<Tensor>) {
    let config = DistillationConfig { divergence: Divergence::ForwardKl, ..CONFIG };
    let student = model(16, 1, 3);
    let distillation = Distillation::new(Box::new(model(24, 2, 5)), config).unwrap();
    let step = fetch(&mut batches(8, Padded), usize::MAX).unwrap().unwrap();
    let loss = distillation.forward(&student, &step.batches[0], (true, false), (None, None)).unwrap();
    runtime::autograd::backward(&[&(&loss.sum / step.targets as f64)]).unwrap();
    let gradients = module::trainable(&student).iter().map(|(_, tensor)| tensor.grad()).collect();
    (loss.sum.double_value(&[]) / step.targets as f64, gradients)
}

/// A file of all tokens is the teacher, to the rounding of fp16; one of a few tokens is the same in every layout, and less than that.
#[test]
fn a_file_of_a_teachers_tokens_is_the_teacher() {
    let (exact, gradients) = run_with_teacher();
    let (all, own) = run_with_file(16, 8, Padded);
    assert!((all - exact).abs() < 2e-3 * exact.abs(), "{all} {exact}");
    for (own, exact) in own.iter().zip(&gradients) {
        let (error, largest) =
            ((own - exact).abs().max().double_value(&[]), exact.abs().max().double_value(&[]));
        assert!(error < 5e-3 * largest.max(1e-2), "{error:e} of {largest:e}");
    }
    let (some, of_some) = run_with_file(5, 8, Padded);
    assert!(some < exact + 1e-3 && some > 0.0, "{some} {exact}");
    for (batch, arrangement) in [(1, Padded), (3, Padded), (3, PaddingFree), (2, Packed(16)), (1, Packed(40))]
    {
        let (loss, own) = run_with_file(5, batch, arrangement);
        assert!((loss - some).abs() < 1e-6, "{batch} {arrangement:?}: {loss} {some}");
        for (own, expected) in own.iter().zip(&of_some) {
            assert!((own - expected).abs().max().double_value(&[]) < 1e-6, "{batch} {arrangement:?}");
        }
    }
}

#[test]
fn a_file_of_something_else_is_refused_by_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.top-k");
    let rows = batches(8, Padded);
    let own = TopKHeader { teacher: "digest".to_owned(), ..header(&rows, 3) };
    write_top_k(&model(24, 2, 5), &rows, &path, &own).unwrap();
    // Any teacher's, or this one's.
    assert_eq!(*TopKFile::open(&path, &header(&rows, 3), 8).unwrap().header(), own);
    for (needed, expected) in [
        (TopKHeader { temperature: 1.0, ..own.clone() }, "its temperature is 1.5, and this training's is 1"),
        (TopKHeader { k: 4, ..own.clone() }, "its k is 3, and this training's is 4"),
        (TopKHeader { tokenizer: "other".to_owned(), ..own.clone() }, "its tokenizer is tokens"),
        (TopKHeader { rows: "0".to_owned(), ..own.clone() }, "its rows is"),
        (TopKHeader { teacher: "other".to_owned(), ..own.clone() }, "its teacher is digest"),
        (TopKHeader { vocabulary: 12, ..own.clone() }, "its vocabulary is 16"),
    ] {
        let error = TopKFile::open(&path, &needed, 8).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let bytes = std::fs::read(&path).unwrap();
    for (length, expected) in [(bytes.len() - 1, "cut short"), (5, "no file of a teacher's probabilities")] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = TopKFile::open(&path, &own, 8).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = write_top_k(&model(24, 2, 5), &rows, &path, &header(&rows, 17)).unwrap_err().to_string();
    assert!(error.contains("the 17 most probable of 16 tokens"), "{error}");
    let js = Distillation::from_files(CONFIG).unwrap_err().to_string();
    assert!(js.contains("use `forward-kl`, or the teacher itself"), "{js}");
}
