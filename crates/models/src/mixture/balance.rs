//! The load-balancing loss of mixtures (Fedus, Zoph & Shazeer, arXiv:2101.03961, equations 4 to 6), as transformers computes it.
//!
//! Over the N rows of all mixtures of a model together, one for each token and layer that is no padding, with the router's
//! probabilities p `[N, E]`:
//!
//! ```text
//! f_e = (rows whose k experts contain e)/N      P_e = Σ p_e/N       aux = E·Σ_e f_e·P_e
//! ∂aux/∂p_e = E·f_e/N                                               f is not differentiated
//! ```
//!
//! aux is k where all experts get as many tokens, and larger elsewhere. It is not the mean of the layers' own losses.
//!
//! f depends on all layers, so it is known when a forward has ended, while a layer that is recomputed, or whose tensors are elsewhere, has
//! no graph of its own by then. So no layer hands its probabilities on. Each adds its counts and its Σ p to the batch's [`RouterBalance`]
//! in forward, and a node at its probabilities adds ∂aux/∂p in backward, with the factor that reached [`RouterBalance::add_to`]'s node. That
//! one is the root of the graph, so it runs first. A layer that runs again adds nothing to the sums, and has the same bits.
//!
//! In 16 bits, transformers computes the probabilities of this loss, and chooses experts by them once more, in that dtype; here both are
//! those of the route, in fp32.

use std::sync::Arc;

use kernels::matmul::wide_kind;
use parking_lot::Mutex;
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::ops::TryScalar;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The sums of one batch over all mixtures of a model; see the [module](self).
#[derive(Debug, Clone)]
pub struct RouterBalance(Arc<Mutex<Sums>>);

#[derive(Debug, Default)]
struct Sums {
    /// 1 for each position with a token, 0 for padding, `[n, 1]`, in fp32; `None` without padding.
    mask: Option<Tensor>,
    /// Rows that each expert was chosen for, and the sums of its probabilities, `[E]`.
    chosen_and_probabilities: Option<[Tensor; 2]>,
    /// N.
    rows: f64,
    /// E·f/N, once the forward has ended.
    slope: Option<Tensor>,
    /// The gradient of aux.
    factor: Option<Tensor>,
}

impl RouterBalance {
    /// Creates the sums for a batch `[rows, length]`, whose rows end with so many positions of padding; an empty list for none.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn new(padding: &[i64], length: i64, device: Device) -> Result<Self> {
        let mask = match padding.iter().any(|&count| count > 0) {
            false => None,
            true => {
                let of_row =
                    |&count: &i64| (0..length).map(move |at| if at < length - count { 1f32 } else { 0.0 });
                let values: Vec<f32> = padding.iter().flat_map(of_row).collect();
                Some(Tensor::f_from_slice(&values)?.f_view([-1, 1])?.f_to_device(device)?)
            }
        };
        Ok(Self::with_mask(mask))
    }

    /// Creates the sums for positions with a mask `[n, 1]` in fp32: 1 for a token, 0 for padding.
    pub fn with_mask(mask: Option<Tensor>) -> Self {
        Self(Arc::new(Mutex::new(Sums { mask, ..Sums::default() })))
    }

    /// Adds a layer's rows, unless the layer runs again in backward. Returns its probabilities `[n, E]` with the loss' gradient.
    pub(super) fn of_layer(&self, probabilities_ne: Tensor, chosen_nk: &Tensor) -> Result<Tensor> {
        self.record(&probabilities_ne.f_detach()?, chosen_nk)?;
        if !probabilities_ne.requires_grad() {
            return Ok(probabilities_ne);
        }
        let [probabilities] = apply(OfLayer(self.0.clone()), &[&probabilities_ne])?;
        Ok(probabilities)
    }

    fn record(&self, probabilities_ne: &Tensor, chosen_nk: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut sums = self.0.lock();
        if sums.slope.is_some() {
            return Ok(());
        }
        let &[rows, experts] = &probabilities_ne.size()[..] else {
            return Err(Error::invalid("router balance", format!("{:?}", probabilities_ne.size())));
        };
        let (kind, device) = (probabilities_ne.kind(), probabilities_ne.device());
        let per_token = chosen_nk.size().last().copied().unwrap_or(1);
        let weights = match &sums.mask {
            None => Tensor::f_ones([rows, 1], (kind, device))?,
            Some(mask) if mask.size() == [rows, 1] => mask.f_to_kind(kind)?,
            Some(mask) => {
                let reason =
                    format!("{rows} rows, and a mask of {:?}; give the padding of this batch", mask.size());
                return Err(Error::invalid("router balance", reason));
            }
        };
        let probabilities = probabilities_ne.f_mul(&weights)?;
        let probabilities = probabilities.f_sum_dim_intlist([0].as_slice(), false, kind)?;
        let of_slots = weights.f_expand([rows, per_token], false)?.f_reshape([-1])?;
        let chosen = Tensor::f_zeros([experts], (kind, device))?;
        let chosen = chosen.f_scatter_add(0, &chosen_nk.f_reshape([-1])?, &of_slots)?;
        sums.rows += weights.f_sum(Kind::Double)?.f_double_value(&[])?;
        sums.chosen_and_probabilities = Some(match sums.chosen_and_probabilities.take() {
            None => [chosen, probabilities],
            Some([all_chosen, all]) => [all_chosen.f_add(&chosen)?, all.f_add(&probabilities)?],
        });
        Ok(())
    }

    /// Ends the forward: returns `loss` + c·aux, from whose backward the layers take their gradients, and aux itself, which has no graph.
    ///
    /// # Errors
    /// A model without a mixture, whose forward has added nothing; a second call.
    pub fn add_to(&self, loss: &Tensor, coefficient: f64) -> Result<[Tensor; 2]> {
        let aux = {
            let _no_grad = tch::no_grad_guard();
            let mut sums = self.0.lock();
            let (rows, is_ended) = (sums.rows.max(1.0), sums.slope.is_some());
            let Some([chosen, probabilities]) = sums.chosen_and_probabilities.as_ref().filter(|_| !is_ended)
            else {
                let reason = "no router has run since the last loss; a load-balancing loss needs a mixture of experts, and a forward for each";
                return Err(Error::invalid("router balance", reason.to_owned()));
            };
            let experts = chosen.size()[0] as f64;
            let share = chosen.try_div_scalar(rows)?;
            let mean = probabilities.try_div_scalar(rows)?;
            let aux = share.f_mul(&mean)?.f_sum(wide_kind(share.kind()))?.try_mul_scalar(experts)?;
            let slope = share.try_mul_scalar(experts / rows)?;
            sums.slope = Some(slope);
            aux
        };
        let [total] =
            apply(Joined { balance: self.0.clone(), coefficient, aux: aux.shallow_clone() }, &[loss])?;
        Ok([total, aux])
    }
}

/// loss + c·aux.
struct Joined {
    balance: Arc<Mutex<Sums>>,
    coefficient: f64,
    aux: Tensor,
}

impl Function for Joined {
    fn name(&self) -> &'static str {
        "load-balancing loss"
    }

    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let aux = self.aux.try_mul_scalar(self.coefficient)?.f_to_kind(inputs[0].kind())?;
        Ok(vec![inputs[0].f_add(&aux)?])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let grad = grads.into_iter().next().flatten();
        let factor = grad.as_ref().map(|grad| grad.try_mul_scalar(self.coefficient)).transpose()?;
        self.balance.lock().factor = factor;
        Ok(vec![grad])
    }
}

/// A layer's probabilities, to whose gradient that of the loss is added.
struct OfLayer(Arc<Mutex<Sums>>);

impl Function for OfLayer {
    fn name(&self) -> &'static str {
        "load-balancing loss of a layer"
    }

    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut copy = inputs[0].f_empty_like()?;
        copy.f_copy_(inputs[0])?;
        Ok(vec![copy])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(vec![None]) };
        let sums = self.0.lock();
        let (Some(slope), Some(factor)) = (&sums.slope, &sums.factor) else { return Ok(vec![Some(grad)]) };
        let of_loss = slope.f_mul(&factor.f_to_kind(slope.kind())?)?.f_unsqueeze(0)?;
        let of_loss = match &sums.mask {
            Some(mask) => mask.f_to_kind(slope.kind())?.f_mul(&of_loss)?,
            None => of_loss,
        };
        Ok(vec![Some(grad.f_add(&of_loss)?)])
    }
}
