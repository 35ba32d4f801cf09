//! A frozen projection with adapters.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kernels::dropout::Mask;
use kernels::linear::linear;
use kernels::low_rank::{Affine, Term, low_rank_linear};
use kernels::quantized::blocks::BlockType;
use kernels::quantized::{is_quantized, is_quantized_layout, matrix_shape};
use models::Linear;
use models::module::{Context, Module, Projection, Visitor, VisitorMut, tensors};
use parking_lot::Mutex;
use runtime::autograd::note_setting;
use runtime::precision;
use runtime::random::Generator;
use runtime::tensor_layout::TensorLayout;
use tch::Tensor;

use crate::adapter::Adapter;
use crate::dora;
use crate::error::{Error, Result, option};
use crate::options::LoraLinearConfig;
use crate::switch::Switch;

/// The default name of an adapter.
pub const DEFAULT: &str = "default";

/// y = x·Wᵀ + b + s·dropout(x)·Aᵀ·Bᵀ with frozen W and b; replaces a [`Linear`].
///
/// W and b keep their dtype (fp32, bf16, fp16, f64, or [NF4](kernels::nf4) for W) and their names, so that checkpoints of the base can be
/// loaded. A `[r, in]` and B `[out, r]` are in fp32 (f64 for f64) and are called `lora_A.default.weight` and `lora_B.default.weight`;
/// DoRA's magnitudes are `lora_magnitude_vector.default.weight`. Input and output have W's dtype (any one over NF4), unless a policy of
/// [`runtime::precision`] casts them. [`kernels::low_rank`] documents the mathematics, what is kept, and where it is rounded; `dora.rs`
/// documents DoRA.
///
/// Dropout is active if [`Context::training`] is set. Between a forward and its backward nothing may be switched, merged or
/// changed.
///
/// ```
/// use lora::{LoraLinear, LoraLinearConfig};
/// use models::Linear;
/// use models::module::{Context, Projection, parameter_count};
/// use tch::{Device, Kind, Tensor, kind};
///
/// let linear = Linear::new(64, 32, true, kind::FLOAT_CPU)?;
/// let adapted = LoraLinear::new(linear, &LoraLinearConfig { r: 8, alpha: 16.0, dropout: 0.05, ..LoraLinearConfig::default() })?;
/// assert_eq!(parameter_count(&adapted).trainable, 8 * (64 + 32));
///
/// let training = Context { training: true, ..Context::default() };
/// let y = adapted.forward(&Tensor::randn([2, 5, 64], kind::FLOAT_CPU), &training)?;
/// runtime::autograd::backward(&[&y.sum(Kind::Float)])?;
/// # Ok::<(), lora::Error>(())
/// ```
#[derive(Debug)]
pub struct LoraLinear {
    /// Its own tensor over the base's memory, so that a merge does not affect others that share it (a tied embedding).
    weight: Tensor,
    /// `[out, in]`.
    shape: [i64; 2],
    bias: Option<Tensor>,
    /// ‖W‖² of each row, if an adapter needs it.
    squares: Option<Tensor>,
    adapters: Vec<Adapter>,
    merged: Arc<Mutex<Option<Merged>>>,
    switch: Arc<Switch>,
    /// The active adapters as of the switch's last change.
    resolved: Mutex<Option<Arc<Resolved>>>,
}

/// The switch's setting for one layer.
#[derive(Debug)]
struct Resolved {
    /// The switch's version.
    version: u64,
    disabled: bool,
    /// Indices of the active adapters, in the order of the switch.
    active: Vec<usize>,
    /// A hash of `disabled` and the names of the active adapters: equal for equal settings, whatever was set in between.
    hash: u64,
}

/// The state of a merge.
#[derive(Debug)]
struct Merged {
    /// W, sharing the base's memory.
    original: Tensor,
    adapters: Vec<String>,
    /// A hash of the adapters' names.
    hash: u64,
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl LoraLinear {
    /// Freezes `linear` and adds an adapter called `default`.
    ///
    /// # Errors
    /// An option outside its range; a base without a floating dtype; too little memory.
    pub fn new(linear: Linear, options: &LoraLinearConfig) -> Result<Self> {
        let switch = Arc::new(Switch::default());
        switch.set(|setting| setting.active = vec![DEFAULT.to_owned()]);
        let mut layer = Self::over(&linear.weight, linear.bias, switch)?;
        layer.push(Adapter::new(DEFAULT, &layer.weight, options, &mut Generator::new(options.seed)?)?)?;
        Ok(layer)
    }

    /// [`LoraLinear::new`] for any projection that computes x·Wᵀ + b with tensors called `weight` and `bias`, which it shares.
    ///
    /// # Errors
    /// A projection with other tensors; as [`LoraLinear::new`].
    pub fn of(projection: &dyn Projection, options: &LoraLinearConfig) -> Result<Self> {
        let (mut weight, mut bias) = (None, None);
        for named in tensors(projection) {
            match named.name.as_str() {
                "weight" => weight = Some(named.tensor.shallow_clone()),
                "bias" => bias = Some(named.tensor.shallow_clone()),
                other => {
                    let value = format!("a projection with a tensor `{other}`");
                    return Err(option("projection", value, "a weight and a bias only"));
                }
            }
        }
        let weight = weight.ok_or_else(|| {
            let value = "one without a weight".to_owned();
            option("projection", value, "a weight [out, in]")
        })?;
        Self::new(Linear { weight, bias }, options)
    }

    /// Creates a layer without adapters.
    pub(crate) fn over(weight: &Tensor, bias: Option<Tensor>, switch: Arc<Switch>) -> Result<Self> {
        let shape = matrix_shape(weight).filter(|_| weight.is_floating_point() || is_quantized(weight));
        let Some(shape) = shape else {
            let value = format!("{:?} {:?}", weight.kind(), weight.size());
            return Err(option("weight", value, "a floating matrix [out, in], or NF4"));
        };
        for tensor in std::iter::once(weight).chain(&bias) {
            let _ = tensor.f_set_requires_grad(false)?;
        }
        Ok(Self {
            weight: weight.f_detach()?,
            shape,
            bias,
            squares: None,
            adapters: Vec::new(),
            merged: Arc::default(),
            switch,
            resolved: Mutex::default(),
        })
    }

    pub(crate) fn push(&mut self, adapter: Adapter) -> Result<()> {
        if adapter.magnitude.is_some() && self.squares.is_none() {
            let _no_grad = tch::no_grad_guard();
            self.squares = Some(dora::squared_norms(&self.base_weight())?);
        }
        self.remove(&adapter.name);
        self.adapters.push(adapter);
        Ok(())
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.adapters.retain(|adapter| adapter.name != name);
        *self.resolved.get_mut() = None;
    }

    /// Returns another handle on the same tensors.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            weight: self.weight.shallow_clone(),
            shape: self.shape,
            bias: self.bias.as_ref().map(Tensor::shallow_clone),
            squares: self.squares.as_ref().map(Tensor::shallow_clone),
            adapters: self.adapters.iter().map(Adapter::shallow_clone).collect(),
            merged: self.merged.clone(),
            switch: self.switch.clone(),
            resolved: Mutex::default(),
        }
    }

    pub(crate) fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// Returns W before any merge, sharing memory.
    pub(crate) fn base_weight(&self) -> Tensor {
        match &*self.merged.lock() {
            Some(merged) => merged.original.shallow_clone(),
            None => self.weight.shallow_clone(),
        }
    }

    /// Merges the active adapters into a new weight that replaces W until [`LoraLinear::unmerge`], which restores W bit for
    /// bit: it is never overwritten. Meanwhile both are in memory. Merged layers compute only the merged product. Does nothing
    /// if already merged.
    ///
    /// # Errors
    /// Values that are not finite, a base in NF4; with nothing changed.
    pub fn merge(&self) -> Result<()> {
        let merged = self.merged_weight()?;
        self.put(merged, "the projection")
    }

    /// Returns W with the active adapters merged, in W's dtype; `None` if it is merged, or none is active.
    pub(crate) fn merged_weight(&self) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        if self.merged.lock().is_some() {
            return Ok(None);
        }
        let active = self.active();
        let [first, ..] = active.as_slice() else { return Ok(None) };
        if is_quantized(&self.weight) {
            let reason = match BlockType::of(&self.weight) {
                Some(_) => {
                    "the base is in the blocks of a GGUF file, whose steps are larger than what an adapter changes; load the model in \
                            bfloat16, and merge there"
                }
                None => {
                    "the base is in NF4, whose steps are larger than what an adapter changes; load the model in the dtype of its \
                         original files, and merge there"
                }
            };
            return Err(Error::Invalid(reason.to_owned()));
        }
        let wide = self.weight.f_to_kind(first.a.kind())?;
        let mut sum = wide.f_add(&first.delta()?)?;
        for adapter in &active[1..] {
            sum = sum.f_add_(&adapter.delta()?)?;
        }
        if let (Some(magnitude), Some(squares)) = (&first.magnitude, &self.squares) {
            let norms = dora::row_norms(&self.weight, squares, &first.terms(None), None)?;
            sum = sum.f_mul_(&magnitude.f_div(&norms)?.f_unsqueeze(1)?)?;
        }
        Ok(Some(sum.f_to_kind(self.weight.kind())?))
    }

    /// Replaces W by a merged weight.
    pub(crate) fn put(&self, merged: Option<Tensor>, module: &str) -> Result<()> {
        let Some(merged) = merged else { return Ok(()) };
        let adapters: Vec<String> = self.active().iter().map(|adapter| adapter.name.clone()).collect();
        if merged.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Err(Error::Invalid(format!(
                "merging {} into `{module}` gives values that are not finite; nothing was merged. Find out where the training diverged, or \
                 delete the adapter",
                adapters.join(", ")
            )));
        }
        let original = self.weight.f_detach()?;
        exchange(&self.weight, &merged)?;
        let hash = hash(&adapters);
        *self.merged.lock() = Some(Merged { original, adapters, hash });
        Ok(())
    }

    /// Restores W. Does nothing if not merged.
    ///
    /// # Errors
    /// Never fails; `Result` for uniformity.
    pub fn unmerge(&self) -> Result<()> {
        match self.merged.lock().take() {
            Some(merged) => exchange(&self.weight, &merged.original),
            None => Ok(()),
        }
    }

    /// Returns the names of the merged adapters.
    pub fn merged(&self) -> Vec<String> {
        self.merged.lock().as_ref().map(|merged| merged.adapters.clone()).unwrap_or_default()
    }

    /// Returns a plain projection with the current W, merged or not.
    pub fn into_linear(self) -> Linear {
        Linear { weight: self.weight, bias: self.bias }
    }

    /// Returns the active adapters that this layer has, in the order of the switch.
    fn active(&self) -> Vec<&Adapter> {
        self.resolved().active.iter().map(|index| &self.adapters[*index]).collect()
    }

    /// Finds the adapters by name if the switch has changed since the last time.
    fn resolved(&self) -> Arc<Resolved> {
        let mut resolved = self.resolved.lock();
        // Read before the setting: a change in between is noticed the next time.
        let version = self.switch.version();
        if let Some(current) = resolved.as_ref().filter(|resolved| resolved.version == version) {
            return current.clone();
        }
        let new = self.switch.read(|setting| {
            let index = |name: &String| self.adapters.iter().position(|adapter| adapter.name == *name);
            let active: Vec<usize> = setting.active.iter().filter_map(index).collect();
            let names: Vec<&str> = active.iter().map(|index| self.adapters[*index].name.as_str()).collect();
            let disabled = setting.disabled > 0;
            Arc::new(Resolved { version, disabled, hash: hash((disabled, names)), active })
        });
        *resolved = Some(new.clone());
        new
    }

    /// Checks x, and returns the setting of this forward, which it notes for a segment that recomputes it in backward.
    fn begin(&self, x: &Tensor) -> runtime::Result<Setting> {
        let (of_x, weight) = (TensorLayout::of(x)?, TensorLayout::of(&self.weight)?);
        if of_x.size().last() != Some(&self.in_features()) {
            let reason = format!("`x` has shape {:?}; expected […, {}]", of_x.size(), self.in_features());
            return Err(Error::invalid("lora linear", reason));
        }
        let same_kind = of_x.kind() == weight.kind() || is_quantized_layout(&weight) || precision::is_set();
        if !same_kind || of_x.device() != weight.device() {
            let expected = format!("{:?} on {:?}, as the weight has", weight.kind(), weight.device());
            let reason = format!("`x` is {:?} on {:?}; expected {expected}", of_x.kind(), of_x.device());
            return Err(Error::invalid("lora linear", reason));
        }
        let resolved = self.resolved();
        let merged = self.merged.lock().as_ref().map(|merged| merged.hash);
        note_setting(&(resolved.hash, merged));
        Ok(match () {
            () if resolved.disabled => Setting::Disabled,
            () if merged.is_some() || resolved.active.is_empty() => Setting::Base,
            () => Setting::Adapted(resolved),
        })
    }

    /// Returns the adapter if it has magnitudes, with the squared norms of W's rows.
    fn with_magnitudes(&self, resolved: &Resolved) -> Option<(&Adapter, &Tensor)> {
        let [index] = resolved.active[..] else { return None };
        let adapter = &self.adapters[index];
        self.squares.as_ref().filter(|_| adapter.magnitude.is_some()).map(|squares| (adapter, squares))
    }

    /// Returns the low-rank terms of the active adapters, each with a mask that is drawn here.
    fn terms(&self, resolved: &Resolved, training: bool) -> runtime::Result<Vec<Term<'_>>> {
        let mut terms = Vec::new();
        for adapter in resolved.active.iter().map(|index| &self.adapters[*index]) {
            terms.extend(adapter.terms(mask(adapter, training)?));
        }
        Ok(terms)
    }

    fn run(&self, x: &Tensor, training: bool) -> models::Result<Tensor> {
        let weight = &self.weight;
        let resolved = match self.begin(x)? {
            Setting::Adapted(resolved) => resolved,
            Setting::Base => return linear(x, weight, self.bias.as_ref()),
            // Offloading moves a merged layer to the device without its base weight.
            Setting::Disabled => {
                let base = self.base_weight().f_to_device(x.device())?;
                return linear(x, &base, self.bias.as_ref());
            }
        };
        if !precision::is_set() {
            return self.adapted(x, weight, self.bias.as_ref(), &resolved, training);
        }
        let x = precision::operand(x)?;
        let weight = precision::weight(weight)?;
        let bias = self.bias.as_ref().map(precision::weight).transpose()?;
        self.adapted(&x, &weight, bias.as_ref(), &resolved, training)
    }

    /// Computes y with the active adapters, at least one.
    fn adapted(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        resolved: &Resolved,
        training: bool,
    ) -> models::Result<Tensor> {
        if let Some((adapter, squares)) = self.with_magnitudes(resolved) {
            return dora::forward(x, weight, bias, squares, adapter, mask(adapter, training)?);
        }
        low_rank_linear(x, &Affine { weight, bias, terms: self.terms(resolved, training)? })
    }
}

/// The setting of one forward.
enum Setting {
    /// The base alone, without a merge.
    Disabled,
    /// The weight as it is: merged, or without an active adapter.
    Base,
    Adapted(Arc<Resolved>),
}

/// Draws the mask of an adapter's dropout, if it is active.
fn mask(adapter: &Adapter, training: bool) -> runtime::Result<Option<Mask>> {
    (training && adapter.dropout > 0.0).then(|| Mask::draw(adapter.dropout)).transpose()
}

/// Makes `tensor` share the memory of `other`. A graph that saved `tensor` refuses to run.
pub(crate) fn exchange(tensor: &Tensor, other: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    tensor.shallow_clone().f_set_data(other)?;
    // An in-place change of no elements counts as a change: libtorch notices that a saved tensor is stale.
    let _ = tensor.f_detach()?.f_narrow(0, 0, 0)?.f_zero_()?;
    Ok(())
}

impl Module for LoraLinear {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.optional_parameter("bias", self.bias.as_ref());
        for adapter in &self.adapters {
            for (name, tensor) in adapter.tensors() {
                visitor.parameter(&format!("{name}.{}.weight", adapter.name), tensor);
            }
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.optional_parameter("bias", self.bias.as_mut())?;
        for Adapter { name, a, b, magnitude, .. } in &mut self.adapters {
            visitor.parameter(&format!("lora_A.{name}.weight"), a)?;
            visitor.parameter(&format!("lora_B.{name}.weight"), b)?;
            visitor
                .optional_parameter(&format!("lora_magnitude_vector.{name}.weight"), magnitude.as_mut())?;
        }
        Ok(())
    }
}

impl Projection for LoraLinear {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        self.run(x, context.training)
    }

    fn affine(&self, x: &Tensor, context: &Context<'_>) -> models::Result<Option<Affine<'_>>> {
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        let terms = match self.begin(x)? {
            Setting::Disabled => return Ok(None),
            Setting::Base => Vec::new(),
            Setting::Adapted(resolved) if self.with_magnitudes(&resolved).is_some() => return Ok(None),
            Setting::Adapted(resolved) => self.terms(&resolved, context.training)?,
        };
        Ok(Some(Affine { weight, bias, terms }))
    }

    fn in_features(&self) -> i64 {
        self.shape[1]
    }

    fn out_features(&self) -> i64 {
        self.shape[0]
    }
}
