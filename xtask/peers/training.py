"""Training steps of the GPT-2-like model in PyTorch, as its repaired assignment script would run them.

The step is that of `training bench`: embedding, sinusoidal positions, a projection, one post-norm decoder layer whose memory
is its own input (causal in both attentions), the output projection, cross-entropy over what has a label, backward, fused
Adam, gradients dropped. Each level runs in turn: eager, and with forward, loss and backward compiled by torch.compile
(`torch.compile`), and with CUDA graphs besides (`reduce-overhead`); the optimizer is one fused kernel in all. In bf16 weights and
moments are bf16. Writes one JSON record per figure; compilation is measured apart.
"""

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F

from measure import busy_of, peak_of, synchronize
from records import DTYPES, Records, add_arguments, environment, metric, progress
from turns import Turns

IGNORED = -100
COMPILED = {"torch.compile": "default", "reduce-overhead": "reduce-overhead"}
WARM_UP = 3


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
    # A sum over 4096 exponentials is fp32, as autocast would have it.
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


class Prepared:
    """A level's model and optimizer, after its first steps."""

    def __init__(self, level, dtype, args, device):
        torch.manual_seed(args.seed)
        self.level, self.args, self.device = level, args, device
        self.generator = torch.Generator().manual_seed(args.seed)
        self.model = Gpt2Like(args.vocabulary, args.width, args.heads, args.length).to(device, DTYPES[dtype])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.loss_of = losses
        if level in COMPILED:
            self.loss_of = torch.compile(losses, dynamic=False, mode=COMPILED[level])
        start = time.perf_counter()
        self.step(*self.draw())
        synchronize(device)
        self.first = time.perf_counter() - start
        for _ in range(WARM_UP):
            self.step(*self.draw())
        synchronize(device)

    def draw(self):
        args = self.args
        return batch(self.generator, args.rows, args.length, args.vocabulary, self.device)

    def step(self, tokens, labels):
        # Results of the last replay may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss_of(self.model, tokens, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure(self):
        """Figures of one round."""
        times = []
        for _ in range(self.args.steps):
            drawn = self.draw()
            synchronize(self.device)
            start = time.perf_counter()
            # The loss is read, as ours is.
            self.step(*drawn).item()
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        # Weights and both moments are there before the step that is measured.
        held = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())
        drawn = self.draw()
        peak = held + peak_of(lambda: self.step(*drawn), self.device)
        places = self.args.rows * self.args.length
        return times, [
            metric("step_seconds", "s", times),
            metric("positions_per_second", "tokens/s", [places / seconds for seconds in times]),
            metric("peak_bytes", "B", [peak]),
        ]

    def once(self, times):
        """Figures that are measured once."""
        parameters = sum(p.numel() for p in self.model.parameters())
        drawn = self.draw()
        figures = [metric("parameters", "count", [parameters]), busy_of(lambda: self.step(*drawn), self.device)]
        if self.level in COMPILED:
            compiling = max(self.first - statistics.median(times), 0.0)
            figures.append(metric("compile_seconds", "s", [compiling]))
        return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtype", default="fp32", help=f"one or more of {', '.join(DTYPES)}")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--levels", default="eager,torch.compile", help=f"one or more of eager, {', '.join(COMPILED)}")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's caches and measure nothing")
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    levels, dtypes = args.levels.split(","), args.dtype.split(",")
    records = Records(args.records, "training-vs-pytorch", environment(device))
    turns = Turns(len(dtypes))
    for dtype in dtypes:
        case = {
            "rows": args.rows, "length": args.length, "width": args.width, "vocabulary": args.vocabulary, "dtype": dtype,
        }
        torch.compiler.reset()
        # In turns all levels are prepared first; else one after the other.
        for group in [levels] if turns.count else [[level] for level in levels]:
            ready = []
            for level in group:
                progress(turns.done, turns.total, f"GPT-2-like, a training step, {dtype}, {level}")
                ready.append(Prepared(level, dtype, args, device))
            if args.compile_only:
                continue
            for turn in turns.rounds():
                for prepared in ready:
                    here = case | {"level": prepared.level}
                    times, figures = prepared.measure()
                    records.put(here, figures, turn)
                    if turns.is_last(turn):
                        records.put(here, prepared.once(times))
            del ready


if __name__ == "__main__":
    main()
