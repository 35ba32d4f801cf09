//! The input tensors of a loss and their checks.

use std::sync::Arc;

use kernels::quantized::{is_quantized, matrix_shape};
use models::distillation::{DistillationConfig, Teacher};
use runtime::autograd::GradMode;
use tch::{Device, Kind, Tensor};

use crate::error::{Result, device, dtype, refused, shape};
use crate::options::{LinearCrossEntropy, Reduction};
use crate::teacher;
use crate::vocabulary_parallel::Shard;

/// The targets of the prediction.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'a> {
    /// One class per token: int64, in the shape of `hidden` without its last dimension.
    Classes(&'a Tensor),
    /// One distribution over the vocabulary per token (distillation, mixup): `[…, vocabulary]` in fp32, or fp64 for fp64
    /// hidden states. Not differentiated. No token is ignored.
    Distributions(&'a Tensor),
}

/// The denominator of a mean.
#[derive(Clone, Copy, Debug)]
pub enum Denominator<'a> {
    /// A number, such as the labelled tokens of a whole step with gradient accumulation or data parallelism.
    Number(f64),
    /// The same as a one-element tensor on the device. It is not read on the host, so it is not checked; if it is 0,
    /// [`EmptyMean`](crate::EmptyMean) applies.
    Tensor(&'a Tensor),
}

/// A low-rank adapter of the weight, W + scale·B·A; only A and B are trained (LoRA, arXiv 2106.09685).
#[derive(Clone, Copy, Debug)]
pub struct Adapter<'a> {
    /// A: `[rank, hidden]`.
    pub a: &'a Tensor,
    /// B: `[vocabulary, rank]`.
    pub b: &'a Tensor,
    /// Factor of B·A (LoRA's α/r).
    pub scale: f64,
}

/// Rows of the weight that are replaced for some classes, such as those of new tokens: logits of class `classes[k]` are x·`rows[k]`.
#[derive(Clone, Copy, Debug)]
pub struct ReplacedRows<'a> {
    /// `[n]` int64, each class at most once.
    pub classes: &'a Tensor,
    /// `[n, hidden]` in a floating dtype, rounded to that of `hidden` for the products.
    pub rows: &'a Tensor,
}

/// The inputs of a loss. Letters: n tokens (all leading dimensions of `hidden`), h hidden, v vocabulary.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// x: `[…, h]`.
    pub hidden: &'a Tensor,
    /// W: `[v, h]` in the dtype of `hidden`, as `nn.Linear` stores it.
    pub weight: &'a Tensor,
    /// The targets.
    pub targets: Targets<'a>,
    /// b: `[v]` in the dtype of `hidden`.
    pub bias: Option<&'a Tensor>,
    /// A low-rank adapter of the weight.
    pub adapter: Option<Adapter<'a>>,
    /// Rows in place of the weight's, which get their own gradient; those of the weight get none.
    pub replaced_rows: Option<ReplacedRows<'a>>,
    /// A factor per token for its loss, z-loss included: fp32 (fp64 for fp64 inputs), in the shape of the targets. Not
    /// differentiated; for gradients, multiply the result of [`Reduction::None`] instead.
    pub token_weights: Option<&'a Tensor>,
    /// A factor per class, as `weight` of PyTorch's `cross_entropy`: `[v]` fp32 (fp64 for fp64 inputs).
    pub class_weights: Option<&'a Tensor>,
    /// The denominator of a mean. `None`: as in PyTorch, the number of tokens that are not ignored, each weighted by its token
    /// weight and the weight of its target class (for distributions, by the token weight only).
    pub denominator: Option<Denominator<'a>>,
    /// The number of tokens that are not ignored, or more, if known. On a GPU the other rows then skip the products without a
    /// synchronisation; a number that is too small drops labelled tokens. On a CPU the targets are read instead, and a number that is
    /// too small is an error.
    pub labelled_tokens: Option<i64>,
    /// The shard of the vocabulary that `weight`, `bias`, B and distributions hold. Target classes and class weights refer to
    /// the whole vocabulary.
    pub shard: Option<Arc<Shard>>,
    /// A teacher: the loss of a token is then w·ℓ + (1 − w)·D of [`models::distillation`].
    pub teacher: Option<(Teacher<'a>, DistillationConfig)>,
}

impl<'a> Inputs<'a> {
    /// Creates inputs without the optional ones.
    pub fn new(hidden: &'a Tensor, weight: &'a Tensor, targets: &'a Tensor) -> Self {
        Self {
            hidden,
            weight,
            targets: Targets::Classes(targets),
            bias: None,
            adapter: None,
            replaced_rows: None,
            token_weights: None,
            class_weights: None,
            denominator: None,
            labelled_tokens: None,
            shard: None,
            teacher: None,
        }
    }
}

/// The sizes of checked inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) tokens: i64,
    pub(crate) hidden: i64,
    /// Rows of the weight of this shard.
    pub(crate) columns: i64,
    /// Number of classes.
    pub(crate) vocabulary: i64,
    /// The first class of this shard.
    pub(crate) first: i64,
    /// Rows of the weight of the largest shard.
    pub(crate) widest: i64,
}

/// Returns the dtype in which the loss is computed: of its statistics and per-token numbers, and of logits unless they are rounded.
pub(crate) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Checks shapes, dtypes, devices and options, and returns the sizes.
pub(crate) fn check(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<Sizes> {
    options.check()?;
    let (x, w) = (inputs.hidden, inputs.weight);
    defined(inputs)?;
    let kind = x.kind();
    if !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
        return Err(dtype("hidden", kind, "Float, Double, BFloat16 or Half"));
    }
    let size = x.size();
    let Some((&hidden, leading)) = size.split_last() else {
        return Err(shape("hidden", x, "[…, hidden]"));
    };
    let Some([columns, width]) = matrix_shape(w) else {
        return Err(shape("weight", w, "[vocabulary, hidden]"));
    };
    if width != hidden {
        return Err(shape("weight", w, format!("[vocabulary, {hidden}] for hidden states {size:?}")));
    }
    if columns == 0 || hidden == 0 {
        return Err(shape("weight", w, "a vocabulary and a hidden size of at least 1"));
    }
    let (first, vocabulary) = match &inputs.shard {
        Some(shard) => shard.range(columns)?,
        None => (0, columns),
    };
    let per_class = |name, tensor: Option<&Tensor>, length, kind| -> Result<()> {
        let Some(tensor) = tensor else { return Ok(()) };
        if tensor.size() != [length] {
            return Err(shape(name, tensor, format!("[{length}]")));
        }
        same(name, tensor, kind, x.device())
    };
    // A quantized weight is for hidden states of any dtype.
    same("weight", w, if is_quantized(w) { w.kind() } else { kind }, x.device())?;
    per_class("bias", inputs.bias, columns, kind)?;
    per_class("class_weights", inputs.class_weights, vocabulary, compute_kind(kind))?;
    if let Some(adapter) = inputs.adapter {
        let rank = adapter.a.size().first().copied().unwrap_or(0);
        for (name, tensor, expected) in
            [("adapter.a", adapter.a, [rank, hidden]), ("adapter.b", adapter.b, [columns, rank])]
        {
            if tensor.size() != expected || rank == 0 {
                return Err(shape(name, tensor, format!("{expected:?}, with a rank of at least 1")));
            }
            same(name, tensor, kind, x.device())?;
        }
        if !adapter.scale.is_finite() {
            return Err(refused(format!(
                "the adapter's scale is {}; expected a finite number",
                adapter.scale
            )));
        }
    }
    replaced_rows(inputs, hidden)?;
    targets(inputs, options, leading, columns)?;
    teacher::check(inputs, options)?;
    if let Some(weights) = inputs.token_weights {
        if weights.size() != leading {
            return Err(shape("token_weights", weights, format!("{leading:?}, the shape of the targets")));
        }
        same("token_weights", weights, compute_kind(kind), x.device())?;
    }
    not_differentiated(inputs)?;
    denominator(inputs, options)?;
    let tokens = leading.iter().product();
    if let Some(labelled) = inputs.labelled_tokens
        && !(0..=tokens).contains(&labelled)
    {
        return Err(refused(format!("{labelled} labelled tokens of {tokens}; expected 0 to {tokens}")));
    }
    let widest = inputs.shard.as_ref().map_or(columns, |shard| shard.widest);
    Ok(Sizes { tokens, hidden, columns, vocabulary, first, widest })
}

fn replaced_rows(inputs: &Inputs<'_>, hidden: i64) -> Result<()> {
    let Some(ReplacedRows { classes, rows }) = inputs.replaced_rows else { return Ok(()) };
    if inputs.shard.is_some() {
        return Err(refused(
            "rows are replaced in a whole vocabulary, not in a shard; replace them in the shards' weights",
        ));
    }
    if inputs.bias.is_some() || inputs.adapter.is_some() {
        return Err(refused("rows are replaced in a weight without a bias and an adapter; leave either out"));
    }
    let expected = [classes.numel() as i64, hidden];
    if rows.size() != expected {
        return Err(shape("replaced_rows.rows", rows, format!("{expected:?}, a row for each class")));
    }
    if !rows.is_floating_point() {
        return Err(dtype("replaced_rows.rows", rows.kind(), "a floating dtype"));
    }
    same("replaced_rows.classes", classes, Kind::Int64, inputs.hidden.device())?;
    same("replaced_rows.rows", rows, rows.kind(), inputs.hidden.device())
}

fn targets(inputs: &Inputs<'_>, options: &LinearCrossEntropy, leading: &[i64], columns: i64) -> Result<()> {
    let device = inputs.hidden.device();
    match inputs.targets {
        Targets::Classes(classes) => {
            if classes.size() != leading {
                return Err(shape(
                    "targets",
                    classes,
                    format!("{leading:?}, one class for each hidden state"),
                ));
            }
            if classes.kind() != Kind::Int64 {
                return Err(dtype("targets", classes.kind(), "Int64 classes"));
            }
            same("targets", classes, Kind::Int64, device)?;
        }
        Targets::Distributions(distributions) => {
            let expected: Vec<i64> = leading.iter().copied().chain([columns]).collect();
            if distributions.size() != expected {
                return Err(shape(
                    "targets",
                    distributions,
                    format!("{expected:?}, a distribution for each token"),
                ));
            }
            same("targets", distributions, compute_kind(inputs.hidden.kind()), device)?;
            if options.shift != 0 {
                let reason = "a shift needs classes as targets; shift the distributions themselves";
                return Err(refused(reason));
            }
        }
    }
    if options.shift != 0 && leading.is_empty() {
        return Err(refused("a shift needs rows of tokens; the hidden states are [hidden]"));
    }
    Ok(())
}

/// Refuses inputs that require a gradient but get none.
fn not_differentiated(inputs: &Inputs<'_>) -> Result<()> {
    if !GradMode::enabled() {
        return Ok(());
    }
    let distributions = match inputs.targets {
        Targets::Distributions(distributions) => Some(distributions),
        Targets::Classes(_) => None,
    };
    let named = [
        ("targets", distributions),
        ("token_weights", inputs.token_weights),
        ("class_weights", inputs.class_weights),
        ("denominator", denominator_tensor(inputs)),
    ];
    for (name, tensor) in named {
        if tensor.is_some_and(Tensor::requires_grad) {
            let reason = format!("`{name}` requires a gradient, but is not differentiated; detach it");
            return Err(refused(reason));
        }
    }
    Ok(())
}

fn denominator(inputs: &Inputs<'_>, options: &LinearCrossEntropy) -> Result<()> {
    let Some(denominator) = inputs.denominator else { return Ok(()) };
    if options.reduction != Reduction::Mean {
        let reason = format!("a denominator needs the reduction Mean; it is {:?}", options.reduction);
        return Err(refused(reason));
    }
    match denominator {
        Denominator::Number(number) if !(number.is_finite() && number > 0.0) => {
            Err(refused(format!("the denominator is {number}; expected a finite number above 0")))
        }
        Denominator::Tensor(tensor) if tensor.numel() != 1 => {
            Err(shape("denominator", tensor, "one element"))
        }
        Denominator::Tensor(tensor) if tensor.device() != inputs.hidden.device() => {
            Err(device("denominator", tensor.device(), inputs.hidden.device()))
        }
        _ => Ok(()),
    }
}

fn defined(inputs: &Inputs<'_>) -> Result<()> {
    let targets = match inputs.targets {
        Targets::Classes(targets) | Targets::Distributions(targets) => targets,
    };
    let named = [
        ("hidden", Some(inputs.hidden)),
        ("weight", Some(inputs.weight)),
        ("targets", Some(targets)),
        ("bias", inputs.bias),
        ("adapter.a", inputs.adapter.map(|adapter| adapter.a)),
        ("adapter.b", inputs.adapter.map(|adapter| adapter.b)),
        ("replaced_rows.classes", inputs.replaced_rows.map(|replaced| replaced.classes)),
        ("replaced_rows.rows", inputs.replaced_rows.map(|replaced| replaced.rows)),
        ("token_weights", inputs.token_weights),
        ("class_weights", inputs.class_weights),
        ("denominator", denominator_tensor(inputs)),
    ];
    let undefined = named.into_iter().find(|(_, tensor)| tensor.is_some_and(|tensor| !tensor.defined()));
    undefined.map_or(Ok(()), |(name, _)| {
        Err(refused(format!("`{name}` is an undefined tensor; pass a tensor with values")))
    })
}

fn denominator_tensor<'a>(inputs: &Inputs<'a>) -> Option<&'a Tensor> {
    match inputs.denominator {
        Some(Denominator::Tensor(tensor)) => Some(tensor),
        _ => None,
    }
}

pub(crate) fn same(name: &str, tensor: &Tensor, kind: Kind, hidden: Device) -> Result<()> {
    if tensor.kind() != kind {
        return Err(dtype(name, tensor.kind(), format!("{kind:?}")));
    }
    if tensor.device() != hidden {
        return Err(device(name, tensor.device(), hidden));
    }
    Ok(())
}
