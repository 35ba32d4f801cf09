//! Linear projections.

use kernels::gpu;
use kernels::linear::linear;
use kernels::low_rank::{Affine, low_rank_linears};
use kernels::nf4::{self, Scales};
use kernels::quantized::{blocks, is_quantized_kind, is_quantized_layout, matrix_shape};
use runtime::precision;
use runtime::tensor_layout::TensorLayout;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, wrong_placement, wrong_shape};
use crate::init::Init;
use crate::module::{Context, Module, Projection, Visitor, VisitorMut};

/// y = x·Wᵀ + b.
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`, or the same matrix quantized ([`kernels::quantized`]): frozen, for an x of any floating dtype.
    pub weight: Tensor,
    /// `[out]`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// Creates a projection with weights and bias uniform in ±1/√in, as PyTorch's `nn.Linear`.
    ///
    /// # Errors
    /// A width below 1, too little memory.
    pub fn new(in_features: i64, out_features: i64, bias: bool, options: (Kind, Device)) -> Result<Self> {
        let init = Init::torch_linear(in_features);
        Self::with_init(in_features, out_features, bias.then_some(init), init, options)
    }

    /// Creates a projection with the given initialisations; no bias for `None`. With a dtype of [`kernels::nf4`] the weight is quantized,
    /// with [`blocks::KIND`] it is a [`placeholder`]; the bias is in bf16.
    ///
    /// # Errors
    /// As [`Linear::new`], and those of [`Init::parameter`].
    pub fn with_init(
        in_features: i64,
        out_features: i64,
        bias: Option<Init>,
        weight: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        positive("linear", &[("in", in_features), ("out", out_features)])?;
        let weight = match Scales::of(options.0) {
            _ if options.0 == blocks::KIND => placeholder(out_features, options.1)?,
            Some(scales) => quantized([out_features, in_features], weight, scales, options.1)?,
            None => weight.parameter(&[out_features, in_features], options)?,
        };
        let options = (dense_kind(options.0), options.1);
        let bias = bias.map(|init| init.parameter(&[out_features], options)).transpose()?;
        Ok(Self { weight, bias })
    }
}

/// Returns the dtype of what is not quantized in a model of `kind`: bf16 beside quantized matrices, else `kind`.
pub(crate) fn dense_kind(kind: Kind) -> Kind {
    if is_quantized_kind(kind) { Kind::BFloat16 } else { kind }
}

/// Returns a tensor without values in the place of a matrix that is in a file's blocks, until it is read.
pub(crate) fn placeholder(out: i64, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_empty([out, 0, 0], (Kind::Uint8, device))?)
}

/// Returns whether a tensor is a [`placeholder`].
#[cfg(feature = "gguf")]
pub(crate) fn is_placeholder(tensor: &Tensor) -> bool {
    matches!(tensor.size()[..], [_, 0, 0])
}

fn quantized([out, inner]: [i64; 2], init: Init, scales: Scales, device: Device) -> Result<Tensor> {
    if init == Init::Uninitialised {
        return nf4::empty([out, inner], scales, device);
    }
    let mut dense = Tensor::f_empty([out, inner], (Kind::BFloat16, device))?;
    init.fill(&mut dense)?;
    nf4::quantize(&dense, scales)
}

/// Computes x·Wᵀ + b over the last dimension. Every projection of this crate calls this function.
pub(crate) fn project(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check(x, weight)?;
    linear(x, weight, bias)
}

/// Runs projections of one input. On a GPU those that are affine are one autograd function if one of them has low-rank terms
/// ([`low_rank_linears`]). Others, as DoRA's, and all under a policy of mixed precision, which decides the dtypes of each product, run by
/// themselves.
pub(crate) fn project_all<const N: usize>(
    projections: [&dyn Projection; N],
    x: &Tensor,
    context: &Context<'_>,
) -> Result<[Tensor; N]> {
    let joins = gpu::is_chosen(x.device()) && !precision::is_set();
    let (mut joint, mut results) = (Vec::new(), Vec::new());
    // Each draws its masks here, in the order of a CPU.
    for projection in projections {
        let affine = if joins { projection.affine(x, context)? } else { None };
        results.push(match affine {
            Some(affine) => {
                joint.push(affine);
                None
            }
            None => Some(projection.forward(x, context)?),
        });
    }
    let mut joint = match joint.iter().any(|one| !one.terms.is_empty()) {
        true => low_rank_linears(x, &joint)?.into_iter(),
        false => Vec::new().into_iter(),
    };
    let results =
        projections.iter().zip(results).map(|(projection, result)| match result.or_else(|| joint.next()) {
            Some(result) => Ok(result),
            None => projection.forward(x, context),
        });
    let results: Vec<Tensor> = results.collect::<Result<_>>()?;
    results.try_into().map_err(|_| Error::invalid("linear", "a projection without a result"))
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    let (of_x, of_weight) = (TensorLayout::of(x)?, TensorLayout::of(weight)?);
    let is_quantized = is_quantized_layout(&of_weight);
    let [_, width] = match of_weight.size() {
        &[out, width] if !is_quantized => [out, width],
        _ => matrix_shape(weight).unwrap_or_default(),
    };
    if of_x.size().last() != Some(&width) {
        let expected = format!("[…, {width}]");
        return Err(wrong_shape("linear", "x", x.size(), expected));
    }
    // A mixed-precision policy, if there is one, decides the dtypes.
    let same_kind = of_x.kind() == of_weight.kind() || is_quantized || precision::is_set();
    if !same_kind || of_x.device() != of_weight.device() {
        return Err(wrong_placement(
            "linear",
            "x",
            (x.kind(), x.device()),
            format!("{:?} on {:?}, as the weight has", weight.kind(), weight.device()),
        ));
    }
    Ok(())
}

/// Refuses sizes below 1.
pub(crate) fn positive(what: &'static str, sizes: &[(&str, i64)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size < 1) {
        None => Ok(()),
        Some((name, size)) => Err(Error::invalid(what, format!("`{name}` is {size}; expected at least 1"))),
    }
}

impl Module for Linear {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.optional_parameter("bias", self.bias.as_ref());
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.optional_parameter("bias", self.bias.as_mut())
    }
}

impl Projection for Linear {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        project(x, &self.weight, self.bias.as_ref())
    }

    fn affine(&self, x: &Tensor, _: &Context<'_>) -> Result<Option<Affine<'_>>> {
        check(x, &self.weight)?;
        Ok(Some(Affine { weight: &self.weight, bias: self.bias.as_ref(), terms: Vec::new() }))
    }

    fn in_features(&self) -> i64 {
        matrix_shape(&self.weight).unwrap_or_default()[1]
    }

    fn out_features(&self) -> i64 {
        self.weight.size()[0]
    }
}
