//! The ways to run a step, and what each takes.

use accounting::offload::{
    AvailableMemory, Method, OffloadPlan, OptimizerPlace, Rates, Setup, SimulatedStep, Start, StepCosts,
    plan, simulate,
};
use accounting::quantity::bytes_text;
use frugal::config::OffloadTier;
use report::unit::human;
use serde_json::{Value, json};

/// A way to run a step, and what it takes.
pub(super) struct Variant {
    pub(super) name: String,
    pub(super) flags: String,
    pub(super) step: SimulatedStep,
    /// Bytes at the peak.
    pub(super) peak: u64,
    /// The plan of offloaded layers.
    pub(super) plan: Option<OffloadPlan>,
}

impl Variant {
    pub(super) fn json(&self, budget: u64) -> Value {
        let mut value = json!({
            "variant": self.name,
            "flags": self.flags,
            "peak_bytes": self.peak,
            "host_bytes": self.step.host_bytes,
            "step_seconds": self.step.seconds,
            "fits": self.peak <= budget,
            "parts": self.step.device.parts.iter().map(|part| json!({ "what": part.name, "bytes": part.bytes }))
                .collect::<Vec<_>>(),
        });
        if let Some(plan) = &self.plan {
            value["layers"] = plan.layers.into();
            value["resident_layers"] = json!(plan.setup.resident);
            value["ring_slots"] = plan.ring().into();
            value["loaded_bytes"] = plan.step.load_bytes.into();
            value["idle_seconds"] = plan.step.idle_seconds.into();
            value["share_of_resident_speed"] = plan.share_of_resident_speed().into();
        }
        value
    }
}

/// The ways to run a step, the fastest first. On a CPU layers in the host's memory are part of what the device holds.
pub(super) fn variants(
    costs: &StepCosts,
    rates: &Rates,
    budget: AvailableMemory,
    tier: OffloadTier,
    on_cpu: bool,
) -> anyhow::Result<Vec<Variant>> {
    let shared = on_cpu && tier == OffloadTier::Host;
    let peak = |step: &SimulatedStep| step.device.total + if shared { step.host_bytes } else { 0 };
    let variant = |name: &str, flags: &str, method, optimizer| -> anyhow::Result<Variant> {
        let setup = Setup { method, resident: Vec::new(), optimizer };
        let step = simulate(costs, rates, &setup, Start::Warm)?;
        Ok(Variant { name: name.to_owned(), flags: flags.to_owned(), peak: peak(&step), step, plan: None })
    };
    let device = OptimizerPlace::Device;
    let mut all = vec![variant("all on the device", "", Method::Resident { recompute: false }, device)?];
    let tier = if tier == OffloadTier::Host { "host" } else { "file" };
    let taken = if shared { costs.layer_bytes()? } else { 0 };
    let available = AvailableMemory { device: budget.device.saturating_sub(taken), ..budget };
    all.push(match plan(costs, rates, available) {
        Ok(result) => {
            let resident: Vec<String> = result.setup.resident.iter().map(ToString::to_string).collect();
            let mut flags = format!("--offload {tier} --ring {}", result.ring().max(1));
            if !resident.is_empty() {
                flags += &format!(" --resident {}", resident.join(","));
            }
            if result.optimizer == Some(OptimizerPlace::Host) {
                flags += " --optimizer-on host";
            }
            let step = result.step.clone();
            Variant {
                name: "layers offloaded".to_owned(),
                flags,
                peak: peak(&step),
                step,
                plan: Some(result),
            }
        }
        // Where nothing fits, a ring of one takes the least.
        Err(accounting::Error::NoOffloadFits { .. }) => {
            let flags = format!("--offload {tier} --ring 1");
            variant("layers offloaded", &flags, Method::Overlap { ring: 1 }, OptimizerPlace::Host)?
        }
        Err(error) => return Err(error.into()),
    });
    Ok(all)
}

/// Sums up the transfers of a plan.
pub(super) fn streaming(plan: &OffloadPlan) -> Vec<(String, String)> {
    let SimulatedStep { host_bytes, load_bytes, idle_seconds, .. } = plan.step;
    vec![
        ("resident layers".into(), format!("{} of {}", plan.setup.resident.len(), plan.layers)),
        ("outside of the device".into(), bytes_text(host_bytes)),
        ("loaded per step".into(), bytes_text(load_bytes)),
        ("compute waits".into(), human(idle_seconds, "s")),
        ("share of resident speed".into(), format!("{:.3}", plan.share_of_resident_speed())),
    ]
}
