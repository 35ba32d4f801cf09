//! Names of candidates in tables.

use super::{Candidate, Placement, Tier};
use crate::activation_plan::LayerPlan;
use crate::offload::OptimizerPlace;

impl Candidate {
    /// Returns a short name, such as `recompute 15 of 24 layers, 2 rows at a time`.
    pub fn name(&self) -> String {
        let placement = match &self.ranks {
            Some(ranks) => {
                let replicas = match ranks.replicas {
                    0 | 1 => String::new(),
                    several => format!(" in {several} replicas"),
                };
                let files = if ranks.keeps_files() { " in files" } else { "" };
                format!("ZeRO-{}{replicas}{files}, {}", ranks.stage.number(), self.placement.name())
            }
            None => self.placement.name(),
        };
        match self.rows {
            None => placement,
            Some(1) => format!("{placement}, 1 row at a time"),
            Some(rows) => format!("{placement}, {rows} rows at a time"),
        }
    }
}

impl Placement {
    /// Returns a short name.
    pub fn name(&self) -> String {
        match self {
            Self::Resident(layers) => of_layers(layers),
            Self::Offloaded { tier, ring, resident, keep, inputs_on_host, optimizer } => {
                let mut name = match tier {
                    Tier::Host => "layers in host memory".to_owned(),
                    Tier::File => "layers in files".to_owned(),
                };
                name += &format!(", ring {ring}");
                if !resident.is_empty() {
                    name += &format!(", {} resident", resident.len());
                }
                if !keep.is_empty() {
                    name += &format!(", activations of {} kept", keep.len());
                }
                if *inputs_on_host {
                    name += ", inputs in host memory";
                }
                if *optimizer == OptimizerPlace::Host {
                    name += match tier {
                        Tier::Host => ", optimizer on the host",
                        Tier::File => ", optimizer in files",
                    };
                }
                name
            }
        }
    }
}

fn of_layers(layers: &[LayerPlan]) -> String {
    let count = |kept: LayerPlan| layers.iter().filter(|one| **one == kept).count();
    let all = layers.len();
    // The last layer keeps its activations where that takes no more memory: its backward follows at once.
    let is_all = |number: usize| number > 0 && number + 1 >= all;
    if is_all(count(LayerPlan::RecomputeAll))
        && count(LayerPlan::KeepAll) + count(LayerPlan::RecomputeAll) == all
    {
        return "recompute all".to_owned();
    }
    let parts: Vec<String> = [
        (LayerPlan::RecomputeAll, "recompute", ""),
        (LayerPlan::RecomputeMlp, "recompute the MLP of", ""),
        (LayerPlan::RecomputeAttention, "recompute the attention of", ""),
        (LayerPlan::RecomputeElementwise, "recompute elementwise operations of", ""),
        (LayerPlan::Offload, "recompute", " from inputs in host memory"),
    ]
    .into_iter()
    .filter(|(kept, ..)| count(*kept) > 0)
    .map(|(kept, what, from)| format!("{what} {} of {all} layers{from}", count(kept)))
    .collect();
    if parts.is_empty() { "keep all".to_owned() } else { parts.join(", ") }
}
