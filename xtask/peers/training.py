"""Training steps of the GPT-2-like model in PyTorch, as its repaired assignment script would run them.

The step is that of `training bench`: embedding, sinusoidal positions, a projection, one post-norm decoder layer whose memory
is its own input (causal in both attentions), the output projection, cross-entropy over what has a label, backward, fused
Adam, gradients dropped. Each level runs in turn: eager, and with forward, loss and backward compiled by torch.compile (the optimizer
is one fused kernel in both). Writes one JSON record per figure; compilation is measured apart.
"""

import argparse
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from records import environment, metric, peak_of, synchronize

IGNORED = -100


class Gpt2Like(torch.nn.Module):
    def __init__(self, vocabulary, width, heads, length):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.hidden_projector = torch.nn.Linear(width, width)
        self.decoder = torch.nn.TransformerDecoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.output_linear = torch.nn.Linear(width, vocabulary)
        place = torch.arange(length)[:, None]
        frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(length, width)
        table[:, 0::2] = torch.sin(place * frequency)
        table[:, 1::2] = torch.cos(place * frequency)
        self.register_buffer("table", table, persistent=False)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        h = self.hidden_projector(self.embedding(tokens) + self.table)
        # The hints let both attentions take the fused kernel's causal path where PyTorch has one.
        h = self.decoder(
            h, h, tgt_mask=self.mask, memory_mask=self.mask, tgt_is_causal=True, memory_is_causal=True
        )
        return self.output_linear(h)


def batch(generator, rows, length, vocabulary, device):
    """Rows of half to full length, padded; the same shapes and share of padding as ours."""
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    lengths = torch.randint(length // 2 + 1, length + 1, (rows,), generator=generator)
    labels = torch.full((rows, length), IGNORED)
    labels[:, :-1] = tokens[:, 1:]
    places = torch.arange(length)[None]
    labels[places >= (lengths - 1)[:, None]] = IGNORED
    tokens[places >= lengths[:, None]] = 0
    return tokens.to(device), labels.to(device)


def losses(model, tokens, labels):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def step(loss_of, model, optimizer, tokens, labels):
    loss = loss_of(model, tokens, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def measure(level, args, device):
    """The figures of one level."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = Gpt2Like(args.vocabulary, args.width, args.heads, args.length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    torch.compiler.reset()
    loss_of = losses if level == "eager" else torch.compile(losses, dynamic=False)
    draw = lambda: batch(generator, args.rows, args.length, args.vocabulary, device)
    start = time.perf_counter()
    step(loss_of, model, optimizer, *draw())
    synchronize(device)
    first = time.perf_counter() - start
    for _ in range(2):
        step(loss_of, model, optimizer, *draw())
    synchronize(device)
    times = []
    for index in range(args.steps):
        print(f"@progress {index} {args.steps} GPT-2-like, a training step, {level}", file=sys.stderr, flush=True)
        tokens, labels = draw()
        start = time.perf_counter()
        # The loss is read, as ours is.
        step(loss_of, model, optimizer, tokens, labels).item()
        synchronize(device)
        times.append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in model.parameters())
    # Weights and both moments are there before the step that is measured.
    held = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    drawn = draw()
    peak = held + peak_of(lambda: step(loss_of, model, optimizer, *drawn), device)
    places = args.rows * args.length
    figures = [
        metric("step_seconds", "s", times),
        metric("positions_per_second", "tokens/s", [places / seconds for seconds in times]),
        {"name": "peak_bytes", "unit": "B", "value": peak, "n": 1},
        {"name": "parameters", "unit": "count", "value": parameters, "n": 1},
    ]
    if level != "eager":
        compiling = max(first - statistics.median(times), 0.0)
        figures.append({"name": "compile_seconds", "unit": "s", "value": compiling, "n": 1})
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    case = {"rows": args.rows, "length": args.length, "width": args.width, "vocabulary": args.vocabulary}
    where = environment(device)
    for level in ("eager", "torch.compile"):
        figures = measure(level, args, device)
        with open(args.records, "a") as records:
            for figure in figures:
                record = {
                    "experiment": "training-vs-pytorch", "case": case | {"level": level}, "metric": figure,
                    "environment": where,
                }
                records.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
