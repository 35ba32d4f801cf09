//! Trainings over ranks, which print losses, norms, weights and state as lines that begin with the training's number.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use std::ffi::OsString;
use std::fmt::Debug;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use models::module;
use runtime::collectives::{Group as Ranks, GroupConfig, Store};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sharding::Mesh;
use tch::{Device, Kind, Tensor};
use training::Trainer;
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Batches that each training is evaluated on.
pub(crate) const EVALUATED: u64 = 5;

/// Names the error of a rank that takes part in nothing any more.
pub(crate) const HANGS: &str = "a rank that hangs";

/// Trains each case with as many ranks as it has beside, which wait for each other as long as it says, if this process is a rank.
pub(crate) fn rank<C: DeserializeOwned>(
    timeout: impl Fn(&C) -> Duration,
    train: impl Fn(&C, &Ranks, usize) -> training::Result<()>,
) {
    testing::ranks::rank(|runs: Vec<(C, usize)>, launch| {
        let store = Store::connect(launch, TIMEOUT).unwrap();
        let options = |timeout| GroupConfig { timeout, ..GroupConfig::default() };
        let world = Ranks::new(&store, "world", options(TIMEOUT)).unwrap();
        let mut kept = Vec::new();
        for (number, (case, count)) in runs.into_iter().enumerate() {
            world.barrier("the next training").unwrap();
            if world.rank() < count {
                let ranks: Vec<usize> = (0..count).collect();
                let name = format!("training {number}");
                let ranks = Ranks::of_ranks(&store, &name, &ranks, options(timeout(&case))).unwrap();
                if let Err(error) = train(&case, &ranks, number) {
                    println!("training {number}: failed: {error}");
                    // It keeps its connections.
                    kept.extend(error.to_string().starts_with(HANGS).then_some(ranks));
                }
            }
        }
        world.barrier("end").unwrap();
    });
}

/// Where the parameters are, and how their tensors travel. The rest travels over the ranks' own group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// On the CPU, over Gloo.
    #[default]
    Host,
    /// On the CPU, over what stands for NCCL, in a group of their own.
    StandIn,
    /// On the first GPU, over NCCL.
    Gpu,
}

impl Place {
    pub(crate) fn device(self) -> Device {
        if self == Self::Gpu { Device::Cuda(0) } else { Device::Cpu }
    }
}

/// The ranks in replicas.
pub(crate) fn mesh(ranks: &Ranks, replicas: usize, place: Place) -> training::Result<Mesh> {
    if place == Place::Host {
        return Mesh::new(ranks, replicas);
    }
    let nccl_stand_in = place == Place::StandIn;
    let options = GroupConfig { timeout: ranks.timeout(), device: place.device(), nccl_stand_in };
    let devices = ranks.reconnect(&format!("{}, devices", ranks.name()), options)?;
    Mesh::over_devices(ranks, &devices, replicas)
}

/// Runs trainings one after another, in the same processes, which run the test `a_rank`. Returns for each what its ranks printed.
#[track_caller]
pub(crate) fn run<C: Serialize + Debug>(a_rank: &str, runs: &[(C, usize)]) -> Vec<Vec<Vec<String>>> {
    let count = runs.iter().map(|(_, count)| *count).max().unwrap();
    of_runs(&testing::ranks::Ranks::new(a_rank, count).run(&runs), runs)
}

/// What the ranks of each run have printed, of all that these processes did.
pub(crate) fn of_runs<C>(printed: &[Vec<String>], runs: &[(C, usize)]) -> Vec<Vec<Vec<String>>> {
    let of = |number: usize, rank: usize| {
        let prefix = format!("training {number}: ");
        printed[rank].iter().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
    };
    let numbered = runs.iter().enumerate();
    numbered.map(|(number, (_, count))| (0..*count).map(|rank| of(number, rank)).collect()).collect()
}

/// The lines of the last step, the weights and the state.
pub(crate) fn end(lines: &[String], step: u64) -> Vec<&String> {
    let last = format!("step {step} ");
    lines.iter().filter(|line| !line.starts_with("step") || line.starts_with(&last)).collect()
}

/// The files of the checkpoint of step 3, with their names.
pub(crate) fn files(folder: &Path) -> Vec<(OsString, Vec<u8>)> {
    let newest = folder.join("step-000000000003");
    let mut files: Vec<_> = std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let file =
        |path: &std::path::PathBuf| (path.file_name().unwrap().to_owned(), std::fs::read(path).unwrap());
    files.iter().map(file).collect()
}

/// Trains and evaluates. Resumes from the checkpoints in `folder`; the last rank kills itself after step `killed_after`, if not 0.
pub(crate) fn train(
    trainer: &mut Trainer,
    ranks: &Ranks,
    number: usize,
    (folder, killed_after): (Option<&Path>, u64),
) -> training::Result<()> {
    let last = Arc::new(Mutex::new(Instant::now()));
    trainer.observers.push(Box::new(Print(number, last.clone())));
    if ranks.rank() + 1 == ranks.size() && killed_after > 0 {
        trainer.observers.push(Box::new(Kill(killed_after)));
    }
    runtime::random::seed(7).unwrap();
    let mut data = Synthetic {
        seed: 3,
        vocabulary: 61,
        rows: 2,
        length: 12,
        noise: 2,
        batches: None,
        device: module::parameters(trainer.model.as_ref())[0].1.device(),
        position: 0,
    };
    if let Some(folder) = folder {
        if ranks.rank() == 0 {
            trainer.checkpoints = Some(Checkpoints::open(folder, 100).unwrap());
        }
        ranks.barrier("checkpoints").unwrap();
        if ranks.rank() > 0 {
            trainer.checkpoints = Some(Checkpoints::reader(folder));
        }
        trainer.resume(&mut data).unwrap();
    }
    trainer.run(&mut data, None).inspect_err(|_| {
        let elapsed = last.lock().unwrap().elapsed();
        let most = ranks.timeout() + Duration::from_secs(2);
        assert!(elapsed < most, "it ends {elapsed:?} after its last step");
    })?;
    trainer.evaluate(&mut Synthetic { seed: 5, batches: Some(EVALUATED), position: 0, ..data }).unwrap();
    for (name, tensor) in module::parameters(trainer.model.as_ref()) {
        println!(
            "training {number}: weight {name} {:016x}",
            bits(&trainer.optimizer.whole_weight(tensor).unwrap())
        );
    }
    let mut state = trainer.optimizer.state().unwrap();
    state.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (name, tensor) in state {
        println!("training {number}: state {name} {:?} {:016x}", tensor.size(), bits(&tensor));
    }
    ranks.barrier("end").unwrap();
    Ok(())
}

/// Prints the steps of a training, by its number, and keeps the time of the last.
#[derive(Debug)]
struct Print(usize, Arc<Mutex<Instant>>);

impl Observer for Print {
    fn on_step(&mut self, step: &StepRecord) -> training::Result<()> {
        let StepRecord { step, loss, gradient_norm, tokens, targets, .. } = step;
        let norm = gradient_norm.map(f64::to_bits);
        println!(
            "training {}: step {step} loss {:016x} norm {norm:x?}, {tokens} tokens, {targets} targets",
            self.0,
            loss.to_bits()
        );
        *self.1.lock().unwrap() = Instant::now();
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        println!("training {}: evaluation {:016x}", self.0, evaluation.loss.to_bits());
        Ok(())
    }
}

/// Kills the process after a step.
#[derive(Debug)]
struct Kill(u64);

impl Observer for Kill {
    fn on_step(&mut self, step: &StepRecord) -> training::Result<()> {
        if step.step == self.0 {
            let own = std::process::id().to_string();
            std::process::Command::new("kill").args(["-9", &own]).status().unwrap();
        }
        Ok(())
    }
}

/// FNV-1a of a tensor's bytes, eight at a time.
fn bits(tensor: &Tensor) -> u64 {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous().view([-1]).view_dtype(Kind::Uint8);
    let bytes = Vec::<u8>::try_from(tensor).unwrap();
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}
