"""What every peer writes into its records: where it ran, and a figure with its spread.

The fields are those of `report`'s records, which `cargo xtask compare` reads from both sides.
"""

import os
import platform
import statistics
import time

import torch


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            cpu = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "torch": torch.__version__.split("+")[0],
        "revision": os.environ.get("FRUGAL_REVISION", ""),
        "unix_time": int(time.time()),
    }


def metric(name, unit, samples):
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    record = {"name": name, "unit": unit, "value": statistics.median(samples), "n": len(samples)}
    if len(samples) > 1:
        record["spread"] = (quartiles[2] - quartiles[0]) / 2
    return record


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
