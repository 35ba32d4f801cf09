//! The ranks of a training that `frugal launch` or torchrun started.
//!
//! Every rank reads the data and the model. Rank 0 alone prints, and writes the output folder.

use std::fmt;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use frugal::{Config, Recipe};
use report::cli::Failure;
use runtime::collectives::{Group, GroupConfig, Launch, ReduceConfig, Store};
use serde_json::{Value, json};
use sharding::Mesh;
use tch::{Device, Tensor};

use super::rank_group::Ranks;
use crate::common_flags::Common;
use crate::output::shell_command::shell_word;

/// Settings that may differ from machine to machine; what they name is compared where it is read.
const PATHS: [&str; 5] = ["model.name", "data.source", "data.validation", "data.tokenizer", "offload.folder"];

/// The variable with the seconds of `frugal launch --timeout`.
pub(crate) const TIMEOUT: &str = "FRUGAL_RANK_TIMEOUT";

/// The variable that allows ranks on GPUs, connected by NCCL.
const TRY_NCCL: &str = "FRUGAL_TRY_NCCL";

/// How long ranks wait for one that reads data, or the model.
const PREPARATION: Duration = Duration::from_secs(24 * 3600);

/// A training that was interrupted.
#[derive(Debug)]
pub(crate) struct Interrupted(pub(crate) String);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Interrupted {}

/// The exit status of a program that Ctrl-C ends, as shells expect it: 128 and the number of the signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// Gives an interruption its exit status.
pub(crate) fn with_status(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<Interrupted>() {
        Ok(Interrupted(message)) => Failure { status: INTERRUPTED, message }.into(),
        Err(error) => error,
    }
}

/// Runs a training, as one of the ranks if a launcher started this process.
///
/// # Errors
/// Any error of the training; invalid variables of the launcher; ranks that do not come, or have another configuration; techniques that do
/// not go together with several ranks. Of an interruption, on the first rank of each machine.
pub(crate) fn run(
    common: &Common,
    config: &Config,
    training: impl FnOnce(&Common) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let common = join(common, config)?;
    let result = training(&common);
    match &common.ranks {
        // Rank 0 keeps what the others need to say that they have come to their end.
        Some(ranks) if result.as_ref().err().is_none_or(|error| error.is::<Interrupted>()) => {
            ranks.preparation.barrier("end")?;
            match result {
                Err(_) if ranks.is_first() => result,
                Err(_) if ranks.launch.local_rank == 0 => {
                    Err(Interrupted("interrupted; rank 0 says after which step".to_owned()).into())
                }
                _ => Ok(()),
            }
        }
        _ => result,
    }
}

/// Connects with the other ranks if a launcher started this process, and checks the configuration against their number. The ranks but
/// the first print nothing.
///
/// # Errors
/// Invalid variables of the launcher; ranks that do not come; techniques that cannot be combined with several ranks.
fn join(common: &Common, config: &Config) -> anyhow::Result<Common> {
    let Some(launch) = Launch::from_environment()? else { return Ok(common.clone()) };
    let device = device(config, &launch)?;
    Recipe::new(config)?.check_ranks_on(launch.world_size, device)?;
    runtime::device::make_current(device)?;
    let timeout = timeout()?;
    let store = Store::connect(&launch, timeout)?;
    let preparation =
        Group::new(&store, "preparation", GroupConfig { timeout: PREPARATION, ..GroupConfig::default() })?;
    let mut fields = vec![("torch".to_owned(), runtime::torch_version().to_owned())];
    flatten("", &serde_json::to_value(config)?, &mut fields);
    fields.retain(|(name, _)| !PATHS.contains(&name.as_str()));
    agree(&preparation, &fields)?;
    let group = Group::new(&store, "training", GroupConfig { timeout, ..GroupConfig::default() })?;
    let mesh = match device {
        Device::Cpu => Mesh::new(&group, config.optimizer.replicas)?,
        device => {
            let options = GroupConfig { timeout, device, ..GroupConfig::default() };
            Mesh::over_devices(&group, &group.reconnect("devices", options)?, config.optimizer.replicas)?
        }
    };
    let mesh = mesh.with_sequence(config.training.sequence_parallel_size)?;
    let ranks = Ranks { preparation, group, mesh, launch };
    let quiet = Common { quiet: true, json: false, records: None, ..common.clone() };
    let own = if ranks.is_first() { common.clone() } else { quiet };
    Ok(Common { ranks: Some(ranks), ..own })
}

/// Where this rank computes: on the CPU, unless [`TRY_NCCL`] allows another device. `cuda` is the GPU with this process's number on its
/// machine.
fn device(config: &Config, launch: &Launch) -> anyhow::Result<Device> {
    match &*config.training.device {
        _ if std::env::var_os(TRY_NCCL).is_none_or(|value| value != "1") => Ok(Device::Cpu),
        "auto" | "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(runtime::device::select(&format!("cuda:{}", launch.local_rank))?),
        named => Ok(runtime::device::select(named)?),
    }
}

/// How long a rank waits for the others in one operation.
fn timeout() -> anyhow::Result<Duration> {
    let Some(text) = std::env::var_os(TIMEOUT) else { return Ok(GroupConfig::default().timeout) };
    let seconds = text.to_str().and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0);
    seconds.map(Duration::from_secs).with_context(|| format!("{TIMEOUT} is {text:?}; expected seconds"))
}

/// The recipe of this process's training.
///
/// # Errors
/// Techniques that cannot be combined.
pub(crate) fn recipe(common: &Common, config: &Config) -> anyhow::Result<Recipe> {
    let recipe = Recipe::new(config)?;
    Ok(match &common.ranks {
        Some(ranks) => recipe.over(ranks.mesh.clone())?,
        None => recipe,
    })
}

/// The values of a JSON text by their keys, behind `prefix`.
pub(crate) fn flatten(prefix: &str, value: &Value, into: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            flatten(&key, value, into);
        }),
        value => into.push((prefix.to_owned(), value.to_string())),
    }
}

fn agree(group: &Group, fields: &[(String, String)]) -> anyhow::Result<()> {
    let fields: Vec<(&str, &str)> =
        fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Ok(group.agree(&fields)?)
}

/// Tells torchrun why this rank has failed, in the file that it names.
pub(crate) fn report_failure(error: &anyhow::Error) {
    let Some(path) = std::env::var_os("TORCHELASTIC_ERROR_FILE") else { return };
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let text = format!("{error:#}");
    let extra = json!({ "py_callstack": text, "timestamp": seconds.to_string() });
    // The error goes to standard error as well.
    let _ = std::fs::write(path, json!({ "message": { "message": text, "extraInfo": extra } }).to_string());
}

impl Common {
    /// Whether this process writes the output folder: rank 0, or a process without ranks.
    pub(crate) fn is_first(&self) -> bool {
        self.ranks.as_ref().is_none_or(Ranks::is_first)
    }

    /// Runs `first` on rank 0 before the other ranks run it: what the first leaves on the disk, such as a download, they find.
    ///
    /// # Errors
    /// Any error of `first`; a rank that failed.
    pub(crate) fn in_turn<T>(
        &self,
        what: &str,
        first: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let Some(ranks) = &self.ranks else { return first() };
        if ranks.is_first() {
            let result = first()?;
            ranks.preparation.barrier(what)?;
            return Ok(result);
        }
        ranks.preparation.barrier(what)?;
        first()
    }

    /// Whether `own` is true on every rank.
    ///
    /// # Errors
    /// A rank that failed.
    pub(crate) fn on_every_rank(&self, own: bool, what: &str) -> anyhow::Result<bool> {
        let Some(ranks) = &self.ranks else { return Ok(own) };
        let missing = Tensor::f_from_slice(&[i64::from(!own)])?;
        ranks.preparation.all_reduce(&missing, ReduceConfig::default(), what)?;
        Ok(missing.f_int64_value(&[0])? == 0)
    }

    /// Compares what ranks train on, and how.
    ///
    /// # Errors
    /// The first difference, on every rank.
    pub(crate) fn agree(&self, fields: &[(String, String)]) -> anyhow::Result<()> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| agree(&ranks.preparation, fields))
    }

    /// Fails on every rank with the error of the first rank that has one.
    ///
    /// # Errors
    /// That one; a rank that failed otherwise.
    pub(crate) fn first_failure(&self, what: &str, own: anyhow::Result<()>) -> anyhow::Result<()> {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.group.failure().is_none()) else {
            return own;
        };
        let text = own.as_ref().err().map(|error| format!("{error:#}"));
        let first = ranks.preparation.first_failure(text.as_deref(), what);
        own?;
        match first? {
            Some((rank, text)) => bail!("rank {rank}: {text}"),
            None => Ok(()),
        }
    }

    /// The command that resumes the training in a folder.
    pub(crate) fn resume_command(&self, out: &std::path::Path) -> String {
        let out = shell_word(&out.display().to_string());
        let Some(Ranks { launch, .. }) = &self.ranks else { return format!("`frugal resume {out}`") };
        let (all, own) = (launch.world_size, launch.local_world_size);
        if launch.is_local() {
            return format!("`frugal launch -n {all} -- resume {out}`");
        }
        let (nodes, node) = (all / own, launch.rank / own);
        let master = format!("{}:{}", launch.master_address, launch.master_port);
        format!(
            "`frugal launch --nodes {nodes} --node-rank {node} --master {master} -n {own} -- resume {out}`, and with its own --node-rank \
             on each other machine, which needs a copy of the folder"
        )
    }

    /// Whether the launcher has started this process again, after a failure.
    pub(crate) fn is_restarted(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.launch.restart_count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interruption_has_the_status_of_shells() {
        let error = with_status(Interrupted("interrupted after step 3 of 9".to_owned()).into());
        let failure = error.downcast_ref::<Failure>().unwrap();
        assert_eq!((failure.status, &*failure.message), (130, "interrupted after step 3 of 9"));
        assert!(with_status(anyhow::anyhow!("another")).downcast_ref::<Failure>().is_none());
    }
}
