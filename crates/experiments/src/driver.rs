//! The driver of every experiment: device, seed, scale, progress and records.
//!
//! An experiment is a table of cases and a function that measures one of them, which it gives to [`Bench::each`], or to
//! [`Bench::in_turns`] where a drift of the machine must be in all cases alike. The driver does the rest.

use std::path::Path;

use report::cli::{CommonArgs, Scale};
use report::measurements::ROUND_KEY;
use report::turns::Turns;
use report::{Case, Metric, Progress, Sink};
use tch::Device;

use crate::environment;

/// The flags that all experiments have.
#[derive(clap::Args, Clone)]
pub(crate) struct Driver {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// How large the experiment is, where it has sizes
    #[arg(long, value_enum, default_value_t, global = true)]
    pub(crate) scale: Scale,
    /// Name of the experiment in the records [default: the verb's own]
    #[arg(long, value_name = "NAME", global = true)]
    experiment: Option<String>,
    #[arg(skip)]
    has_one_size: bool,
    #[arg(skip)]
    is_on_cpu: bool,
}

impl Driver {
    /// Returns the driver of experiments that are the same at every scale; their records name none.
    pub(crate) fn one_size(&self) -> Self {
        Self { has_one_size: true, ..self.clone() }
    }

    /// Returns the driver of experiments that run on the processor, whatever `--device` is.
    pub(crate) fn on_cpu(&self) -> Self {
        Self { is_on_cpu: true, ..self.clone() }
    }

    /// Runs an experiment, whose records are of the experiment `name`.
    ///
    /// # Errors
    /// A device that is not there, records that cannot be written, and those of the experiment.
    pub(crate) fn run(
        &self,
        name: &str,
        experiment: impl FnOnce(&mut Bench) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Self { common, scale, .. } = self;
        let device = if self.is_on_cpu { Device::Cpu } else { runtime::device::select(&common.device)? };
        runtime::random::seed(common.seed)?;
        let sink = Sink::new(common, environment::detect(device)?, (!self.has_one_size).then_some(*scale))?;
        experiment(&mut Bench {
            device,
            seed: common.seed,
            scale: *scale,
            common,
            name: self.experiment.as_deref().unwrap_or(name),
            sink,
            progress: Progress::new(1),
            turns: Turns::from_environment(1),
            round: None,
        })
    }
}

/// The device and scale of an experiment, and the sink of its records.
pub(crate) struct Bench<'a> {
    pub(crate) device: Device,
    pub(crate) seed: u64,
    pub(crate) scale: Scale,
    common: &'a CommonArgs,
    name: &'a str,
    sink: Sink,
    progress: Progress,
    turns: Turns,
    /// The round that is measured, of a case in turns.
    round: Option<u64>,
}

impl Bench<'_> {
    /// Returns the value for the scale, from those for smoke, laptop, full and paper.
    pub(crate) fn sized<T>(&self, [smoke, laptop, full, paper]: [T; 4]) -> T {
        match self.scale {
            Scale::Smoke => smoke,
            Scale::Laptop => laptop,
            Scale::Full => full,
            Scale::Paper => paper,
        }
    }

    /// Measures one case after the other. Progress shows each by its label.
    ///
    /// # Errors
    /// Errors of `measure`.
    pub(crate) fn each<C>(
        &mut self,
        cases: impl IntoIterator<Item = C>,
        label: impl Fn(&C) -> String,
        mut measure: impl FnMut(&mut Self, C) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let cases: Vec<C> = cases.into_iter().collect();
        self.expect(cases.len());
        for case in cases {
            self.message(&label(&case));
            measure(self, case)?;
            self.step();
        }
        Ok(())
    }

    /// Measures all cases in each round, and returns the samples of each case, by round. Every round begins with another case, so that
    /// none is always the first or the last.
    ///
    /// # Errors
    /// Errors of `measure`, whose argument is the number of the round.
    pub(crate) fn in_turns<C, S>(
        &mut self,
        rounds: usize,
        cases: &[C],
        label: impl Fn(&C) -> String,
        mut measure: impl FnMut(usize, &C) -> anyhow::Result<S>,
    ) -> anyhow::Result<Vec<Vec<S>>> {
        let mut samples: Vec<Vec<S>> = cases.iter().map(|_| Vec::new()).collect();
        self.expect(rounds * cases.len());
        for round in 0..rounds {
            for turn in 0..cases.len() {
                let index = (turn + round * cases.len() / rounds) % cases.len();
                self.message(&format!("{}, round {}", label(&cases[index]), round + 1));
                samples[index].push(measure(round, &cases[index])?);
                self.step();
            }
        }
        Ok(samples)
    }

    /// Begins the turns of so many cases with a program that this one is compared with.
    pub(crate) fn expect_turns(&mut self, cases: usize) {
        self.turns = Turns::from_environment(cases as u64);
    }

    /// Measures the rounds of a prepared case, each when it is this program's turn ([`report::turns`]); what is recorded meanwhile has the
    /// round's number. Without another program there is one round, without a number.
    ///
    /// # Errors
    /// Errors of `measure`; the end of the process that gives the turns.
    pub(crate) fn rounds(
        &mut self,
        mut measure: impl FnMut(&mut Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for round in self.turns.rounds() {
            self.turns.wait()?;
            self.round = round;
            let measured = measure(self);
            self.round = None;
            measured?;
        }
        Ok(())
    }

    /// Begins the progress of so many steps.
    pub(crate) fn expect(&mut self, steps: usize) {
        self.progress = Progress::new(steps as u64);
    }

    /// Says what is under way.
    pub(crate) fn message(&self, message: &str) {
        self.progress.message(message);
    }

    /// Ends a step.
    pub(crate) fn step(&mut self) {
        self.progress.step();
    }

    /// Writes text to standard error, above the progress bar.
    pub(crate) fn print(&self, text: &str) {
        self.progress.print(text);
    }

    /// Records the metrics of a case.
    ///
    /// # Errors
    /// A file or a standard output that cannot be written.
    pub(crate) fn put(&mut self, case: &Case, metrics: Vec<Metric>) -> anyhow::Result<()> {
        match self.round {
            Some(round) => self.sink.put(self.name, &case.clone().with(ROUND_KEY, round), metrics),
            None => self.sink.put(self.name, case, metrics),
        }
    }

    /// Records figures, each with its case.
    ///
    /// # Errors
    /// Same as [`Bench::put`].
    pub(crate) fn put_all(&mut self, figures: Vec<(Case, Metric)>) -> anyhow::Result<()> {
        figures.into_iter().try_for_each(|(case, metric)| self.put(&case, vec![metric]))
    }

    /// Returns the device as the command line names it.
    pub(crate) fn device_flag(&self) -> &str {
        &self.common.device
    }

    /// Returns the file of the records, if they go to one.
    pub(crate) fn records(&self) -> Option<&Path> {
        self.common.records.as_deref()
    }
}
