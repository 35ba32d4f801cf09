//! Saving and loading the state under the names of [`DeviceOptimizer::state`].

use std::collections::HashMap;

use runtime::file_memory;
use tch::Tensor;
use training::optimizer::{AdamW, DeviceOptimizer, Group};

use super::HostAdamW;
use super::state::{Parameter, state_of};
use crate::error::{Error, Result, refused};

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
        self.engine.forget_failed_update();
        let mut state = self.shared.state.lock();
        let positions: HashMap<&str, usize> = state
            .parameters
            .iter()
            .enumerate()
            .map(|(at, parameter)| (parameter.name.as_str(), at))
            .collect();
        let mut of_parameters: Vec<Vec<(String, Tensor)>> =
            state.parameters.iter().map(|_| Vec::new()).collect();
        let mut others = Vec::new();
        for (name, tensor) in tensors {
            let parameter = name.rsplit_once('.').filter(|(_, slot)| SLOTS.contains(slot));
            match parameter.and_then(|(parameter, _)| positions.get(parameter)) {
                Some(&at) => of_parameters[at].push((name.clone(), tensor.shallow_clone())),
                None => others.push((name.clone(), tensor.shallow_clone())),
            }
        }
        let mut read = Vec::new();
        for (parameter, own) in state.parameters.iter().zip(&of_parameters) {
            read.push(self.read_state(parameter, own, state.rule)?);
        }
        match &mut self.rest {
            Some(rest) => rest.load_state(&others)?,
            None if others.is_empty() => {}
            None => {
                let names: Vec<&str> = others.iter().map(|(name, _)| name.as_str()).take(8).collect();
                let reason = format!("its state lacks {}", names.join(", "));
                return Err(refused("optimizer", reason));
            }
        }
        for (parameter, Loaded { step, moments, master }) in state.parameters.iter_mut().zip(read) {
            (parameter.step, parameter.moments, parameter.master) = (step, moments, master);
            parameter.written = None;
        }
        Ok(())
    }

    /// Reads a parameter's state. The standard optimizer's own loading decides what matches.
    fn read_state(&self, parameter: &Parameter, saved: &[(String, Tensor)], rule: AdamW) -> Result<Loaded> {
        let weight = &parameter.tensor;
        let group = Group::new(vec![(parameter.name.clone(), weight.shallow_clone())], 0.0);
        let mut reader = DeviceOptimizer::new(rule, vec![group])?;
        reader.load_state(saved)?;
        let read: HashMap<String, Tensor> = reader.state().into_iter().collect();
        let slot = |slot: &str| read.get(&format!("{}.{slot}", parameter.name));
        let host_copy = |tensor: &Tensor| -> Result<Tensor> {
            let mut memory = state_of(weight, self.engine.placement())?;
            memory.f_copy_(tensor)?;
            file_memory::release(&memory)?;
            Ok(memory)
        };
        let moments = slot("exp_avg").zip(slot("exp_avg_sq"));
        Ok(Loaded {
            step: slot("step").map_or(Ok(0), |step| step.f_int64_value(&[]))? as u64,
            moments: moments.map(|(m, v)| Ok::<_, Error>([host_copy(m)?, host_copy(v)?])).transpose()?,
            master: slot("master").map(host_copy).transpose()?,
        })
    }
}

/// The state of a parameter in a checkpoint.
struct Loaded {
    step: u64,
    moments: Option<[Tensor; 2]>,
    master: Option<Tensor>,
}

/// The parts of a parameter's state, as they are named after it.
const SLOTS: [&str; 4] = ["step", "exp_avg", "exp_avg_sq", "master"];
