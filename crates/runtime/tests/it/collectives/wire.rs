//! Bytes on the wire: the count of a group against that of the kernel.

use std::time::Duration;

use runtime::collectives::{Division, Launch, ReduceConfig};
use tch::{Device, Kind, Tensor};

const ELEMENTS: i64 = 8 << 20;

/// Bytes that the loopback device has sent.
fn kernel() -> u64 {
    let text = std::fs::read_to_string("/proc/net/dev").unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("lo:")).expect("a loopback device");
    line.split_whitespace().nth(8).unwrap().parse().unwrap()
}

#[test]
fn a_group_counts_what_the_kernel_counts() {
    if !std::path::Path::new("/proc/net/dev").exists() {
        eprintln!("skipped: this system has no /proc/net/dev");
        return;
    }
    super::ranks(2).run(&"wire");
}

pub(super) fn rank(launch: &Launch) {
    let (_store, group) = super::connect(launch, Duration::from_secs(30));
    let whole = Tensor::ones([ELEMENTS], (Kind::Float, Device::Cpu));
    let division = Division::even(ELEMENTS, 2);
    let own = division.range(group.rank());
    let shard = whole.narrow(0, own.start, own.end - own.start).copy();
    // What other processes send is counted, too: one of a few attempts is undisturbed.
    let attempts: Vec<f64> = (0..5)
        .map(|attempt| {
            group.barrier("before").unwrap();
            let (before, counted) = (kernel(), group.bytes().sent);
            group.barrier("begin").unwrap();
            group.all_gather(&whole, division, &shard, "weights").unwrap().wait().unwrap();
            let options = ReduceConfig::default();
            group.reduce_scatter(&whole, division, &shard, options, "gradients").unwrap().wait().unwrap();
            let counted = group.bytes().sent - counted;
            assert_eq!(
                counted,
                4 * ELEMENTS as u64,
                "attempt {attempt}: half of each, of four bytes an element"
            );
            group.barrier("after").unwrap();
            let ratio = (kernel() - before) as f64 / (2 * counted) as f64;
            group.barrier("end").unwrap();
            ratio
        })
        .collect();
    let best = attempts.iter().copied().fold(f64::INFINITY, f64::min);
    assert!((1.0..1.03).contains(&best), "the kernel counted {attempts:?} times the bytes of the group");
}
