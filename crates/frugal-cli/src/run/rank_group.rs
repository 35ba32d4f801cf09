//! The groups of processes of a training over ranks.

use runtime::collectives::{Group, Launch};
use sharding::Mesh;

/// This process among the ranks of a training.
#[derive(Clone, Debug)]
pub(crate) struct Ranks {
    /// For what takes one rank's time alone.
    pub(crate) preparation: Group,
    /// For the training.
    pub(crate) group: Group,
    /// The same, divided into replicas.
    pub(crate) mesh: Mesh,
    pub(crate) launch: Launch,
}

impl Ranks {
    /// Returns whether this is rank 0.
    pub(crate) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }
}
