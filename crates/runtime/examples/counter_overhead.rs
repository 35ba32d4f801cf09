//! What a counter costs: the time of a small operator without one, with one, and without one again.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};

const CALLS: u32 = 100_000;

/// The shortest of five rounds, in nanoseconds per call.
fn nanoseconds(operator: &dyn Fn()) -> f64 {
    let round = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| operator());
        start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
    };
    (0..5).map(|_| round()).fold(f64::INFINITY, f64::min)
}

fn main() -> runtime::Result<()> {
    let _no_grad = tch::no_grad_guard();
    let x = Tensor::randn([8, 8], (Kind::Float, Device::Cpu));
    type Operator<'a> = Box<dyn Fn() + 'a>;
    let operators: [(&str, Operator<'_>); 2] =
        [("mm 8x8", Box::new(|| drop(x.mm(&x)))), ("add 8x8", Box::new(|| drop(&x + &x)))];
    println!("{:10} {:>12} {:>12} {:>12}", "operator", "off (ns)", "on (ns)", "off again");
    for (name, operator) in operators {
        let before = nanoseconds(&operator);
        let counter = Counter::on_this_thread()?;
        let counting = nanoseconds(&operator);
        counter.finish()?;
        let after = nanoseconds(&operator);
        println!("{name:10} {before:>12.0} {counting:>12.0} {after:>12.0}");
    }
    let range = nanoseconds(&|| drop(runtime::profile::range("nothing records")));
    println!("a range while nothing records: {range:.0} ns");
    Ok(())
}
