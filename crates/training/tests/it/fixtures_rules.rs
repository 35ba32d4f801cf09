//! Lion, Muon, Adafactor and 8-bit AdamW compared with recorded steps of bitsandbytes', PyTorch's and transformers'
//! (`data/fixtures/optimizers/make_steps.py`).

use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};
use training::optimizer::{
    Adafactor, AdamW, AdamW8bit, DeviceOptimizer, Group, Implementation, Lion, Muon, MuonScale, Rule,
};

/// The hyperparameters of the recorded steps.
const LR: f64 = 0.05;
const WEIGHT_DECAY: f64 = 0.1;
const STEPS: i64 = 20;
/// The steps, from 1, after which parameters were saved.
const SAVED: [i64; 3] = [1, 5, STEPS];

struct Fixture(Vec<u8>);

impl Fixture {
    fn open() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures/optimizers/steps.safetensors");
        Self(std::fs::read(path).unwrap_or_else(|cause| panic!("{path}: {cause}")))
    }

    fn read(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|cause| panic!("{name}: {cause}"));
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::U8 => Kind::Uint8,
            other => panic!("{name}: {other:?}"),
        };
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        Tensor::from_data_size(view.data(), &shape, kind)
    }
}

fn optimizer(rule: Box<dyn Rule>, parameter: &Tensor) -> DeviceOptimizer {
    let group =
        Group { weight_decay: WEIGHT_DECAY, ..Group::new(vec![("p".into(), parameter.shallow_clone())], LR) };
    DeviceOptimizer::boxed(rule, vec![group]).unwrap()
}

fn step(optimizer: &mut DeviceOptimizer, parameter: &Tensor, gradient: &Tensor) {
    runtime::autograd::set_grad(parameter, Some(gradient)).unwrap();
    optimizer.step().unwrap();
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    (a.detach().to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
}

/// Compares the saved steps, relative to the largest element, by at most `tolerance`.
fn check(fixture: &Fixture, name: &str, names: &[&str], tolerance: f64, rule: impl Fn() -> Box<dyn Rule>) {
    for implementation in [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused] {
        let mut used: f64 = 0.0;
        for parameter_name in names {
            let parameter = fixture.read(&format!("{parameter_name}.param")).set_requires_grad(true);
            let gradients = fixture.read(&format!("{parameter_name}.grads"));
            let trace = fixture.read(&format!("{name}.{parameter_name}"));
            assert_eq!((trace.size()[0], gradients.size()[0]), (SAVED.len() as i64, STEPS), "{name}");
            let mut optimizer = optimizer(rule(), &parameter).with_implementation(implementation);
            for number in 0..STEPS {
                step(&mut optimizer, &parameter, &gradients.get(number));
                let Some(at) = SAVED.iter().position(|saved| *saved == number + 1) else { continue };
                let expected = trace.get(at as i64);
                let off = difference(&parameter, &expected) / expected.abs().max().double_value(&[]);
                assert!(
                    off <= tolerance,
                    "{name} {parameter_name} {implementation:?} step {number}: off by {off:.2e}"
                );
                used = used.max(off / tolerance);
            }
        }
        eprintln!("{name} {implementation:?}: {:.0} % of the tolerance of {tolerance:.0e}", used * 100.0);
    }
}

#[test]
fn fixtures_lion_matches_bitsandbytes() {
    let fixture = Fixture::open();
    check(&fixture, "lion", &["tall", "wide", "vector"], 1e-6, || Box::new(Lion::default()));
}

#[test]
fn fixtures_adafactor_matches_transformers() {
    let fixture = Fixture::open();
    for (name, scale_parameter, relative_step) in [
        ("adafactor", false, false),
        ("adafactor_scaled", true, false),
        ("adafactor_scaled_relative", true, true),
    ] {
        let rule = || -> Box<dyn Rule> {
            Box::new(Adafactor { scale_parameter, relative_step, ..Adafactor::default() })
        };
        check(&fixture, name, &["tall", "wide", "vector"], 1e-6, rule);
    }
}

/// In bf16 with PyTorch's own iteration, and in fp32 with the same one without its cast.
#[test]
fn fixtures_muon_matches_pytorch() {
    let fixture = Fixture::open();
    for (scale_name, scale) in
        [("original", MuonScale::Original), ("match_rms_adamw", MuonScale::MatchRmsAdamW)]
    {
        for nesterov in [true, false] {
            let name = format!("muon_{scale_name}{}", if nesterov { "_nesterov" } else { "" });
            for (suffix, products) in [("_fp32", None), ("", Some(Kind::BFloat16))] {
                let rule =
                    || -> Box<dyn Rule> { Box::new(Muon { nesterov, scale, products, ..Muon::default() }) };
                check(&fixture, &format!("{name}{suffix}"), &["tall", "wide"], 1e-6, rule);
            }
        }
    }
}

#[test]
fn fixtures_8bit_levels_are_those_of_bitsandbytes() {
    let fixture = Fixture::open();
    for (name, ours) in [
        ("map.signed", kernels::adam_8bit::levels::signed()),
        ("map.unsigned", kernels::adam_8bit::levels::unsigned()),
    ] {
        let theirs = Vec::<f32>::try_from(fixture.read(name)).unwrap();
        let differ = ours.iter().zip(&theirs).filter(|(ours, theirs)| ours.to_bits() != theirs.to_bits());
        assert_eq!(differ.collect::<Vec<_>>(), [], "{name}");
    }
}

/// With bitsandbytes' maps and rounding, but for second moments above 0 (`kept`): the same codes. On another processor a moment that lies between two
/// levels may get the other code, which changes its element by a few hundredths of an update.
#[test]
fn fixtures_8bit_adamw_matches_bitsandbytes() {
    let fixture = Fixture::open();
    let base = fixture.read("large.base");
    let start = (base.roll([1000], [0]) * 3.0).view([61, 71]);
    let [parameter, exact] = [(); 2].map(|()| start.copy().set_requires_grad(true));
    let mut in_fp32 = optimizer(Box::new(AdamW::default()), &exact);
    let mut optimizer = optimizer(Box::new(AdamW8bit::default()), &parameter);
    for number in 0..STEPS {
        let factor = Tensor::from_slice(&[1.0 + 0.1 * number as f64]).to_kind(Kind::Float);
        let gradient = (base.roll([37 * number], [0]) * factor).view([61, 71]);
        step(&mut optimizer, &parameter, &gradient);
        step(&mut in_fp32, &exact, &gradient);
    }
    let of = |name: &str| fixture.read(&format!("adamw8bit_kept.{name}"));
    let state = optimizer.state();
    for name in ["exp_avg", "exp_avg_sq"] {
        let ours = |name: &str| {
            let name = format!("p.{name}");
            state.iter().find(|(of, _)| *of == name).unwrap().1.shallow_clone()
        };
        let scale = format!("{name}_scale");
        let scales = of(&scale);
        let off = ((ours(&scale) - &scales) / &scales).abs().max().double_value(&[]);
        let codes = (ours(name).to_kind(Kind::Int64) - of(name).to_kind(Kind::Int64)).abs();
        let differ = codes.ne(0).to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]);
        eprintln!("{name}: scales off by {off:.1e}, {differ} codes of {}", codes.numel());
        assert!(off <= 1e-6 && codes.max().int64_value(&[]) <= 1 && differ <= 4, "{name}: {differ}, {off:e}");
    }
    let off = (parameter.detach() - of("param")).abs();
    let beyond = off.ge(1e-6).to_kind(Kind::Int64).sum(Kind::Int64).int64_value(&[]);
    let most = off.max().double_value(&[]);
    eprintln!("{beyond} parameters are off by more than 1e-6, at most by {most:.1e}");
    assert!(beyond <= 4 && most <= 0.05 * LR, "{beyond} off by {most:.2e}");
    // As far from AdamW's as 8 bits are; with the nearest codes for second moments, some are 0, and updates are divided by ε.
    let off =
        ((parameter.detach() - exact.detach()).norm() / (exact.detach() - start).norm()).double_value(&[]);
    let nearest = fixture.read("adamw8bit.distance").double_value(&[0]);
    eprintln!("from AdamW's change in 20 steps: {off:.3} of it, {nearest:.3} with the nearest codes");
    assert!(off < 0.05 && nearest > 1.0, "{off}, {nearest}");
}
