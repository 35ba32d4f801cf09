//! A counter of the whole process sees every thread. So no other test may run at the same time.

use std::thread;

use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};

#[test]
fn every_thread_is_counted_once() {
    let (m, k, n) = (4, 8, 2);
    let product = (2 * m * k * n) as u64;
    let work = move || {
        let x = Tensor::randn([m, k], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let w = Tensor::randn([k, n], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        for _ in 0..50 {
            x.mm(&w).sum(Kind::Float).backward();
        }
    };
    let all = Counter::start().unwrap();
    let here = Counter::on_this_thread().unwrap();
    let threads: Vec<_> = (0..2).map(|_| thread::spawn(work)).collect();
    let apart = thread::spawn(move || {
        let counter = Counter::on_this_thread().unwrap();
        work();
        counter.finish().unwrap()
    });
    work();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let apart = apart.join().unwrap();
    assert_eq!(here.finish().unwrap().total.flops.dense, 150 * product);
    assert_eq!(apart.total.flops.dense, 150 * product);
    let all = all.finish().unwrap();
    assert_eq!(all.total.flops.dense, 4 * 150 * product, "{all}");
    assert_eq!(all.op("aten::mm").calls, 4 * 150);

    // Without a counter the callback is gone.
    work();
    assert_eq!(Counter::start().unwrap().finish().unwrap().total.calls, 0);
}
