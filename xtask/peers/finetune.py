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
import pathlib
import sys
import tempfile
import time

from programs import ours, peer, print_result, rate, write_model, write_tokenizer

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
LEARNING_RATE = {"lora": "2e-4", "full": "2e-5"}
SHARES = {"1/2": 2, "1/3": 3, "1/4": 4}


def write_files(folder, shape, length, seed):
    import torch

    write_model(folder / "model", SHAPES[shape], seed)
    write_tokenizer(folder / "model", SHAPES[shape]["vocab_size"])
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
    print_result(ends, losses)


def trl(args, folder, method, variant):
    words = ["--method", method, "--variant", variant, "--steps", str(args.steps), "--seed", str(args.seed)]
    return peer(__file__, words, folder)


def frugal(args, folder, method, budget):
    """`None` where nothing fits the budget."""
    command = ["--model", "model", "--data", "rows.jsonl"]
    command += ["--method", method, "--batch-size", str(BATCH), "--accumulation", str(ACCUMULATION), "--steps", str(args.steps)]
    command += ["--lr", LEARNING_RATE[method], "--schedule", "constant", "--warmup", "0", "--weight-decay", "0", "--clip", "1"]
    command += ["--held-out", "0", "--samples", "0", "--seed", str(args.seed)]
    command += ["--r", "8", "--alpha", "16", "--dropout", "0"] if method == "lora" else []
    command += ["--budget", str(budget)] if budget else []
    return ours(command, folder)


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
                    is_ours, result = False, trl(args, folder, method, variant)
                else:
                    share = SHARES.get(variant.split()[0])
                    is_ours, result = True, frugal(args, folder, method, share and reference["peak"] // share)
                case = {"impl": "frugal" if is_ours else "pytorch", "shape": args.shape, "method": method, "variant": variant}
                if result is None:
                    why = dict(unit="tokens/s", value=None, n=0, note="nothing fits the budget")
                    records.put(case, [dict(name="tokens_per_second", **why)])
                    continue
                reference = reference or result
                compared = list(zip(result["losses"], reference["losses"]))[: 1 if method == "lora" else None]
                records.put(case, [
                    metric("first_step_seconds", "s", [result["first"]]),
                    metric("tokens_per_second", "tokens/s", [rate(tokens, result)]),
                    metric("process_bytes", "B", [result["peak"]]),
                    metric("loss_difference", "nat", [max(abs(a - b) for a, b in compared)]),
                ])
                if is_ours:
                    print(f"{method}, {variant}: {result['plan']}", file=sys.stderr)


if __name__ == "__main__":
    main()
