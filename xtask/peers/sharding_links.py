"""Training steps over two machines whose cable has a limited rate, in PyTorch: FSDP2 over all ranks, and hybrid (HSDP).

The model, batches and optimizer are those of `sharding.py`. The machines are network namespaces that a virtual cable joins, as those of
`experiments sharding links`, and the rate is limited by the same queue. Writes one JSON record per figure.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sharding
from records import Records, add_arguments, environment, metric, progress

INTERFACE = "cable"
# Name, FSDP2's variant, ranks on each machine, and whether each machine has a whole copy.
DIVISIONS = [
    ("ZeRO-2, a rank on each machine", "ZeRO-2", 1, False),
    ("ZeRO-3, a rank on each machine", "ZeRO-3", 1, False),
    ("ZeRO-3, two ranks on each machine", "ZeRO-3", 2, False),
    ("ZeRO-3, a replica of two ranks on each machine", "ZeRO-3", 2, True),
]


def sent():
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes") as count:
        return int(count.read())


def rank_program(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = sharding.RANKS = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")) if args.hybrid else init_device_mesh("cpu", (world,))
    trainings = [sharding.Training(variant, args.tokens, mesh) for variant in ("alone", args.variant)]
    link = []
    for step in range(sharding.WARMUP + args.steps):
        for training in trainings:
            dist.barrier()
            before, start = sent(), time.perf_counter()
            training.step()
            dist.barrier()
            if step >= sharding.WARMUP:
                training.seconds.append(time.perf_counter() - start)
                if training.variant != "alone":
                    link.append(sent() - before)
    alone, measured = trainings
    line = {"alone": alone.seconds, "seconds": measured.seconds, "losses": measured.losses, "link": link}
    print(json.dumps(line), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def machines(rate):
    names = [f"peer-{os.getpid()}-{node}" for node in range(2)]
    ip = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for node, name in enumerate(names):
            ip("-netns", name, "address", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE)
            ip("-netns", name, "link", "set", INTERFACE, "up")
            ip("-netns", name, "link", "set", "lo", "up")
            if rate:
                limit = ["tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "100ms"]
                ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ranks(names, on_a_machine, arguments):
    """Runs the ranks, and returns what each printed."""
    shared = os.environ | {
        "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": str(2 * on_a_machine), "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    processes = []
    for rank in range(2 * on_a_machine):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % on_a_machine)}
        inside = ["ip", "netns", "exec", names[rank // on_a_machine], sys.executable, __file__, "--records", os.devnull, *arguments]
        processes.append(subprocess.Popen(inside, env=shared | place, text=True, stdout=subprocess.PIPE))
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode != 0 for process in processes):
        sys.exit("a rank failed")
    return [json.loads(lines) for lines in printed]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="0,1000,300")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--variant")
    parser.add_argument("--hybrid", action="store_true")
    add_arguments(parser)
    args = parser.parse_args()
    if args.variant:
        return rank_program(args)
    try:
        with machines(0):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: no network namespaces: {getattr(error, 'stderr', error)}", file=sys.stderr)
        return
    records = Records(args.records, "sharding-links", environment(torch.device("cpu")))
    rates = [int(rate) for rate in args.rates.split(",")]
    cases = [(rate, division) for rate in rates for division in DIVISIONS]
    for number, (rate, (name, variant, on_a_machine, hybrid)) in enumerate(cases):
        progress(number, len(cases), f"{rate} Mbit/s, {name}")
        arguments = ["--variant", variant, "--steps", str(args.steps), "--tokens", str(args.tokens)] + ["--hybrid"] * hybrid
        with machines(rate) as names:
            lines = ranks(names, on_a_machine, arguments)
        link = [max(bytes) for bytes in zip(lines[0]["link"], lines[on_a_machine]["link"])]
        case = {"rate_mbit": rate, "division": name}
        records.put(case, [
            metric("step_seconds", "s", lines[0]["seconds"]), metric("alone_seconds", "s", lines[0]["alone"]),
            metric("link_bytes", "B", link),
        ])
        for step, loss in enumerate(lines[0]["losses"]):
            records.put(case | {"step": step + 1}, [{"name": "loss", "unit": "nats", "value": loss, "n": 1}])


if __name__ == "__main__":
    main()
