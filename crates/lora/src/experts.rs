//! The frozen experts of a mixture with adapters.
//!
//! transformers 5 has the experts of a layer in two tensors, `experts.gate_up_proj` and `experts.down_proj`, which PEFT adapts as parameters
//! ([`LoraConfig::target_parameters`](crate::LoraConfig::target_parameters)). [`ExpertTerm`] documents the layout of A and B, and the
//! mathematics. In a file, an adapter of one tensor is called `experts.lora_A.weight`; of both, that of gate and up is
//! `experts.base_layer.lora_A.weight`, because PEFT wraps the module once for each.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kernels::matmul::wide_kind;
use kernels::quantized::{is_quantized, matrix_shape};
use models::module::{Module, Visitor, VisitorMut};
use models::{ExpertChange, ExpertTensor, ExpertTerm, delta_of_expert};
use parking_lot::Mutex;
use runtime::autograd::note_setting;
use runtime::ops::TryScalar;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, unsupported};
use crate::init::Init;
use crate::linear::exchange;
use crate::options::LoraLinearConfig;
use crate::switch::Switch;

/// Refuses what adapters of experts do not have, as PEFT does, but for initialisations that PEFT reads from a module's weight.
///
/// # Errors
/// Dropout, DoRA, an initialisation by the base's values or by an orthogonal basis.
pub(crate) fn refuse(options: &LoraLinearConfig) -> Result<()> {
    let refused = |field: &str, value: String, remedy| {
        Err(unsupported(field, format!("{value} with `target_parameters`"), remedy))
    };
    if options.dropout != 0.0 {
        let remedy =
            "PEFT has no dropout of an expert's input; set it to 0, or leave `target_parameters` out";
        return refused("lora_dropout", options.dropout.to_string(), remedy);
    }
    if options.dora {
        return refused(
            "use_dora",
            "true".to_owned(),
            "adapt the experts without DoRA, or leave `target_parameters` out",
        );
    }
    match options.init {
        Init::Kaiming | Init::Gaussian | Init::Random => Ok(()),
        Init::Pissa | Init::Olora | Init::Orthogonal => refused(
            "init_lora_weights",
            format!("{:?}", options.init).to_lowercase(),
            "take true, false or \"gaussian\", or leave `target_parameters` out",
        ),
    }
}

/// The shapes of a layer's experts: number, and `[in, out]` of a tensor of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertShape {
    pub(crate) experts: i64,
    pub(crate) hidden: i64,
    pub(crate) inner: i64,
}

impl ExpertShape {
    /// Returns `[in, out]` of an expert in a tensor of all.
    pub(crate) fn widths(self, of: ExpertTensor) -> [i64; 2] {
        match of {
            ExpertTensor::GateUp => [self.hidden, 2 * self.inner],
            ExpertTensor::Down => [self.inner, self.hidden],
        }
    }

    /// Returns the shapes of A and B.
    pub(crate) fn of_adapter(self, of: ExpertTensor, rank: i64) -> [[i64; 2]; 2] {
        let [inner, out] = self.widths(of);
        [[self.experts * rank, inner], [out, rank * self.experts]]
    }
}

/// One adapter of one tensor of all experts.
#[derive(Debug)]
pub(crate) struct ExpertAdapter {
    pub(crate) name: String,
    pub(crate) to: ExpertTensor,
    /// `[E·r, in]`.
    pub(crate) a: Tensor,
    /// `[out, r·E]`.
    pub(crate) b: Tensor,
    scaling: f64,
}

impl ExpertAdapter {
    /// Creates an adapter as PEFT does: A as that of a projection to E·r numbers, B zero, or as a projection's from as many.
    pub(crate) fn new(
        name: &str,
        to: ExpertTensor,
        (shape, options): (ExpertShape, (Kind, Device)),
        config: &LoraLinearConfig,
        generator: &mut Generator,
    ) -> Result<Self> {
        config.check()?;
        refuse(config)?;
        let _no_grad = tch::no_grad_guard();
        let [of_a, of_b] = shape.of_adapter(to, config.r);
        let options = (wide_kind(options.0), options.1);
        let mut uniform = |size: [i64; 2]| {
            let bound = 1.0 / (size[1] as f64).sqrt();
            generator.uniform(&size, (-bound, bound), options)
        };
        let (a, b) = match config.init {
            Init::Random => (uniform(of_a)?, uniform(of_b)?),
            Init::Gaussian => {
                let drawn = generator.normal(&of_a, options)?;
                (drawn.try_mul_scalar(1.0 / config.r as f64)?, Tensor::f_zeros(of_b, options)?)
            }
            _ => (uniform(of_a)?, Tensor::f_zeros(of_b, options)?),
        };
        Ok(Self { name: name.to_owned(), to, a, b, scaling: config.scaling() })
    }

    fn shallow_clone(&self) -> Self {
        let Self { name, to, a, b, scaling } = self;
        Self { name: name.clone(), to: *to, a: a.shallow_clone(), b: b.shallow_clone(), scaling: *scaling }
    }

    /// Returns the trained tensors with PEFT's names.
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 2] {
        [("lora_A", &self.a), ("lora_B", &self.b)]
    }

    fn term(&self) -> ExpertTerm<'_> {
        ExpertTerm { to: self.to, a: &self.a, b: &self.b, scale: self.scaling }
    }
}

/// The low-rank terms of a layer's experts, in the order of the switch's active adapters.
#[derive(Debug)]
pub(crate) struct LoraExperts {
    in_turns: bool,
    adapters: Vec<ExpertAdapter>,
    /// The matrices before a merge, gate, up and down of each expert, and the names of what was merged.
    merged: Arc<Mutex<Option<Merged>>>,
    switch: Arc<Switch>,
}

#[derive(Debug)]
struct Merged {
    originals: Vec<[Tensor; 3]>,
    adapters: Vec<String>,
}

impl LoraExperts {
    /// Creates a change without adapters.
    pub(crate) fn new(in_turns: bool, switch: Arc<Switch>) -> Self {
        Self { in_turns, adapters: Vec::new(), merged: Arc::default(), switch }
    }

    pub(crate) fn push(&mut self, adapter: ExpertAdapter) {
        self.adapters.push(adapter);
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.adapters.retain(|adapter| adapter.name != name);
    }

    pub(crate) fn adapters(&self) -> &[ExpertAdapter] {
        &self.adapters
    }

    /// Returns the tensors of the experts that an adapter adapts.
    pub(crate) fn tensors_of(&self, adapter: &str) -> Vec<ExpertTensor> {
        self.adapters.iter().filter(|known| known.name == adapter).map(|known| known.to).collect()
    }

    /// Returns another handle on the same tensors.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            in_turns: self.in_turns,
            adapters: self.adapters.iter().map(ExpertAdapter::shallow_clone).collect(),
            merged: self.merged.clone(),
            switch: self.switch.clone(),
        }
    }

    /// Returns the active adapters in the order of the switch, and whether all are disabled.
    fn active(&self) -> (Vec<&ExpertAdapter>, bool) {
        self.switch.read(|setting| {
            let of = |name: &String| {
                let name = name.clone();
                self.adapters.iter().filter(move |adapter| adapter.name == name)
            };
            (setting.active.iter().flat_map(of).collect(), setting.disabled > 0)
        })
    }

    /// Returns the names of the merged adapters.
    pub(crate) fn merged(&self) -> Vec<String> {
        self.merged.lock().as_ref().map(|merged| merged.adapters.clone()).unwrap_or_default()
    }

    /// Merges the active adapters into new matrices, expert by expert, until [`LoraExperts::unmerge`] with the same ones. Both are in memory
    /// meanwhile. Does nothing if merged, or if none is active.
    ///
    /// # Errors
    /// Quantized or streamed experts; values that are not finite, with nothing changed.
    pub(crate) fn merge(&self, matrices: &[[Tensor; 3]], is_streamed: bool, module: &str) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let (active, _) = self.active();
        if active.is_empty() || self.merged.lock().is_some() {
            return Ok(());
        }
        if is_streamed {
            return Err(Error::Invalid(format!(
                "the experts of `{module}` are streamed from files, which a merge does not change; load the model without streaming, and \
                 merge there"
            )));
        }
        if matrices.iter().flatten().any(is_quantized) {
            return Err(Error::Invalid(format!(
                "the experts of `{module}` are quantized, in steps larger than what an adapter changes; load the model in the dtype of its original \
                 files, and merge there"
            )));
        }
        let mut new = Vec::with_capacity(matrices.len());
        for (expert, [gate, up, down]) in matrices.iter().enumerate() {
            let wide =
                |one: &Tensor| -> Result<Tensor> { Ok(one.f_detach()?.f_to_kind(wide_kind(one.kind()))?) };
            let mut sums = [wide(gate)?, wide(up)?, wide(down)?];
            for adapter in &active {
                let deltas = delta_of_expert(matrices.len(), expert, self.in_turns, &adapter.term())?;
                let first = if adapter.to == ExpertTensor::GateUp { 0 } else { 2 };
                for (sum, delta) in sums[first..].iter_mut().zip(deltas) {
                    *sum = sum.f_add(&delta)?;
                }
            }
            for sum in &sums {
                if sum.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
                    return Err(Error::Invalid(format!(
                        "merging into `{module}` gives values that are not finite; nothing was merged. Find out where the training diverged, \
                         or delete the adapter"
                    )));
                }
            }
            let [of_gate, of_up, of_down] = &sums;
            let kind = gate.kind();
            new.push([of_gate.f_to_kind(kind)?, of_up.f_to_kind(kind)?, of_down.f_to_kind(kind)?]);
        }
        let mut originals = Vec::new();
        for (own, merged) in matrices.iter().zip(new) {
            let [gate, up, down] = own;
            originals.push([gate.f_detach()?, up.f_detach()?, down.f_detach()?]);
            own.iter().zip(&merged).try_for_each(|(own, merged)| exchange(own, merged))?;
        }
        let mut adapters: Vec<String> = active.iter().map(|adapter| adapter.name.clone()).collect();
        adapters.dedup();
        *self.merged.lock() = Some(Merged { originals, adapters });
        Ok(())
    }

    /// Restores the matrices bit for bit. Does nothing if not merged.
    pub(crate) fn unmerge(&self, matrices: &[[Tensor; 3]]) -> Result<()> {
        let Some(Merged { originals, .. }) = self.merged.lock().take() else { return Ok(()) };
        matrices
            .iter()
            .flatten()
            .zip(originals.iter().flatten())
            .try_for_each(|(own, original)| exchange(own, original))
    }
}

impl ExpertChange for LoraExperts {
    fn terms(&self) -> runtime::Result<Vec<ExpertTerm<'_>>> {
        let (active, is_disabled) = self.active();
        let merged = self.merged.lock().as_ref().map(|merged| merged.adapters.clone());
        let names: Vec<&str> = active.iter().map(|adapter| adapter.name.as_str()).collect();
        let mut hasher = DefaultHasher::new();
        (is_disabled, names, &merged).hash(&mut hasher);
        note_setting(&hasher.finish());
        match (is_disabled, merged) {
            (true, Some(_)) => {
                let reason = "adapters are merged into the experts, which then are not those of the base; call `unmerge` to disable them";
                Err(Error::invalid("mixture of experts", reason.to_owned()))
            }
            (true, None) | (false, Some(_)) => Ok(Vec::new()),
            (false, None) => Ok(active.into_iter().map(ExpertAdapter::term).collect()),
        }
    }
}

impl Module for LoraExperts {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for adapter in &self.adapters {
            for (name, tensor) in adapter.tensors() {
                visitor.parameter(&format!("{}.{name}.{}.weight", adapter.to.name(), adapter.name), tensor);
            }
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        for ExpertAdapter { name, to, a, b, .. } in &mut self.adapters {
            visitor.parameter(&format!("{}.lora_A.{name}.weight", to.name()), a)?;
            visitor.parameter(&format!("{}.lora_B.{name}.weight", to.name()), b)?;
        }
        Ok(())
    }
}

/// Returns the shape of a layer's experts.
pub(crate) fn shape_of(matrices: &[[Tensor; 3]]) -> ExpertShape {
    let [inner, hidden] = matrices.first().and_then(|[gate, ..]| matrix_shape(gate)).unwrap_or_default();
    ExpertShape { experts: matrices.len() as i64, hidden, inner }
}

/// Returns the name of an adapter's tensors in a file, without their last part, if it adapts these tensors of the experts called `experts`.
pub(crate) fn key(experts: &str, of: ExpertTensor, adapted: &[ExpertTensor]) -> String {
    let is_inner = of == ExpertTensor::GateUp && adapted.contains(&ExpertTensor::Down);
    format!("{experts}{}", if is_inner { ".base_layer" } else { "" })
}
