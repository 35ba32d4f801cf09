"""Elementwise expressions in PyTorch: eager, and compiled by torch.compile (inductor), which needs a C++ compiler on a CPU.

The expressions, sizes and dtypes are those of `runtime elementwise`. Forward alone runs without a graph; forward and backward
gives the gradients of all inputs from a given upstream gradient. Writes one JSON record per figure; compilation is not timed.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F

from records import environment, metric, synchronize


def chain(x, y, scale, shift):
    return ((F.silu(torch.tanh(x * scale + shift) * y + x)) * 0.5 + y).square()


# Name, inputs of the result's shape, inputs of its last dimension, the expression.
EXPRESSIONS = [
    ("GELU(x + bias)", 1, 1, lambda x, bias: F.gelu(x + bias)),
    ("SiLU(gate)·up", 2, 0, lambda gate, up: F.silu(gate) * up),
    ("residual + x·σ(gate)", 3, 0, lambda residual, x, gate: residual + x * torch.sigmoid(gate)),
    ("chain of 8", 2, 2, chain),
]


def forward(function, inputs, upstream):
    with torch.no_grad():
        function(*inputs)


def both(function, inputs, upstream):
    torch.autograd.grad(function(*inputs), inputs, upstream)


def measure(step, device, budget):
    """Seconds of a step, several samples."""
    def seconds(count):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        return (time.perf_counter() - start) / count

    for _ in range(3):
        step()
    once = seconds(1)
    count = max(1, min(1000, int(0.005 / once) + 1))
    rounds = max(5, min(41, int(budget / (once * count))))
    return [seconds(count) for _ in range(rounds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="128,8192")
    parser.add_argument("--budget", type=float, default=0.35)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    where = environment(device)
    with open(args.records, "a") as records:
        for index, (name, full, vectors, function) in enumerate(EXPRESSIONS):
            print(f"@progress {index} {len(EXPRESSIONS)} {name}", file=sys.stderr, flush=True)
            for rows in (int(rows) for rows in args.rows.split(",")):
                for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                    shapes = [(rows, 1024)] * full + [(1024,)] * vectors
                    inputs = [torch.randn(shape, device=device).to(kind).requires_grad_() for shape in shapes]
                    upstream = torch.randn(rows, 1024, device=device).to(kind)
                    torch.compiler.reset()
                    compiled = torch.compile(function, dynamic=False)
                    for level, callee in (("eager", function), ("torch.compile", compiled)):
                        for part, step in (("forward", forward), ("forward + backward", both)):
                            samples = measure(lambda: step(callee, inputs, upstream), device, args.budget)
                            case = {
                                "expression": name, "dtype": dtype, "shape": f"{rows} × 1024", "part": part,
                                "device": args.device, "level": level,
                            }
                            record = {
                                "experiment": "elementwise", "case": case,
                                "metric": metric("seconds", "s", samples), "environment": where,
                            }
                            records.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
