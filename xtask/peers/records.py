"""What every peer writes into its records: where it ran, and a figure with its spread.

The fields are those of `report`'s records, which `cargo xtask compare` reads from both sides.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Distributions whose versions decide a peer's speed.
PACKAGES = ["transformers", "peft", "liger_kernel", "cut_cross_entropy", "triton"]


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


def not_measured(name, unit, why):
    return {"name": name, "unit": unit, "value": None, "n": 0, "note": why}


def metric(name, unit, samples):
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    record = {"name": name, "unit": unit, "value": statistics.median(samples), "n": len(samples)}
    if len(samples) > 1:
        record["spread"] = (quartiles[2] - quartiles[0]) / 2
    return record


def add_arguments(parser):
    """Adds the arguments that every peer has."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)


def progress(done, total, message):
    """Says how far this program is, and what it does."""
    print(f"@progress {done} {total} {message}", file=sys.stderr, flush=True)
