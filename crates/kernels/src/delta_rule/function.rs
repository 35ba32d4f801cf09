//! The rule by chunks as an autograd function.

use runtime::autograd::{Backward, Forward, Function};
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use super::chunks::{Span, spans};
use super::{DeltaInputs, NAME, Sizes};

/// Inputs: q, k, v, g, β, and the state before the first token if there is one. Outputs: o and the state after the last.
pub(super) struct ChunkedRule {
    sizes: Sizes,
    kind: Kind,
    /// Used by forward; backward gets them from libtorch.
    documents: Option<Tensor>,
    has_documents: bool,
    has_state: bool,
}

/// Number of [`DeltaInputs`].
const INPUTS: usize = 5;

impl ChunkedRule {
    pub(super) fn new(sizes: Sizes, kind: Kind, documents: Option<&Tensor>, has_state: bool) -> Self {
        let documents = documents.map(Tensor::shallow_clone);
        Self { sizes, kind, has_documents: documents.is_some(), documents, has_state }
    }

    /// The shape of a state by key head.
    fn by_key_head(&self) -> [i64; 5] {
        let Sizes { batch, key_heads, group, key, value, .. } = self.sizes;
        [batch, key_heads, group, key, value]
    }
}

fn inputs_of(tensors: &[Tensor]) -> Result<DeltaInputs<'_>> {
    let [q, k, v, g, beta] = tensors else {
        return Err(Error::invalid(NAME, "a tensor that forward saved is gone"));
    };
    Ok(DeltaInputs { q, k, v, g, beta })
}

impl Function for ChunkedRule {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
        let documents = self.documents.take();
        let inputs =
            DeltaInputs { q: tensors[0], k: tensors[1], v: tensors[2], g: tensors[3], beta: tensors[4] };
        let mut state = match tensors.get(INPUTS) {
            Some(state) => state.f_reshape(self.by_key_head())?,
            None => Tensor::f_zeros(self.by_key_head(), (self.kind, inputs.v.device()))?,
        };
        let (mut outputs, mut starts) = (Vec::new(), Vec::new());
        for tokens in spans(self.sizes.sequence) {
            // Backward starts from zeros where forward did.
            if ctx.will_run_backward() && (tokens.start > 0 || self.has_state) {
                starts.push(state.shallow_clone());
            }
            let span = Span::new(&inputs, documents.as_ref(), &self.sizes, tokens, self.kind)?;
            let passed = span.advance(&state, true, false)?;
            outputs.push(tokens.join(&span.outputs(&passed)?, inputs.v.kind())?);
            state = passed.state;
        }
        tensors[..INPUTS].iter().chain(&documents.as_ref()).for_each(|tensor| ctx.save(tensor));
        starts.iter().for_each(|start| ctx.save(start));
        let output = match outputs.len() {
            1 => outputs.swap_remove(0).f_contiguous()?,
            _ => Tensor::f_cat(&outputs, 1)?,
        };
        Ok(vec![output, state.f_reshape(self.sizes.state())?])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let count = INPUTS + usize::from(self.has_state);
        let mut grads = grads.into_iter();
        let (of_output, of_state) = (grads.next().flatten(), grads.next().flatten());
        if of_output.is_none() && of_state.is_none() {
            return Ok((0..count).map(|_| None).collect());
        }
        let mut saved = ctx.take_saved();
        let mut starts = saved.split_off(INPUTS + usize::from(self.has_documents));
        let documents = if self.has_documents { saved.pop() } else { None };
        let inputs = inputs_of(&saved)?;
        let options = (self.kind, inputs.v.device());
        let zeros = || Tensor::f_zeros(self.by_key_head(), options);
        let of_output = match of_output {
            Some(gradient) => gradient,
            None => inputs.v.f_zeros_like()?,
        };
        let mut d_state = match of_state {
            Some(gradient) => gradient.f_reshape(self.by_key_head())?.f_to_kind(self.kind)?,
            None => zeros()?,
        };
        let mut parts = Vec::new();
        for tokens in spans(self.sizes.sequence).into_iter().rev() {
            let before = if tokens.start > 0 || self.has_state { starts.pop() } else { None };
            let before = before.map_or_else(zeros, Ok)?;
            let span = Span::new(&inputs, documents.as_ref(), &self.sizes, tokens, self.kind)?;
            let d_o = tokens.split(&of_output, self.sizes.key_heads, self.kind)?;
            let (gradients, next) = span.backward(&inputs, &self.sizes, &before, &d_o, d_state)?;
            parts.push(gradients);
            d_state = next;
        }
        parts.reverse();
        let join = |part: fn(&super::gradients::Gradients) -> &Tensor| -> Result<Option<Tensor>> {
            let parts: Vec<&Tensor> = parts.iter().map(part).collect();
            Ok(Some(match parts[..] {
                [only] => only.shallow_clone(),
                _ => Tensor::f_cat(&parts, 1)?,
            }))
        };
        let mut gradients =
            vec![join(|part| &part.q)?, join(|part| &part.k)?, join(|part| &part.v)?, join(|part| &part.g)?];
        gradients.push(join(|part| &part.beta)?);
        if self.has_state {
            gradients.push(Some(d_state.f_reshape(self.sizes.state())?));
        }
        for (index, gradient) in gradients.iter_mut().enumerate() {
            if !ctx.needs_input_grad(index) {
                *gradient = None;
            }
        }
        Ok(gradients)
    }
}
