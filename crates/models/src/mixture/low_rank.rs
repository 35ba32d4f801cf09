//! Low-rank terms of the experts of a mixture, as parts of their products.
//!
//! PEFT adapts the tensors that hold all experts of a layer: gate and up as one (`gate_up_proj`), and `down_proj`. For E experts, an adapter
//! of rank r has A `[E·r, in]`, whose rows e·r to e·r + r − 1 are those of expert e, and B `[out, r·E]`, whose column j·E + e is column j of
//! expert e. With the n rows x of an expert, their A_e `[r, in]` and B_e `[out, r]`, a scale s, and g = ∂L/∂y:
//!
//! ```text
//! u = s·x·A_eᵀ        y = x·Wᵀ + b + u·B_eᵀ
//! du = s·g·B_e        dA_e = duᵀ·x        dB_e = gᵀ·u        dx = g·W + du·A_e
//! ```
//!
//! Only rows that the router gives to an expert are computed, no W + s·B·A is made, and r numbers are kept for each row: u. Sums are in fp32
//! (f64 for f64) and are rounded once, as in [`kernels::low_rank`]. An expert without a row has gradients of zero, as in PEFT. The
//! gradients have the size of A and B, whose layout is that of the files.
//!
//! Of `gate_up_proj`, rows of B are those of gate, then those of up; gpt-oss has a row of gate, then one of up, in turns.

use std::borrow::Borrow;

use kernels::matmul::{Matrix, mm, mm_into, mm_scaled};
use runtime::autograd::Backward;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

/// The tensor of all experts of a layer that a low-rank term belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExpertTensor {
    /// Gate and up: `experts.gate_up_proj`.
    GateUp,
    /// `experts.down_proj`.
    Down,
}

impl ExpertTensor {
    /// Both, in the order of the parameters of transformers' modules.
    pub const ALL: [Self; 2] = [Self::GateUp, Self::Down];

    /// Its name in a layer's `experts`.
    pub fn name(self) -> &'static str {
        match self {
            Self::GateUp => "gate_up_proj",
            Self::Down => "down_proj",
        }
    }
}

/// s·A·B of all experts of a layer; see the [module](self).
#[derive(Debug, Clone, Copy)]
pub struct ExpertTerm<'a> {
    /// What it is added to.
    pub to: ExpertTensor,
    /// `[E·r, in]`, in fp32 (f64 for an x in f64).
    pub a: &'a Tensor,
    /// `[out, r·E]`, likewise.
    pub b: &'a Tensor,
    /// s.
    pub scale: f64,
}

/// The terms of a mixture, whose tensors are inputs of its function.
pub(super) struct Terms {
    experts: i64,
    /// Whether rows of gate and up in B come in turns.
    in_turns: bool,
    scales: Vec<(ExpertTensor, f64)>,
}

/// The part of a term that belongs to an expert.
pub(super) struct Part {
    /// The term.
    pub(super) index: usize,
    scale: f64,
    /// `[r, in]`.
    a: Tensor,
    /// `[out, r]` of each product: gate and up, or down.
    b: Vec<Tensor>,
}

impl Terms {
    pub(super) fn new(experts: usize, in_turns: bool, terms: &[ExpertTerm<'_>]) -> Self {
        let scales = terms.iter().map(|term| (term.to, term.scale)).collect();
        Self { experts: experts as i64, in_turns, scales }
    }

    pub(super) fn count(&self) -> usize {
        self.scales.len()
    }

    pub(super) fn has(&self, to: ExpertTensor) -> bool {
        self.scales.iter().any(|(of, _)| *of == to)
    }

    pub(super) fn is_to(&self, index: usize, to: ExpertTensor) -> bool {
        self.scales[index].0 == to
    }

    /// Returns the parts of an expert in the terms of one tensor. `inputs` are A and B of each term.
    pub(super) fn parts(
        &self,
        expert: usize,
        to: ExpertTensor,
        inputs: &[impl Borrow<Tensor>],
    ) -> Result<Vec<Part>> {
        let of = |(index, &(_, scale)): (usize, &(ExpertTensor, f64))| -> Result<Part> {
            let (a, b) = (inputs[2 * index].borrow(), inputs[2 * index + 1].borrow());
            // Rows of an expert's B are a column of the whole apart: a copy of them is read once and multiplied by twice.
            let copied = |view: Tensor| -> Result<Tensor> { Ok(view.f_contiguous()?) };
            let b = self.views_of_b(expert, to, b)?.into_iter().map(copied).collect::<Result<_>>()?;
            Ok(Part { index, scale, a: self.view_of_a(expert, a)?, b })
        };
        self.scales.iter().enumerate().filter(|(_, (other, _))| *other == to).map(of).collect()
    }

    /// A_e as a view of A.
    fn view_of_a(&self, expert: usize, a: &Tensor) -> Result<Tensor> {
        let rank = a.size()[0] / self.experts;
        Ok(a.f_narrow(0, expert as i64 * rank, rank)?)
    }

    /// B_e of each product as views of B.
    fn views_of_b(&self, expert: usize, to: ExpertTensor, b: &Tensor) -> Result<Vec<Tensor>> {
        let &[out, columns] = &b.size()[..] else {
            return Err(Error::invalid("mixture of experts", format!("B is {:?}", b.size())));
        };
        let of_expert = b.f_view([out, columns / self.experts, self.experts])?.f_select(2, expert as i64)?;
        Ok(match (to, self.in_turns) {
            (ExpertTensor::Down, _) => vec![of_expert],
            (ExpertTensor::GateUp, false) => {
                vec![of_expert.f_narrow(0, 0, out / 2)?, of_expert.f_narrow(0, out / 2, out / 2)?]
            }
            (ExpertTensor::GateUp, true) => {
                vec![of_expert.f_slice(0, 0, None, 2)?, of_expert.f_slice(0, 1, None, 2)?]
            }
        })
    }
}

/// Adds u·B_eᵀ of each part to the products, in the dtype of sums. `x` has that dtype, too. Returns each u.
pub(super) fn add(parts: &[Part], x: &Tensor, products: &mut [&mut Tensor]) -> Result<Vec<Tensor>> {
    let one = |part: &Part| -> Result<Tensor> {
        let u = mm_scaled(x, Matrix::from(&part.a).transposed(), part.scale)?;
        for (product, b) in products.iter_mut().zip(&part.b) {
            mm_into(product, &u, Matrix::from(b).transposed(), true)?;
        }
        Ok(u)
    };
    parts.iter().map(one).collect()
}

/// Returns du = s·Σ g·B_e of a part, over the gradients of its products.
pub(super) fn gradient_of_u(part: &Part, grads: &[&Tensor]) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for (grad, b) in grads.iter().zip(&part.b) {
        match &mut sum {
            None => sum = Some(mm_scaled(*grad, b, part.scale)?),
            Some(sum) => {
                let _ = sum.f_add_(&mm_scaled(*grad, b, part.scale)?)?;
            }
        }
    }
    sum.ok_or_else(|| Error::invalid("mixture of experts", "a term without a product".to_owned()))
}

/// Adds du·A_e to a gradient in the dtype of sums.
pub(super) fn add_gradient(part: &Part, du: &Tensor, sum: &mut Tensor) -> Result<()> {
    mm_into(sum, du, &part.a, true)
}

/// The gradients of A and B of each term, zero where no expert has written.
pub(super) struct TermGradients(Vec<[Option<Tensor>; 2]>);

impl TermGradients {
    /// `inputs` are A and B of each term, the first of them input number `first`.
    pub(super) fn new(inputs: &[Tensor], ctx: &Backward, first: usize) -> Result<Self> {
        let zeros = |index: usize| -> Result<Option<Tensor>> {
            Ok(ctx.needs_input_grad(first + index).then(|| inputs[index].f_zeros_like()).transpose()?)
        };
        let both =
            |term: usize| -> Result<[Option<Tensor>; 2]> { Ok([zeros(2 * term)?, zeros(2 * term + 1)?]) };
        Ok(Self((0..inputs.len() / 2).map(both).collect::<Result<_>>()?))
    }

    /// Writes dA_e = duᵀ·x.
    pub(super) fn write_a(
        &mut self,
        terms: &Terms,
        expert: usize,
        part: &Part,
        du: &Tensor,
        x: &Tensor,
    ) -> Result<()> {
        let Some(grad) = &self.0[part.index][0] else { return Ok(()) };
        let mut rows = terms.view_of_a(expert, grad)?;
        mm_into(&mut rows, Matrix::from(du).transposed(), x, false)
    }

    /// Writes dB_e = gᵀ·u of each product.
    pub(super) fn write_b(
        &mut self,
        terms: &Terms,
        expert: usize,
        part: &Part,
        grads: &[&Tensor],
        u: &Tensor,
    ) -> Result<()> {
        let Some(grad) = &self.0[part.index][1] else { return Ok(()) };
        let to = terms.scales[part.index].0;
        for (mut view, of_product) in terms.views_of_b(expert, to, grad)?.into_iter().zip(grads) {
            view.f_copy_(&mm(Matrix::from(*of_product).transposed(), u)?)?;
        }
        Ok(())
    }

    /// Returns them in the order of the inputs.
    pub(super) fn into_list(self) -> Vec<Option<Tensor>> {
        self.0.into_iter().flatten().collect()
    }
}

/// Returns the change of an expert's matrices by a term: gate and up, or down, `[out, in]` each, in the term's dtype.
///
/// # Errors
/// Errors of libtorch.
pub fn delta_of_expert(
    experts: usize,
    expert: usize,
    in_turns: bool,
    term: &ExpertTerm<'_>,
) -> Result<Vec<Tensor>> {
    let terms = Terms::new(experts, in_turns, std::slice::from_ref(term));
    let a = terms.view_of_a(expert, term.a)?;
    let product = |b: &Tensor| mm_scaled(b, &a, term.scale);
    terms.views_of_b(expert, term.to, term.b)?.iter().map(product).collect()
}

/// Returns `tensor` in `kind`, without a copy if it has it.
pub(super) fn in_kind(tensor: Tensor, kind: Kind) -> Result<Tensor> {
    if tensor.kind() == kind { Ok(tensor) } else { Ok(tensor.f_to_kind(kind)?) }
}
