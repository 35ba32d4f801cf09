//! The output folder of a training, before the training writes to it.

use std::path::Path;

use anyhow::{Context, bail};
use frugal::Config;
use frugal::config::{CONFIG_FILE, MasterWeights};
use frugal::lora::peft::TENSORS_FILE as ADAPTER;
use frugal::loss_log::Losses;
use frugal::run_folder::{BEST, CHECKPOINTS, LOSSES, RunRecord, State};
use frugal::training::checkpoint::{self, Checkpoints};

use crate::common_flags::Common;
use crate::folder::output_folder::{self, Existing};
use crate::folder::run_record::About;
use crate::output::shell_command::more_steps;
use frugal::run_folder::MODEL;

/// Where a training writes.
pub(crate) struct Saving<'a> {
    pub(crate) out: &'a Path,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) resume: bool,
    /// The run record's entries on the data and the plan.
    pub(crate) about: About,
}

impl<'a> Saving<'a> {
    /// Refuses an output folder that cannot be taken; before anything is read.
    ///
    /// # Errors
    /// A folder with what no training has written; one that a process writes to; one with an earlier run that is not to be resumed.
    pub(crate) fn check(out: &Path, common: &Common, resume: bool) -> anyhow::Result<()> {
        if !common.is_first() {
            return Ok(());
        }
        output_folder::check(out, Existing::Training)?;
        let checkpoints = out.join(CHECKPOINTS);
        if checkpoints.is_dir() && checkpoint::is_in_use(&checkpoints) {
            return Err(frugal::training::Error::Locked { folder: checkpoints }.into());
        }
        refuse_earlier(out, common, resume)
    }

    /// Makes the output folder.
    ///
    /// # Errors
    /// A folder that cannot be written; one with the checkpoints of an earlier run that is not to be resumed.
    pub(crate) fn open(
        out: &'a Path,
        common: &Common,
        config: &Config,
        resume: bool,
    ) -> anyhow::Result<Self> {
        common.in_turn("the output folder", || Self::open_alone(out, common, config, resume))
    }

    fn open_alone(out: &'a Path, common: &Common, config: &Config, resume: bool) -> anyhow::Result<Self> {
        if !common.is_first() {
            let checkpoints = Checkpoints::reader(&out.join(CHECKPOINTS));
            return Ok(Self { out, checkpoints, resume, about: About::default() });
        }
        std::fs::create_dir_all(out).with_context(|| format!("--out {} cannot be created", out.display()))?;
        let checkpoints = Checkpoints::open(&out.join(CHECKPOINTS), config.training.keep)?;
        refuse_earlier(out, common, resume)?;
        Ok(Self { out, checkpoints, resume, about: About::default() })
    }
}

/// The configuration of a training that continues the one in a folder: where the first plan decided on master weights, that holds.
pub(crate) fn as_begun(config: &Config, out: &Path) -> Config {
    let mut config = config.clone();
    if let (MasterWeights::Auto, Ok(earlier)) =
        (config.optimizer.master_weights, Config::read(&out.join(CONFIG_FILE)))
    {
        config.optimizer.master_weights = earlier.optimizer.master_weights;
    }
    config
}

/// Refuses an output folder with what an earlier run has left, unless its checkpoints are there and it is resumed; and a configuration that
/// no run wrote, which the run's own would replace.
fn refuse_earlier(out: &Path, common: &Common, resume: bool) -> anyhow::Result<()> {
    let checkpoints = out.join(CHECKPOINTS);
    let has_checkpoints = checkpoints.is_dir() && !checkpoint::steps(&checkpoints)?.is_empty();
    if has_checkpoints && resume {
        return Ok(());
    }
    let shown = out.display();
    let record = RunRecord::read(out)?;
    let is_recorded = record.is_some();
    let state = record.and_then(|record| record.outcome).map(|outcome| outcome.state);
    if has_checkpoints {
        if common.is_restarted() {
            bail!("{shown} holds checkpoints; a training that --restarts starts again needs --resume");
        }
        if state == Some(State::Finished) {
            bail!(
                "{shown} holds a finished run; give another --out, or train it further: {}",
                more_steps(out)
            );
        }
        let resume = common.resume_command(out);
        bail!("{shown} holds checkpoints of an earlier run; resume it with {resume}, or give an empty folder")
    }
    let weights = [(ADAPTER, out.join(ADAPTER).exists()), (MODEL, out.join(MODEL).is_dir())];
    if let Some((weights, _)) = weights.into_iter().find(|(_, is_there)| *is_there) {
        let cannot = if resume { ", so it cannot be resumed" } else { "" };
        bail!(
            "{shown} holds {weights} of an earlier run, whose checkpoints are gone{cannot}; give another --out"
        );
    }
    let has_steps = || Losses::read(&out.join(LOSSES)).is_ok_and(|losses| losses.first.is_some());
    if !resume && (out.join(BEST).exists() || state.is_some() || has_steps()) {
        let resume = common.resume_command(out);
        bail!(
            "{shown} holds an earlier run without a checkpoint; start it again from its beginning with {resume}, or give another --out"
        );
    }
    if !is_recorded && out.join(CONFIG_FILE).is_file() {
        bail!(
            "{shown} holds a {CONFIG_FILE} that no run wrote, and the run would replace it by its own; give another --out"
        );
    }
    Ok(())
}
