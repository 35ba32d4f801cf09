"""Training steps of a SwiGLU stack in PyTorch: eager, and under torch.utils.checkpoint.

The step is that of `swiglu-ckpt bench`: forward through all layers, backward of the output's sum to the input and all
weights, gradients dropped between steps. Writes one JSON record per figure.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from measure import forward_and_backward, peak_of, phases
from records import Records, add_arguments, environment, metric, progress


class SwigluMlp(torch.nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, intermediate, bias=False)
        self.up = torch.nn.Linear(hidden, intermediate, bias=False)
        self.down = torch.nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(torch.nn.Module):
    def __init__(self, layers, hidden, intermediate, recompute):
        super().__init__()
        self.layers = torch.nn.ModuleList(SwigluMlp(hidden, intermediate) for _ in range(layers))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def step(model, x, device):
    """One step; seconds of the forward and of the backward."""
    seconds = forward_and_backward(lambda: model(x), lambda y: y.sum().backward(), device)
    model.zero_grad(set_to_none=True)
    x.grad = None
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="BATCH,SEQ,HIDDEN,INTERMEDIATE,LAYERS")
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()

    batch, seq, hidden, intermediate, layers = (int(size) for size in args.config.split(","))
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    flops = 9 * 2 * batch * seq * hidden * intermediate * layers
    records = Records(args.records, "swiglu", environment(device))
    for done, (level, recompute) in enumerate([("eager", False), ("checkpoint", True)]):
        progress(done, 2, level)
        model = Stack(layers, hidden, intermediate, recompute).to(device)
        x = torch.randn(batch, seq, hidden, device=device, requires_grad=True)
        step(model, x, device)
        times = [step(model, x, device) for _ in range(args.repeats)]
        above = peak_of(lambda: step(model, x, device), device)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        resident = weights + x.numel() * x.element_size()
        case = {
            "device": args.device, "dtype": "fp32", "batch": batch, "seq": seq, "hidden": hidden,
            "intermediate": intermediate, "layers": layers, "level": level,
        }
        records.put(case, [
            *phases(times),
            metric("peak_bytes", "B", [above + resident]),
            metric("peak_above_weights_bytes", "B", [above + resident - weights]),
            metric("flop_rate", "FLOP/s", [flops / (forward + backward) for forward, backward in times]),
        ])


if __name__ == "__main__":
    main()
