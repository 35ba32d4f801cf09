"""A training step of a Qwen2 in transformers, fp32: of adapters with PEFT, or of all weights.

Adapters have rank 8 on q, k, v and o, without dropout; fused AdamW over what is trained; labels on the last part of each row. The
model computes the loss itself, over the logits of all tokens, as transformers does when it is given labels. Each level runs in turn:
eager, and with forward, loss and backward compiled by torch.compile (compilation is measured apart). `process_bytes` is the most that
the process held in RAM during the measured steps (`VmHWM`, reset before them), `peak_bytes` the most that lived in torch's allocator
(on a CPU: as its profiler tells it, above what lived before the step, plus that). Writes one JSON record per figure.
"""

import argparse
import json
import statistics
import sys
import time

import peft
import torch

from decoders import NAMES, SHAPES, qwen2, reset_resident_peak, resident_peak
from records import environment, metric, peak_of, synchronize


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--train", choices=["adapters", "all"], default="adapters")
    parser.add_argument("--answers", type=float, default=0.5)
    parser.add_argument("--methods", default="recompute,keep")
    parser.add_argument("--levels", default="eager,torch.compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = qwen2(args.shape, "fp32", device)
    if args.train == "adapters":
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(SHAPES[args.shape]["vocab_size"], (args.batch, args.sequence), device=device)
    labels = ids.clone()
    labels[:, : args.sequence - round(args.sequence * args.answers)] = -100
    where = environment(device)

    def loss_of(ids, labels):
        return model(input_ids=ids, labels=labels).loss

    def step(loss_of):
        synchronize(device)
        start = time.perf_counter()
        loss = loss_of(ids, labels)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - start

    runs = [(level, method) for level in args.levels.split(",") for method in args.methods.split(",")]
    with open(args.records, "a") as records:
        for done, (level, method) in enumerate(runs):
            print(f"@progress {done} {len(runs)} {method}, {level}", file=sys.stderr, flush=True)
            if method == "recompute":
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            torch.compiler.reset()
            run = loss_of if level == "eager" else torch.compile(loss_of, dynamic=False)
            first = step(run)
            if level != "eager":
                step(run)
            if device.type == "cpu":
                reset_resident_peak()
            times = [step(run) for _ in range(args.repeats)]
            figures = [
                metric("step_seconds", "s", times),
                metric("tokens_per_second", "tokens/s", [ids.numel() / seconds for seconds in times]),
            ]
            if level != "eager":
                figures.append(metric("compile_seconds", "s", [max(first - statistics.median(times), 0.0)]))
            if device.type == "cpu":
                figures.append(metric("process_bytes", "B", [resident_peak()]))
                held = sum(p.numel() * p.element_size() for p in model.parameters())
                held += 2 * sum(p.numel() * p.element_size() for p in trained)
            else:
                held = torch.cuda.memory_allocated(device)
            figures.append(metric("peak_bytes", "B", [held + peak_of(lambda: step(run), device)]))
            case = {
                "impl": "pytorch" if level == "eager" else level, "shape": NAMES[args.shape], "method": method, "dtype": "fp32",
                "batch": args.batch, "sequence": args.sequence,
            }
            for figure in figures:
                record = {"experiment": "lora-step", "case": case, "metric": figure, "environment": where}
                records.write(json.dumps(record) + "\n")
            records.flush()


if __name__ == "__main__":
    main()
