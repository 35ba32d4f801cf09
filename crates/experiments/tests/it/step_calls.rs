//! A bound on the host's work in a training step: the calls into libtorch and the allocations of one LoRA step, counted by Callgrind.
//!
//! On a GPU the host queues a step's operators while the device computes, so a step of small kernels takes as long as the host does. Both
//! counts are exact, and equal in every run. Where they increase, `callgrind_annotate --inclusive=yes` on such a run names the callers.

use std::fs::read_to_string;
use std::path::Path;
use std::process::Command;

use tempfile::tempdir;

/// Functions of `tch`'s C++ (`atg_…`, `at_…`) and of the shim (`rt_…`) that one step calls, and its allocations on the heap: an eighth
/// above the counts when the bounds were set, 15 693 and 17 838.
const MOST_CALLS: u64 = 17_500;
const MOST_ALLOCATIONS: u64 = 20_000;

/// At the beginning of this function a step ends: Callgrind writes what was counted since the step before.
const END_OF_STEP: &str = "training::optimizer::device_optimizer::DeviceOptimizer::zero_grad";

#[test]
fn a_lora_step_makes_few_calls_and_allocations() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: valgrind, which counts the calls, is not installed");
        return;
    }
    let folder = tempdir().unwrap();
    let out = folder.path().join("calls");
    let arguments = ["lora", "step", "--shape", "narrow", "--sequence", "16", "--train", "adapters"];
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--compress-strings=no", &format!("--dump-before={END_OF_STEP}")])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(env!("CARGO_BIN_EXE_experiments"))
        .args(arguments)
        .args(["--methods", "keep", "--repeats", "3"])
        .env("OMP_NUM_THREADS", "1")
        .env("CUDA_VISIBLE_DEVICES", "")
        .current_dir(folder.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&run.stderr);
    if errors.contains("unhandled instruction bytes") {
        eprintln!("skipped: this valgrind does not know an instruction that libtorch uses on this processor");
        return;
    }
    assert!(run.status.success(), "{errors}");
    // A dump for each step: the first one fills caches, and the measurement is set up before the second one.
    let [third, fourth] = [3, 4].map(|dump| Counts::read(&folder.path().join(format!("calls.{dump}"))));
    eprintln!("{fourth:?}");
    assert_eq!(third.calls, fourth.calls, "each step makes the same calls");
    let Counts { calls, allocations } = fourth;
    assert!((1000..=MOST_CALLS).contains(&calls), "{calls} calls; at most {MOST_CALLS}");
    assert!((1000..=MOST_ALLOCATIONS).contains(&allocations), "{allocations}; at most {MOST_ALLOCATIONS}");
}

#[derive(Debug, Default)]
struct Counts {
    calls: u64,
    allocations: u64,
}

impl Counts {
    /// Adds up the calls of a dump: a line `cfn=` with the called function, then one `calls=` with their number.
    fn read(path: &Path) -> Self {
        let text = read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (mut counts, mut called) = (Self::default(), "");
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("cfn=") {
                // A recursive call has its depth as a suffix.
                called = name.split('\'').next().unwrap_or(name);
            }
            let Some(rest) = line.strip_prefix("calls=") else { continue };
            let number: u64 = rest.split(' ').next().unwrap().parse().unwrap();
            match called {
                "malloc" | "calloc" | "realloc" | "posix_memalign" | "aligned_alloc" => {
                    counts.allocations += number;
                }
                _ if ["atg_", "at_", "rt_"].iter().any(|prefix| called.starts_with(prefix)) => {
                    counts.calls += number;
                }
                _ => {}
            }
        }
        counts
    }
}
