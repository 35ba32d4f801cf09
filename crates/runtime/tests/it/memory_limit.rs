//! A limit on live bytes. The counts are the whole process's, so no other test may run at the same time.

use expect_test::expect;
use runtime::memory::{self, Region};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn bytes(count: i64) -> Result<Tensor, tch::TchError> {
    Tensor::f_zeros([count], (Kind::Uint8, CPU))
}

fn live() -> u64 {
    memory::live_bytes(CPU).unwrap()
}

fn words(result: Result<Tensor, tch::TchError>) -> String {
    runtime::Error::from(result.unwrap_err()).to_string()
}

#[test]
fn an_allocation_beyond_the_limit_fails_and_counts_nothing() {
    memory::track_cpu().unwrap();
    assert_eq!(live(), 0);
    let first = bytes(1000).unwrap();
    let region = Region::start(CPU).unwrap();
    {
        let limit = memory::limit(CPU, 5000).unwrap();
        assert_eq!(limit.bytes(), 5000);
        // Exactly, to the byte.
        let rest = bytes(4000).unwrap();
        expect!["out of memory on the CPU: 1 bytes were asked for, 5000 are live and the limit is 5000; free tensors, take smaller batches, or raise the limit (runtime::memory::limit)"]
            .assert_eq(&words(bytes(1)));
        assert_eq!(live(), 5000);
        drop(rest);
        assert_eq!(live(), 1000);
        // Any operator's result, small or large, and sizes that would overflow a sum.
        assert!(words(bytes(4001)).starts_with("out of memory on the CPU: 4001 bytes"));
        assert!(words(first.f_to_kind(Kind::Double)).starts_with("out of memory on the CPU: 8000 bytes"));
        assert!(words(bytes(64 << 20)).starts_with("out of memory on the CPU: 67108864 bytes"));
        assert!(words(bytes(i64::MAX)).starts_with("out of memory on the CPU: 9223372036854775807 bytes"));
        assert!(bytes(0).is_ok());

        // The lower of two limits applies, whichever is older and whichever ends first.
        let wider = memory::limit(CPU, 1 << 20).unwrap();
        assert!(bytes(4001).is_err());
        let tighter = memory::limit(CPU, 2000).unwrap();
        assert!(bytes(1000).is_ok());
        assert!(bytes(1001).is_err());
        drop(limit);
        assert!(bytes(1001).is_err());
        drop(tighter);
        assert!(bytes(5001).is_ok());
        drop(wider);
    }
    let usage = region.finish().unwrap();
    assert_eq!(
        (usage.live_before, usage.peak, usage.live_after),
        (1000, 6001, 1000),
        "refusals are not a peak"
    );
    drop(bytes(8 << 20).unwrap());

    // Existing allocations are not affected.
    let error = memory::limit(CPU, 999).unwrap_err().to_string();
    expect!["memory limit: 1000 bytes are live already, more than the limit of 999; free tensors first"]
        .assert_eq(&error);
    assert!(bytes(1 << 20).is_ok(), "a limit that was refused does not hold");

    // Cached blocks do not count against an allocation, and are freed to keep the process under the limit.
    memory::empty_cache(CPU).unwrap();
    let cached_before = memory::set_block_cache(true).unwrap();
    drop([(); 3].map(|()| bytes(4 << 20).unwrap()));
    assert_eq!(memory::cached_bytes(CPU).unwrap(), 12 << 20);
    let limit = memory::limit(CPU, (9 << 20) + 1000).unwrap();
    assert_eq!(memory::cached_bytes(CPU).unwrap(), 8 << 20);
    let reused = bytes(4 << 20).unwrap();
    assert_eq!(memory::cached_bytes(CPU).unwrap(), 4 << 20);
    let fresh = bytes(5 << 20).unwrap();
    assert_eq!((live(), memory::cached_bytes(CPU).unwrap()), ((9 << 20) + 1000, 0));
    drop((reused, fresh));
    assert!(memory::cached_bytes(CPU).unwrap() <= 9 << 20);
    drop(limit);
    memory::set_block_cache(cached_before).unwrap();

    // Many threads: never above the limit, and every refusal leaves the count as it was.
    let limit = memory::limit(CPU, 1000 + 4 * 1024).unwrap();
    let region = Region::start(CPU).unwrap();
    let refused: usize = std::thread::scope(|scope| {
        let workers = [(); 4].map(|()| {
            scope.spawn(|| {
                let held = || [1024, 2048].map(bytes).iter().filter(|tensor| tensor.is_err()).count();
                (0..200).map(|_| held()).sum::<usize>()
            })
        });
        workers.map(|worker| worker.join().unwrap()).iter().sum()
    });
    let usage = region.finish().unwrap();
    assert!(usage.peak <= 1000 + 4 * 1024, "{usage:?}, {refused} refused");
    assert_eq!(usage.live_after, 1000);
    drop(limit);
}
