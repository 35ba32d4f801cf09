//! A frozen embedding with adapters.

use std::sync::Arc;

use models::module::{Module, Visitor, VisitorMut};
use models::{EmbeddingChange, look_up};
use parking_lot::Mutex;
use runtime::ops::TryScalar;
use runtime::random::Generator;
use tch::Tensor;

use kernels::matmul::wide_kind;
use kernels::quantized::{is_quantized, matrix_shape};

use crate::error::{Error, Result, option, unsupported};
use crate::init::Init;
use crate::linear::exchange;
use crate::options::LoraLinearConfig;
use crate::switch::Switch;

/// Rows that are merged at a time.
const PIECE: i64 = 4096;

/// One adapter of an embedding W `[v, d]`.
#[derive(Debug)]
pub(crate) struct EmbeddingAdapter {
    pub(crate) name: String,
    /// `[r, v]`: a column of r numbers for each token.
    pub(crate) a: Tensor,
    /// `[d, r]`.
    pub(crate) b: Tensor,
    scaling: f64,
}

impl EmbeddingAdapter {
    /// Creates an adapter for W: A is 0 and B normal, in fp32 (f64 for f64), as in PEFT; both are normal for [`Init::Random`].
    ///
    /// # Errors
    /// DoRA; an initialisation by the values of W; an option outside its range.
    pub(crate) fn new(
        name: &str,
        weight: &Tensor,
        options: &LoraLinearConfig,
        generator: &mut Generator,
    ) -> Result<Self> {
        options.check()?;
        refuse(options)?;
        let _no_grad = tch::no_grad_guard();
        let Some([tokens, width]) = matrix_shape(weight) else {
            return Err(option("embedding", format!("{:?}", weight.size()), "a matrix [vocabulary, width]"));
        };
        let place = (wide_kind(weight.kind()), weight.device());
        let a = match options.init {
            Init::Random => generator.normal(&[options.r, tokens], place)?,
            _ => Tensor::f_zeros([options.r, tokens], place)?,
        };
        let b = generator.normal(&[width, options.r], place)?;
        Ok(Self { name: name.to_owned(), a, b, scaling: options.scaling() })
    }

    fn shallow_clone(&self) -> Self {
        let Self { name, a, b, scaling } = self;
        Self { name: name.clone(), a: a.shallow_clone(), b: b.shallow_clone(), scaling: *scaling }
    }

    /// Returns the trained tensors with PEFT's names.
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 2] {
        [("lora_embedding_A", &self.a), ("lora_embedding_B", &self.b)]
    }

    /// Returns s·(B·A)ᵀ of some rows, a part of the change of W: `[count, d]`.
    fn delta(&self, start: i64, count: i64) -> Result<Tensor> {
        Ok(self.a.f_narrow(1, start, count)?.f_tr()?.f_mm(&self.b.f_tr()?)?.try_mul_scalar(self.scaling)?)
    }
}

/// Refuses what an embedding's adapter does not have.
///
/// # Errors
/// DoRA; PiSSA and OLoRA.
pub(crate) fn refuse(options: &LoraLinearConfig) -> Result<()> {
    let remedy = "leave the embedding out of the targets, or choose another value";
    if options.dora {
        return Err(unsupported("use_dora", "true with an adapter on an embedding", remedy));
    }
    if options.init.has_offset() {
        return Err(unsupported(
            "init_lora_weights",
            "by the base's values, with an adapter on an embedding",
            remedy,
        ));
    }
    Ok(())
}

/// x = W[tokens] + s·A[:, tokens]ᵀ·Bᵀ with a frozen W `[v, d]`, A `[r, v]` and B `[d, r]`; in place of an embedding's own lookup.
///
/// There is no dropout, as in PEFT. Of a head that is tied to the embedding, W stays as it is.
#[derive(Debug)]
pub(crate) struct LoraEmbedding {
    /// Its own tensor over the base's memory, so that a merge does not affect a tied head; the embedding's `weight`.
    pub(crate) weight: Tensor,
    adapters: Vec<EmbeddingAdapter>,
    /// W before a merge.
    merged: Arc<Mutex<Option<Tensor>>>,
    switch: Arc<Switch>,
}

impl LoraEmbedding {
    /// Creates a change without adapters.
    pub(crate) fn over(weight: &Tensor, switch: Arc<Switch>) -> Result<Self> {
        let _ = weight.f_set_requires_grad(false)?;
        Ok(Self { weight: weight.f_detach()?, adapters: Vec::new(), merged: Arc::default(), switch })
    }

    pub(crate) fn push(&mut self, adapter: EmbeddingAdapter) {
        self.remove(&adapter.name);
        self.adapters.push(adapter);
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.adapters.retain(|adapter| adapter.name != name);
    }

    pub(crate) fn adapters(&self) -> &[EmbeddingAdapter] {
        &self.adapters
    }

    /// Returns another handle on the same tensors.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            weight: self.weight.shallow_clone(),
            adapters: self.adapters.iter().map(EmbeddingAdapter::shallow_clone).collect(),
            merged: self.merged.clone(),
            switch: self.switch.clone(),
        }
    }

    /// Returns W before any merge, sharing memory.
    pub(crate) fn base_weight(&self) -> Tensor {
        self.merged.lock().as_ref().unwrap_or(&self.weight).shallow_clone()
    }

    /// Returns the names of the active adapters, if they are merged.
    pub(crate) fn merged(&self) -> Vec<String> {
        match *self.merged.lock() {
            Some(_) => self.active().0.into_iter().map(|adapter| adapter.name.clone()).collect(),
            None => Vec::new(),
        }
    }

    /// Returns the active adapters in the order of the switch, and whether all are disabled.
    fn active(&self) -> (Vec<&EmbeddingAdapter>, bool) {
        self.switch.read(|setting| {
            let adapter = |name: &String| self.adapters.iter().find(|adapter| adapter.name == *name);
            (setting.active.iter().filter_map(adapter).collect(), setting.disabled > 0)
        })
    }

    /// Merges the active adapters into a new W, until [`LoraEmbedding::unmerge`]. Does nothing if merged.
    ///
    /// # Errors
    /// A quantized W; values that are not finite.
    pub(crate) fn merge(&self, module: &str) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let (active, _) = self.active();
        if active.is_empty() || self.merged.lock().is_some() {
            return Ok(());
        }
        if is_quantized(&self.weight) {
            return Err(Error::Invalid(format!(
                "the base's `{module}` is quantized, in steps larger than what an adapter changes; load the model in bfloat16, and merge \
                 there"
            )));
        }
        let merged = self.weight.f_empty_like()?;
        let rows = merged.size()[0];
        for start in (0..rows).step_by(PIECE as usize) {
            let count = PIECE.min(rows - start);
            let mut sum = self.weight.f_narrow(0, start, count)?.f_to_kind(active[0].a.kind())?;
            for adapter in &active {
                sum = sum.f_add(&adapter.delta(start, count)?)?;
            }
            merged.f_narrow(0, start, count)?.f_copy_(&sum)?;
        }
        if merged.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Err(Error::Invalid(format!(
                "merging into `{module}` gives values that are not finite; nothing was merged. Find out where the training diverged, or \
                 delete the adapter"
            )));
        }
        let original = self.weight.f_detach()?;
        exchange(&self.weight, &merged)?;
        *self.merged.lock() = Some(original);
        Ok(())
    }

    /// Restores W. Does nothing if not merged.
    pub(crate) fn unmerge(&self) -> Result<()> {
        match self.merged.lock().take() {
            Some(original) => exchange(&self.weight, &original),
            None => Ok(()),
        }
    }
}

impl EmbeddingChange for LoraEmbedding {
    fn apply(&self, looked_up: Tensor, tokens_bt: &Tensor) -> models::Result<Tensor> {
        let (active, is_disabled) = self.active();
        let original = self.merged.lock().as_ref().map(Tensor::shallow_clone);
        match (is_disabled, original) {
            (true, Some(original)) => return Ok(look_up(&original, tokens_bt)?),
            (true, None) | (false, Some(_)) => return Ok(looked_up),
            (false, None) => {}
        }
        let kind = looked_up.kind();
        let mut sum = looked_up;
        for EmbeddingAdapter { a, b, scaling, .. } in active {
            // [b, t, r], then [b, t, d]; the columns of A are gathered in fp32, where their gradients are summed.
            let columns = Tensor::f_embedding(&a.f_tr()?, tokens_bt, -1, false, false)?;
            let change = columns.f_matmul(&b.f_tr()?)?.try_mul_scalar(*scaling)?;
            sum = sum.f_add(&change)?;
        }
        Ok(if sum.kind() == kind { sum } else { sum.f_to_kind(kind)? })
    }
}

impl Module for LoraEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for adapter in &self.adapters {
            for (name, tensor) in adapter.tensors() {
                visitor.parameter(&format!("{name}.{}", adapter.name), tensor);
            }
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        for EmbeddingAdapter { name, a, b, .. } in &mut self.adapters {
            visitor.parameter(&format!("lora_embedding_A.{name}"), a)?;
            visitor.parameter(&format!("lora_embedding_B.{name}"), b)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use runtime::autograd::{GradcheckConfig, gradcheck};
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn gradients_match_finite_differences() {
        let mut generator = Generator::new(1).unwrap();
        let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
        let weight = normal(&[7, 4]);
        let leaves = [normal(&[2, 7]), normal(&[4, 2])].map(|leaf| leaf.set_requires_grad(true));
        let tokens = Tensor::from_slice2(&[[6i64, 6, 1], [0, 3, 1]]);
        let switch = Arc::new(Switch::default());
        switch.set(|setting| setting.active = vec!["default".to_owned()]);
        let function = |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
            let mut change = LoraEmbedding::over(&weight, switch.clone())?;
            let [a, b] = [&given[0], &given[1]].map(Tensor::shallow_clone);
            change.push(EmbeddingAdapter { name: "default".to_owned(), a, b, scaling: 1.5 });
            let x = change.apply(look_up(&weight, &tokens)?, &tokens)?;
            Ok(vec![x.f_mul(&x)?])
        };
        gradcheck(function, &leaves.each_ref(), GradcheckConfig::default()).unwrap();
    }
}
