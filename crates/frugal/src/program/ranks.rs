//! The ranks of a training that `frugal launch` or torchrun started.
//!
//! Every rank reads the data and the model. Rank 0 alone prints, and writes the output folder.

use std::time::Duration;

use frugal::{Config, Recipe};
use runtime::collectives::{Group, GroupOptions, Launch, Store};

use super::Common;

/// How long ranks wait for one that reads data, or the model.
const PREPARATION: Duration = Duration::from_secs(24 * 3600);

/// This process among the ranks of a training.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    /// For what takes one rank's time alone.
    preparation: Group,
    /// For the training.
    pub(crate) group: Group,
}

impl Ranks {
    /// Whether this is rank 0.
    pub(crate) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }
}

/// Connects with the other ranks if a launcher started this process, and checks the configuration against their number. The ranks but
/// the first print nothing.
///
/// # Errors
/// Invalid variables of the launcher; ranks that do not come; techniques that do not go together with several ranks.
pub(crate) fn join(common: &Common, config: &Config) -> anyhow::Result<Common> {
    let Some(launch) = Launch::from_environment()? else { return Ok(common.clone()) };
    Recipe::new(config)?.check_ranks(launch.world_size)?;
    let store = Store::connect(&launch, GroupOptions::default().timeout)?;
    let preparation =
        Group::new(&store, "preparation", GroupOptions { timeout: PREPARATION, ..GroupOptions::default() })?;
    let ranks = Ranks { preparation, group: Group::new(&store, "training", GroupOptions::default())? };
    let quiet = Common { quiet: true, json: false, records: None, ..common.clone() };
    let own = if ranks.is_first() { common.clone() } else { quiet };
    Ok(Common { ranks: Some(ranks), ..own })
}

/// The recipe of this process's training.
///
/// # Errors
/// Techniques that do not go together.
pub(crate) fn recipe(common: &Common, config: &Config) -> anyhow::Result<Recipe> {
    let recipe = Recipe::new(config)?;
    Ok(match &common.ranks {
        Some(ranks) => recipe.over(&ranks.group)?,
        None => recipe,
    })
}

impl Common {
    /// Whether this process writes the output folder: rank 0, or a process without ranks.
    pub(crate) fn is_first(&self) -> bool {
        self.ranks.as_ref().is_none_or(Ranks::is_first)
    }

    /// Runs `first` on rank 0 before the other ranks run it: what the first leaves on the disk, such as a download, they find.
    ///
    /// # Errors
    /// Those of `first`; a rank that failed.
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

    /// Waits until every rank has come to its end: rank 0 keeps what the others need to say so.
    ///
    /// # Errors
    /// A rank that failed.
    pub(crate) fn leave(&self) -> anyhow::Result<()> {
        Ok(self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.preparation.barrier("end"))?)
    }
}
