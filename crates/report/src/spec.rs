//! The registered experiments, claims and comparisons of a crate, from `crates/experiments/experiments/<crate>.toml`.
//!
//! Everything that runs and renders an experiment reads it from there, so that a new experiment is a new file and no
//! change in this crate or in `xtask`. An unknown field is an error.
//!
//! ```
//! let specs: report::Specs = toml::from_str(r#"
//!     [[experiment]]
//!     name = "swiglu-ckpt"
//!     title = "SwiGLU: keep or recompute"
//!     about = "What each level costs in time and saves in memory."
//!     args = ["swiglu-ckpt", "bench"]
//!
//!     [[experiment.table]]
//!     title = "Time and memory"
//!     rows = ["batch", "level"]
//!     columns = ["forward_seconds", "peak_bytes"]
//!
//!     [[claim]]
//!     name = "swiglu-ckpt/tiled-peak"
//!     what = "peak of the tiled level above weights, against keeping everything"
//!     experiment = "swiglu-ckpt"
//!     metric = "peak_ratio"
//!     case = { level = "InputOnlyTiled" }
//!     op = "<="
//!     limit = 0.35
//!     run = "cargo xtask run-all --only swiglu-ckpt"
//! "#)?;
//! assert_eq!(specs.experiments[0].tables[0].rows, ["batch", "level"]);
//! assert!(specs.claims[0].op.holds(0.31, specs.claims[0].limit));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod article;
mod load;
mod part;
mod template;
mod view;

use serde::Deserialize;

use crate::cli::Scale;
use crate::environment::Environment;
use crate::filter::Filter;
pub use article::{
    Article, Exhibit, Figure, FigureKind, Front, Grid, GridColumn, GridRow, Item, Machine, Measure, Panel,
    Peer, Says,
};
pub use load::{FOLDER, SpecError};
pub use part::{Part, Row};
pub use template::{Operand, Template};
pub(crate) use template::{Piece, Quantity};
pub use view::{Finding, Plot, PlotKind, Table, Wording};

/// Everything that the crates of a workspace register.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Specs {
    /// `[[experiment]]`: programs whose records the report shows.
    #[serde(rename = "experiment")]
    pub experiments: Vec<Experiment>,
    /// `[[claim]]`: claims, with their limits.
    #[serde(rename = "claim")]
    pub claims: Vec<Claim>,
    /// `[[comparison]]`: programs that are measured against another program, alternately.
    #[serde(rename = "comparison")]
    pub comparisons: Vec<Comparison>,
    /// `[[part]]`: the assignments' questions, and which sections belong to them.
    #[serde(rename = "part")]
    pub parts: Vec<Part>,
    /// `[front]`: what the page begins with.
    pub front: Option<Front>,
    /// `[[article]]`: the page's articles.
    #[serde(rename = "article")]
    pub articles: Vec<Article>,
}

impl Specs {
    /// Returns whether an experiment or a comparison has this name.
    pub fn has(&self, name: &str) -> bool {
        self.experiment(name).is_some() || self.comparison(name).is_some()
    }

    /// Returns the heading of an experiment's or a comparison's section.
    pub fn title(&self, name: &str) -> Option<&str> {
        let experiment = self.experiment(name).map(|e| e.title.as_str());
        experiment.or_else(|| self.comparison(name).map(|c| c.title.as_str()))
    }

    /// Returns the command that runs an experiment or a comparison.
    pub fn command(&self, name: &str) -> Option<String> {
        let verb = if self.experiment(name).is_some() { "run-all" } else { "compare" };
        self.has(name).then(|| format!("cargo xtask {verb} --only {name}"))
    }

    /// Returns the experiment of this name.
    pub fn experiment(&self, name: &str) -> Option<&Experiment> {
        self.experiments.iter().find(|experiment| experiment.name == name)
    }

    /// Returns the comparison of this name.
    pub fn comparison(&self, name: &str) -> Option<&Comparison> {
        self.comparisons.iter().find(|comparison| comparison.name == name)
    }
}

/// A program whose records make a section of the report.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// The name that its records carry; also the name of its CSV file, so letters, digits, `-` and `_` only.
    #[serde(deserialize_with = "view::file_name")]
    pub name: String,
    /// Heading of its section.
    pub title: String,
    /// Description of what it shows, in Markdown.
    pub about: String,
    /// Cargo package, whose binary has the same name; `experiments` where this is missing.
    #[serde(default = "experiments")]
    pub package: String,
    /// Packages whose programs it starts, which stand beside its own.
    #[serde(default)]
    pub starts: Vec<String>,
    /// Arguments of the binary. `xtask` appends `--scale` (unless `one_size` is set), `--device`, `--records` and `--seed`.
    #[serde(default)]
    pub args: Vec<String>,
    /// The scales at which it runs; all if missing.
    #[serde(default)]
    pub scales: Option<Vec<Scale>>,
    /// Whether it is the same at every scale: its program gets no `--scale`.
    #[serde(default)]
    pub one_size: bool,
    /// Seconds that it may take at scale laptop on two cores. A run names the experiments that took longer; all budgets together are at
    /// most the 600 s of a run.
    #[serde(default = "default_laptop_seconds")]
    pub laptop_seconds: f64,
    /// Tables, in the order of the page.
    #[serde(default, rename = "table")]
    pub tables: Vec<Table>,
    /// Plots, in the order of the page.
    #[serde(default, rename = "plot")]
    pub plots: Vec<Plot>,
    /// Findings, in the order of the page.
    #[serde(default, rename = "finding")]
    pub findings: Vec<Finding>,
}

/// The budget of an experiment that names none.
fn default_laptop_seconds() -> f64 {
    6.0
}

/// The package that measures.
fn experiments() -> String {
    "experiments".to_owned()
}

impl Experiment {
    /// Returns whether it is meant to run at `scale`.
    pub fn runs_at(&self, scale: Scale) -> bool {
        self.scales.as_ref().is_none_or(|scales| scales.contains(&scale))
    }
}

/// A claim: what is measured, its limit, and the command that measures it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// `crate/what`, for example `swiglu-ckpt/save-all-time`.
    pub name: String,
    /// Description of the claimed figure.
    pub what: String,
    /// The experiment or comparison whose records decide.
    pub experiment: String,
    /// The metric that is compared with the limit.
    pub metric: String,
    /// Which cases; all if missing. The worst of them decides.
    #[serde(default)]
    pub case: Filter,
    /// The kind of device whose records decide; any if missing.
    #[serde(default)]
    pub device: Option<DeviceKind>,
    /// On which side of the limit the value must be.
    pub op: Op,
    /// The limit, in the metric's unit.
    #[serde(deserialize_with = "view::finite")]
    pub limit: f64,
    /// The unit of `limit` where there is no record to take it from.
    #[serde(default)]
    pub unit: String,
    /// The command that measures it.
    pub run: String,
}

/// A kind of device. Records of two GPUs are never judged together, whatever their kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// A GPU.
    Gpu,
}

impl DeviceKind {
    /// Returns whether a measurement was made on such a device.
    pub fn is_of(self, environment: &Environment) -> bool {
        (environment.device == "cpu") == (self == Self::Cpu)
    }
}

/// How a claim's value relates to its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Op {
    /// `<=`: the largest value decides.
    #[serde(rename = "<=")]
    AtMost,
    /// `>=`: the smallest value decides.
    #[serde(rename = ">=")]
    AtLeast,
    /// `==`: the value farthest from the limit decides.
    #[serde(rename = "==")]
    Equal,
}

impl Op {
    /// Returns whether `value` is within `limit`. NaN never is.
    pub fn holds(self, value: f64, limit: f64) -> bool {
        match self {
            Self::AtMost => value <= limit,
            Self::AtLeast => value >= limit,
            Self::Equal => value == limit,
        }
    }

    /// How much worse a value is for the claim: larger is worse.
    pub(crate) fn badness(self, value: f64, limit: f64) -> f64 {
        match self {
            Self::AtMost => value,
            Self::AtLeast => -value,
            Self::Equal => (value - limit).abs(),
        }
    }

    /// Returns the operator as it is written: `<=`, `>=` or `==`.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::AtMost => "<=",
            Self::AtLeast => ">=",
            Self::Equal => "==",
        }
    }
}

/// A program of this project and a peer that alternately do the same work on the same machine.
///
/// Both append records under the comparison's name, with the case keys `impl` (`frugal`, `pytorch`) and `round`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// The name that the records of both programs carry.
    #[serde(deserialize_with = "view::file_name")]
    pub name: String,
    /// Heading of its section.
    pub title: String,
    /// Description of what is compared, in Markdown.
    pub about: String,
    /// Cargo package of our program, whose binary has the same name; `experiments` where this is missing.
    #[serde(default = "experiments")]
    pub package: String,
    /// Arguments of our program.
    #[serde(default)]
    pub args: Vec<String>,
    /// The peer's script under `xtask/peers`, for example `swiglu.py`.
    pub peer: String,
    /// Arguments of the peer.
    #[serde(default)]
    pub peer_args: Vec<String>,
    /// Whether the peer runs our program, on files that it has written, and records both.
    #[serde(default)]
    pub peer_runs_ours: bool,
    /// Python modules that the peer imports besides torch.
    #[serde(default)]
    pub peer_modules: Vec<String>,
    /// Which PyTorch the peer runs on.
    #[serde(default)]
    pub peer_torch: PeerTorch,
    /// Whether each side is one process that measures a round whenever it is its turn, instead of a process for each round.
    #[serde(default)]
    pub in_turns: bool,
    /// The dtypes that both sides measure, one after the other; empty where the arguments say it.
    #[serde(default)]
    pub dtypes: Vec<String>,
    /// Number of rounds; both run once in each.
    #[serde(deserialize_with = "view::at_least_one")]
    pub rounds: u32,
    /// Number of rounds from which on a run that was ended counts; all if missing.
    #[serde(default)]
    pub needed_rounds: Option<u32>,
    /// What differs on a GPU.
    #[serde(default)]
    pub gpu: Sizes,
    /// What differs where it is only to be shown that both sides run.
    #[serde(default)]
    pub smoke: Sizes,
    /// The ratios that are computed of each round.
    #[serde(default, rename = "ratio")]
    pub ratios: Vec<Ratio>,
    /// Tables, in the order of the page. Rounds appear in them as one value with its spread.
    #[serde(default, rename = "table")]
    pub tables: Vec<Table>,
    /// Plots, in the order of the page.
    #[serde(default, rename = "plot")]
    pub plots: Vec<Plot>,
    /// Findings, in the order of the page.
    #[serde(default, rename = "finding")]
    pub findings: Vec<Finding>,
}

/// What a comparison takes in place of its own, each where it is given.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sizes {
    /// Arguments of our program.
    pub args: Option<Vec<String>>,
    /// Arguments of the peer.
    pub peer_args: Option<Vec<String>>,
    /// The dtypes.
    pub dtypes: Option<Vec<String>>,
    /// Whether the sides take turns.
    pub in_turns: Option<bool>,
    /// Number of rounds.
    pub rounds: Option<u32>,
    /// Number of rounds from which on a run that was ended counts.
    pub needed_rounds: Option<u32>,
}

impl Comparison {
    /// Returns this comparison with `sizes` in place of its own.
    #[must_use]
    pub fn with(mut self, sizes: &Sizes) -> Self {
        let Sizes { args, peer_args, dtypes, in_turns, rounds, needed_rounds } = sizes.clone();
        self.args = args.unwrap_or(self.args);
        self.peer_args = peer_args.unwrap_or(self.peer_args);
        self.dtypes = dtypes.unwrap_or(self.dtypes);
        self.in_turns = in_turns.unwrap_or(self.in_turns);
        self.rounds = rounds.unwrap_or(self.rounds).max(1);
        self.needed_rounds = needed_rounds.or(self.needed_rounds);
        self
    }

    /// Returns the number of rounds from which on a run that was ended counts.
    pub fn needed_rounds(&self) -> u32 {
        self.needed_rounds.map_or(self.rounds, |needed| needed.min(self.rounds))
    }
}

/// Which PyTorch a peer runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerTorch {
    /// The newest release, which is what a user would pick.
    #[default]
    Newest,
    /// The release whose libtorch our programs link, where both sides shall run the same kernels.
    Linked,
}

/// A ratio of our value to theirs, computed within each round so that drift of the machine cancels.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ratio {
    /// The metric of both.
    pub metric: String,
    /// The cases of the numerator.
    pub ours: Filter,
    /// The cases of the denominator.
    pub theirs: Filter,
    /// The name of the resulting metric.
    #[serde(rename = "as")]
    pub name: String,
    /// Case keys which both sides share. A key that `ours` or `theirs` fixes is not matched on that side, so that
    /// every level can be divided by one baseline.
    #[serde(default)]
    pub per: Vec<String>,
}
