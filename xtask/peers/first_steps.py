"""The first steps of a fine-tuning with pretrained weights by transformers and PEFT, and by our program, over the same rows.

Our `experiments` (`FRUGAL_PROGRAM`) writes the dequantized model, adapters with their first values, and the rows; then each side trains from
these files in a process of its own: bf16 weights, adapters of rank 8 with AdamW, a constant learning rate, gradients clipped to 1, the loss
on the answers alone. PEFT pads the rows of a step to the longest; we lay them end to end.

Recorded are the loss of each step, tokens per second (padding is not counted), and the most memory that the process held (`VmHWM`).
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

from programs import peer, print_result, resident_peak

# The first steps allocate.
WARM_UP = 3


def train_with_peft(args):
    """Runs in a process of its own, and prints what it measured as JSON."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / "base", dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(model, args.folder / "adapter", is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=True)
    rows = json.loads((args.folder / "rows.json").read_text())
    ends, losses = [], []
    for first in range(0, args.steps * args.batch, args.batch):
        step = rows[first:first + args.batch]
        longest = max(len(row["input_ids"]) for row in step)

        def padded(key, value):
            return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in step])

        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in step])
        loss = model(input_ids=padded("input_ids", 0), attention_mask=mask, labels=padded("labels", -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.time())
    print_result(ends, losses)


def ours(args, folder):
    """Trains by our program; what it wrote, and the most memory that its process held."""
    command = [args.program, "lora", "first-steps", "--folder", str(folder), "--steps", str(args.steps), "--batch", str(args.batch)]
    process = subprocess.Popen([*command, "--lr", str(args.lr)])
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident_peak(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"our program failed with {process.returncode}")
    return {**json.loads((folder / "ours.json").read_text()), "peak": peak}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("FRUGAL_PROGRAM"), help="our `experiments`")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()
    if args.folder:
        return train_with_peft(args)
    if args.device != "cpu":
        raise SystemExit("this comparison measures the memory of processes: --device cpu")

    import torch

    from records import Records, environment, metric, progress

    records = Records(args.records, "first-steps-vs-peft", environment(torch.device("cpu")))
    with tempfile.TemporaryDirectory(prefix="first-steps-") as name:
        folder = pathlib.Path(name)
        words = ["--steps", str(args.steps), "--batch", str(args.batch)]
        progress(0, 3, "files")
        subprocess.run([args.program, "lora", "first-steps", "--prepare", "--folder", name, *words], check=True)
        rows = json.loads((folder / "rows.json").read_text())
        steps = [rows[first:first + args.batch] for first in range(0, args.steps * args.batch, args.batch)]
        # A row of n tokens predicts n - 1.
        tokens = [sum(len(row["input_ids"]) - 1 for row in step) for step in steps]
        progress(1, 3, "PEFT")
        theirs = peer(__file__, [*words, "--lr", str(args.lr)], folder)
        progress(2, 3, "ours")
        own = ours(args, folder)
    own["seconds"] = own["seconds"][WARM_UP:]
    for impl, result in [("pytorch", theirs), ("frugal", own)]:
        rates = [count / seconds for count, seconds in zip(tokens[WARM_UP:], result["seconds"])]
        records.put({"impl": impl}, [
            metric("tokens_per_second", "tokens/s", rates),
            metric("process_bytes", "B", [result["peak"]]),
        ])
        for step, loss in enumerate(result["losses"], 1):
            records.put({"impl": impl, "step": step}, [metric("training_loss", "nat", [loss])])
    differences = [abs(one - other) for one, other in zip(own["losses"], theirs["losses"], strict=True)]
    records.put({"impl": "frugal"}, [
        metric("largest_loss_difference", "nat", [max(differences)]),
        metric("mean_loss_difference", "nat", [sum(differences) / len(differences)]),
    ])


if __name__ == "__main__":
    main()
