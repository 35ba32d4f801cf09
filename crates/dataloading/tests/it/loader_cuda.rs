//! The loader on a CUDA device: the batches of the CPU, whatever is kept, dropped or under way.
//!
//! One test, because what it holds of page-locked memory is the process's.

use crate::strategies::{content, reference, strategies};
use dataloading::{Batch, Loader, LoaderOptions, Result};
use runtime::device::{pinned_bytes, synchronize};
use tch::Device;

#[test]
#[expect(clippy::print_stdout, reason = "a test that does nothing says so")]
fn a_device_gets_the_batches_of_the_cpu() {
    if !tch::Cuda::is_available() {
        println!("skipped: no CUDA device");
        return;
    }
    let device = Device::Cuda(0);
    let options = |workers, pinned| LoaderOptions {
        workers,
        prefetch: 3,
        device,
        pinned,
        epochs: Some(2),
        ..LoaderOptions::default()
    };
    // Pageable first: nothing may have asked for page-locked memory before.
    for pinned in [false, true] {
        for source in strategies(37, 5) {
            let expected = reference(&source, 2);
            for workers in [0, 2] {
                let loader = || Loader::new(source.clone(), &options(workers, pinned)).unwrap();
                // One at a time: memory is used again.
                let found: Vec<_> = loader().map(|batch| content(&batch.unwrap())).collect();
                assert_eq!(found, expected, "{workers} workers, pinned: {pinned}");

                // All alive while others are made.
                let kept: Vec<Batch> = loader().collect::<Result<_>>().unwrap();
                assert!(kept.iter().all(|batch| batch.tokens.device() == device));
                assert_eq!(kept.iter().map(content).collect::<Vec<_>>(), expected);

                // Dropped with copies under way; what was handed out stays.
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
