//! Adam and AdamW over many tensors.

use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Outcome, Shift, launch};
use super::program::{ADAM, Program, type_of};
use super::tolerance::{close, epsilon, normal};

/// Numbers of a block, all of one tensor.
pub(super) const CHUNK: i64 = 1024;
/// Bytes of the kernel's table: 60 entries of 8 members of 8 bytes.
pub(super) const TABLE: usize = 60 * 8 * 8;
const SIZES: [i64; 6] = [1, 7, 1025, 1024, 3, 2055];
const STEPS: [f32; 6] = [1.0, 2.0, 10.0, 1000.0, 3.0, 100_000.0];
const LR: f64 = 0.01;
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;

/// Dtypes of the gradient and of the weight that the model computes with.
const KINDS: [(Kind, Option<Kind>); 5] = [
    (Kind::Float, None),
    (Kind::BFloat16, Some(Kind::BFloat16)),
    (Kind::Half, Some(Kind::Half)),
    (Kind::Float, Some(Kind::BFloat16)),
    (Kind::BFloat16, None),
];

fn wide((gradient, weight): (Kind, Option<Kind>)) -> i64 {
    16 / [Some(gradient), weight].into_iter().flatten().map(|kind| kind.elt_size_in_bytes()).min().unwrap()
        as i64
}

fn expression((gradient, weight): (Kind, Option<Kind>), width: i64, decoupled: bool) -> String {
    let weight = type_of(weight.unwrap_or(Kind::BFloat16));
    format!("adam<{}, {weight}, {width}, {decoupled}, 128, {CHUNK}>", type_of(gradient))
}

/// A parameter before the step, exact in its dtypes, in f64.
struct Parameter {
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
}

impl Parameter {
    fn draw(generator: &mut Generator, numbers: i64, step: f32, gradient: Kind) -> Self {
        let mut draw = |kind| normal(generator, &[numbers], kind);
        let (exp_avg, root) = (draw(Kind::Float), draw(Kind::Float));
        Self {
            gradient: draw(gradient),
            master: draw(Kind::Float),
            exp_avg: (exp_avg * 0.5).to_kind(Kind::Float),
            exp_avg_sq: (&root * &root + 0.01).to_kind(Kind::Float),
            step: Tensor::from_slice(&[step]),
        }
    }

    /// The parameter and both moments after the step.
    fn stepped(&self, decoupled: bool, lr: f64) -> [Tensor; 3] {
        let [g, p, m, v] = [&self.gradient, &self.master, &self.exp_avg, &self.exp_avg_sq]
            .map(|tensor| tensor.to_kind(Kind::Double));
        let step = self.step.double_value(&[0]);
        let (g, p) = if decoupled { (g, p * (1.0 - lr * DECAY)) } else { (g + &p * DECAY, p) };
        let m = &m + (&g - &m) * (1.0 - BETA1);
        let v = v * BETA2 + &g * &g * (1.0 - BETA2);
        let root = v.sqrt() / (1.0 - BETA2.powf(step)).sqrt();
        let p = p - &m / (root + EPS) * (lr / (1.0 - BETA1.powf(step)));
        [p, m, v]
    }
}

/// Outputs: for each parameter the master copy, both moments, and the rounded weight, if any.
fn run(
    program: &Program,
    kinds: (Kind, Option<Kind>),
    (width, decoupled): (i64, bool),
    parameters: &[Parameter],
    skip: Option<f32>,
    rate: Option<f64>,
) -> Outcome {
    let single = |t: &Tensor| t.to_kind(Kind::Float);
    let own: Vec<[Tensor; 5]> = parameters
        .iter()
        .map(|one| {
            let weight = single(&one.master).to_kind(kinds.1.unwrap_or(Kind::Float));
            let [master, exp_avg, exp_avg_sq] = [&one.master, &one.exp_avg, &one.exp_avg_sq].map(single);
            [one.gradient.to_kind(kinds.0), master, exp_avg, exp_avg_sq, weight]
        })
        .collect();
    let (mut members, mut blocks) = (Vec::new(), 0);
    for ([gradient, master, exp_avg, exp_avg_sq, weight], one) in own.iter().zip(parameters) {
        let numbers = gradient.size()[0];
        members.extend([
            Given::In("gradient", gradient),
            Given::InOut("master", master),
            Given::InOut("exp_avg", exp_avg),
            Given::InOut("exp_avg_sq", exp_avg_sq),
            kinds.1.map_or(Given::Null, |_| Given::InOut("weight", weight)),
            Given::In("step", &one.step),
            Given::I64(numbers),
            Given::I64(blocks),
        ]);
        blocks += (numbers + CHUNK - 1) / CHUNK;
    }
    let flag = skip.map(|skip| Tensor::from_slice(&[skip]));
    let on_device = rate.map(|rate| Tensor::from_slice(&[rate]));
    let given = [
        Given::Structure(members, TABLE),
        Given::I32(parameters.len() as i64),
        Given::optional("skip", flag.as_ref()),
        Given::optional("rate", on_device.as_ref()),
        // The same argument at every rate, where the rate is on the device.
        Given::F64(if rate.is_some() { f64::NAN } else { LR }),
        Given::F64(BETA1),
        Given::F64(BETA2),
        Given::F32(EPS),
        Given::F64(DECAY),
    ];
    // Numbers that are read one at a time are aligned for fp32; the others to 16 bytes.
    let shift = Shift(if width == 1 { 4 } else { 16 });
    launch(program.kernel(&expression(kinds, width, decoupled)), (blocks, 128), &given, shift)
}

#[test]
fn adam_is_correct_for_every_dtype_size_and_decay() {
    let all: Vec<_> =
        KINDS.iter().flat_map(|kinds| [true, false].map(|decoupled| (*kinds, decoupled))).collect();
    let expressions: Vec<String> = all
        .iter()
        .flat_map(|(kinds, decoupled)| [1, wide(*kinds)].map(|width| expression(*kinds, width, *decoupled)))
        .collect();
    let Some(program) = Program::of(ADAM, &expressions) else { return };
    let mut generator = Generator::new(6).unwrap();
    for (kinds, decoupled) in all {
        let parameters: Vec<Parameter> = SIZES
            .iter()
            .zip(STEPS)
            .map(|(numbers, step)| Parameter::draw(&mut generator, *numbers, step, kinds.0))
            .collect();
        let what = format!("{kinds:?}, decoupled {decoupled}");
        let outcomes = [wide(kinds), 1].map(|width| {
            let outcome = run(&program, kinds, (width, decoupled), &parameters, None, None);
            for outputs in [&outcome.outputs, &outcome.perturbed] {
                compare(&what, outputs, kinds.1, &parameters, (decoupled, LR));
            }
            outcome
        });
        // The last numbers of a tensor, read one at a time, have the same results.
        let [together, single] = outcomes;
        for (index, (a, b)) in together.outputs.iter().zip(&single.outputs).enumerate() {
            assert!(a.equal(b), "{what}: the width changes output {index}");
        }
        assert_eq!(single.counts.wide_requests, 0, "{what}");
        assert!(together.counts.wide_requests > 0, "{what}");
    }
}

fn compare(
    what: &str,
    outputs: &[Tensor],
    weight: Option<Kind>,
    parameters: &[Parameter],
    (decoupled, lr): (bool, f64),
) {
    let outputs_of_each = if weight.is_some() { 4 } else { 3 };
    assert_eq!(outputs.len(), outputs_of_each * parameters.len());
    for (found, one) in outputs.chunks(outputs_of_each).zip(parameters) {
        let what = format!("{what}, {} numbers", one.master.numel());
        for (found, expected) in found.iter().zip(one.stepped(decoupled, lr)) {
            close(&what, found, &expected, 8.0 * epsilon(Kind::Float));
        }
        if let Some(kind) = weight {
            assert!(found[3].equal(&found[0].to_kind(kind)), "{what}: the weight is not the rounded master");
        }
    }
}

/// If the flag is set, nothing changes and only the flag is read; NaN counts as set.
#[test]
fn a_skipped_step_changes_nothing() {
    let kinds = (Kind::BFloat16, Some(Kind::BFloat16));
    let Some(program) = Program::of(ADAM, &[expression(kinds, 8, true)]) else { return };
    let mut generator = Generator::new(7).unwrap();
    let parameters = [Parameter::draw(&mut generator, 1025, 4.0, kinds.0)];
    let with_flag = |flag| run(&program, kinds, (8, true), &parameters, flag, None);
    let (taken, flagged) = (with_flag(None), with_flag(Some(0.0)));
    for (a, b) in taken.outputs.iter().zip(&flagged.outputs) {
        assert!(a.equal(b));
    }
    for flag in [1.0, f32::NAN] {
        let skipped = with_flag(Some(flag));
        assert_eq!((skipped.counts.bytes_read, skipped.counts.bytes_written), (4, 0));
        let one = &parameters[0];
        for (found, before) in skipped.outputs.iter().zip([&one.master, &one.exp_avg, &one.exp_avg_sq]) {
            assert!(found.equal(&before.to_kind(Kind::Float)));
        }
    }
}

/// An infinite or NaN gradient affects its own element only.
#[test]
fn special_gradients_affect_their_own_element_only() {
    let kinds = (Kind::Float, None);
    let Some(program) = Program::of(ADAM, &[expression(kinds, 4, true)]) else { return };
    let one = Parameter::draw(&mut Generator::new(8).unwrap(), 21, 2.0, kinds.0);
    let _ = one.gradient.narrow(0, 3, 1).fill_(f64::NAN);
    let _ = one.gradient.narrow(0, 20, 1).fill_(f64::INFINITY);
    let outcome = run(&program, kinds, (4, true), std::slice::from_ref(&one), None, None);
    compare("special gradients", &outcome.outputs, None, &[one], (true, LR));
    let numbers = outcome.outputs[0].isfinite().to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]);
    assert_eq!((numbers, outcome.outputs[0].device()), (19, Device::Cpu));
}

/// A graph repeats the arguments of its launches, so the learning rate is read from the device: at two rates the arguments are equal, and
/// each step is as long as its rate says, with the bits of the rate as an argument.
#[test]
fn the_learning_rate_is_read_from_the_device() {
    let kinds = (Kind::BFloat16, Some(Kind::BFloat16));
    for decoupled in [true, false] {
        let Some(program) = Program::of(ADAM, &[expression(kinds, 8, decoupled)]) else { return };
        let mut generator = Generator::new(9).unwrap();
        let parameters = [Parameter::draw(&mut generator, 1025, 4.0, kinds.0)];
        let at = |rate| run(&program, kinds, (8, decoupled), &parameters, None, rate).outputs;
        for lr in [LR, 3e-5] {
            compare("a rate on the device", &at(Some(lr)), kinds.1, &parameters, (decoupled, lr));
        }
        for (argument, device) in at(None).iter().zip(&at(Some(LR))) {
            assert!(argument.equal(device), "decoupled {decoupled}");
        }
    }
}
