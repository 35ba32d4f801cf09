"""The rotary embedding and SwiGLU's product in PyTorch, as transformers writes them: eager, and compiled by torch.compile.

Pieces, sizes and dtypes are those of `runtime fused-pieces`. Forward runs without a graph; forward and backward gives the gradients
of all inputs from given upstream gradients. Writes one JSON record per figure; compilation is not timed.
"""

import argparse
import time

import torch
import torch.nn.functional as F

from measure import synchronize
from records import DTYPES, Records, add_arguments, environment, metric, progress

# Batch, sequence, heads of queries, of keys, their width, and the width within the MLP.
SHAPES = [
    ("1 × 64, Qwen2.5-0.5B", (1, 64, 14, 2, 64, 4864)),
    ("2 × 512, Qwen2.5-0.5B", (2, 512, 14, 2, 64, 4864)),
    ("1 × 512, Llama-3-8B", (1, 512, 32, 8, 128, 14336)),
]


def rotary(sizes, kind, device):
    batch, sequence, heads, kv_heads, head, _ = sizes
    angles = torch.arange(sequence)[:, None] * 10_000.0 ** (-torch.arange(0, head, 2) / head)
    angles = torch.cat((angles, angles), dim=-1)[None, :, None]
    cos, sin = angles.cos().to(device, kind), angles.sin().to(device, kind)

    def turned(x):
        first, second = x[..., : head // 2], x[..., head // 2 :]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def rotate(q, k):
        return turned(q), turned(k)

    return rotate, [(batch, sequence, heads, head), (batch, sequence, kv_heads, head)]


def product(sizes, kind, device):
    batch, sequence, *_, inner = sizes

    def gated(gate, up):
        return (F.silu(gate) * up,)

    return gated, [(batch, sequence, 1, inner)] * 2


PIECES = [("rotary embedding of q and k", rotary), ("SiLU(gate)·up", product)]


def forward(piece, inputs, upstream):
    with torch.no_grad():
        piece(*inputs)


def both(piece, inputs, upstream):
    torch.autograd.grad(piece(*inputs), inputs, upstream)


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
    parser.add_argument("--budget", type=float, default=0.3)
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    records = Records(args.records, "fused-pieces", environment(device))
    steps = [(*piece, *shape) for piece in PIECES for shape in SHAPES]
    for index, (what, make, shape, sizes) in enumerate(steps):
        progress(index, len(steps), what)
        for dtype, kind in DTYPES.items():
            piece, shapes = make(sizes, kind, device)
            inputs = [torch.randn(shape, device=device).to(kind).requires_grad_() for shape in shapes]
            upstream = [output.detach().clone() for output in piece(*inputs)]
            torch.compiler.reset()
            compiled = torch.compile(piece, dynamic=False)
            for level, callee in (("eager", piece), ("torch.compile", compiled)):
                for part, step in (("forward", forward), ("forward + backward", both)):
                    samples = measure(lambda: step(callee, inputs, upstream), device, args.budget)
                    case = {
                        "what": what, "dtype": dtype, "shape": shape, "part": part, "device": args.device, "level": level,
                    }
                    records.put(case, [metric("seconds", "s", samples)])


if __name__ == "__main__":
    main()
