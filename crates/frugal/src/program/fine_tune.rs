//! A fine-tuning: of whatever in a model requires a gradient, be it adapters or all of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use fused_ce::LinearCrossEntropy;
use models::module::{self, Block, Edit, LanguageModel, Module, ParameterCount};
use tch::{Device, Tensor};
use training::activations::{self, LayerPlan};
use training::checkpoint::Checkpoints;
use training::masked_rows::{Layout, MaskedBatches, MaskedRow};
use training::observer::Observer;
use training::optimizer::{AdamW, Group, Optimizer};
use training::schedule::{Schedule, Shape};
use training::trainer::{Ended, Frozen, Options};
use training::{Batches, Trainer};

/// Where checkpoints go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checkpointing {
    /// A folder of their own.
    pub(crate) folder: PathBuf,
    /// Steps between two; one is written at the end in any case.
    pub(crate) every: Option<u64>,
    /// How many are kept.
    pub(crate) keep: usize,
    /// Whether to go on from the newest, where there is one; else there must be none.
    pub(crate) resume: bool,
}

/// How to fine-tune.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FineTuning {
    /// How often each row comes, where `steps` does not say when to end.
    pub(crate) epochs: u64,
    /// Steps in all; `None` for those that the epochs make.
    pub(crate) steps: Option<u64>,
    /// Rows of a batch.
    pub(crate) batch: usize,
    /// Batches of a step.
    pub(crate) accumulation: usize,
    /// Places of a packed row; `None` to pad each batch to its longest row.
    pub(crate) packed: Option<usize>,
    /// The id that pads.
    pub(crate) pad: i64,
    /// Learning rate after warm-up.
    pub(crate) lr: f64,
    /// How it falls after warm-up, to 0 at the last step.
    pub(crate) shape: Shape,
    /// The part of the steps that warm up, in [0, 1).
    pub(crate) warmup: f64,
    /// Decoupled decay of matrices.
    pub(crate) weight_decay: f64,
    /// Largest norm of the gradients.
    pub(crate) clip: Option<f64>,
    /// Whether layers run again in backward instead of keeping what it needs.
    pub(crate) recompute: bool,
    /// Steps between evaluations; one is made at the end in any case where there are rows for it.
    pub(crate) evaluate_every: Option<u64>,
    /// Steps between reading losses from the device.
    pub(crate) read_every: u64,
    /// Where checkpoints go.
    pub(crate) checkpoints: Option<Checkpointing>,
    /// The seed of the rows' order. (Dropout draws from the process's generator.)
    pub(crate) seed: u64,
}

impl Default for FineTuning {
    fn default() -> Self {
        Self {
            epochs: 1,
            steps: None,
            batch: 4,
            accumulation: 4,
            packed: None,
            pad: 0,
            lr: 2e-4,
            shape: Shape::Cosine,
            warmup: 0.03,
            weight_decay: 0.0,
            clip: Some(1.0),
            recompute: false,
            evaluate_every: None,
            read_every: 1,
            checkpoints: None,
            seed: 0,
        }
    }
}

/// A fine-tuning that is ready to run.
pub(crate) struct Prepared {
    trainer: Trainer,
    train: MaskedBatches,
    validation: Option<MaskedBatches>,
    resume: bool,
}

/// What a fine-tuning came to.
pub(crate) struct Tuned {
    /// The model.
    pub(crate) model: Box<dyn LanguageModel>,
    /// Why it ended.
    pub(crate) ended: Ended,
    /// Steps done, those before a resume included.
    pub(crate) step: u64,
    /// The step of the last checkpoint.
    pub(crate) saved: Option<u64>,
}

/// Fine-tunes what requires a gradient in `model`: adapters ([`lora::Adapters::wrap`]) or all of it. Its head learns without its
/// logits where it is a plain projection, and its layers run again where that is wanted; the loss is over the rows' labels.
/// `observe` is shown what is about to be done, and says who is told of it; raising `stop` ends the training with a checkpoint.
///
/// # Errors
/// Options outside their ranges; nothing to train; rows that make no batch; a folder of checkpoints that cannot be used, or is of
/// another base, adapter or order of rows; a divergence; those of the model and the observers.
pub(crate) fn fine_tune(
    model: Box<dyn LanguageModel>,
    train: Vec<MaskedRow>,
    validation: Vec<MaskedRow>,
    options: &FineTuning,
    observe: impl FnOnce(&Prepared) -> anyhow::Result<Vec<Box<dyn Observer>>>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<Tuned> {
    let mut prepared = prepare(model, train, validation, options)?;
    prepared.trainer.observers = observe(&prepared)?;
    prepared.trainer.stop = stop;
    prepared.run()
}

fn prepare(
    mut model: Box<dyn LanguageModel>,
    train: Vec<MaskedRow>,
    validation: Vec<MaskedRow>,
    options: &FineTuning,
) -> anyhow::Result<Prepared> {
    if !(0.0..1.0).contains(&options.warmup) {
        bail!("a warm-up of {} of the steps; expected a share in [0, 1)", options.warmup);
    }
    let device = module::tensors(model.as_ref()).first().map_or(Device::Cpu, |named| named.tensor.device());
    install_head(model.as_mut())?;
    if options.recompute {
        let layers = blocks(model.as_mut())?;
        let plan = activations::every_kth(layers, 1, LayerPlan::RecomputeAll)?;
        activations::apply(model.as_mut(), &plan)?;
    }
    let layout = Layout {
        batch: options.batch,
        packed: options.packed,
        pad: options.pad,
        shuffle: Some(options.seed),
        epochs: options.steps.is_none().then_some(options.epochs),
    };
    let train = MaskedBatches::new(train, layout, device)?;
    let ordered = Layout { shuffle: None, epochs: Some(1), ..layout };
    let validation =
        (!validation.is_empty()).then(|| MaskedBatches::new(validation, ordered, device)).transpose()?;
    let batches = train.batches_per_epoch() * options.epochs;
    let steps = options.steps.unwrap_or_else(|| batches.div_ceil(options.accumulation.max(1) as u64));
    if steps == 0 {
        bail!("0 steps; expected 1 step or epoch at least");
    }
    let parameters: Vec<(String, &Tensor)> = module::trainable(model.as_ref());
    if parameters.is_empty() {
        bail!(
            "nothing in the model requires a gradient; install adapters, or unfreeze what is to be trained"
        );
    }
    let all = module::parameters(model.as_ref()).len();
    let frozen = if parameters.len() < all { Frozen::LeftOut } else { Frozen::Saved };
    let groups = Group::by_dimension(parameters, options.lr, options.weight_decay);
    let optimizer = Optimizer::new(AdamW::default(), groups)?;
    let training = Options {
        steps,
        accumulation: options.accumulation,
        clip: options.clip,
        read_every: options.read_every,
        evaluate_every: options.evaluate_every,
        checkpoint_every: options.checkpoints.as_ref().and_then(|checkpoints| checkpoints.every),
        frozen,
        ..Options::default()
    };
    let mut trainer = Trainer::new(model, optimizer, training)?;
    // At least one step is left, so that the shape has something to fall over.
    let warmup = ((options.warmup * steps as f64).ceil() as u64).min(steps - 1);
    trainer.schedule = Schedule { shape: options.shape, warmup, steps, floor: 0.0 };
    trainer.schedule.check()?;
    if let Some(Checkpointing { folder, keep, resume, .. }) = &options.checkpoints {
        let checkpoints = Checkpoints::open(folder, *keep)?;
        if !resume && !checkpoints.steps()?.is_empty() {
            let folder = folder.display();
            bail!(
                "{folder} holds checkpoints of an earlier run; go on from them with --resume, or give an empty folder"
            );
        }
        trainer.checkpoints = Some(checkpoints);
    }
    let resume = options.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.resume);
    Ok(Prepared { trainer, train, validation, resume })
}

impl Prepared {
    /// Steps in all.
    pub(crate) fn steps(&self) -> u64 {
        self.trainer.options.steps
    }

    /// What is trained on.
    pub(crate) fn rows(&self) -> &MaskedBatches {
        &self.train
    }

    /// How many numbers the model learns, and how many it has.
    pub(crate) fn parameters(&self) -> ParameterCount {
        module::parameter_count(self.trainer.model.as_ref())
    }

    /// Goes on from the newest checkpoint where that is wanted, trains to the end and saves; evaluates at the end what was not
    /// evaluated then.
    fn run(self) -> anyhow::Result<Tuned> {
        let Self { mut trainer, mut train, mut validation, resume } = self;
        if resume {
            trainer.resume(&mut train)?;
        }
        let ended = {
            let validation = validation.as_mut().map(|validation| validation as &mut dyn Batches);
            trainer.run(&mut train, validation)?
        };
        let evaluated =
            trainer.options.evaluate_every.is_some_and(|every| trainer.step().is_multiple_of(every));
        if let Some(validation) = validation.as_mut().filter(|_| ended != Ended::Interrupted && !evaluated) {
            trainer.evaluate(validation)?;
        }
        let (step, saved) = (trainer.step(), trainer.saved());
        // Bars and files are done before anybody says what came of it.
        trainer.observers.clear();
        Ok(Tuned { model: trainer.model, ended, step, saved })
    }
}

/// A head that never holds all logits; one that is more than a projection, because it is adapted itself, stays.
fn install_head(model: &mut dyn Module) -> anyhow::Result<()> {
    match fused_ce::install(model, &LinearCrossEntropy::default()) {
        Ok(()) | Err(fused_ce::Error::Head { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn blocks(model: &mut dyn Module) -> anyhow::Result<usize> {
    struct Count(usize);
    impl Edit for Count {
        fn block(&mut self, _: &str, _: &mut Box<dyn Block>) -> models::Result<()> {
            self.0 += 1;
            Ok(())
        }
    }
    let mut count = Count(0);
    module::edit(model, &mut count)?;
    Ok(count.0)
}

#[cfg(test)]
mod tests {
    use frugal::tasks::gsm8k::tokenize::IGNORED;
    use lora::{Adapters, LoraConfig};
    use models::{Llama, LlamaConfig};
    use runtime::random::Generator;
    use tch::Kind;

    use super::*;
    use frugal::loss_log::Ends;

    /// What follows a token is the token and one, over answers of three.
    fn rows() -> Vec<MaskedRow> {
        let row = |first: i64| {
            let input_ids: Vec<i64> = (first..first + 6).collect();
            let labels = input_ids.iter().map(|id| if *id < first + 3 { IGNORED } else { *id }).collect();
            MaskedRow { tokens: input_ids, labels }
        };
        (0..12).map(row).collect()
    }

    fn model() -> Llama {
        let model = Llama::new(&LlamaConfig::llama(24, 16, 24, 2, 4), (Kind::Float, Device::Cpu)).unwrap();
        let mut generator = Generator::new(5).unwrap();
        for named in module::tensors(&model).into_iter().filter(|named| named.tensor.dim() == 2) {
            let noise = generator.normal(&named.tensor.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.3;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&noise));
        }
        model
    }

    #[test]
    fn a_whole_model_and_its_adapters_are_trained_by_one_function() {
        for adapted in [false, true] {
            let mut model = model();
            let model: Box<dyn LanguageModel> = if adapted {
                let all = LoraConfig {
                    target_modules: Some(["q_proj", "v_proj", "up_proj", "down_proj"].into()),
                    ..LoraConfig::default()
                };
                let adapters = Adapters::install(&mut model, &all, 1).unwrap();
                Box::new(adapters.wrap(Box::new(model)).unwrap())
            } else {
                Box::new(model)
            };
            let options = FineTuning { steps: Some(30), accumulation: 1, lr: 1e-2, ..FineTuning::default() };
            let ends = Ends::default();
            let observers = |prepared: &Prepared| -> anyhow::Result<Vec<Box<dyn Observer>>> {
                let ParameterCount { total, trainable } = prepared.parameters();
                assert_eq!(prepared.steps(), 30);
                assert_eq!(trainable < total, adapted);
                Ok(vec![Box::new(ends.clone())])
            };
            let tuned = fine_tune(model, rows(), rows(), &options, observers, Arc::default()).unwrap();
            assert_eq!((tuned.step, tuned.ended, tuned.saved), (30, Ended::Done, None));
            let losses = ends.get();
            let (first, last) = (losses.first.unwrap(), losses.last.unwrap());
            assert!(last < first - 0.3 && losses.validation.unwrap() < first - 0.3, "{losses:?}");
        }
    }

    #[test]
    fn what_cannot_be_trained_is_refused() {
        for (frozen, options, said) in [
            (true, FineTuning::default(), "nothing in the model requires a gradient"),
            (false, FineTuning { warmup: 1.0, ..FineTuning::default() }, "a share in [0, 1)"),
            (false, FineTuning { epochs: 0, ..FineTuning::default() }, "0 steps"),
            (false, FineTuning { accumulation: 0, ..FineTuning::default() }, "expected 1 or more"),
        ] {
            let model = model();
            module::freeze(&model, ".*", frozen).unwrap();
            let refused = prepare(Box::new(model), rows(), vec![], &options).err().unwrap().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }
}
