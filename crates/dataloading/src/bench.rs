//! What packing, sampling and loading cost, over one table of sizes that the command line and the report share.

pub mod lengths;
pub mod packing;
pub mod sampler;
pub mod synthetic;
pub mod texts;
pub mod throughput;

use report::cli::Scale;
use report::{Case, Metric};

/// Figures of one case.
#[derive(Debug, Clone)]
pub struct Figures {
    /// The experiment.
    pub experiment: &'static str,
    /// Which case.
    pub case: Case,
    /// What came out.
    pub metrics: Vec<Metric>,
}

/// How often a fast piece of work is repeated.
fn repeats(scale: Scale) -> usize {
    match scale {
        Scale::Smoke => 3,
        Scale::Laptop | Scale::Paper => 21,
    }
}

/// Seconds of each of `repeats` runs, after one to warm up.
fn seconds<R>(repeats: usize, mut run: impl FnMut() -> R) -> Vec<f64> {
    std::hint::black_box(run());
    let sample = |_| {
        let began = std::time::Instant::now();
        let result = run();
        let seconds = began.elapsed().as_secs_f64();
        std::hint::black_box(result);
        seconds
    };
    (0..repeats).map(sample).collect()
}
