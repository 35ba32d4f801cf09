//! The step of a row, as `accounting` predicts it.

use accounting::Decoder;
use accounting::decoder_flops::Workload;
use accounting::lora::{ExpertTargets, LowRank, Targets};
use accounting::memory::logits::Loss;
use accounting::offload::sizes::{self, Choices, Logits};
use accounting::offload::{self as paper, Footprint, Rates, Setup, Start, simulate};
use accounting::recompute::NormKernel;
use offload::Method;
use tch::Device;

use super::{AdapterKind, Head, OptimizerPlace, Pass, Placement, Row};

impl Row {
    /// The same step as `accounting` predicts it.
    ///
    /// # Errors
    /// A shape that is not modelled.
    pub fn predict(&self) -> anyhow::Result<Footprint> {
        let model = Decoder::from_config(&self.config)?;
        let [rows, tokens] = self.batch;
        let work = Workload { batch: rows.unsigned_abs(), sequence: tokens.unsigned_abs() };
        let choices = Choices {
            recipe: frugal::planning::recipe(self.kind),
            loss: match self.head {
                Head::Logits => Loss::Eager,
                Head::Chunks(tokens) => Loss::LinearCrossEntropy { tokens: tokens.unsigned_abs(), whole: 0 },
            },
            norm: NormKernel::Output,
            logits: Logits::LastToken,
            widens: frugal::planning::widens(self.kind, Device::Cpu),
            attention_kernel: true,
            ..Choices::default()
        };
        let lora = match &self.pass {
            Pass::Adapters { targets, experts, rank, dropout, kind } => Some(LowRank {
                rank: rank.unsigned_abs(),
                targets: if targets.is_empty() { Targets::NONE } else { targets.join(",").parse()? },
                experts: if experts.is_empty() { ExpertTargets::NONE } else { experts.join(",").parse()? },
                dropout: *dropout > 0.0,
                magnitudes: *kind == AdapterKind::Dora,
                subtracted: *kind == AdapterKind::Pissa,
                on_cpu: true,
                ..LowRank::default()
            }),
            _ => None,
        };
        let mut costs = match (&self.pass, &lora) {
            (Pass::Inference, _) => sizes::inference(&model, work, &choices)?,
            (_, None) => sizes::training(&model, work, &choices)?,
            (_, Some(lora)) => sizes::adapters(&model, lora, work, None, &choices)?,
        };
        if self.optimizer == OptimizerPlace::None {
            costs.fixed.state_bytes = 0;
            costs.layers.iter_mut().for_each(|layer| layer.state_bytes = 0);
        }
        let setup = match &self.placement {
            Placement::Resident(plan) => {
                if costs.training {
                    costs = sizes::with_activation_plan(costs, &model, lora.as_ref(), work, &choices, plan)?;
                }
                Setup {
                    method: paper::Method::Resident { recompute: false },
                    resident: Vec::new(),
                    optimizer: paper::OptimizerPlace::Device,
                }
            }
            Placement::Offloaded { method, ring, resident, .. } => Setup {
                method: match method {
                    Method::Overlap => paper::Method::Overlap { ring: *ring },
                    _ => paper::Method::OneAtATime,
                },
                resident: resident.clone(),
                optimizer: paper::OptimizerPlace::Host,
            },
        };
        // Gradients leave before the next layer runs, as `InStep` has it.
        let rates = Rates { load: 1e15, store: f64::MAX, host_optimizer: 1e15, device_optimizer: 1e15 };
        Ok(simulate(&costs, &rates, &setup, Start::Warm)?.device)
    }
}
