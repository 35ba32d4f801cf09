"""Fine-tuning by TRL's SFTTrainer and by our program, over the same files.

Writes a model of SmolLM2-135M's shape with random weights, and rows of random tokens, all of them learned; a step takes all rows, so that
their order does not matter. Both sides train with AdamW in fp32, each in a process of its own: TRL (over transformers and PEFT) as it is
by default, which recomputes activations, and keeping them; our program (`FRUGAL_PROGRAM`) with its default budget, and within a half, a
third and a quarter of the memory that TRL by default took. Recorded are the seconds from the start of the process to the end of the
first step, tokens per second as the median over later steps, the most memory that the process held (`VmHWM`), and the largest
difference of a loss from TRL's by default. Adapters start with other random values on both sides, so with LoRA only the first loss is
compared.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SHAPES = {
    "SmolLM2-135M": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    ),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BATCH, ACCUMULATION = 4, 2
# The first step allocates; the program tells its prediction after three.
WARM_UP = 3
LEARNING_RATE = {"lora": "2e-4", "full": "2e-5"}
SHARES = {"1/2": 2, "1/3": 3, "1/4": 4}


def write_files(folder, shape, length, seed):
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = {f"w{number}": number for number in range(SHAPES[shape]["vocab_size"])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), bos_token="w0", eos_token="w0", pad_token="w0",
    )
    tokenizer.save_pretrained(folder / "model")
    rows = torch.randint(2, SHAPES[shape]["vocab_size"], (BATCH * ACCUMULATION, length)).tolist()
    with open(folder / "rows.jsonl", "w") as file:
        file.writelines(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows)


def train_with_trl(args):
    """Runs in a process of its own, and prints what it measured as JSON."""
    import torch
    import transformers
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    ends, losses = [], []

    class Record(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.time())

        def on_log(self, arguments, state, control, logs=None, **__):
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder / "model")
    rows = load_dataset("json", data_files=str(args.folder / "rows.jsonl"), split="train", cache_dir=str(args.folder / "cache"))
    kept = {"gradient_checkpointing": False} if args.variant == "TRL, activations kept" else {}
    config = SFTConfig(
        output_dir=str(args.folder / "trl"), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION,
        max_steps=args.steps, learning_rate=float(LEARNING_RATE[args.method]), lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=False, fp16=False, use_cpu=True, logging_steps=1,
        report_to="none", save_strategy="no", max_length=None, seed=args.seed, disable_tqdm=True, **kept,
    )
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer,
        peft_config=lora if args.method == "lora" else None, callbacks=[Record()],
    )
    trainer.train()
    with open("/proc/self/status") as file:
        peak = int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    print("@result " + json.dumps({"ends": ends, "losses": losses, "peak": peak}), flush=True)


def trl(args, folder, method, variant):
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), "--method", method, "--variant", variant]
    command += ["--steps", str(args.steps), "--seed", str(args.seed), "--records", "none"]
    start = time.time()
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@result ")]
    if ended.returncode or not lines:
        raise SystemExit(f"TRL failed with {ended.returncode}:\n{ended.stderr[-3000:]}")
    result = json.loads(lines[-1].removeprefix("@result "))
    ends = result["ends"]
    seconds = [after - before for before, after in zip(ends, ends[1:])][WARM_UP - 1:]
    return dict(first=ends[0] - start, seconds=seconds, peak=result["peak"], losses=result["losses"])


def frugal(args, folder, method, budget):
    """`None` where nothing fits the budget."""
    records, out = folder / "records.jsonl", folder / "out"
    command = [str(pathlib.Path(os.environ["FRUGAL_PROGRAM"])), "finetune", "--model", "model", "--data", "rows.jsonl"]
    command += ["--method", method, "--batch-size", str(BATCH), "--accumulation", str(ACCUMULATION), "--steps", str(args.steps)]
    command += ["--lr", LEARNING_RATE[method], "--schedule", "constant", "--warmup", "0", "--weight-decay", "0", "--clip", "1"]
    command += ["--held-out", "0", "--samples", "0", "--log-every", "1", "--seed", str(args.seed), "--out", "out", "--json"]
    command += ["--records", "records.jsonl"]
    command += ["--r", "8", "--alpha", "16", "--dropout", "0"] if method == "lora" else []
    command += ["--budget", str(budget)] if budget else []
    start = time.time()
    with open(folder / "said", "w+") as said, open(folder / "printed", "w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=said, cwd=folder)
        first = peak = None
        while process.poll() is None:
            if first is None and records.exists() and "step_seconds" in records.read_text():
                first = time.time() - start
            try:
                with open(f"/proc/{process.pid}/status") as file:
                    peak = max([peak or 0] + [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")])
            except OSError:
                pass
            time.sleep(0.02)
        said.seek(0), printed.seek(0)
        text, lines = said.read(), printed.read().splitlines()
    if process.returncode == 3:
        return None
    if process.returncode:
        raise SystemExit(f"frugal failed with {process.returncode}:\n{text[-3000:]}")
    values = {"step_seconds": {}, "loss": {}}
    for record in map(json.loads, records.read_text().splitlines()):
        values.get(record["metric"]["name"], {})[record["case"]["step"]] = record["metric"]["value"]
    records.unlink()
    subprocess.run(["rm", "-rf", str(out)], check=True)
    plans = [found["plan"]["chosen"] for found in map(json.loads, lines) if found.get("plan")]
    seconds = [value for _, value in sorted(values["step_seconds"].items())][WARM_UP:]
    losses = [value for _, value in sorted(values["loss"].items())]
    return dict(first=first, seconds=seconds, peak=peak, losses=losses, plan=(plans or [""])[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="SmolLM2-135M")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--method")
    parser.add_argument("--variant")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()
    if args.folder:
        return train_with_trl(args)
    if args.device != "cpu":
        raise SystemExit("this comparison measures the memory of processes: --device cpu")

    import torch

    from records import Records, environment, metric, progress

    records = Records(args.records, "finetune-vs-trl", environment(torch.device("cpu")))
    tokens = BATCH * ACCUMULATION * args.length
    with tempfile.TemporaryDirectory(prefix="finetune-") as name:
        folder = pathlib.Path(name)
        write_files(folder, args.shape, args.length, args.seed)

        done = 0
        for method in ["lora", "full"]:
            reference = None
            variants = ["TRL", "TRL, activations kept", "default"] + [f"{share} of TRL's memory" for share in SHARES]
            for variant in variants:
                progress(done, 2 * len(variants), f"{method}, {variant}")
                done += 1
                if variant.startswith("TRL"):
                    ours, result = False, trl(args, folder, method, variant)
                else:
                    share = SHARES.get(variant.split()[0])
                    ours, result = True, frugal(args, folder, method, share and reference["peak"] // share)
                case = {"impl": "frugal" if ours else "pytorch", "shape": args.shape, "method": method, "variant": variant}
                if result is None:
                    why = dict(unit="tokens/s", value=None, n=0, note="nothing fits the budget")
                    records.put(case, [dict(name="tokens_per_second", **why)])
                    continue
                reference = reference or result
                compared = list(zip(result["losses"], reference["losses"]))[: 1 if method == "lora" else None]
                records.put(case, [
                    metric("first_step_seconds", "s", [result["first"]]),
                    metric("tokens_per_second", "tokens/s", [tokens / statistics.median(result["seconds"])]),
                    metric("process_bytes", "B", [result["peak"]]),
                    metric("loss_difference", "nat", [max(abs(a - b) for a, b in compared)]),
                ])
                if ours:
                    print(f"{method}, {variant}: {result['plan']}", file=sys.stderr)


if __name__ == "__main__":
    main()
