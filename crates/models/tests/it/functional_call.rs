//! Parts that run on other tensors than their own: those are back afterwards, whatever happened.

use std::panic::{AssertUnwindSafe, catch_unwind};

use expect_test::expect;
use models::module::{Block, Context, FunctionalCall, Module, Visitor, VisitorMut, parameters};
use models::{Error, Result};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

type Part = dyn Block + 'static;

/// x·w + b·w, with one tensor in two slots.
#[derive(Debug)]
struct Twice {
    weight: Tensor,
    bias: Tensor,
    again: Tensor,
}

impl Module for Twice {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.weight);
        visitor.parameter("bias", &self.bias);
        visitor.buffer("again", &self.again);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.weight)?;
        visitor.parameter("bias", &mut self.bias)?;
        visitor.buffer("again", &mut self.again)
    }
}

impl Block for Twice {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x * &self.weight + &self.bias * &self.again)
    }
}

fn number(value: f64) -> Tensor {
    Tensor::full([1], value, FLOAT)
}

fn part() -> FunctionalCall<dyn Block> {
    let weight = number(2.0);
    let again = weight.shallow_clone();
    FunctionalCall::new("the part", Box::new(Twice { weight, bias: number(3.0), again }))
}

fn forward(block: &Part) -> Result<f64> {
    Ok(block.forward(&number(10.0), &Context::default())?.double_value(&[0]))
}

/// That the part has its own tensors: the same memory under the same names.
fn is_itself(held: &FunctionalCall<dyn Block>) -> bool {
    held.shared().run(|block| {
        let inside = parameters(block);
        let same = |((name, tensor), (other, own, _)): (&(String, &Tensor), &(String, Tensor, _))| {
            name == other && tensor.data_ptr() == own.data_ptr()
        };
        inside.len() == held.named().len()
            && inside.iter().zip(held.named()).all(same)
            && forward(block).unwrap() == 26.0
    })
}

#[test]
fn a_part_runs_on_other_tensors_and_has_its_own_again() {
    let held = part();
    let names: Vec<&str> = held.named().iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["weight", "bias"], "a tensor that is there twice comes once");
    let others = [number(5.0), number(7.0)];
    // 10·5 + 7·5: the weight is replaced in both of its slots.
    assert_eq!(held.shared().functional_call(&others, forward).unwrap(), 85.0);
    assert!(is_itself(&held));
    assert_eq!(held.shared().run(forward).unwrap(), 26.0);
}

#[test]
fn its_own_are_back_after_an_error() {
    let held = part();
    let body = |_: &Part| -> Result<()> { Err(Error::Config { what: "test", reason: "no".into() }) };
    let error = held.shared().functional_call(&[number(5.0), number(7.0)], body).unwrap_err();
    assert!(matches!(&error, Error::Config { what: "test", reason } if reason == "no"), "{error}");
    assert!(is_itself(&held));
}

#[test]
fn its_own_are_back_after_a_panic() {
    let held = part();
    let shared = held.shared();
    let run =
        || shared.functional_call(&[number(5.0), number(7.0)], |_: &Part| -> Result<()> { panic!("no") });
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    assert!(is_itself(&held));
    assert_eq!(shared.functional_call(&[number(5.0), number(7.0)], forward).unwrap(), 85.0);
}

#[test]
fn another_number_of_tensors_is_refused() {
    let held = part();
    for (count, expected) in [
        (1, expect!["model part: 1 tensors in the place of 2; give one for each"]),
        (3, expect!["model part: 3 tensors in the place of 2; give one for each"]),
    ] {
        let others: Vec<Tensor> = (0..count).map(|value| number(f64::from(value))).collect();
        let error = held.shared().functional_call(&others, forward).unwrap_err();
        expected.assert_eq(&error.to_string());
        assert!(is_itself(&held));
    }
}

#[test]
fn a_part_does_not_run_inside_itself_on_others() {
    let held = part();
    let (shared, others) = (held.shared(), [number(5.0), number(7.0)]);
    let nested = |_: &Part| shared.functional_call(&[number(0.0), number(0.0)], forward);
    let error = shared.functional_call(&others, nested).unwrap_err();
    expect!["model part: is running already; a part cannot run inside itself on other tensors"]
        .assert_eq(&error.to_string());
    assert!(is_itself(&held));
    // It may run inside itself as it is there: a checkpoint's backward inside a backward does.
    let nested = |_: &Part| shared.run(forward);
    assert_eq!(shared.functional_call(&others, nested).unwrap(), 85.0);
    assert!(is_itself(&held));
}

#[test]
fn another_thread_waits_for_its_turn() {
    let held = part();
    let shared = held.shared();
    std::thread::scope(|scope| {
        for value in 0..4 {
            let shared = shared.clone();
            scope.spawn(move || {
                for _ in 0..200 {
                    let others = [number(f64::from(value)), number(1.0)];
                    let found = shared.functional_call(&others, forward).unwrap();
                    assert_eq!(found, 11.0 * f64::from(value));
                }
            });
        }
        for _ in 0..200 {
            assert_eq!(shared.run(forward).unwrap(), 26.0);
        }
    });
    assert!(is_itself(&held));
}

#[test]
fn gradients_of_a_run_go_to_what_it_ran_on() {
    let held = part();
    let others = [number(5.0).set_requires_grad(true), number(7.0).set_requires_grad(true)];
    let y = held
        .shared()
        .functional_call(&others, |block| block.forward(&number(10.0), &Context::default()))
        .unwrap();
    runtime::autograd::backward(&[&y]).unwrap();
    assert_eq!(others[0].grad().double_value(&[0]), 17.0);
    assert_eq!(others[1].grad().double_value(&[0]), 5.0);
    assert!(held.named().iter().all(|(_, tensor, _)| !tensor.grad().defined()));
}

#[test]
fn a_part_that_is_held_elsewhere_stays() {
    let held = part();
    let shared = held.shared();
    let held = held.into_inner().map(|_| ()).expect_err("someone has it");
    assert!(is_itself(&held));
    drop(shared);
    assert_eq!(forward(&*held.into_inner().expect("no one has it")).unwrap(), 26.0);
}
