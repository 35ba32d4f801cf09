//! Activation checkpointing: a segment's forward runs without a graph, and its backward runs the segment again with
//! one.
//!
//! For y = f(x) the ordinary graph keeps every intermediate of f until backward. A checkpointed segment keeps x alone,
//! and costs one more forward of f. The second run has the random state of the first, so that dropout draws the same
//! mask, and its autocast. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
//!
//! Leaves (weights) that the closure captures receive their gradients in `.grad` as usual. Pass a tensor that is not a leaf as an
//! input: if captured, the graph around the segment would be differentiated twice. A segment may return a captured tensor: the
//! result is an alias, and the tensor itself is unchanged. Layers may depend on settings outside the graph, such as which adapters
//! are active. A second run with other settings than the first is an error ([`Settings`]). Unlike PyTorch's re-entrant form, the
//! segment takes part in backward even when no input needs a gradient, so that captured weights of a first layer are trained and
//! not silently ignored.

use std::sync::Arc;

use tch::Tensor;

use super::engine::{GradMode, Keep, backward_with};
use super::function::{Backward, Forward, Function, apply_always_any, exactly};
use super::retain::{self, TapeGuard};
use super::saved_tensor_storage::{SavedTensorStorage, StoredTensor};
use super::settings::Settings;
use super::thread_local_state::ThreadLocalState;
use crate::error::{Error, Result};

/// Options of checkpointing a segment.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    /// Whether backward runs the segment again. If `false`, the segment runs once and keeps its graph, which is right
    /// for the last one, whose activations would be recomputed immediately.
    pub recompute: bool,
    /// Whether the second run gets the random state of the first. Costs one copy of the generators' state; unnecessary
    /// for a segment that draws nothing.
    pub preserve_random_state: bool,
    /// Whether to keep the results of products and recompute only what is between them: [`retain`](super::retain).
    /// Inside another such segment, this one's products are recomputed.
    pub retain_products: bool,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { recompute: true, preserve_random_state: true, retain_products: false }
    }
}

impl Checkpoint {
    /// Runs the segment `f` on `inputs`.
    ///
    /// # Errors
    /// Errors of `f`. In backward: errors of its second run, layers with other [`Settings`] than the first time, or a backward for
    /// chosen inputs only ([`grad`](super::grad)), which would give captured
    /// weights no gradient.
    pub fn run<F, const INPUTS: usize, const OUTPUTS: usize>(
        self,
        f: F,
        inputs: [&Tensor; INPUTS],
    ) -> Result<[Tensor; OUTPUTS]>
    where
        F: Fn([&Tensor; INPUTS]) -> Result<[Tensor; OUTPUTS]> + Send + 'static,
    {
        exactly(NAME, self.run_any(of_arrays::<F, INPUTS, OUTPUTS>(f), &inputs)?)
    }

    /// As [`Checkpoint::run`], with the inputs in `storage` between forward and backward.
    ///
    /// # Errors
    /// As [`Checkpoint::run`], and those of the storage.
    pub fn run_with_storage<F, const INPUTS: usize, const OUTPUTS: usize>(
        self,
        f: F,
        inputs: [&Tensor; INPUTS],
        storage: Arc<dyn SavedTensorStorage>,
    ) -> Result<[Tensor; OUTPUTS]>
    where
        F: Fn([&Tensor; INPUTS]) -> Result<[Tensor; OUTPUTS]> + Send + 'static,
    {
        exactly(NAME, self.run_any_with_storage(of_arrays::<F, INPUTS, OUTPUTS>(f), &inputs, Some(storage))?)
    }

    /// As [`Checkpoint::run`], for a segment whose numbers of inputs and of outputs are not known at compile time.
    ///
    /// # Errors
    /// As [`Checkpoint::run`].
    pub fn run_any<F>(self, f: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>>
    where
        F: Fn(&[&Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
    {
        self.run_any_with_storage(f, inputs, None)
    }

    /// As [`Checkpoint::run_any`], with the inputs in `storage`, if there is one, between forward and backward.
    ///
    /// # Errors
    /// As [`Checkpoint::run`], and those of the storage.
    pub fn run_any_with_storage<F>(
        self,
        f: F,
        inputs: &[&Tensor],
        storage: Option<Arc<dyn SavedTensorStorage>>,
    ) -> Result<Vec<Tensor>>
    where
        F: Fn(&[&Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
    {
        if !self.recompute {
            return f(inputs);
        }
        let segment = Segment {
            f,
            options: self,
            state: None,
            settings: None,
            storage,
            stored: Vec::new(),
            products: None,
        };
        apply_always_any(segment, inputs)
    }
}

const NAME: &str = "checkpoint";

/// A segment over arrays as one over slices.
fn of_arrays<F, const INPUTS: usize, const OUTPUTS: usize>(
    f: F,
) -> impl Fn(&[&Tensor]) -> Result<Vec<Tensor>> + Send + 'static
where
    F: Fn([&Tensor; INPUTS]) -> Result<[Tensor; OUTPUTS]> + Send + 'static,
{
    move |inputs: &[&Tensor]| {
        let count = inputs.len();
        let inputs: [&Tensor; INPUTS] = inputs.try_into().map_err(|_| {
            Error::invalid(NAME, format!("{count} inputs were saved; the segment takes {INPUTS}"))
        })?;
        Ok(f(inputs)?.into())
    }
}

/// [`Checkpoint::run`] with the defaults.
///
/// ```
/// use runtime::autograd::{backward, checkpoint};
/// use tch::{Kind, Tensor, kind};
///
/// let x = Tensor::randn([4, 8], kind::FLOAT_CPU).set_requires_grad(true);
/// let w = Tensor::randn([8, 8], kind::FLOAT_CPU).set_requires_grad(true);
/// let weight = w.shallow_clone();
/// let [y] = checkpoint(move |[x]| Ok([x.f_matmul(&weight)?.f_gelu("none")?]), [&x])?;
/// backward(&[&y.sum(Kind::Float)])?;
/// assert_eq!(w.grad().size(), [8, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`Checkpoint::run`].
pub fn checkpoint<F, const INPUTS: usize, const OUTPUTS: usize>(
    f: F,
    inputs: [&Tensor; INPUTS],
) -> Result<[Tensor; OUTPUTS]>
where
    F: Fn([&Tensor; INPUTS]) -> Result<[Tensor; OUTPUTS]> + Send + 'static,
{
    Checkpoint::default().run(f, inputs)
}

struct Segment<F> {
    f: F,
    options: Checkpoint,
    state: Option<ThreadLocalState>,
    /// The settings of the first run.
    settings: Option<Settings>,
    storage: Option<Arc<dyn SavedTensorStorage>>,
    stored: Vec<Box<dyn StoredTensor>>,
    /// The number of tensors of each product of the first run. They follow the inputs in the list of saved tensors.
    products: Option<Vec<usize>>,
}

impl<F> Function for Segment<F>
where
    F: Fn(&[&Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
{
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        if !ctx.will_run_backward() {
            return (self.f)(inputs);
        }
        self.state = Some(ThreadLocalState::capture(self.options.preserve_random_state)?);
        match &self.storage {
            Some(storage) => {
                self.stored = inputs.iter().map(|input| storage.pack(input)).collect::<Result<_>>()?;
            }
            None => inputs.iter().for_each(|input| ctx.save(input)),
        }
        // An enclosing segment records what is computed here; a second list would have the same tensors.
        let within = (self.options.retain_products && !retain::active()).then(TapeGuard::record);
        let (outputs, settings) = Settings::of(|| (self.f)(inputs));
        let outputs = outputs?;
        self.settings = Some(settings);
        if let Some(state) = &mut self.state {
            state.expect_no_draws()?;
        }
        if let Some(within) = within {
            let products = within.recorded()?;
            products.iter().flatten().for_each(|tensor| ctx.save(tensor));
            self.products = Some(products.iter().map(Vec::len).collect());
        }
        self.stored.iter().try_for_each(|tensor| tensor.wait())?;
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        ctx.check_replay(NAME)?;
        let mut saved = ctx.take_saved();
        let products = self.products.as_ref().map(|counts| {
            let mut kept = saved.split_off(saved.len() - counts.iter().sum::<usize>()).into_iter();
            counts.iter().map(|&count| kept.by_ref().take(count).collect()).collect()
        });
        // In reverse, since a storage fetches in advance what was stored before.
        for tensor in self.stored.iter().rev() {
            saved.insert(0, tensor.unpack()?);
        }
        let inputs: Vec<Tensor> = saved
            .into_iter()
            .enumerate()
            .map(|(index, input)| {
                if !input.defined() {
                    return Ok(input);
                }
                Ok(input.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(index))?)
            })
            .collect::<Result<_>>()?;
        let outputs = {
            let _recompute = crate::profile::recompute();
            let _state = self.state.as_ref().map(ThreadLocalState::enter).transpose()?;
            let _grad = GradMode::on();
            let within = products.map_or_else(TapeGuard::none, TapeGuard::replay);
            let (outputs, second) = Settings::of(|| (self.f)(&inputs.iter().collect::<Vec<_>>()));
            // A run that stopped for lack of memory recorded fewer settings, so they are not compared.
            let ended = !outputs.as_ref().is_err_and(Error::is_out_of_memory);
            if let Some(first) = self.settings.filter(|_| ended) {
                first.check(second, NAME)?;
            }
            let outputs = outputs?;
            within.exhausted()?;
            outputs
        };
        let (reached, upstream): (Vec<_>, Vec<_>) = outputs
            .iter()
            .zip(&grads)
            .filter(|(output, grad)| grad.is_some() && output.requires_grad())
            .map(|(output, grad)| (output, grad.as_ref()))
            .unzip();
        if !reached.is_empty() {
            let _grad = GradMode::on();
            backward_with(&reached, &upstream, Keep::default())?;
        }
        Ok(inputs.iter().map(|input| Some(input.grad()).filter(Tensor::defined)).collect())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, kind};

    use super::*;
    use crate::sys::autocast::Autocast;

    #[test]
    fn the_second_run_has_the_autocast_of_the_first() {
        use std::sync::{Arc, Mutex};
        let x = Tensor::randn([6, 8], kind::FLOAT_CPU).set_requires_grad(true);
        let w = Tensor::randn([8, 8], kind::FLOAT_CPU);
        let kinds = Arc::new(Mutex::new(Vec::new()));
        let seen = kinds.clone();
        let segment = move |[x]: [&Tensor; 1]| {
            let y = x.f_matmul(&w)?;
            seen.lock().unwrap().push(y.kind());
            Ok([y])
        };
        let [y] = {
            let _autocast = Autocast::cpu_bf16().enter().unwrap();
            checkpoint(segment, [&x]).unwrap()
        };
        super::super::backward(&[&y.f_sum(Kind::Float).unwrap()]).unwrap();
        assert_eq!(*kinds.lock().unwrap(), [Kind::BFloat16, Kind::BFloat16]);
        assert_eq!(x.matmul(&x.tr()).kind(), Kind::Float, "autocast is off again");
    }
}
