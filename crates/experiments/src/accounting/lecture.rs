//! CS336, lecture 2, executed: each of its cells as a row with the expected figure and the found one.
//!
//! The lecture's own code is PyTorch; this runs the same statements through `tch` and the project's crates. Where the lecture
//! slips, the row has the right figure and names the lecture's.

mod cruncher;
mod gradients;
mod tensors;

use report::cli::Scale;
use report::{Case, Metric};
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;

/// A statement of the lecture, and what running it gave.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    /// The lecture's part.
    part: &'static str,
    /// The statement.
    statement: String,
    /// The unit of both figures; `holds` for a statement that is true (1) or not (0).
    unit: &'static str,
    /// The result of the lecture, corrected; `None` if only a measurement has one.
    expected: Option<f64>,
    /// Our result; `Err` with the reason why it was not measured.
    computed: Result<f64, String>,
    /// Largest relative distance at which the two agree.
    tolerance: f64,
}

impl Cell {
    /// A statement that is true or not.
    fn holds(part: &'static str, statement: &str, holds: bool) -> Self {
        Self::equal(part, statement, "holds", 1.0, f64::from(u8::from(holds)))
    }

    /// A figure that must be exact.
    fn equal(part: &'static str, statement: &str, unit: &'static str, expected: f64, computed: f64) -> Self {
        Self { expected: Some(expected), ..Self::measured(part, statement, unit, Ok(computed)) }
    }

    /// A figure that must be within a relative distance.
    fn near(self, tolerance: f64) -> Self {
        Self { tolerance, ..self }
    }

    /// A figure without an expectation.
    fn measured(
        part: &'static str,
        statement: &str,
        unit: &'static str,
        computed: Result<f64, String>,
    ) -> Self {
        Self { part, statement: statement.to_owned(), unit, expected: None, computed, tolerance: 0.0 }
    }

    /// Whether the found figure is as expected; `None` where nothing was expected or measured.
    fn agrees(&self) -> Option<bool> {
        let (expected, computed) = (self.expected?, *self.computed.as_ref().ok()?);
        Some(expected == computed || (computed / expected - 1.0).abs() <= self.tolerance)
    }

    fn metrics(&self) -> Vec<Metric> {
        let computed = match &self.computed {
            Ok(value) => Metric::exact("found", self.unit, *value),
            Err(why) => Metric::not_measured("found", self.unit, why),
        };
        let expected = self.expected.map(|value| Metric::exact("expected", self.unit, value));
        let agrees = self.agrees().map(|agrees| Metric::exact("agrees", "", f64::from(u8::from(agrees))));
        [expected, Some(computed), agrees].into_iter().flatten().collect()
    }
}

/// Executes all cells on `device`; the lecture's large product only at scale full and above.
///
/// # Errors
/// An operator that fails.
fn cells(device: Device, seed: u64, scale: Scale) -> anyhow::Result<Vec<Cell>> {
    runtime::random::seed(seed)?;
    let mut cells = tensors::cells(device)?;
    cells.extend(gradients::cells(device, scale)?);
    cells.extend(cruncher::cells(device, seed)?);
    Ok(cells)
}

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    bench.message("the lecture's cells");
    let cells = cells(bench.device, bench.seed, bench.scale)?;
    for (number, cell) in cells.iter().enumerate() {
        let case = Case::new()
            .with("part", cell.part)
            .with("number", number + 1)
            .with("statement", cell.statement.as_str());
        bench.put(&case, cell.metrics())?;
    }
    let agree = cells.iter().filter_map(Cell::agrees);
    let (right, all) = agree.fold((0, 0), |(right, all), agrees| (right + u32::from(agrees), all + 1));
    let summary = [
        Metric::exact("cells", "count", f64::from(all)),
        Metric::exact("cells_that_agree", "count", f64::from(right)),
    ];
    bench.put(&Case::new().with("part", "summary"), summary.into())
}

/// The values of a tensor in fp64.
fn values(tensor: &Tensor) -> anyhow::Result<Vec<f64>> {
    Ok(Vec::<f64>::try_from(&tensor.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?.f_reshape([-1])?)?)
}
