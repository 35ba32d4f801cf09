//! The variables of Slurm, by which `srun` describes its place to each task of a step.
//!
//! Source: the section "OUTPUT ENVIRONMENT VARIABLES" of srun's manual. The script of a batch job has some of them too, but is no task of a step.

use super::Launch;
use crate::error::{Error, Result};

/// Where all machines of a job agree on a port without a word: one of these many from 20000 on, by the job's number.
const PORTS: u64 = 10_000;

/// A task of a step, with the variables that it has.
struct Step<V>(V);

impl<V: Fn(&str) -> Option<String>> Step<V> {
    fn text(&self, name: &str) -> Result<String> {
        (self.0)(name).ok_or_else(|| invalid(&format!("{name} is not set, but SLURM_STEP_ID is")))
    }

    fn number(&self, name: &str) -> Result<usize> {
        let text = self.text(name)?;
        text.parse().map_err(|_| invalid(&format!("{name} is {text:?}; expected a number")))
    }

    /// The first machine of the step, and a port of the job's own; the caller's `MASTER_ADDR` and `MASTER_PORT` win.
    fn master(&self) -> Result<(String, u16)> {
        let address = match (self.0)("MASTER_ADDR") {
            Some(address) => address,
            None => {
                let list = self.text("SLURM_STEP_NODELIST")?;
                first_host(&list).ok_or_else(|| {
                    invalid(&format!("SLURM_STEP_NODELIST is {list:?}; set MASTER_ADDR to the first machine"))
                })?
            }
        };
        let port = match (self.0)("MASTER_PORT") {
            Some(text) => {
                text.parse().map_err(|_| invalid(&format!("MASTER_PORT is {text:?}; expected a port")))?
            }
            None => {
                let job = self.text("SLURM_JOB_ID")?;
                let number: u64 = job
                    .parse()
                    .map_err(|_| invalid(&format!("SLURM_JOB_ID is {job:?}; expected a number")))?;
                (20_000 + number % PORTS) as u16
            }
        };
        Ok((address, port))
    }

    fn run_id(&self) -> Result<String> {
        Ok(format!("{}.{}", self.text("SLURM_JOB_ID")?, self.text("SLURM_STEP_ID")?))
    }
}

/// Returns the place of a task that `srun` started beside others; `None` for a process that is no such task.
pub(super) fn task(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
    let step = Step(variable);
    if (step.0)("SLURM_STEP_ID").is_none() || step.number("SLURM_STEP_NUM_TASKS")? < 2 {
        return Ok(None);
    }
    let (master_address, master_port) = step.master()?;
    let per_node = step.text("SLURM_STEP_TASKS_PER_NODE")?;
    let local_world_size = tasks_of(&per_node, step.number("SLURM_NODEID")?)
        .ok_or_else(|| invalid(&format!("SLURM_STEP_TASKS_PER_NODE is {per_node:?}")))?;
    Ok(Some(Launch {
        rank: step.number("SLURM_PROCID")?,
        world_size: step.number("SLURM_STEP_NUM_TASKS")?,
        local_rank: step.number("SLURM_LOCALID")?,
        local_world_size,
        master_address,
        master_port,
        restart_count: 0,
        run_id: step.run_id()?,
        agent_store: false,
        listener: None,
    }))
}

/// The machines of a step with one task on each, such as a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines {
    /// Number of machines.
    pub count: usize,
    /// The number of this one.
    pub rank: usize,
    /// Where the first one is.
    pub master: (String, u16),
    /// The run's name, which all have.
    pub run_id: String,
}

impl Machines {
    /// Reads Slurm's variables. `None` if this process is not the only task of its machine in a step over several.
    ///
    /// # Errors
    /// A variable that is missing or has an invalid value.
    pub fn of_slurm(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let step = Step(variable);
        if (step.0)("SLURM_STEP_ID").is_none() {
            return Ok(None);
        }
        let count = step.number("SLURM_STEP_NUM_NODES")?;
        if count < 2 || step.number("SLURM_STEP_NUM_TASKS")? != count {
            return Ok(None);
        }
        let rank = step.number("SLURM_NODEID")?;
        Ok(Some(Self { count, rank, master: step.master()?, run_id: step.run_id()? }))
    }
}

fn invalid(reason: &str) -> Error {
    Error::invalid("launch", reason)
}

/// The first machine of a list such as `node[01-04,07],gpu3`.
fn first_host(list: &str) -> Option<String> {
    let (mut name, mut rest) = (String::new(), list);
    while let Some(end) = rest.find(['[', ',']) {
        name.push_str(&rest[..end]);
        if rest[end..].starts_with(',') {
            return Some(name);
        }
        let (numbers, after) = rest[end + 1..].split_once(']')?;
        name.push_str(numbers.split(['-', ',']).next()?);
        rest = after;
    }
    name.push_str(rest);
    Some(name).filter(|name| !name.is_empty())
}

/// The tasks of a machine by a list such as `2(x3),1`.
fn tasks_of(list: &str, machine: usize) -> Option<usize> {
    let mut before = 0;
    for entry in list.split(',') {
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1usize),
        };
        before += times;
        if machine < before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let hosts = [
            ("node7", "node7"),
            ("a,b", "a"),
            ("node[01-04,07],gpu3", "node01"),
            ("r[2,4]n[10-11]-ib", "r2n10-ib"),
        ];
        for (list, first) in hosts {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_host("node[01"), None);
        assert_eq!(first_host(""), None);
        let tasks = |machine| tasks_of("2(x3),1", machine);
        assert_eq!([0, 2, 3, 4].map(tasks), [Some(2), Some(2), Some(1), None]);
    }
}
