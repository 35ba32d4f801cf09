"""Tokens per second of PyTorch's DataLoader over the tokens of `dataloading throughput`.

`base` and `standard` are a map-style dataset of slices of one array, a collate function that pads to 512 or to the longest, and
random batches of 32. `balanced` gives `standard` a batch sampler: lengths in windows of 21, each shuffled and cut into batches, in
random order. `sequenced` joins the samples of each random batch, and `packed` is an IterableDataset that fills rows of 512 tokens
first-fit from a buffer of shuffled documents, with positions, document numbers and cumulative lengths. Every batch has int64
tokens and labels; those joined or packed have what tells places apart besides. Samples are cut at 512 tokens, except that
`packed` divides them, so that no token is lost. On CUDA batches are pinned and copied without blocking. Writes one JSON record per figure.
"""

import argparse
import math
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from measure import synchronize
from records import Records, add_arguments, environment, metric, progress

BATCH, LENGTH, ROWS, GAP, IGNORED = 32, 512, 8, 20, -100


def mix(value):
    """SplitMix64's finaliser, on an array of uint64."""
    value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return value ^ (value >> numpy.uint64(31))


def text_lengths(count, seed):
    """Log-normal with median 72 and sigma 1.2, between 2 and 2048 tokens: those of `dataloading throughput`."""
    start = mix(numpy.array([seed], dtype=numpy.uint64)) * numpy.uint64(2)
    numbers = mix(start + numpy.arange(2 * count, dtype=numpy.uint64))
    uniform = ((numbers >> numpy.uint64(11)).astype(numpy.float64) + 0.5) / 2.0**53
    normal = numpy.sqrt(-2.0 * numpy.log(uniform[::2])) * numpy.cos(2 * math.pi * uniform[1::2])
    return numpy.clip(72.0 * numpy.exp(1.2 * normal), 2, 2048).astype(numpy.int64)


class Samples(Dataset):
    """Slices of one int64 tensor: nothing is converted when a sample is taken."""

    def __init__(self, lengths):
        self.offsets = [0] + numpy.cumsum(lengths).tolist()
        tokens = 1 + mix(numpy.arange(self.offsets[-1], dtype=numpy.uint64)) % numpy.uint64(50_000)
        self.tokens = torch.from_numpy(tokens.astype(numpy.int64))

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, index):
        start = self.offsets[index]
        return self.tokens[start : min(self.offsets[index + 1], start + LENGTH)]


    def pieces(self, index):
        """The whole sample, in pieces of up to a row."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].split(LENGTH)


def collate(samples):
    """Pads to the longest sample. Labels are the tokens moved by one; tokens are above 0, the padding is 0."""
    tokens = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, :-1] = tokens[:, 1:]
    labels.masked_fill_(labels == 0, IGNORED)
    return {"tokens": tokens, "labels": labels, "count": sum(map(len, samples))}


def collate_to_one_length(samples):
    """Pads to 512, whatever the samples' lengths."""
    tokens = torch.zeros(len(samples), LENGTH, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample
        labels[row, : len(sample) - 1] = sample[1:]
    return {"tokens": tokens, "labels": labels, "count": sum(map(len, samples))}


class Balanced(Sampler):
    """Batches of samples whose lengths differ by at most 20, from windows of lengths that begin elsewhere in each epoch."""

    def __init__(self, lengths, seed):
        self.lengths = numpy.minimum(lengths, LENGTH)
        self.order = numpy.argsort(self.lengths, kind="stable")
        self.random = numpy.random.default_rng(seed)

    def __iter__(self):
        width = GAP + 1
        numbers = (self.lengths[self.order] + self.random.integers(width)) // width
        batches = []
        for window in numpy.split(self.order, numpy.flatnonzero(numpy.diff(numbers)) + 1):
            shuffled = self.random.permutation(window)
            batches.extend(shuffled[start : start + BATCH] for start in range(0, len(shuffled), BATCH))
        for batch in self.random.permutation(len(batches)):
            yield batches[batch].tolist()


def pack(rows):
    """Joins the documents of each row; rows are padded to the longest of them."""
    width = max(sum(len(document) for document in row) for row in rows)
    pieces, positions, sizes = [], [], []
    real = 0
    for row in rows:
        used = 0
        for document in row:
            pieces.append(document)
            sizes.append(len(document))
            used += len(document)
        real += used
        if used < width:
            pieces.append(torch.zeros(width - used, dtype=torch.int64))
            sizes.append(width - used)
    tokens = torch.cat(pieces)
    lengths = torch.tensor(sizes)
    ends = torch.cumsum(lengths, 0)
    starts = ends - lengths
    ids = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
    positions = torch.arange(len(tokens)) - starts[ids]
    labels = torch.roll(tokens, -1)
    labels[ends - 1] = IGNORED
    shape = (len(rows), width)
    return {
        "tokens": tokens.view(shape),
        "labels": labels.view(shape),
        "positions": positions.view(shape),
        "document_ids": ids.view(shape),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        "count": real,
    }


def sequence(samples):
    return pack([samples])


class Packed(IterableDataset):
    """Rows of up to 512 tokens, first-fit into the rows of the batch at hand."""

    def __init__(self, samples, seed):
        self.samples, self.seed, self.epoch = samples, seed, 0

    def __iter__(self):
        order = numpy.random.default_rng(self.seed + self.epoch).permutation(len(self.samples))
        worker = get_worker_info()
        if worker is not None:
            order = order[worker.id :: worker.num_workers]
        rows, room = [[] for _ in range(ROWS)], [LENGTH] * ROWS
        for index in order.tolist():
            for document in self.samples.pieces(index):
                place = next((row for row in range(ROWS) if room[row] >= len(document)), None)
                if place is None:
                    yield pack([row for row in rows if row])
                    rows, room = [[] for _ in range(ROWS)], [LENGTH] * ROWS
                    place = 0
                rows[place].append(document)
                room[place] -= len(document)
        if any(rows):
            yield pack([row for row in rows if row])


def loader(strategy, samples, lengths, workers, seed, device):
    generator = torch.Generator().manual_seed(seed)
    pinned = device.type == "cuda"
    ahead = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": pinned}
    if workers > 0:
        ahead["prefetch_factor"] = 4
    if strategy == "packed":
        return DataLoader(Packed(samples, seed), batch_size=None, **ahead)
    if strategy == "balanced":
        return DataLoader(samples, batch_sampler=Balanced(lengths, seed), collate_fn=collate, **ahead)
    function = {"base": collate_to_one_length, "standard": collate, "sequenced": sequence}[strategy]
    return DataLoader(samples, batch_size=BATCH, shuffle=True, collate_fn=function, generator=generator, **ahead)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", default="0,2")
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    lengths = text_lengths(args.samples, args.seed)
    samples = Samples(lengths)
    workers_list = [int(workers) for workers in args.workers.split(",")]
    cases = [(s, w) for s in ("base", "standard", "balanced", "sequenced", "packed") for w in workers_list]
    best = {}
    records = Records(args.records, "loader", environment(device))

    def write(strategy, workers, rates):
        records.put({"strategy": strategy, "workers": workers}, [metric("tokens_per_second", "tokens/s", rates)])

    for done, (strategy, workers) in enumerate(cases):
        progress(done, len(cases), f"{strategy}, {workers} workers")
        batches = loader(strategy, samples, lengths, workers, args.seed, device)
        rates = []
        for epoch in range(args.epochs + 1):
            start, tokens = time.perf_counter(), 0
            for batch in batches:
                moved = (v.to(device, non_blocking=True) if torch.is_tensor(v) else v for v in batch.values())
                batch = dict(zip(batch, moved))
                tokens += batch["count"]
            synchronize(device)
            if epoch > 0:
                rates.append(tokens / (time.perf_counter() - start))
        write(strategy, workers, rates)
        if math.fsum(rates) > math.fsum(best.get(strategy, [])):
            best[strategy] = rates
    for strategy, rates in best.items():
        write(strategy, "best", rates)


if __name__ == "__main__":
    main()
