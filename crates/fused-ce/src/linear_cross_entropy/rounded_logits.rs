//! Rounded logits against logits in fp32: the passes for other devices, run on CPU tensors, by plans that a GPU has.
//!
//! With u = 2⁻⁸ in bf16, a logit errs by at most d = u·(s·|x·Wᵀ| + s·|x·Wᵀ + low-rank| + |z|), the last two with an adapter and with a
//! bias, scale or soft cap. So log Σ eᶻ errs by d, the loss of a token by 2d (and ζ·(2·|l|·d + d²)), and a probability by the factor e^(2d).

use std::sync::{Arc, Barrier, Mutex};

use kernels::cross_entropy::Reference;
use runtime::random::Generator;

use super::*;
use crate::options::{Chunk, Gradients, Reduction};
use crate::vocabulary_parallel::{ProcessGroup, ReduceOp, Shard};

const TOKENS: i64 = 11;
const SCALE: f64 = 0.5;

/// The tensors in bf16, and the options of one comparison.
struct Case {
    x: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    adapter: Option<[Tensor; 2]>,
    targets: Tensor,
    upstream: Tensor,
    options: LinearCrossEntropy,
}

fn f64_of(tensor: &Tensor) -> Tensor {
    tensor.detach().to_kind(Kind::Double)
}

impl Case {
    /// Returns the loss of each token or all, and the gradients of x, W, b, A and B.
    fn run(&self, logits: Kind, shard: Option<Arc<Shard>>) -> (Tensor, Vec<Option<Tensor>>) {
        let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
        let (x, w, bias) = (leaf(&self.x), leaf(&self.w), self.bias.as_ref().map(leaf));
        let ab = self.adapter.as_ref().map(|ab| ab.each_ref().map(leaf));
        let adapter = ab.as_ref().map(|[a, b]| Adapter { a, b, scale: SCALE });
        let inputs = Inputs { bias: bias.as_ref(), adapter, shard, ..Inputs::new(&x, &w, &self.targets) };
        let sizes = check(&inputs, &self.options).unwrap();
        let plan = ChunkPlan { compute: Kind::Float, logits, gradient: Kind::BFloat16, tokens: 4 };
        let rows = Rows::new(&inputs, &self.options, sizes).unwrap();
        let output = self.options.run_planned(&inputs, sizes, (plan, &Reference), rows, None).unwrap();
        let mut total = match self.options.reduction {
            Reduction::None => (&output.loss * &self.upstream).sum(Kind::Float),
            _ => &output.loss * 2.0,
        };
        if let Some(log_sum_exp) = &output.log_sum_exp {
            total += (log_sum_exp * &self.upstream).sum(Kind::Float);
        }
        runtime::autograd::backward(&[&total]).unwrap();
        let [a, b] = ab.map_or([None, None], |ab| ab.map(Some));
        let gradients = [Some(x), Some(w), bias, a, b].map(|leaf| leaf.map(|leaf| f64_of(&leaf.grad())));
        (f64_of(&output.loss), gradients.into())
    }

    /// Returns the tolerances of what [`run`](Self::run) returns.
    fn tolerances(&self) -> (Tensor, Vec<Option<Tensor>>) {
        let unit = 2f64.powi(-8);
        let LinearCrossEntropy { scale, softcap, label_smoothing: smoothing, z_loss, .. } = self.options;
        let (x, w) = (f64_of(&self.x), f64_of(&self.w));
        let vocabulary = w.size()[0];
        let row_max = |t: &Tensor| t.abs().amax([1].as_slice(), true);
        let product = x.matmul(&w.tr());
        let mut errors = row_max(&product) * scale;
        let low = self
            .adapter
            .as_ref()
            .map(|[a, b]| (f64_of(&(self.x.matmul(&a.tr()) * SCALE)), f64_of(a), f64_of(b)));
        let mut z = match &low {
            Some((low, _, b)) => product + low.matmul(&b.tr()),
            None => product,
        };
        if low.is_some() {
            errors += row_max(&z) * scale;
        }
        if let Some(bias) = &self.bias {
            z += f64_of(bias);
        }
        z *= scale;
        if let Some(cap) = softcap {
            z = (z / cap).tanh() * cap;
        }
        if self.bias.is_some() || softcap.is_some() || scale != 1.0 {
            errors += row_max(&z);
        }
        // What fp32 rounds, and errors of errors.
        let d = errors * (unit * 1.02) + 1e-6;
        let l = z.logsumexp([1].as_slice(), true);
        let labelled = self.targets.ne(-100).to_kind(Kind::Double).unsqueeze(1);
        let each = (&d * 2.0 + (l.abs() * 2.0 + &d) * &d * z_loss) * &labelled;
        let losses = match self.options.reduction {
            Reduction::None => each.squeeze_dim(1),
            Reduction::Sum => each.sum(Kind::Double),
            Reduction::Mean => each.sum(Kind::Double) / labelled.sum(Kind::Double),
        };

        let upstream = f64_of(&self.upstream).abs().unsqueeze(1);
        let of_loss = match self.options.reduction {
            Reduction::None => &upstream * &labelled,
            Reduction::Sum => &labelled * 2.0,
            Reduction::Mean => &labelled * 2.0 / labelled.sum(Kind::Double),
        };
        let mut alpha = &of_loss * (l.abs() * (2.0 * z_loss) + 1.0);
        if self.options.log_sum_exp == LogSumExp::Differentiable {
            alpha += &upstream * &labelled;
        }
        let p = z.softmax(1, Kind::Double);
        let classes = self.targets.clamp_min(0).one_hot(vocabulary).to_kind(Kind::Double);
        let t = classes * (1.0 - smoothing) + smoothing / vocabulary as f64;
        // ∂L/∂z, and its error from p and l; then those of ∂L/∂r, which both plans round.
        let size = &alpha * &p + &of_loss * t;
        let grown = (&d * 2.0).exp();
        let mut error = (alpha * (&grown - 1.0) + of_loss * &d * &grown * (2.0 * z_loss)) * p;
        if let Some(cap) = softcap {
            error += (&size + &error) * (z.abs() * 2.0 + &d) * &d / (cap * cap);
        }
        let (size, error) = (size * scale, error * scale);
        let error = error + &size * (2.0 * unit);
        // Gradients are rounded to bf16 where they are saved, and where they are multiplied by the upstream gradient: by both plans.
        let later = 4.0 * unit;
        let by = |error: &Tensor, size: &Tensor, other: &Tensor| {
            let other = other.abs();
            error.matmul(&other) + size.matmul(&other) * later
        };
        let (mut of_x, of_w) = (by(&error, &size, &w), by(&error.tr(), &size.tr(), &x));
        let of_bias = self.bias.as_ref().map(|_| {
            error.sum_dim_intlist(0, false, Kind::Double)
                + size.sum_dim_intlist(0, false, Kind::Double) * later
        });
        let (mut of_a, mut of_b) = (None, None);
        if let Some((low, a, b)) = low {
            of_b = Some(by(&error.tr(), &size.tr(), &low));
            let (error, size) = (by(&error, &size, &b) * SCALE, size.matmul(&b.abs()) * SCALE);
            of_a = Some(by(&error.tr(), &size.tr(), &x));
            of_x += by(&error, &size, &a);
        }
        (losses, vec![Some(of_x), Some(of_w), of_bias, of_a, of_b])
    }
}

/// The largest share of the tolerance.
fn share(found: &Tensor, expected: &Tensor, tolerance: &Tensor) -> f64 {
    ((found - expected).abs() / (tolerance + 1e-12)).max().double_value(&[])
}

#[test]
fn rounded_logits_give_loss_and_gradients_within_their_rounding() {
    let mut generator = Generator::new(3).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    for bits in 0..32 {
        let on = |bit: i32| bits >> bit & 1 == 1;
        let mut low = |size: &[i64]| (normal(size) * 0.5).to_kind(Kind::BFloat16);
        let (x, w) = (low(&[TOKENS, 8]), low(&[37, 8]));
        let bias = on(0).then(|| low(&[37]));
        let adapter = on(1).then(|| [low(&[2, 8]), low(&[37, 2])]);
        let targets = Tensor::from_slice(&[3i64, -100, 36, 0, 5, 5, -100, 1, 2, 30, 7]);
        let case = Case {
            options: LinearCrossEntropy {
                reduction: [Reduction::Mean, Reduction::Sum, Reduction::None][bits as usize % 3],
                gradients: if on(2) { Gradients::Forward } else { Gradients::Backward },
                softcap: on(3).then_some(2.0),
                scale: if on(3) { 1.3 } else { 1.0 },
                label_smoothing: if on(4) { 0.1 } else { 0.0 },
                z_loss: if on(4) { 0.02 } else { 0.0 },
                chunk: Some(Chunk::Tokens(4)),
                log_sum_exp: if on(4) { LogSumExp::Differentiable } else { LogSumExp::No },
                ..LinearCrossEntropy::default()
            },
            upstream: normal(&[TOKENS]),
            x,
            w,
            bias,
            adapter,
            targets,
        };
        let (expected_loss, expected) = case.run(Kind::Float, None);
        let (loss, gradients) = case.run(Kind::BFloat16, None);
        assert_ne!(loss, expected_loss, "the logits are not rounded");
        let (of_loss, tolerances) = case.tolerances();
        let of_loss = share(&loss, &expected_loss, &of_loss);
        assert!(of_loss <= 1.0, "loss of {:?}: {of_loss} of the tolerance", case.options);
        for (index, ((found, expected), tolerance)) in
            gradients.iter().zip(&expected).zip(&tolerances).enumerate()
        {
            let (Some(found), Some(expected), Some(tolerance)) = (found, expected, tolerance) else {
                continue;
            };
            let of_gradient = share(found, expected, tolerance);
            assert!(of_gradient <= 1.0, "gradient {index} of {:?}: {of_gradient}", case.options);
        }
    }
}

/// One of two threads that hold a shard each.
#[derive(Debug)]
struct Half {
    rank: usize,
    both: Arc<(Barrier, Mutex<[Option<Tensor>; 2]>)>,
}

impl ProcessGroup for Half {
    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<(), runtime::Error> {
        let (barrier, given) = &*self.both;
        given.lock().unwrap()[self.rank] = Some(tensor.copy());
        barrier.wait();
        let reduced = match &*given.lock().unwrap() {
            [Some(a), Some(b)] if op == ReduceOp::Max => a.maximum(b),
            [Some(a), Some(b)] => a + b,
            _ => unreachable!("both have given a tensor"),
        };
        barrier.wait();
        tensor.copy_(&reduced);
        Ok(())
    }
}

#[test]
fn shards_of_rounded_logits_give_the_loss_of_the_vocabulary() {
    let mut generator = Generator::new(6).unwrap();
    let mut low = |size: &[i64]| {
        let drawn = generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
        (drawn * 0.5).to_kind(Kind::BFloat16)
    };
    for gradients in [Gradients::Forward, Gradients::Backward] {
        let whole = Case {
            x: low(&[TOKENS, 8]),
            w: low(&[37, 8]),
            bias: Some(low(&[37])),
            adapter: None,
            targets: Tensor::from_slice(&[3i64, -100, 36, 0, 5, 5, -100, 1, 2, 30, 7]),
            upstream: low(&[TOKENS]).to_kind(Kind::Float),
            options: LinearCrossEntropy {
                gradients,
                softcap: Some(2.0),
                chunk: Some(Chunk::Tokens(4)),
                ..LinearCrossEntropy::default()
            },
        };
        let both = Arc::new((Barrier::new(2), Mutex::new([None, None])));
        let ranks = [(0, 0, 21), (1, 21, 16)].map(|(rank, first, classes)| {
            let case = Case {
                x: whole.x.copy(),
                w: whole.w.narrow(0, first, classes).copy(),
                bias: whole.bias.as_ref().map(|bias| bias.narrow(0, first, classes).copy()),
                adapter: None,
                targets: whole.targets.copy(),
                upstream: whole.upstream.copy(),
                options: whole.options.clone(),
            };
            let group = Box::new(Half { rank, both: both.clone() });
            let shard = Arc::new(Shard { first, vocabulary: 37, widest: 21, group });
            std::thread::spawn(move || case.run(Kind::BFloat16, Some(shard)))
        });
        let [(loss, mut first), (_, second)] = ranks.map(|rank| rank.join().unwrap());
        for slot in [1, 2] {
            let parts = [&first[slot], &second[slot]].map(|part| part.as_ref().unwrap());
            first[slot] = Some(Tensor::cat(&parts, 0));
        }
        let (expected_loss, expected) = whole.run(Kind::Float, None);
        let (of_loss, tolerances) = whole.tolerances();
        assert!(share(&loss, &expected_loss, &of_loss) <= 1.0, "{gradients:?}: {loss} {expected_loss}");
        for slot in 0..3 {
            let [found, expected, tolerance] =
                [&first, &expected, &tolerances].map(|of| of[slot].as_ref().unwrap());
            let share = share(found, expected, tolerance);
            assert!(share <= 1.0, "{gradients:?}, gradient {slot}: {share}");
        }
    }
}
