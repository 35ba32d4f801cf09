//! The environment variables of torchrun and of Slurm, by which a launcher describes its place to each process.

use std::env;

use super::slurm;
use crate::error::{Error, Result};

/// The variable with the descriptor of the listening socket that `frugal launch` hands to rank 0.
pub(super) const LISTENER: &str = "FRUGAL_LISTEN_FD";

/// This process's place among the ranks.
///
/// | variable | field | when it is missing |
/// |---|---|---|
/// | `RANK` | `rank` | an error, or one process where `WORLD_SIZE` is missing as well |
/// | `WORLD_SIZE` | `world_size` | the same |
/// | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `local_rank`, `local_world_size` | an error |
/// | `MASTER_ADDR`, `MASTER_PORT` | `master_address`, `master_port` | an error |
/// | `TORCHELASTIC_RESTART_COUNT` | `restart_count` | 0 |
/// | `TORCHELASTIC_RUN_ID` | `run_id` | `none` |
/// | `TORCHELASTIC_USE_AGENT_STORE` | `agent_store` | false |
///
/// Without `RANK` and `WORLD_SIZE`, a process that Slurm's `srun` started beside others has the place that the step's variables give it. The
/// store is then on the step's first machine, at the port 20000 plus the last four digits of the job's number, unless `MASTER_ADDR` or
/// `MASTER_PORT` is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The number of this process, below `world_size`.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// The number of this process among those of its machine. It chooses the GPU.
    pub local_rank: usize,
    /// Number of processes on this machine.
    pub local_world_size: usize,
    /// Where the store is.
    pub master_address: String,
    /// The store's port.
    pub master_port: u16,
    /// How often the launcher has started the ranks again.
    pub restart_count: u64,
    /// The launcher's name of the run.
    pub run_id: String,
    /// Whether the launcher itself keeps the store, so that every rank is a client.
    pub agent_store: bool,
    pub(super) listener: Option<i32>,
}

impl Launch {
    /// Reads the environment. `None` if the process was started without a launcher: `RANK` and `WORLD_SIZE` are not set, and it is no
    /// task of a step of Slurm with others.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name of a variable that is missing or has an invalid value.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::read(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`Launch::from_environment`], with `variable` in the place of the environment.
    ///
    /// # Errors
    /// The same.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        if variable("RANK").is_none() && variable("WORLD_SIZE").is_none() {
            return slurm::task(variable);
        }
        let required = |name: &str| {
            let missing = || {
                invalid(format!(
                    "{name} is not set, but the process has a rank; start it with `frugal launch` or torchrun, which set all \
                     of their variables"
                ))
            };
            variable(name).ok_or_else(missing)
        };
        let number = |name: &str| parse::<usize>(name, &required(name)?, "a number");
        let launch = Self {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            local_rank: number("LOCAL_RANK")?,
            local_world_size: number("LOCAL_WORLD_SIZE")?,
            master_address: required("MASTER_ADDR")?,
            master_port: parse("MASTER_PORT", &required("MASTER_PORT")?, "a port")?,
            restart_count: variable("TORCHELASTIC_RESTART_COUNT")
                .map_or(Ok(0), |text| parse("TORCHELASTIC_RESTART_COUNT", &text, "a number"))?,
            run_id: variable("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".to_owned()),
            agent_store: variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|text| text == "True"),
            listener: variable(LISTENER).map(|text| parse(LISTENER, &text, "a descriptor")).transpose()?,
        };
        for (name, rank, count_name, count) in [
            ("RANK", launch.rank, "WORLD_SIZE", launch.world_size),
            ("LOCAL_RANK", launch.local_rank, "LOCAL_WORLD_SIZE", launch.local_world_size),
        ] {
            if rank >= count {
                return Err(invalid(format!(
                    "{name} is {rank}; expected a number below {count_name}, {count}"
                )));
            }
        }
        if launch.local_world_size > launch.world_size {
            let reason = format!(
                "LOCAL_WORLD_SIZE is {}; expected at most WORLD_SIZE, {}",
                launch.local_world_size, launch.world_size
            );
            return Err(invalid(reason));
        }
        Ok(Some(launch))
    }

    /// Returns whether all ranks are on this machine.
    pub fn is_local(&self) -> bool {
        self.local_world_size == self.world_size
    }
}

fn invalid(reason: String) -> Error {
    Error::invalid("launch", reason)
}

fn parse<T: std::str::FromStr>(name: &str, text: &str, expected: &str) -> Result<T> {
    text.parse().map_err(|_| invalid(format!("{name} is {text:?}; expected {expected}")))
}
