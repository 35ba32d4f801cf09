"""Training steps over two ranks in PyTorch: DDP and FSDP2 (`fully_shard`) over Gloo, a thread each.

The model, its weights, the batches and the optimizer are those of `sharding bench`: a Llama in fp32 whose weights and tokens are a hash
of their position. ZeRO-2 is FSDP2 that keeps the gathered weights until backward, ZeRO-3 FSDP2 that gathers them again; "ZeRO-3
recomputed" also runs every layer again in backward, as ours of that name does. Variants run in turns for the times; each runs in processes of its own
for the memory, which is counted from before the model is made, and read after the warm-up. After all steps the parameters are projected
on directions of ±1. Writes one JSON record per figure.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from records import Records, add_arguments, environment, metric, progress

RANKS = 2
WARMUP = 2
VARIANTS = ["alone", "DDP", "ZeRO-2", "ZeRO-3", "ZeRO-3 recomputed"]
PROJECTIONS = 4
# Overridden by --sizes.
HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY, HEADS = 512, 1408, 8, 1024, 8


def hashed(count, seed):
    x = (torch.arange(count) + seed * 0x01000003) & 0xFFFFFFFF
    x = (x * 0x9E3779B1) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x85EBCA77) & 0xFFFFFFFF
    return x ^ (x >> 13)


def rotated(x, cosine, sine):
    a, b = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-b, a), dim=-1) * sine


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda inputs, outputs: torch.nn.Linear(inputs, outputs, bias=False)
        self.input_layernorm = torch.nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(HIDDEN, HIDDEN) for _ in range(4))
        self.post_attention_layernorm = torch.nn.RMSNorm(HIDDEN, eps=1e-6)
        self.gate_proj, self.up_proj = linear(HIDDEN, FEED_FORWARD), linear(HIDDEN, FEED_FORWARD)
        self.down_proj = linear(FEED_FORWARD, HIDDEN)

    def forward(self, x, cosine, sine):
        rows, length, _ = x.shape
        heads = lambda y: y.view(rows, length, HEADS, HIDDEN // HEADS).transpose(1, 2)
        n = self.input_layernorm(x)
        q, k, v = heads(self.q_proj(n)), heads(self.k_proj(n)), heads(self.v_proj(n))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(rows, length, HIDDEN))
        n = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))


class Llama(torch.nn.Module):
    """Parameters in the order of ours; the head is the embedding."""

    def __init__(self, length):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(HIDDEN, eps=1e-6)
        width = HIDDEN // HEADS
        angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("cosine", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("sine", torch.cat((angles, angles), dim=-1).sin(), persistent=False)

    def forward(self, tokens, labels):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def initialize(model, names):
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for number, name in enumerate(names):
            tensor = parameters[name]
            if tensor.dim() >= 2:
                values = (hashed(tensor.numel(), number).double() / 4294967296.0 - 0.5) * 0.07
                tensor.copy_(values.float().view_as(tensor))


def names_in_order():
    """The names of parameters in the order in which ours number them."""
    block = [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm",
        "post_attention_layernorm",
    ]
    layers = [f"layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in block]
    return ["embed_tokens.weight", *layers, "norm.weight"]


class Training:
    def __init__(self, variant, tokens, mesh):
        self.variant, self.tokens, self.number = variant, tokens, 0
        self.losses, self.seconds = [], []
        model = Llama(tokens)
        initialize(model, names_in_order())
        if variant == "DDP":
            model = DistributedDataParallel(model)
        elif variant != "alone":
            again = variant != "ZeRO-2"
            if variant == "ZeRO-3 recomputed":
                for index, layer in enumerate(model.layers):
                    model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=again)
            fully_shard(model, mesh=mesh, reshard_after_forward=again)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(self):
        row = hashed(self.tokens + 1, self.number * RANKS + dist.get_rank() + 1000) % VOCABULARY
        self.number += 1
        loss = self.model(row[None, :-1], row[None, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # The mean over ranks, as ours is read.
        if self.variant != "alone":
            mean = loss.detach().double()
            dist.all_reduce(mean)
            self.losses.append(mean.item() / RANKS)

    def projections(self):
        """As `projections` of our program. All ranks call it."""
        plain = lambda name: name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        parameters = {plain(name): value for name, value in self.model.named_parameters()}
        sums, squares = [0.0] * PROJECTIONS, 0.0
        for number, name in enumerate(names_in_order()):
            value = parameters[name].detach()
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().double()
            squares += value.square().sum().item()
            for direction in range(PROJECTIONS):
                negative = hashed(value.numel(), 5000 + PROJECTIONS * number + direction) >> 31
                sums[direction] += (value * (1 - 2 * negative)).sum().item()
        return [1.0 + total / squares**0.5 for total in sums]


def peak_after(profile, name):
    """Largest number of live bytes from the mark on; live bytes count from the profile's start."""
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    mark = next(e.start_ns() for e in events if e.name() == name)
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if event.start_ns() >= mark:
                peak = max(peak, live)
    return peak


def rank_program(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    out = []
    if args.rank_program == "memory":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            training = Training(args.variant, args.tokens, mesh)
            for _ in range(WARMUP):
                training.step()
            with torch.profiler.record_function("measured"):
                training.step()
        peak = torch.tensor(float(peak_after(profile, "measured")), dtype=torch.double)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        out.append({"variant": args.variant, "peak_bytes": peak.item()})
    else:
        trainings = [Training(variant, args.tokens, mesh) for variant in VARIANTS]
        for step in range(WARMUP + args.steps):
            for training in trainings:
                dist.barrier()
                start = time.perf_counter()
                training.step()
                dist.barrier()
                if step >= WARMUP:
                    training.seconds.append(time.perf_counter() - start)
        out = [{"variant": t.variant, "seconds": t.seconds, "losses": t.losses} for t in trainings]
        for training, line in zip(trainings, out):
            line["projections"] = [] if training.variant == "alone" else training.projections()
    if dist.get_rank() == 0:
        for line in out:
            print(json.dumps(line), flush=True)
    dist.barrier()
    # All is said. Without tearing down: now and then a thread of the profiler or of Gloo ends the process then (`terminate called`).
    sys.stdout.flush()
    os._exit(0)


def ranks(arguments):
    """Runs the ranks, and returns what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--records", os.devnull, *arguments]
    processes = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    printed = processes[0].communicate()[0]
    if any(process.wait() != 0 for process in processes):
        sys.exit("a rank failed")
    return [json.loads(line) for line in printed.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,512")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", help="hidden, feed-forward, layers and vocabulary", default="")
    parser.add_argument("--fixture", help="write the losses and projections of one number of tokens into this file, and nothing else")
    parser.add_argument("--rank-program", choices=["time", "memory"])
    parser.add_argument("--variant")
    add_arguments(parser)
    args = parser.parse_args()
    if args.sizes:
        global HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY
        HIDDEN, FEED_FORWARD, LAYERS, VOCABULARY = map(int, args.sizes.split(","))
    if args.rank_program:
        args.tokens = int(args.tokens)
        return rank_program(args)
    if args.fixture:
        sizes = ["--tokens", args.tokens, "--steps", str(args.steps), "--sizes", args.sizes]
        lines = [line for line in ranks(["--rank-program", "time", *sizes]) if line["variant"] != "alone"]
        for line in lines:
            del line["seconds"]
        with open(args.fixture, "w") as fixture:
            json.dump({"torch": torch.__version__, "trainings": lines}, fixture, indent=1)
            fixture.write("\n")
        return

    records = Records(args.records, "sharding-vs-pytorch", environment(torch.device("cpu")))
    for tokens in args.tokens.split(","):
        sizes = ["--tokens", tokens, "--steps", str(args.steps)]

        def put(case, figure):
            records.put({"tokens_per_rank": int(tokens)} | case, [figure])

        progress(0, 1 + len(VARIANTS), f"{tokens} tokens per rank, time")
        timed = ranks(["--rank-program", "time", *sizes])
        alone = timed[0]["seconds"]
        for line in timed:
            case = {"variant": line["variant"]}
            put(case, metric("step_seconds", "s", line["seconds"]))
            if line["variant"] not in ("alone", "ZeRO-3 recomputed"):
                exposed = [1 - least / seconds for least, seconds in zip(alone, line["seconds"])]
                put(case, metric("exposed_share", "ratio", exposed))
            for step, loss in enumerate(line["losses"]):
                put(case | {"step": step + 1}, {"name": "loss", "unit": "nats", "value": loss, "n": 1})
            for direction, value in enumerate(line["projections"]):
                put(case | {"projection": direction + 1}, {"name": "parameters", "unit": "", "value": value, "n": 1})
        for index, variant in enumerate(VARIANTS):
            progress(1 + index, 1 + len(VARIANTS), f"{tokens} tokens per rank, memory of {variant}")
            for line in ranks(["--rank-program", "memory", "--variant", variant, *sizes]):
                put({"variant": variant}, {"name": "peak_bytes", "unit": "B", "value": line["peak_bytes"], "n": 1})


if __name__ == "__main__":
    main()
