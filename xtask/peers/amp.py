"""Mixed precision in PyTorch: what `torch.amp.GradScaler` adds to a step, and how exact `torch.autocast` is in bf16 on the CPU.

`overhead` does what `amp overhead` does, `numerics` what `amp numerics` does. Each writes one JSON record per figure.
"""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F

from measure import synchronize
from records import Records, add_arguments, environment, metric, progress

WIDTH = 768
# Tensors, and rows of each matrix: half of the tensors are matrices [rows, 768], half vectors [768].
SIZES = [(148, 432), (16, 162)]
# Beside PyTorch's own error: about the root mean square of one rounding to bf16, whose unit roundoff is 2^-8.
TOLERANCE = 2.0**-9


def overhead(args, device, records):
    warmup = 2
    for index, (tensors, rows) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(1)
        draw = lambda size: torch.randn(size, generator=generator).to(device)
        parameters = []
        for tensor in range(tensors):
            size = (rows, WIDTH) if tensor % 2 == 0 else (WIDTH,)
            parameter = torch.nn.Parameter(draw(size))
            parameter.grad = draw(size)
            parameters.append(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
        # The scale is 1 and stays, so that the gradients are the same in every step.
        scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
        scaler.scale(torch.ones((), device=device))

        def scaled():
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        one, found = torch.ones(1, device=device), torch.zeros(1, device=device)

        def unscale():
            torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in parameters], found, one)

        ways = {"plain": optimizer.step, "scaled": scaled, "unscale": unscale}
        seconds = {name: [] for name in ways}
        for round in range(warmup + args.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                synchronize(device)
                if round >= warmup:
                    seconds[name].append(time.perf_counter() - start)
            done, total = index * args.rounds + max(0, round - warmup), len(SIZES) * args.rounds
            progress(done, total, f"AdamW of {tensors} tensors")
        beyond = [scaled - plain for scaled, plain in zip(seconds["scaled"], seconds["plain"])]
        parameters = tensors // 2 * WIDTH * (rows + 1)
        case = {"tensors": tensors, "parameters": parameters, "decides": "host"}
        figures = [
            metric("plain_seconds", "s", seconds["plain"]),
            metric("scaled_seconds", "s", seconds["scaled"]),
            metric("overhead_seconds", "s", beyond),
            metric("unscale_seconds", "s", seconds["unscale"]),
        ]
        records.put(case, figures)


class Gpt2Like(torch.nn.Module):
    """The model of the fixture: `data/fixtures/make_fixtures.py`."""

    def __init__(self, vocab_size, embedding_dim, hidden_dim, num_heads, ff_dim, max_length):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, embedding_dim)
        self.hidden_projector = torch.nn.Linear(embedding_dim, hidden_dim)
        self.decoder = torch.nn.TransformerDecoderLayer(hidden_dim, num_heads, ff_dim, dropout=0.0)
        self.output_linear = torch.nn.Linear(hidden_dim, vocab_size)
        place = torch.arange(max_length)[:, None]
        frequency = torch.exp(torch.arange(0, embedding_dim, 2) * (-torch.log(torch.tensor(10000.0)) / embedding_dim))
        table = torch.zeros(max_length, embedding_dim)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * frequency), torch.cos(place * frequency)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        hidden = self.hidden_projector(self.embedding(tokens) + self.table[:length]).transpose(0, 1)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=self.table.dtype)
        return self.output_linear(self.decoder(hidden, hidden, tgt_mask=mask, memory_mask=mask)).transpose(0, 1)


def read_tensors(path):
    """A safetensors file: the header's length, the header, the bytes."""
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(data[start:end], dtype=dtypes[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def numerics(args, device, records):
    with open(os.path.join(args.fixture, "config.json")) as file:
        config = json.load(file)
    names = ("vocab_size", "embedding_dim", "hidden_dim", "num_heads", "ff_dim", "max_length")
    tensors = read_tensors(os.path.join(args.fixture, "cases.safetensors"))
    weights = {name[len("param.") :]: tensor for name, tensor in tensors.items() if name.startswith("param.")}

    def model(dtype):
        made = Gpt2Like(**{name: config[name] for name in names})
        made.load_state_dict(weights)
        return made.to(dtype)

    def loss(model, tokens, lengths):
        model.zero_grad(set_to_none=True)
        logits, targets = model(tokens)[:, :-1], tokens[:, 1:]
        keep = torch.arange(1, tokens.shape[1])[None] < lengths[:, None]
        return F.cross_entropy(logits[keep], targets[keep])

    exact, low = model(torch.float64), model(torch.float32)
    sums = {}
    batches = tensors["tokens"].shape[0]
    for batch in range(batches):
        progress(batch, batches, "autocast in bf16, and fp64")
        tokens, lengths = tensors["tokens"][batch], tensors["lengths"][batch]
        whole = loss(exact, tokens, lengths)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = loss(low, tokens, lengths)
        whole.backward()
        found.backward()
        pairs = [("loss", found.detach(), whole.detach())]
        pairs += [(n, p.grad, q.grad) for (n, p), q in zip(low.named_parameters(), exact.parameters())]
        for name, found, whole in pairs:
            off, size = sums.get(name, (0.0, 0.0))
            found = found.to(torch.float64)
            sums[name] = (off + (found - whole).square().sum().item(), size + whole.square().sum().item())
    gradients = [pair for name, pair in sums.items() if name != "loss"]
    sums["all gradients"] = tuple(map(sum, zip(*gradients)))
    for name, (off, size) in sums.items():
        error = (off / size) ** 0.5
        records.put(
            {"tensor": name},
            [
                {"name": "error", "unit": "ratio", "value": error, "n": 1},
                {"name": "allowed_error", "unit": "ratio", "value": error + TOLERANCE, "n": 1},
            ],
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["overhead", "numerics"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--fixture", default="data/fixtures/gpt2_like")
    add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    # The numerics are the CPU's, wherever the rest runs.
    device = torch.device("cpu" if args.what == "numerics" else args.device)
    {"overhead": overhead, "numerics": numerics}[args.what](args, device, Records(args.records, f"amp-{args.what}", environment(device)))


if __name__ == "__main__":
    main()
