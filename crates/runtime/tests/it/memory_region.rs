//! Exact bytes of the CPU allocator. The counts are the whole process's, so no other test may run at the same time.

use runtime::memory::{self, Region};
use tch::{Device, Tensor, kind};

const CPU: Device = Device::Cpu;

fn tensor(elements: i64) -> Tensor {
    Tensor::zeros([elements], kind::FLOAT_CPU)
}

/// Runs a test in a process of its own. Returns whether this is that process.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "FRUGAL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", &format!("memory_region::{test}")]).env(ALONE, "1");
    let output = alone.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

/// Large blocks come from the C library then, and go back to it.
#[cfg(target_os = "linux")]
#[test]
fn a_process_without_room_for_mappings_allocates() {
    if !is_alone("a_process_without_room_for_mappings_allocates") {
        return;
    }
    const LARGE: i64 = 100_000;
    memory::track_cpu().unwrap();
    drop(tensor(LARGE));
    let map = |number: usize| {
        let map = memmap2::MmapMut::map_anon(1 << 16).ok()?;
        // Neighbours of another protection are not merged.
        if number.is_multiple_of(2) { map.make_read_only().ok().map(Ok) } else { Some(Err(map)) }
    };
    let mapped: Vec<_> = (0..).map_while(map).collect();
    let made: Vec<Tensor> = (0..3).map(|_| tensor(LARGE)).collect();
    assert!(made.iter().all(|tensor| (tensor.data_ptr() as usize).is_multiple_of(64)));
    assert_eq!(memory::live_bytes(CPU).unwrap(), 3 * LARGE as u64 * 4);
    assert_eq!(made[2].sum(tch::Kind::Float).double_value(&[]), 0.0);
    drop(made);
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);
    drop(mapped);
}

/// Counting changes nothing of what a program holds: what is freed goes back to the system, as from libtorch's own allocator.
#[test]
fn counted_memory_that_is_freed_goes_back_to_the_system() {
    if !is_alone("counted_memory_that_is_freed_goes_back_to_the_system") {
        return;
    }
    const BYTES: u64 = 256 << 20;
    let resident = || runtime::device::resident_memory().unwrap().anonymous;
    let hold = || drop(Tensor::ones([BYTES as i64 / 4], kind::FLOAT_CPU));
    hold();
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);
    let before = resident();
    let _limit = memory::limit(CPU, 4 * BYTES).unwrap();
    for _ in 0..3 {
        let region = Region::start(CPU).unwrap();
        hold();
        assert_eq!(region.finish().unwrap().peak_above_start(), BYTES);
        assert_eq!(memory::cached_bytes(CPU).unwrap(), 0);
        assert!(resident() < before + (16 << 20), "{before} before, {} after", resident());
    }
    // A cache that was asked for is given back when that is asked for.
    memory::set_block_cache(true).unwrap();
    hold();
    assert_eq!(memory::cached_bytes(CPU).unwrap(), BYTES);
    memory::empty_cache(CPU).unwrap();
    assert!(resident() < before + (16 << 20), "{before} before, {} after", resident());
}

/// As under `ulimit -v`, where the system refuses what no limit of this project does.
#[cfg(target_os = "linux")]
#[test]
fn a_system_without_memory_is_recognised() {
    const COUNTED: &str = "FRUGAL_TEST_COUNTED";
    if std::env::var_os(COUNTED).is_none() {
        for counted in ["1", "0"] {
            let mut shell = std::process::Command::new("sh");
            shell.args([
                "-c",
                "ulimit -v 8388608; exec \"$0\" --exact memory_region::a_system_without_memory_is_recognised",
            ]);
            let output = shell.arg(std::env::current_exe().unwrap()).env(COUNTED, counted).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
        return;
    }
    let is_counted = std::env::var(COUNTED).unwrap() == "1";
    if is_counted {
        memory::track_cpu().unwrap();
        memory::set_block_cache(true).unwrap();
    }
    let bytes = |count: i64| Tensor::f_empty([count], (tch::Kind::Uint8, CPU));
    // Cached blocks are given back for a block of another size.
    const GIB: i64 = 1 << 30;
    drop((0..4).map(|_| bytes(GIB / 2).unwrap()).collect::<Vec<_>>());
    drop(bytes(3 * GIB).unwrap());
    let error = runtime::Error::from(bytes(64 * GIB).unwrap_err());
    assert!(error.is_out_of_memory(), "{error}");
    if is_counted {
        let message = error.to_string();
        assert!(
            message.contains("68719476736 bytes were asked for, 0 are live, and the system gives no more"),
            "{message}"
        );
        assert_eq!(memory::live_bytes(CPU).unwrap(), 0, "a refusal counts nothing");
    }
    assert!(bytes(GIB / 4).is_ok());
}

#[test]
fn live_and_peak_bytes_are_exact() {
    if !is_alone("live_and_peak_bytes_are_exact") {
        return;
    }
    memory::track_cpu().unwrap();
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);

    // Sizes from zero to beyond the threshold for huge pages; every byte is freed.
    for elements in [0, 1, 3, 1000, 1 << 20, (5 << 20) + 7] {
        let region = Region::start(CPU).unwrap();
        let a = tensor(elements);
        assert_eq!(memory::live_bytes(CPU).unwrap(), elements as u64 * 4);
        assert_eq!(a.data_ptr() as usize % 64, 0, "libtorch's alignment is kept");
        let b = a.neg();
        drop(a);
        drop(b);
        let usage = region.finish().unwrap();
        let expected = memory::RegionUsage { live_before: 0, live_after: 0, peak: elements as u64 * 8 };
        assert_eq!(usage, expected, "{elements}");
    }

    // Regions that nest, and that overlap without nesting, each see their own peak.
    let outer = Region::start(CPU).unwrap();
    drop(tensor(1000));
    let first = Region::start(CPU).unwrap();
    let kept = tensor(10);
    let second = Region::start(CPU).unwrap();
    drop(tensor(100));
    let first = first.finish().unwrap();
    drop(tensor(500));
    let second = second.finish().unwrap();
    let outer = outer.finish().unwrap();
    assert_eq!((first.peak, first.live_after), (440, 40));
    assert_eq!((second.live_before, second.peak, second.peak_above_start()), (40, 2040, 2000));
    assert_eq!((outer.peak, outer.live_after), (4000, 40));
    drop(kept);

    // A leaked region does not affect others.
    drop(Region::start(CPU).unwrap());

    // Many threads at once: nothing is lost, the peak is at least each thread's own.
    let region = Region::start(CPU).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    drop(tensor(256));
                }
            });
        }
    });
    let usage = region.finish().unwrap();
    assert!((1024..=4 * 1024).contains(&usage.peak), "{usage:?}");
    assert_eq!(usage.live_after, 0);

    // A tensor made on one thread and freed on another.
    let moved = tensor(64);
    std::thread::spawn(move || drop(moved)).join().unwrap();
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);
    assert!(!memory::set_block_cache(true).unwrap(), "nothing is cached until a program asks for it");
    // A freed block is reused by the next tensor of its size only; cached blocks are not live, and live and cached bytes together
    // stay below the maximum that was ever live.
    memory::empty_cache(CPU).unwrap();
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    const LARGE: i64 = 2 << 20;
    let first = tensor(LARGE);
    let place = address(&first);
    drop(first);
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);
    let other = tensor(LARGE - 1);
    assert_ne!(address(&other), place);
    let again = tensor(LARGE);
    assert_eq!(address(&again), place);
    let most = memory::live_bytes(CPU).unwrap() + 5 * LARGE as u64 * 4;
    drop([(); 5].map(|()| tensor(LARGE + 7)));
    for size in 1..40 {
        drop(tensor(LARGE + size));
        let (live, cached) = (memory::live_bytes(CPU).unwrap(), memory::cached_bytes(CPU).unwrap());
        assert!(
            live + cached <= most + 5 * 28,
            "size {size}: {live} live and {cached} kept, at most {most} were live"
        );
        assert!(cached > 0);
    }
    // With slack, that share more; without it again, no more.
    assert_eq!(memory::set_cache_slack(25).unwrap(), 0);
    let bound = (most + 5 * 28) * 5 / 4;
    let mut largest = 0;
    for size in 1..40 {
        drop(tensor(LARGE + 100 + size));
        let (live, cached) = (memory::live_bytes(CPU).unwrap(), memory::cached_bytes(CPU).unwrap());
        assert!(live + cached <= bound, "size {size}: {live} live and {cached} kept, at most {bound}");
        largest = largest.max(live + cached);
    }
    assert!(largest > most + 5 * 28, "{largest}");
    assert_eq!(memory::set_cache_slack(0).unwrap(), 25);
    let held = memory::live_bytes(CPU).unwrap() + memory::cached_bytes(CPU).unwrap();
    assert!(held <= most + 5 * 28, "{held}");
    drop((other, again));
    assert!(memory::set_block_cache(false).unwrap());
    assert_eq!(memory::cached_bytes(CPU).unwrap(), 0);
    // Blocks from 256 KiB on leave no holes between small ones that live on.
    let resident = || runtime::device::resident_memory().unwrap().anonymous;
    let before = resident();
    let (large, small): (Vec<Tensor>, Vec<Tensor>) =
        (0..400).map(|_| (tensor(64 << 10), tensor(1000))).unzip();
    let held = resident();
    assert!(held > before + (95 << 20), "{before} {held}");
    drop(large);
    let after = resident();
    assert!(after < before + (6 << 20), "{before} {held} {after}");
    drop(small);
    assert!(!memory::set_block_cache(true).unwrap());
    assert_eq!(memory::live_bytes(CPU).unwrap(), 0);
}
