"""Times, busy time and peak memory of a step, on a CPU or a GPU."""

import time

import torch

from records import metric, not_measured


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forward_and_backward(forward, backward, device):
    """Seconds of `forward()`, and of `backward` of its result."""
    synchronize(device)
    start = time.perf_counter()
    result = forward()
    synchronize(device)
    middle = time.perf_counter()
    backward(result)
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def phases(times):
    """Figures of several steps; `times` has each one's seconds of forward and of backward."""
    return [
        metric("forward_seconds", "s", [forward for forward, _ in times]),
        metric("backward_seconds", "s", [backward for _, backward in times]),
        metric("step_seconds", "s", [forward + backward for forward, backward in times]),
    ]


def union(intervals):
    """Length of the union of intervals (start, end)."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def busy_of(run, device):
    """The time in which the GPU computes or copies while `run` runs once: what remains of a step if the host takes no time."""
    name = "gpu_busy_seconds"
    if device.type != "cuda":
        return not_measured(name, "s", "the processor computes")
    run()
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        synchronize(device)
    events = [
        event for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    busy = union((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events)
    return metric(name, "s", [busy / 1e9]) if events else not_measured(name, "s", "the profiler saw no kernel")


def peak_of(run, device):
    """Largest number of live bytes while `run` runs, beyond those there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
