//! The flags that every command has, and the device that they choose.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::flags::Flags;
use crate::flags::table::COMMON;
use crate::output;
use crate::run::rank_group::Ranks;
use clap::Args;
use frugal::Config;
use frugal::config::origins::Origins;
use frugal::run_folder::RunRecord;
use runtime::collectives::Launch;
use runtime::device::Choice;
use serde_json::Value;
use tch::Device;

/// The device that is chosen.
const AUTO: &str = "auto";

/// Heading of [`Common`]'s flags in a subcommand's help.
const OPTIONS: &str = "Common options";

/// Flags that every subcommand has.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    #[command(flatten)]
    pub(crate) flags: Flags<COMMON>,
    /// Append the measurements of each training step to FILE, as JSON lines
    #[arg(long, value_name = "FILE", global = true, help_heading = OPTIONS)]
    pub(crate) records: Option<PathBuf>,
    /// Print a machine-readable result on standard output
    #[arg(long, global = true, help_heading = OPTIONS)]
    pub(crate) json: bool,
    /// Print results and errors only: no progress, no notes
    #[arg(long, short, global = true, help_heading = OPTIONS)]
    pub(crate) quiet: bool,
    /// The ranks of a training that a launcher started.
    #[arg(skip)]
    pub(crate) ranks: Option<Ranks>,
    /// Where the values of the configuration come from.
    #[arg(skip)]
    pub(crate) origins: Origins,
    /// The origins of values that this command was given, and no earlier one.
    #[arg(skip)]
    pub(crate) asked: Origins,
    /// The device that was chosen.
    #[arg(skip)]
    pub(crate) chosen: Arc<OnceLock<Device>>,
    /// The record of the training whose configuration is used.
    #[arg(skip)]
    pub(crate) earlier: Option<Arc<RunRecord>>,
}

impl Common {
    /// Writes a line to standard error, unless `--quiet`.
    pub(crate) fn note(&self, line: &str) {
        if !self.quiet {
            output::note(line);
        }
    }

    /// Returns the device. A device that `auto` chose is noted once.
    ///
    /// # Errors
    /// A device that does not exist.
    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        if let Some(device) = self.chosen.get() {
            return Ok(*device);
        }
        let device = self.select(self.device_name().unwrap_or(AUTO), self.json)?;
        Ok(*self.chosen.get_or_init(|| device))
    }

    /// The device on which weights are changed and written: the CPU unless another is asked for, because a GPU may not hold them all.
    ///
    /// # Errors
    /// A device that does not exist.
    pub(crate) fn device_of_weights(&self) -> anyhow::Result<Device> {
        match self.device_name().filter(|name| *name != AUTO) {
            Some(_) => self.device(),
            None => Ok(Device::Cpu),
        }
    }

    /// The device of a name; says which `auto` is, and why, unless the result stands alone.
    ///
    /// # Errors
    /// A device that does not exist.
    fn select(&self, name: &str, is_result_alone: bool) -> anyhow::Result<Device> {
        if name != AUTO {
            return Ok(runtime::device::select(name)?);
        }
        let launch = Launch::from_environment()?;
        let Choice { device, reason } = match &launch {
            // Groups of ranks compute there.
            Some(_) => Choice { device: Device::Cpu, reason: "several ranks".to_owned() },
            None => runtime::device::choose()?,
        };
        if launch.is_none_or(|launch| launch.rank == 0) && !is_result_alone {
            self.note(&format!("device: {} ({reason})", runtime::device::flag(device)));
        }
        Ok(device)
    }

    /// Replaces `auto` in a configuration by the device that it is here.
    ///
    /// # Errors
    /// Invalid variables of a launcher.
    pub(crate) fn choose_device(&self, config: &mut Config) -> anyhow::Result<()> {
        if config.training.device == AUTO {
            config.training.device = runtime::device::flag(self.select(AUTO, false)?);
        }
        Ok(())
    }

    /// The seed.
    pub(crate) fn seed(&self) -> u64 {
        self.flags.value("--seed").and_then(Value::as_u64).unwrap_or(0)
    }

    /// The device that is asked for.
    pub(crate) fn device_name(&self) -> Option<&str> {
        self.flags.text("--device")
    }
}
