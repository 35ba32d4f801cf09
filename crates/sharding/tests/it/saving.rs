//! What saving and reading a checkpoint take of each rank's memory.
#![allow(clippy::print_stdout, reason = "the results of a rank, which the test reads")]

use models::module;
use models::tensors_file::PIECE_BYTES;
use runtime::collectives::Group as Ranks;
use runtime::memory::{self, Region};
use runtime::random::RandomState;
use tch::Device;
use training::Trainer;
use training::checkpoint::{Checkpoints, Snapshot, latest};

use crate::run;
use crate::training_case::{Case, Dtype};
use crate::trainings::files;

/// Saves what the training has into another folder, reads it again, and prints the peaks.
pub(crate) fn measure(trainer: &mut Trainer, ranks: &Ranks, number: usize) -> training::Result<()> {
    memory::track_cpu()?;
    let folder = tempfile::tempdir().unwrap();
    let saving = Region::start(Device::Cpu)?;
    let model = module::parameters(trainer.model.as_ref()).into_iter();
    let model = model.map(|(name, tensor)| trainer.optimizer.lazy_weight(name, tensor)).collect();
    let optimizer = trainer.optimizer.lazy_state()?;
    let random = RandomState::capture(Device::Cpu)?;
    let mut snapshot = Snapshot::new(3, model, optimizer, random, trainer.scaler.state());
    if ranks.rank() == 0 {
        Checkpoints::open(folder.path(), 1)?.save(snapshot)?;
    } else {
        snapshot.give()?;
    }
    println!("training {number}: saving took {}", saving.finish()?.peak_above_start());
    println!("training {number}: a state of {}", trainer.optimizer.state_bytes());
    // In its own folder: the file's pages are no memory of a tensor.
    if ranks.rank() == 0 {
        let reading = Region::start(Device::Cpu)?;
        let found = latest(folder.path())?.checkpoint.unwrap();
        println!("training {number}: reading took {}", reading.finish()?.peak_above_start());
        assert!(found.optimizer.len() > found.model.len());
    }
    Ok(())
}

fn bytes(lines: &[String], what: &str) -> u64 {
    lines.iter().find_map(|line| line.strip_prefix(what)?.trim().parse().ok()).unwrap()
}

#[test]
fn rank_0_takes_a_piece_however_large_the_state() {
    let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
    // An embedding of 7 MiB. The state has three copies of it in fp32.
    let case = Case { vocabulary: 15_000, micro_batches: 4, measured: true, ..Case::default() };
    let bf16 = |case: Case| Case { dtype: Dtype::Bf16, master_weights: true, ..case };
    let runs: Vec<(Case, usize)> = folders
        .iter()
        .zip([(0, 1), (1, 1), (2, 2), (1, 4)])
        .map(|(folder, (stage, count))| {
            (Case { stage, folder: Some(folder.path().to_owned()), ..case.clone() }, count)
        })
        .chain([(bf16(Case { stage: 2, ..case.clone() }), 2)])
        .collect();
    let printed = run(&runs);
    for ((case, count), printed) in runs.iter().zip(&printed) {
        let state: u64 = printed.iter().map(|lines| bytes(lines, "a state of")).sum();
        assert!(state > 3 * PIECE_BYTES as u64, "{state}");
        // Besides a piece, the numbers of steps.
        let most = PIECE_BYTES as u64 + 64 * 1024;
        for (rank, lines) in printed.iter().enumerate() {
            let took = bytes(lines, "saving took");
            assert!(took <= most, "rank {rank} of {count}: {took} bytes, {case:?}");
        }
        let read = bytes(&printed[0], "reading took");
        assert!(read < 64 * 1024, "{read} bytes");
    }
    let tensors = |number: usize| -> Vec<_> {
        let files = files(folders[number].path()).into_iter();
        files.filter(|(name, _)| name.to_string_lossy().ends_with(".safetensors")).collect()
    };
    for (number, run) in runs.iter().enumerate().take(4) {
        assert!(tensors(number) == tensors(0), "{run:?}");
    }
}
