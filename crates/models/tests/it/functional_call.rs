//! Functional calls with other tensors: the originals are always restored.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use expect_test::expect;
use models::module::{Block, Context, FunctionalCall, Module, SharedModule, Visitor, VisitorMut, parameters};
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

/// Returns whether the part has its own tensors: the same memory under the same names.
fn is_itself(part: &FunctionalCall<dyn Block>) -> bool {
    part.shared().run(|block| {
        let inside = parameters(block);
        let same = |((name, tensor), (other, own, _)): (&(String, &Tensor), &(String, Tensor, _))| {
            name == other && tensor.data_ptr() == own.data_ptr()
        };
        inside.len() == part.named().len()
            && inside.iter().zip(part.named()).all(same)
            && forward(block).unwrap() == 26.0
    })
}

#[test]
fn a_functional_call_uses_other_tensors_and_restores_the_originals() {
    let part = part();
    let names: Vec<&str> = part.named().iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["weight", "bias"], "a tensor that is there twice comes once");
    let others = [number(5.0), number(7.0)];
    // 10·5 + 7·5: the weight is replaced in both of its slots.
    assert_eq!(part.shared().functional_call(&others, forward).unwrap(), 85.0);
    assert!(is_itself(&part));
    assert_eq!(part.shared().run(forward).unwrap(), 26.0);
}

#[test]
fn the_original_tensors_are_restored_after_an_error() {
    let part = part();
    let body = |_: &Part| -> Result<()> { Err(Error::invalid("test", "no")) };
    let error = part.shared().functional_call(&[number(5.0), number(7.0)], body).unwrap_err();
    assert_eq!(error.to_string(), "test: no");
    assert!(is_itself(&part));
}

#[test]
fn the_original_tensors_are_restored_after_a_panic() {
    let part = part();
    let shared = part.shared();
    let run =
        || shared.functional_call(&[number(5.0), number(7.0)], |_: &Part| -> Result<()> { panic!("no") });
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    assert!(is_itself(&part));
    assert_eq!(shared.functional_call(&[number(5.0), number(7.0)], forward).unwrap(), 85.0);
}

#[test]
fn another_number_of_tensors_is_refused() {
    let part = part();
    for (count, expected) in [
        (1, expect!["model part: 1 tensors for a part with 2; give one for each"]),
        (3, expect!["model part: 3 tensors for a part with 2; give one for each"]),
    ] {
        let others: Vec<Tensor> = (0..count).map(|value| number(f64::from(value))).collect();
        let error = part.shared().functional_call(&others, forward).unwrap_err();
        expected.assert_eq(&error.to_string());
        assert!(is_itself(&part));
    }
}

#[test]
fn a_part_cannot_call_itself_functionally() {
    let part = part();
    let (shared, others) = (part.shared(), [number(5.0), number(7.0)]);
    let nested = |_: &Part| shared.functional_call(&[number(0.0), number(0.0)], forward);
    let error = shared.functional_call(&others, nested).unwrap_err();
    expect!["model part: is already running; it cannot run inside itself with other tensors"]
        .assert_eq(&error.to_string());
    assert!(is_itself(&part));
    // It may run inside itself with its current tensors: a checkpoint's backward inside a backward does.
    let nested = |_: &Part| shared.run(forward);
    assert_eq!(shared.functional_call(&others, nested).unwrap(), 85.0);
    assert!(is_itself(&part));
}

#[test]
fn a_concurrent_functional_call_waits() {
    let part = part();
    let shared = part.shared();
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
    assert!(is_itself(&part));
}

#[test]
fn gradients_go_to_the_tensors_of_the_call() {
    let part = part();
    let others = [number(5.0).set_requires_grad(true), number(7.0).set_requires_grad(true)];
    let y = part
        .shared()
        .functional_call(&others, |block| block.forward(&number(10.0), &Context::default()))
        .unwrap();
    runtime::autograd::backward(&[&y]).unwrap();
    assert_eq!(others[0].grad().double_value(&[0]), 17.0);
    assert_eq!(others[1].grad().double_value(&[0]), 5.0);
    assert!(part.named().iter().all(|(_, tensor, _)| !tensor.grad().defined()));
}

#[test]
fn a_shared_part_cannot_be_unwrapped() {
    let part = part();
    let shared = part.shared();
    let part = part.into_inner().map(|_| ()).expect_err("someone has it");
    assert!(is_itself(&part));
    drop(shared);
    assert_eq!(forward(&*part.into_inner().expect("no one has it")).unwrap(), 26.0);
}

/// A block around another, which keeps the inner part alive after a forward, as a graph does.
#[derive(Debug)]
struct Leaks(FunctionalCall<dyn Block>, Arc<Mutex<Option<SharedModule<dyn Block>>>>);

impl Module for Leaks {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("inner", &self.0);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.part("inner", &mut self.0)
    }
}

impl Block for Leaks {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        *self.1.lock().unwrap() = Some(self.0.shared());
        self.0.forward(x, context)
    }
}

#[test]
fn a_part_that_a_graph_holds_keeps_the_calls_tensors_until_the_graph_is_gone() {
    let leaked: Arc<Mutex<Option<SharedModule<dyn Block>>>> = Arc::default();
    let outer = FunctionalCall::new("outer", Box::new(Leaks(part(), Arc::clone(&leaked))) as Box<dyn Block>);
    let others = [number(5.0), number(7.0)];
    assert_eq!(outer.shared().functional_call(&others, forward).unwrap(), 85.0);
    // A graph recomputes with the values of its forward; a concurrent call is refused.
    assert_eq!(leaked.lock().unwrap().as_ref().unwrap().run(forward).unwrap(), 85.0);
    let error = outer.shared().functional_call(&others, forward).unwrap_err().to_string();
    assert!(error.contains("a graph whose backward has not run holds `the part`"), "{error}");
    *leaked.lock().unwrap() = None;
    assert_eq!(outer.shared().run(forward).unwrap(), 26.0);
}
