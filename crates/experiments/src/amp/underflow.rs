//! `amp underflow`: the gradients that underflow in fp16, by exponent and by scale.

use std::sync::Arc;

use amp::Autocast;
use report::{Case, Metric};
use tch::Kind;

use super::gradients::{GradientKind, GradientRecorder, Histogram};
use super::sizes::Sizes;
use super::training::{Trained, Training};
use crate::corpus::DataArgs;
use crate::driver::Bench;

/// Exponents of scales at which the shares are given.
const SCALES: std::ops::RangeInclusive<i64> = -8..=40;
/// Exponents of scales at which a backward pass in fp16 is counted as well.
const COUNTED: [i64; 4] = [0, 8, 16, 24];

pub(crate) fn run(bench: &mut Bench, data: &DataArgs) -> anyhow::Result<()> {
    let device = bench.device;
    let sizes = Sizes::new(bench.scale, device, bench.seed);
    let corpus = sizes.corpus(&data.data, bench.scale)?;
    let training = Training { steps: sizes.sweep_steps, ..sizes.training.clone() };
    bench.message("training in fp32");
    let trained = Trained::in_fp32(&corpus, &training)?;
    bench.message("gradients in fp32");
    let exact = Arc::new(GradientRecorder::new(None));
    trained.backward(exact.clone(), 1.0)?;
    for kind in GradientKind::ALL {
        put_exact(bench, kind, &exact.histogram(kind))?;
    }
    let label = |log2: &i64| format!("gradients in fp16, scale 2^{log2}");
    bench.each(COUNTED, label, |bench, log2| {
        let rounded = Arc::new(GradientRecorder::new(Some(Autocast::new(Kind::Half)?.policy())));
        trained.backward(rounded.clone(), 2f64.powi(i32::try_from(log2)?))?;
        for kind in GradientKind::ALL {
            let (full, low) = (exact.histogram(kind), rounded.histogram(kind));
            let case = Case::new().with("gradients", kind.name()).with("log2_scale", log2);
            // Gradients that are zero in fp32 too (a unit that is off, a token that did not occur) do not count as underflow.
            let lost =
                low.zeros.saturating_sub(full.zeros) as f64 / (full.total() - full.zeros).max(1) as f64;
            bench.put(&case, vec![Metric::exact("counted_underflow", "ratio", lost)])?;
        }
        Ok(())
    })
}

fn put_exact(bench: &mut Bench, kind: GradientKind, histogram: &Histogram) -> anyhow::Result<()> {
    let case = || Case::new().with("gradients", kind.name());
    let total = histogram.total().max(1) as f64;
    for (exponent, count) in &histogram.exponents {
        let case = case().with("exponent", *exponent);
        bench.put(&case, vec![Metric::exact("share_of_gradients", "ratio", *count as f64 / total)])?;
    }
    for log2 in SCALES {
        let metrics = vec![
            Metric::exact("underflow", "ratio", histogram.underflow(log2)),
            Metric::exact("subnormal", "ratio", histogram.subnormal(log2)),
            Metric::exact("overflow", "ratio", histogram.overflow(log2)),
        ];
        bench.put(&case().with("log2_scale", log2), metrics)?;
    }
    let metrics = vec![
        Metric::exact("zero_share", "ratio", histogram.zeros as f64 / total),
        Metric::exact("numbers", "count", total),
    ];
    bench.put(&case(), metrics)
}
