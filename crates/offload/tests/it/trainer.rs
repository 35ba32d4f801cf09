//! The ordinary loop, with its clipping, accumulation and checkpoints, over a model whose layers are elsewhere.

use crate::support;
use std::path::Path;

use crate::support::{alone, tiny};
use models::module::{tensors, trainable};
use offload::{Method, Offload, Options, Tier};
use tch::{Device, Tensor};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::optimizer::{AdamW, Group};
use training::trainer::Ended;
use training::{Optimizer, Trainer, trainer};

const DATA: Synthetic = Synthetic {
    seed: 1,
    vocabulary: 60,
    rows: 2,
    length: 12,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

fn open(folder: &Path, steps: u64, options: Option<&Options>) -> Trainer {
    let mut model = tiny();
    // The handle may go: the model holds what it needs.
    if let Some(options) = options {
        Offload::apply(&mut *model, options).unwrap();
    }
    let optimizer = Optimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), 1e-2)]).unwrap();
    let settings = trainer::Options {
        steps,
        accumulation: 2,
        clip: Some(0.5),
        checkpoint_every: Some(3),
        evaluate_every: Some(2),
        ..trainer::Options::default()
    };
    let mut trainer = Trainer::new(model, optimizer, settings).unwrap();
    trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
    trainer
}

fn values(trainer: &Trainer) -> Vec<(String, Tensor)> {
    tensors(trainer.model.as_ref()).into_iter().map(|named| (named.name, named.tensor.detach())).collect()
}

/// Evaluation between the steps changes the order of uses, which the ring had learned.
#[test]
fn it_trains_evaluates_stops_and_goes_on_to_the_same_bits() {
    let _alone = alone();
    let [plain, whole, cut] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let run = |trainer: &mut Trainer, data: &mut Synthetic| {
        let mut validation = Synthetic { seed: 7, batches: Some(2), ..DATA };
        assert_eq!(trainer.run(data, Some(&mut validation)).unwrap(), Ended::Done);
    };
    let mut ordinary = open(plain.path(), 8, None);
    run(&mut ordinary, &mut DATA.clone());
    for options in [
        Options::default(),
        Options { method: Method::Function, ..Options::default() },
        Options { ring: 2, resident: vec![1], ..Options::default() },
    ] {
        let mut offloaded = open(whole.path(), 8, Some(&options));
        run(&mut offloaded, &mut DATA.clone());
        assert_eq!(values(&offloaded), values(&ordinary), "{options:?}");
        std::fs::remove_dir_all(whole.path()).unwrap();
    }

    // A checkpoint knows nothing of where layers live: written with offload, read without, and the other way round.
    run(&mut open(cut.path(), 5, Some(&Options::default())), &mut DATA.clone());
    let mut resumed = open(cut.path(), 6, None);
    let mut data = DATA.clone();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(5));
    run(&mut resumed, &mut data);
    drop(resumed);
    let mut resumed = open(cut.path(), 8, Some(&Options { ring: 4, ..Options::default() }));
    let mut data = DATA.clone();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(6));
    run(&mut resumed, &mut data);
    assert_eq!(values(&resumed), values(&ordinary));
}

#[test]
fn a_trained_model_cannot_be_in_files_alone() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut model = tiny();
    models::module::freeze(&*model, ".*", true).unwrap();
    let options = Options { tier: Tier::File(folder.path().to_owned()), ..Options::default() };
    Offload::apply(&mut *model, &options).unwrap();
    // Unfrozen when it is too late: what a step would change would not be what the next load brings.
    models::module::freeze(&*model, r"layers\.2\.mlp.*", false).unwrap();
    let tokens = support::batch(60, 0);
    let input = models::module::Input::new(&tokens);
    let error = models::module::LanguageModel::loss(&*model, &input, &tokens).unwrap_err().to_string();
    assert!(error.contains("is to be trained, but it lives in"), "{error}");
    assert!(error.contains("choose what is trained"), "{error}");
}
