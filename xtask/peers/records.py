"""What every peer writes into its records: where it ran, and a figure with its spread. And how it takes turns.

The fields are those of `report`'s records, which `cargo xtask compare` reads from both sides. Where that sets `FRUGAL_TURNS`, each
program prepares a case, writes `@turn DONE TOTAL` to standard error, waits for a line on standard input, and measures one round.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Distributions whose versions decide a peer's speed.
PACKAGES = ["transformers", "peft", "liger_kernel", "triton"]


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
        "packages": packages(),
        "beside": os.environ.get("FRUGAL_BESIDE") or None,
        "revision": os.environ.get("FRUGAL_REVISION", ""),
        "unix_time": int(time.time()),
    }


def packages():
    """Versions of the packages that this process has imported, and of triton, which torch imports when it compiles."""
    versions = {}
    for name in PACKAGES:
        if name in sys.modules or name == "triton":
            try:
                versions[name.replace("_", "-")] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
    return versions


class Records:
    """Appends records of one experiment to a file, each as soon as it is measured."""

    def __init__(self, path, experiment, where):
        self.file = open(path, "a")
        self.experiment, self.where = experiment, where

    def put(self, case, figures, turn=None):
        case = case if turn is None else case | {"round": turn}
        for figure in figures:
            record = {"experiment": self.experiment, "case": case, "metric": figure, "environment": self.where}
            self.file.write(json.dumps(record) + "\n")
        self.file.flush()


class Turns:
    """The rounds of each of `cases` cases; one round without a number where nobody gives turns."""

    def __init__(self, cases):
        self.count = int(os.environ.get("FRUGAL_TURNS", "0"))
        self.done, self.total = 0, cases * max(self.count, 1)

    def rounds(self):
        """Yields the number of each round when it is this program's turn."""
        if self.count == 0:
            yield None
            return
        for turn in range(self.count):
            print(f"@turn {self.done} {self.total}", file=sys.stderr, flush=True)
            if not sys.stdin.readline():
                sys.exit("error: the process that gives the turns has ended")
            self.done += 1
            yield turn

    def is_last(self, turn):
        return turn is None or turn + 1 == self.count


class Delegate:
    """Another process of this script, which measures levels that change classes for the whole process, in turn with this one."""

    def __init__(self, arguments):
        command = [sys.executable, os.path.abspath(sys.argv[0]), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.waits = False
        self.settle()

    def settle(self):
        """Reads what it writes until it waits for its turn, or has ended."""
        self.waits = False
        for line in self.process.stderr:
            if line.startswith("@turn "):
                self.waits = True
                return
            sys.stderr.write(line)
        if self.process.wait() != 0:
            sys.exit(f"error: the process of {' '.join(self.process.args[2:])} ended with {self.process.returncode}")

    def turn(self):
        """Lets it measure one round."""
        if self.waits:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.settle()


def not_measured(name, unit, why):
    return {"name": name, "unit": unit, "value": None, "n": 0, "note": why}


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
