//! Behaviour that CUDA shares with the CPU, and that only CUDA has. Prints that it is skipped without CUDA.

use runtime::device::{self, Event, PinnedBuffer, Stream, copy_async};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Runs the body on the first CUDA device.
fn on_cuda(body: impl FnOnce(Device) -> Result<()>) {
    if device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    body(device::select("cuda").unwrap()).unwrap();
}

/// Occupies the current stream of `device` for some milliseconds.
fn occupy(device: Device) -> Result<()> {
    let x = Tensor::f_ones([2048, 2048], (Kind::Float, device))?;
    for _ in 0..50 {
        drop(x.f_mm(&x)?);
    }
    Ok(())
}

#[test]
fn the_device_has_a_name_and_memory() {
    on_cuda(|device| {
        assert!(!device::name(device)?.starts_with("CUDA device"), "the driver gives the name");
        let memory = device::memory_info(device)?;
        assert!(0 < memory.free && memory.free <= memory.total);
        let count = device::cuda_count()?;
        let error = device::select(&format!("cuda:{count}")).unwrap_err();
        assert!(error.to_string().contains("this machine has cuda:0"), "{error}");
        Ok(())
    });
}

#[test]
fn submit_enqueues_on_its_stream_and_events_order() {
    on_cuda(|device| {
        let (producer, consumer) = (Stream::new(device)?, Stream::high_priority(device)?);
        let ready = Event::untimed(device)?;
        let shared = Tensor::f_zeros([1 << 20], (Kind::Float, device))?;
        device::synchronize(device)?;
        let mut written = shared.shallow_clone();
        producer.submit(move || {
            occupy(device)?;
            let _ = written.f_fill_(3.0)?;
            Ok(())
        })?;
        producer.record(&ready)?;
        assert!(!ready.query()?, "submit returns before the kernels end");
        consumer.wait(&ready)?;
        let (sender, receiver) = std::sync::mpsc::channel();
        consumer.submit(move || {
            let sum = shared.f_sum(Kind::Double)?;
            sender.send(sum).map_err(|error| Error::Other(error.to_string().into()))
        })?;
        consumer.synchronize()?;
        assert!(consumer.query()? && ready.query()?);
        assert_eq!(f64::try_from(receiver.recv().unwrap())?, 3.0 * f64::from(1 << 20));
        Ok(())
    });
}

#[test]
fn the_guard_makes_a_stream_current_and_restores_the_previous_one() {
    on_cuda(|device| {
        let (outer, inner) = (format!("{:?}", Stream::current(device)?), Stream::new(device)?);
        {
            let _guard = inner.enter()?;
            assert_eq!(format!("{:?}", Stream::current(device)?), format!("{inner:?}"));
        }
        assert_eq!(format!("{:?}", Stream::current(device)?), outer);
        let error = inner.submit(|| panic!("boom")).unwrap_err();
        assert_eq!(error.to_string(), "work on the stream failed: panicked: boom");
        assert_eq!(format!("{:?}", Stream::current(device)?), outer, "a panic restores it too");
        Ok(())
    });
}

#[test]
fn events_time_the_device_and_keep_earlier_recordings() {
    on_cuda(|device| {
        let stream = Stream::new(device)?;
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        assert!(start.query()?, "never recorded is complete");
        stream.record(&start)?;
        stream.submit(move || occupy(device))?;
        stream.record(&end)?;
        assert!(start.elapsed(&end).is_err(), "not complete yet");
        end.synchronize()?;
        assert!(start.elapsed(&end)? > 0.0);

        // A wait for the first recording is not held up by the second.
        let (mark, early) = (Event::untimed(device)?, Stream::new(device)?);
        stream.record(&mark)?;
        early.wait(&mark)?;
        stream.submit(move || occupy(device))?;
        stream.record(&mark)?;
        early.synchronize()?;
        assert!(!mark.query()?);
        mark.synchronize()
    });
}

#[test]
fn pinned_memory_copies_asynchronously_and_survives_its_owner() {
    on_cuda(|device| {
        let stream = Stream::new(device)?;
        let mut source = device::pinned_empty(&[1 << 22], Kind::Float, device)?;
        assert!(source.f_is_pinned(device)?);
        let _ = source.f_fill_(2.0)?;
        let target = Tensor::f_zeros([1 << 22], (Kind::Float, device))?;
        device::synchronize(device)?;
        let (mut inside, from) = (target.shallow_clone(), source.shallow_clone());
        stream.submit(move || {
            occupy(device)?;
            copy_async(&mut inside, &from)
        })?;
        device::record_stream(&source, &stream)?;
        device::record_stream(&target, &stream)?;
        drop(source);
        // Without the record of the running copy, the allocator would reuse the block.
        let mut other = device::pinned_empty(&[1 << 22], Kind::Float, device)?;
        let _ = other.f_fill_(7.0)?;
        stream.synchronize()?;
        assert_eq!(f64::try_from(target.f_mean(Kind::Double)?)?, 2.0);

        let mut buffer = PinnedBuffer::new(1024, device)?;
        let view = buffer.view(0, &[256], Kind::Float)?;
        assert!(view.f_is_pinned(device)?);
        drop(view);
        assert_eq!(buffer.as_slice::<u8>()?, [0; 1024]);
        assert!(device::pinned_bytes(device)?.live >= 1024);
        Ok(())
    });
}

#[test]
fn a_buffer_is_borrowed_after_the_copies_of_its_views() {
    on_cuda(|device| {
        const FLOATS: i64 = 1 << 22;
        let stream = Stream::new(device)?;
        let mut buffer = PinnedBuffer::new(4 * FLOATS as usize, device)?;
        buffer.as_mut_slice::<f32>()?.fill(2.0);
        let target = Tensor::f_zeros([FLOATS], (Kind::Float, device))?;
        device::synchronize(device)?;

        let (mut inside, from) = (target.shallow_clone(), buffer.view(0, &[FLOATS], Kind::Float)?);
        stream.submit(move || {
            occupy(device)?;
            copy_async(&mut inside, &from)
        })?;
        buffer.as_mut_slice::<f32>()?.fill(7.0);
        stream.synchronize()?;
        assert_eq!(f64::try_from(target.f_mean(Kind::Double)?)?, 2.0);

        let (inside, mut to) = (target.shallow_clone(), buffer.view(0, &[FLOATS], Kind::Float)?);
        stream.submit(move || {
            occupy(device)?;
            copy_async(&mut to, &inside)
        })?;
        assert!(buffer.as_slice::<f32>()?.iter().all(|number| *number == 2.0));
        Ok(())
    });
}

#[test]
fn a_cpu_stream_waits_for_a_cuda_event_and_the_reverse() {
    on_cuda(|device| {
        let (gpu, cpu) = (Stream::new(device)?, Stream::new(Device::Cpu)?);
        let (on_gpu, on_cpu) = (Event::untimed(device)?, Event::untimed(Device::Cpu)?);
        let mut staging = device::pinned_empty(&[1024], Kind::Float, device)?;
        let _ = staging.f_zero_()?;
        let data = Tensor::f_full([1024], 5.0, (Kind::Float, device))?;
        device::synchronize(device)?;

        let (inside, mut to) = (data.shallow_clone(), staging.shallow_clone());
        gpu.submit(move || {
            occupy(device)?;
            copy_async(&mut to, &inside)
        })?;
        gpu.record(&on_gpu)?;
        cpu.wait(&on_gpu)?;
        let mut on_host = staging.shallow_clone();
        cpu.submit(move || {
            let _ = on_host.f_mul_scalar_(2.0)?;
            Ok(())
        })?;
        cpu.record(&on_cpu)?;
        gpu.wait(&on_cpu)?;
        let (mut back, from) = (data.shallow_clone(), staging.shallow_clone());
        gpu.submit(move || copy_async(&mut back, &from))?;
        gpu.synchronize()?;
        assert_eq!(f64::try_from(data.f_mean(Kind::Double)?)?, 10.0);

        // A failed CPU event fails the wait of a CUDA stream.
        cpu.submit(|| Err(Error::Other("no data".into())))?;
        cpu.record(&on_cpu)?;
        assert_eq!(gpu.wait(&on_cpu).unwrap_err().to_string(), "work on the stream failed: no data");
        assert!(cpu.synchronize().is_err());
        let error = gpu.record(&on_cpu).unwrap_err();
        assert!(error.to_string().contains("the event is of cpu and the stream of cuda:0"), "{error}");
        Ok(())
    });
}

#[test]
fn a_cpu_stream_waits_for_a_cuda_event_without_occupying_a_core() {
    on_cuda(|device| {
        let (gpu, cpu) = (Stream::new(device)?, Stream::new(Device::Cpu)?);
        let done = Event::untimed(device)?;
        gpu.submit(move || {
            // About a second on the GPUs of 2022 to 2025; few launches, so that the host's time is the wait's.
            let x = Tensor::f_ones([8192, 8192], (Kind::Float, device))?;
            (0..40).try_for_each(|_| x.f_mm(&x).map(drop)).map_err(Into::into)
        })?;
        gpu.record(&done)?;
        let (start, used) = (std::time::Instant::now(), processor_seconds());
        cpu.wait(&done)?;
        cpu.submit(|| Ok(()))?;
        cpu.synchronize()?;
        let (wall, used) = (start.elapsed().as_secs_f64(), processor_seconds() - used);
        // Clock ticks of 10 ms.
        assert!(wall > 0.1, "the wait was too short to show anything: {wall} s");
        assert!(used <= 0.3 * wall, "{used} s of processor time in a wait of {wall} s");
        Ok(())
    });
}

/// Seconds of processor time of this process, of all threads.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // utime and stime are fields 14 and 15; the name in brackets may contain spaces.
    let fields = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}
