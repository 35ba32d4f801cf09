//! A step of AdamW whose moments are kept in 8 bits, in one pass over memory (Dettmers et al., arXiv:2110.02861).
//!
//! A moment is a code of 8 bits for each element, and an fp32 scale for each [`BLOCK`] consecutive elements: the element is
//! scale · level(code), with the scale the largest magnitude of its block, and the levels those of the [dynamic map](levels). A step, of a
//! block at a time (AdamW's: Loshchilov & Hutter, arXiv:1711.05101):
//!
//! - m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g², from the levels of the old codes, in fp32
//! - p ← (1 − η·λ)·p − η/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε), from these moments, before they are rounded
//! - the scales are the blocks' largest |m| and v, and the codes those of the nearest levels; of two, the one nearer to 0
//!
//! **A v above 0 never becomes 0**: it gets the least code. A level of 0 beside an m that is not would make the next update m/ε. With scales over
//! four decades in a block and half of the gradients 0, the largest update of 200 steps is 72 learning rates with the nearest code, 2.0 with this
//! rule, and 1.2 with moments in fp32. bitsandbytes takes the nearest code, as it stores what it has divided by.
//!
//! The state takes 2 + 8/256 bytes per parameter instead of 8. Bytes moved per parameter: 16.06 in fp32 (g, p in; p out; 2.03 in and out).
//! On a CPU the bits depend on neither threads nor the division of a tensor at multiples of [`BLOCK`]. On other devices libtorch's operators
//! compute the same step, part by part, with the same levels; a moment between two levels may get the other code there.

mod cpu;
pub mod levels;
mod reference;

use runtime::profile::{Flops, kernel, record_external};
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::adam::AdamStep;
use crate::operands::Operands;
use crate::processor::computes_on;

const NAME: &str = "8-bit adam";

/// Elements that share a scale.
pub const BLOCK: i64 = 256;

/// Returns the number of scales of so many elements.
pub fn scales(elements: i64) -> i64 {
    (elements + BLOCK - 1) / BLOCK
}

/// A moment in 8 bits.
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    /// Codes, uint8, of the parameter's shape.
    pub codes: &'a Tensor,
    /// Scales, fp32, `[scales(elements)]`.
    pub scales: &'a Tensor,
}

/// The tensors of a step: contiguous, on one device, without overlap.
#[derive(Clone, Copy, Debug)]
pub struct Adam8bitTensors<'a> {
    /// The parameter, in fp32; updated.
    pub parameter: &'a Tensor,
    /// The gradient, in fp32; read.
    pub gradient: &'a Tensor,
    /// m; updated. Its codes are those of [`levels::signed`].
    pub exp_avg: Moment<'a>,
    /// v; updated. Its codes are those of [`levels::unsigned`].
    pub exp_avg_sq: Moment<'a>,
}

/// Runs one step in place and without a graph; on the CPU in parallel on libtorch's threads. It increments the version counters of the
/// tensors that it writes. Codes and scales of 0 are moments of 0, with which a training begins.
///
/// ```
/// use kernels::adam::AdamStep;
/// use kernels::adam_8bit::{Adam8bitTensors, Moment, adam_8bit, scales};
/// use tch::{Device, Kind, Tensor};
///
/// let cpu = |kind| (kind, Device::Cpu);
/// let parameter = Tensor::ones([300], cpu(Kind::Float));
/// let gradient = Tensor::full([300], -0.5, cpu(Kind::Float));
/// let [m, v] = [(); 2].map(|()| Tensor::zeros([300], cpu(Kind::Uint8)));
/// let [of_m, of_v] = [(); 2].map(|()| Tensor::zeros([scales(300)], cpu(Kind::Float)));
/// let tensors = Adam8bitTensors {
///     parameter: &parameter,
///     gradient: &gradient,
///     exp_avg: Moment { codes: &m, scales: &of_m },
///     exp_avg_sq: Moment { codes: &v, scales: &of_v },
/// };
/// adam_8bit(&tensors, &AdamStep { lr: 0.25, weight_decay: 0.0, ..AdamStep::default() })?;
/// // The first step is the learning rate long, whatever the gradient.
/// assert!((parameter.double_value(&[299]) - 1.25).abs() < 1e-6);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for another shape, dtype, device or layout, for tensors that overlap, for step 0, decays outside [0, 1), and for
/// [`AdamStep::gradient_factor`] and a weight decay that is not decoupled, which this step does not have; errors of libtorch.
pub fn adam_8bit(tensors: &Adam8bitTensors<'_>, step: &AdamStep) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid(NAME, reason));
    if step.step == 0 {
        return refuse("step 0; the first step is 1, as it corrects the bias by 1 − βᵗ".to_owned());
    }
    for (name, beta) in [("beta1", step.beta1), ("beta2", step.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return refuse(format!("{name} is {beta}; expected one in [0, 1)"));
        }
    }
    if !step.decoupled || step.gradient_factor.is_some() {
        return refuse(
            "an L2 penalty or a factor of the gradient; expected a decoupled decay, and gradients as they are".to_owned(),
        );
    }
    let Adam8bitTensors { parameter, gradient, exp_avg, exp_avg_sq } = *tensors;
    let size = parameter.size();
    let mut operands = Operands::new(NAME, parameter.device());
    operands.write("parameter", parameter, Kind::Float, &size[..])?;
    operands.read("gradient", gradient, Kind::Float, &size[..])?;
    let of = scales(parameter.numel() as i64) as usize;
    operands.write("codes of exp_avg", exp_avg.codes, Kind::Uint8, &size[..])?;
    operands.write("scales of exp_avg", exp_avg.scales, Kind::Float, of)?;
    operands.write("codes of exp_avg_sq", exp_avg_sq.codes, Kind::Uint8, &size[..])?;
    operands.write("scales of exp_avg_sq", exp_avg_sq.scales, Kind::Float, of)?;
    operands.check()?;
    let _no_grad = tch::no_grad_guard();
    let _scope = kernel("runtime::adam_8bit", []);
    if parameter.numel() == 0 {
        return Ok(());
    }
    if !computes_on(parameter.device()) {
        return reference::step(tensors, step);
    }
    cpu::step(tensors, step)?;
    let bytes = 12 * parameter.numel() as u64 + 4 * parameter.numel() as u64 + 16 * of as u64;
    record_external("runtime::adam_8bit", Flops::default(), bytes)
}

/// The factors of a step, computed in f64 and rounded once.
#[derive(Clone, Copy)]
struct Coefficients {
    /// 1 − η·λ.
    shrink: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    /// √(1 − β₂ᵗ).
    root: f32,
    eps: f32,
    /// η/(1 − β₁ᵗ).
    rate: f32,
}

impl Coefficients {
    fn new(step: &AdamStep) -> Self {
        let AdamStep { lr, beta1, beta2, eps, weight_decay, .. } = *step;
        let count = step.step as f64;
        Self {
            shrink: (1.0 - lr * weight_decay) as f32,
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            root: (1.0 - beta2.powf(count)).sqrt() as f32,
            eps: eps as f32,
            rate: (lr / (1.0 - beta1.powf(count))) as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    const STEP: AdamStep = AdamStep {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        step: 1,
        gradient_factor: None,
    };

    /// A parameter with its gradient and its state.
    struct Owned {
        parameter: Tensor,
        gradient: Tensor,
        codes: [Tensor; 2],
        scales: [Tensor; 2],
    }

    impl Owned {
        fn new(elements: i64) -> Self {
            tch::manual_seed(elements);
            let normal = || Tensor::randn([elements], (Kind::Float, Device::Cpu));
            // Over four decades within a block.
            let decades = (Tensor::rand([elements], (Kind::Float, Device::Cpu)) * -4.0 * 10f64.ln()).exp();
            Self {
                parameter: normal(),
                gradient: normal() * decades,
                codes: [(); 2].map(|()| Tensor::zeros([elements], (Kind::Uint8, Device::Cpu))),
                scales: [(); 2].map(|()| Tensor::zeros([scales(elements)], (Kind::Float, Device::Cpu))),
            }
        }

        fn tensors(&self) -> Adam8bitTensors<'_> {
            let moment = |index: usize| Moment { codes: &self.codes[index], scales: &self.scales[index] };
            Adam8bitTensors {
                parameter: &self.parameter,
                gradient: &self.gradient,
                exp_avg: moment(0),
                exp_avg_sq: moment(1),
            }
        }

        fn part(&self, from: i64, to: i64) -> Self {
            let [codes, scales] = [(&self.codes, (from, to)), (&self.scales, (from / BLOCK, scales(to)))]
                .map(|(both, (from, to))| both.each_ref().map(|one| one.narrow(0, from, to - from)));
            let of = |tensor: &Tensor| tensor.narrow(0, from, to - from);
            Self { parameter: of(&self.parameter), gradient: of(&self.gradient), codes, scales }
        }
    }

    fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
        (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
    }

    #[test]
    fn operators_compute_the_same_step() {
        for elements in [1, 255, 256, 257, 5000, 70_000] {
            let (ours, theirs) = (Owned::new(elements), Owned::new(elements));
            for number in 1..=3 {
                let step = AdamStep { step: number, ..STEP };
                adam_8bit(&ours.tensors(), &step).unwrap();
                reference::step(&theirs.tensors(), &step).unwrap();
                for index in 0..2 {
                    assert!(
                        largest_difference(&ours.codes[index], &theirs.codes[index]) <= 1.0,
                        "{elements}"
                    );
                    let scales = &ours.scales[index];
                    let off = ((scales - &theirs.scales[index]) / scales).abs().max().double_value(&[]);
                    assert!(off <= 1e-6, "{elements}: {off:e}");
                    // From equal states on, so that a moment between two levels does not add up.
                    tch::no_grad(|| theirs.codes[index].shallow_clone().copy_(&ours.codes[index]));
                }
                let off = largest_difference(&ours.parameter, &theirs.parameter);
                assert!(off <= 1e-6, "{elements}: {off:e}");
            }
        }
    }

    #[test]
    fn parts_of_whole_blocks_have_the_bits_of_the_whole() {
        let elements = 300 * BLOCK + 17;
        let (all, divided) = (Owned::new(elements), Owned::new(elements));
        let ends = [0, BLOCK, 257 * BLOCK, elements];
        for number in 1..=3 {
            let step = AdamStep { step: number, ..STEP };
            adam_8bit(&all.tensors(), &step).unwrap();
            for pair in ends.windows(2) {
                adam_8bit(&divided.part(pair[0], pair[1]).tensors(), &step).unwrap();
            }
        }
        assert_eq!(all.parameter, divided.parameter);
        assert_eq!((all.codes, all.scales), (divided.codes, divided.scales));
    }

    /// Half of the gradients are 0 in turns, and the others' sizes differ by four decades within each block.
    #[test]
    fn small_second_moments_do_not_make_large_updates() {
        let of = Owned::new(4 * BLOCK);
        let (start, mut largest) = (of.gradient.copy(), 0.0f64);
        for number in 1..=200 {
            let kept = Tensor::rand([4 * BLOCK], (Kind::Float, Device::Cpu)).ge(0.5);
            let noise = Tensor::randn([4 * BLOCK], (Kind::Float, Device::Cpu));
            tch::no_grad(|| of.gradient.shallow_clone().copy_(&(&start * noise * kept)));
            let before = of.parameter.copy();
            adam_8bit(&of.tensors(), &AdamStep { step: number, lr: 1.0, weight_decay: 0.0, ..STEP }).unwrap();
            largest = largest.max(largest_difference(&of.parameter, &before));
        }
        assert!(largest < 6.0, "an update of {largest} learning rates");
    }

    #[test]
    fn operands_are_checked() {
        let of = Owned::new(300);
        let tensors = of.tensors();
        let short = of.scales[0].narrow(0, 0, 1);
        let refusals = [
            adam_8bit(&tensors, &AdamStep { step: 0, ..STEP }),
            adam_8bit(&tensors, &AdamStep { beta2: 1.0, ..STEP }),
            adam_8bit(&tensors, &AdamStep { decoupled: false, ..STEP }),
            adam_8bit(&Adam8bitTensors { exp_avg_sq: tensors.exp_avg, ..tensors }, &STEP),
            adam_8bit(
                &Adam8bitTensors { exp_avg: Moment { scales: &short, ..tensors.exp_avg }, ..tensors },
                &STEP,
            ),
            adam_8bit(&Adam8bitTensors { gradient: &of.codes[0], ..tensors }, &STEP),
        ];
        for refusal in refusals {
            let error = refusal.unwrap_err().to_string();
            assert!(error.starts_with("8-bit adam: "), "{error}");
        }
    }
}
