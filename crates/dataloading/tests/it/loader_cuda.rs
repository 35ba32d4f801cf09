//! The loader on a CUDA device: the same batches as on the CPU, with batches held, dropped or in progress.
//!
//! Page-locked memory belongs to the process: the test that inspects it comes first in alphabetical order.

use crate::strategies::{content, reference, strategies};
use dataloading::{Batch, Loader, LoaderConfig, Result};
use runtime::device::graph::CapturedStep;
use runtime::device::{cuda_count, pinned_bytes, synchronize};
use tch::{Device, Kind, Tensor};

/// Returns whether there is a CUDA device. (`tch`'s own check would answer no for good before libtorch's CUDA library is
/// loaded.)
#[expect(clippy::print_stdout, reason = "a test that does nothing says so")]
fn has_cuda() -> bool {
    let has_cuda = cuda_count().unwrap() > 0;
    if !has_cuda {
        println!("skipped: no CUDA device");
    }
    has_cuda
}

#[test]
fn a_loader_works_while_a_step_is_captured() {
    if !has_cuda() {
        return;
    }
    let device = Device::Cuda(0);
    let source = strategies(97, 6).remove(1);
    let options =
        LoaderConfig { workers: 2, prefetch: 8, device, epochs: Some(4), ..LoaderConfig::default() };
    let mut loader = Loader::new(source.clone(), &options).unwrap();
    let mut batches = vec![content(&loader.next().unwrap().unwrap())];
    let sum = Tensor::zeros([4], (Kind::Float, device));
    let mut inside = sum.shallow_clone();
    let mut step = CapturedStep::capture(device, move || {
        let _ = inside.f_add_(&inside.f_ones_like()?)?;
        Ok(())
    })
    .unwrap();
    batches.extend(loader.map(|batch| content(&batch.unwrap())));
    step.replay().unwrap();
    synchronize(device).unwrap();
    assert_eq!(batches, reference(&source, 4));
    assert_eq!(Vec::<f32>::try_from(sum.to_device(Device::Cpu)).unwrap(), [3.0; 4]);
}

#[test]
fn a_device_gets_the_batches_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let device = Device::Cuda(0);
    let options = |workers, pinned| LoaderConfig {
        workers,
        prefetch: 3,
        device,
        pinned,
        epochs: Some(2),
        ..LoaderConfig::default()
    };
    // Pageable first: nothing may have allocated page-locked memory before.
    for pinned in [false, true] {
        for source in strategies(37, 5) {
            let expected = reference(&source, 2);
            for workers in [0, 2] {
                let loader = || Loader::new(source.clone(), &options(workers, pinned)).unwrap();
                // One at a time: memory is reused.
                let batches: Vec<_> = loader().map(|batch| content(&batch.unwrap())).collect();
                assert_eq!(batches, expected, "{workers} workers, pinned: {pinned}");

                // All held while others are made.
                let kept: Vec<Batch> = loader().collect::<Result<_>>().unwrap();
                assert!(kept.iter().all(|batch| batch.tokens.device() == device));
                assert_eq!(kept.iter().map(content).collect::<Vec<_>>(), expected);

                // Dropped with copies in progress; returned batches remain valid.
                let mut abandoned = loader();
                let first = abandoned.next().unwrap().unwrap();
                drop(abandoned);
                assert_eq!(content(&first), expected[0]);
            }
        }
        synchronize(device).unwrap();
        assert_eq!(pinned_bytes(device).unwrap().peak > 0, pinned);
    }
}
