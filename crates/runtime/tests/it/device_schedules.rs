//! Random schedules over several streams against the same operations in sequence.
//!
//! Every operation is `slot[to] = slot[to]·a + slot[from]·b` on a random stream after a random delay. The schedule waits for the
//! last write of both slots and for the last reads of the one it writes, through events that are recorded again and again. Any
//! order that these waits allow gives the sequential result bit for bit.

use runtime::Result;
use runtime::device::{self, Event, Stream};
use tch::{Device, Kind, Tensor};

const STREAMS: usize = 4;
const SLOTS: usize = 6;
const OPERATIONS: usize = 60;
const ROUNDS: u64 = 60;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }
}

#[derive(Clone, Copy)]
struct Operation {
    stream: usize,
    from: usize,
    to: usize,
    a: f64,
    b: f64,
    delay: usize,
}

fn draw(random: &mut Random) -> Operation {
    let (from, to) = (random.below(SLOTS), random.below(SLOTS));
    Operation {
        stream: random.below(STREAMS),
        from,
        to,
        a: 0.5 + random.below(7) as f64 / 16.0,
        b: random.below(9) as f64 / 16.0 - 0.25,
        // Most operations are fast, some delay their stream.
        delay: if random.below(4) == 0 { random.below(20_000) } else { 0 },
    }
}

fn slots(device: Device) -> Vec<Tensor> {
    (0..SLOTS).map(|slot| Tensor::full([257], slot as f64 - 2.0, (Kind::Double, device))).collect()
}

fn apply(to: &Tensor, from: &Tensor, operation: Operation) -> Result<()> {
    let term = from.f_mul_scalar(operation.b)?;
    let _ = to.shallow_clone().f_mul_scalar_(operation.a)?.f_add_(&term)?;
    Ok(())
}

/// Spends time on the stream, on the CPU or with a kernel.
fn hold(device: Device, delay: usize) -> Result<()> {
    if device.is_cuda() && delay > 0 {
        let x = Tensor::f_ones([256, 256], (Kind::Double, device))?;
        for _ in 0..1 + delay / 2000 {
            drop(x.f_mm(&x)?);
        }
    } else {
        for _ in 0..delay {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

fn in_sequence(operations: &[Operation], device: Device) -> Result<Vec<Tensor>> {
    let slots = slots(device);
    for &operation in operations {
        apply(&slots[operation.to], &slots[operation.from], operation)?;
    }
    Ok(slots)
}

fn scheduled(operations: &[Operation], device: Device) -> Result<Vec<Tensor>> {
    let slots = slots(device);
    let streams: Vec<Stream> = (0..STREAMS).map(|_| Stream::new(device)).collect::<Result<_>>()?;
    let written: Vec<Event> = (0..SLOTS).map(|_| Event::untimed(device)).collect::<Result<_>>()?;
    let read: Vec<Event> = (0..SLOTS * STREAMS).map(|_| Event::untimed(device)).collect::<Result<_>>()?;

    // The current stream's operations on the slots come first.
    let filled = Event::untimed(device)?;
    Stream::current(device)?.record(&filled)?;
    for stream in &streams {
        stream.wait(&filled)?;
    }
    for &operation in operations {
        let stream = &streams[operation.stream];
        stream.wait(&written[operation.from])?;
        stream.wait(&written[operation.to])?;
        for event in &read[operation.to * STREAMS..][..STREAMS] {
            stream.wait(event)?;
        }
        let (to, from) = (slots[operation.to].shallow_clone(), slots[operation.from].shallow_clone());
        stream.submit(move || {
            hold(device, operation.delay)?;
            apply(&to, &from, operation)
        })?;
        stream.record(&written[operation.to])?;
        stream.record(&read[operation.from * STREAMS + operation.stream])?;
    }
    let current = Stream::current(device)?;
    for event in &written {
        current.wait(event)?;
    }
    for stream in &streams {
        stream.synchronize()?;
    }
    Ok(slots)
}

fn check(device: Device) {
    for seed in 0..ROUNDS {
        let mut random = Random(seed);
        let operations: Vec<Operation> = (0..OPERATIONS).map(|_| draw(&mut random)).collect();
        let expected = in_sequence(&operations, device).unwrap();
        let actual = scheduled(&operations, device).unwrap();
        for (slot, (expected, actual)) in expected.iter().zip(&actual).enumerate() {
            assert!(expected.equal(actual), "seed {seed}, slot {slot}");
        }
    }
}

#[test]
fn any_schedule_gives_the_sequential_result_on_cpu() {
    check(Device::Cpu);
}

#[test]
fn any_schedule_gives_the_sequential_result_on_cuda() {
    if device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    check(Device::Cuda(0));
}
