//! Accepts a layer's gradients when its backward delivers them: accumulates them, or updates the layer.

use std::sync::atomic::Ordering;

use training::clip::NonFinite;
use training::optimizer::StepSettings;

use super::state::{LayerGradients, MAX_WAITING, Shared, State};
use crate::engine::{Engine, GradientConsumer};
use crate::error::{Result, refused};
use crate::storage::Gradients;

impl GradientConsumer for Shared {
    fn accept(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<()> {
        let mut state = self.state.lock();
        let Arrived { ours, others, name, outstanding, fresh } = state.partition(engine, layer, gradients)?;
        // Parameters in no group belong to others, and are treated as without this optimizer.
        if !others.is_empty() {
            engine.accumulate(layer, others)?;
        }
        let StepSettings { micro_batches, clip, non_finite, .. } = state.settings;
        let gathering = &mut state.layers[layer];
        if gathering.stepped {
            let reason = format!(
                "gradients of `{name}` arrived after the layer's update, which ran when all of its forwards had delivered theirs \
                 {micro_batches} time(s); announce the micro-batches of a step with `HostAdamW::begin` before the first of them"
            );
            return Err(refused("optimizer", reason));
        }
        let first = !std::mem::replace(&mut gathering.begun, true);
        gathering.rounds += u64::from(outstanding == 0);
        let last = outstanding == 0 && gathering.rounds >= micro_batches;
        if first {
            engine.with_layers(|layers| layers[layer].update_queued = false);
            gathering.shares = engine.shares(layer)?;
        }
        // A step that may be skipped is known only with all gradients.
        if clip.is_some() || non_finite == NonFinite::Skip || gathering.shares || !last {
            return engine.accumulate(layer, ours);
        }
        gathering.stepped = true;
        let (pooled, (gradients, arrived)) = if fresh {
            (true, engine.transfer(layer, ours)?)
        } else {
            engine.accumulate(layer, ours)?;
            (false, state.take_accumulated(engine, layer)?)
        };
        // Waiting gradients occupy memory, so backward waits for the host beyond this.
        while state.waiting.len() >= MAX_WAITING {
            if let Some(oldest) = state.waiting.pop_front() {
                oldest.synchronize()?;
            }
        }
        let checked = non_finite == NonFinite::Fail;
        let gradients = LayerGradients { gradients, arrived, pooled, factor: None, is_early: true, checked };
        state.step(engine, layer, gradients)
    }
}

/// Gradients of a layer that have arrived.
struct Arrived {
    ours: Gradients,
    others: Gradients,
    name: String,
    /// Forwards of the layer that have not delivered theirs.
    outstanding: usize,
    /// Whether no earlier gradients of our parameters are accumulated.
    fresh: bool,
}

impl State {
    fn partition(&self, engine: &Engine, layer: usize, gradients: Gradients) -> Result<Arrived> {
        engine.with_layers(|layers| {
            let source = &layers[layer];
            let (mut ours, mut others, mut fresh) = (Vec::new(), Vec::new(), true);
            for index in 0..source.tensors.len() {
                fresh = fresh && !(self.owns(&source.tensors[index])? && source.has_gradient(index)?);
            }
            for (index, gradient) in gradients {
                let has = self.owns(&source.tensors[index])?;
                if has { &mut ours } else { &mut others }.push((index, gradient));
            }
            let outstanding = source.outstanding.load(Ordering::Relaxed);
            Ok(Arrived { ours, others, name: source.name.clone(), outstanding, fresh })
        })
    }
}
