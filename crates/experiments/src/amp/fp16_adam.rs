//! Adam computed entirely in fp16.
//!
//! PyTorch keeps Adam's moments in the parameter's dtype, and each of its operators rounds to that. In fp16 the square of a
//! gradient below 2.4·10⁻⁴ is zero, and so is ε = 10⁻⁸: a parameter whose gradient is zero, such as the embedding of a token
//! that did not occur, becomes 0/0 in the first step. The optimizers of [`training`] compute in fp32 for that reason; this
//! one is a baseline.

use runtime::autograd::GradMode;
use tch::{Kind, Tensor};
use training::optimizer::{Adam, Extent, Hyperparameters, Rule, Slot, Tensors};

/// Adam whose every intermediate is rounded to fp16.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp16Adam(pub Adam);

impl Rule for Fp16Adam {
    fn name(&self) -> &'static str {
        "fp16_adam"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        self.0.slots(parameter)
    }

    fn check(&self) -> training::Result<()> {
        self.0.check()
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> training::Result<()> {
        let _no_grad = GradMode::off();
        let half = |wide: &[&Tensor]| -> training::Result<Vec<Tensor>> {
            Ok(wide.iter().map(|tensor| tensor.f_to_kind(Kind::Half)).collect::<Result<_, _>>()?)
        };
        let (params, grads) = (half(tensors.params)?, half(tensors.grads)?);
        let slots = tensors.slots.iter().map(|slot| half(slot)).collect::<training::Result<Vec<_>>>()?;
        let of_slots: Vec<Vec<&Tensor>> = slots.iter().map(|slot| slot.iter().collect()).collect();
        let [of_params, of_grads] = [&params, &grads].map(|list| list.iter().collect::<Vec<&Tensor>>());
        let halves = Tensors { params: &of_params, grads: &of_grads, slots: &of_slots };
        self.0.update(&halves, hyperparameters)?;
        let rounded = params.iter().chain(slots.iter().flatten());
        for (wide, rounded) in tensors.params.iter().chain(tensors.slots.iter().flatten()).zip(rounded) {
            wide.shallow_clone().f_copy_(rounded)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use training::optimizer::{DeviceOptimizer, Group};

    use super::*;

    #[test]
    fn a_gradient_of_zero_is_not_a_number_and_a_small_one_takes_far_too_long_a_step() {
        let w = Tensor::from_slice(&[1.0f32, 1.0, 1.0]).to_kind(Kind::Half).set_requires_grad(true);
        let group = Group::new(vec![("w".into(), w.shallow_clone())], 1e-3);
        let mut optimizer = DeviceOptimizer::new(Fp16Adam(Adam::default()), vec![group]).unwrap();
        let grad = Tensor::from_slice(&[0.0f32, 1e-4, 0.5]).to_kind(Kind::Half);
        runtime::autograd::set_grad(&w, Some(&grad)).unwrap();
        optimizer.step().unwrap();
        let after = Vec::<f32>::try_from(w.to_kind(Kind::Float)).unwrap();
        assert!(after[0].is_nan(), "{after:?}");
        assert!(after[1].is_infinite(), "{after:?}");
        assert!((after[2] - 0.999).abs() < 1e-3, "{after:?}");
    }
}
