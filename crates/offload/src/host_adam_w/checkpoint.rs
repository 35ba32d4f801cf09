//! Saving and loading the state under the names of [`DeviceOptimizer::state`].

use std::collections::HashMap;

use runtime::device;
use tch::{Device, Tensor};
use training::optimizer::{DeviceOptimizer, Group};

use super::HostAdamW;
use super::state::Parameter;
use crate::error::{Error, Result};

impl HostAdamW {
    /// Returns the state, sharing memory with the optimizer's own.
    pub(super) fn named_state(&self) -> Result<Vec<(String, Tensor)>> {
        self.engine.synchronize()?;
        let state = self.shared.state.lock();
        let mut named = Vec::new();
        for parameter in &state.parameters {
            let Parameter { name, step, moments: Some([m, v]), master, .. } = parameter else { continue };
            named.push((format!("{name}.step"), Tensor::from(*step as i64)));
            named.push((format!("{name}.exp_avg"), m.shallow_clone()));
            named.push((format!("{name}.exp_avg_sq"), v.shallow_clone()));
            named.extend(master.iter().map(|master| (format!("{name}.master"), master.shallow_clone())));
        }
        named.extend(self.rest.iter().flat_map(DeviceOptimizer::state));
        Ok(named)
    }

    /// Loads a state completely, or changes nothing.
    pub(super) fn load_named_state(&mut self, tensors: &[(String, Tensor)]) -> Result<()> {
        self.engine.synchronize()?;
        // The standard optimizer's own loading decides what matches.
        let mut state = self.shared.state.lock();
        let own = |parameter: &Parameter| (parameter.name.clone(), parameter.tensor.shallow_clone());
        let of_layers: Vec<(String, Tensor)> = state.parameters.iter().map(own).collect();
        let is_ours = |name: &str| {
            of_layers.iter().any(|(own, _)| name.strip_prefix(own.as_str()).is_some_and(is_slot))
        };
        let (ours, others): (Vec<_>, Vec<_>) = tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .partition(|(name, _)| is_ours(name));
        let mut reader = (!of_layers.is_empty())
            .then(|| DeviceOptimizer::new(state.rule, vec![Group::new(of_layers, 0.0)]))
            .transpose()?;
        if let Some(reader) = &mut reader {
            reader.load_state(&ours)?;
        }
        match &mut self.rest {
            Some(rest) => rest.load_state(&others)?,
            None if others.is_empty() => {}
            None => {
                let names: Vec<&str> = others.iter().map(|(name, _)| name.as_str()).take(8).collect();
                let reason = format!("its state lacks {}", names.join(", "));
                return Err(Error::config("optimizer", reason));
            }
        }
        let read: HashMap<String, Tensor> = reader.iter().flat_map(DeviceOptimizer::state).collect();
        for parameter in &mut state.parameters {
            let slot = |slot: &str| read.get(&format!("{}.{slot}", parameter.name));
            let own = |tensor: &Tensor| -> Result<Tensor> {
                let memory = device::pinned_empty(&tensor.size(), tensor.kind(), Device::Cpu)?;
                memory.shallow_clone().f_copy_(tensor)?;
                Ok(memory)
            };
            let moments = slot("exp_avg").zip(slot("exp_avg_sq"));
            let (step, moments, master) = (
                slot("step").map_or(Ok(0), |step| step.f_int64_value(&[]))?,
                moments.map(|(m, v)| Ok::<_, Error>([own(m)?, own(v)?])).transpose()?,
                slot("master").map(own).transpose()?,
            );
            (parameter.step, parameter.moments, parameter.master) = (step as u64, moments, master);
        }
        Ok(())
    }
}

/// Whether this is the part of a state's name after the parameter's.
fn is_slot(rest: &str) -> bool {
    [".step", ".exp_avg", ".exp_avg_sq", ".master"].contains(&rest)
}
