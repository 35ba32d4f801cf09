"""Preferences and rewards by TRL's trainers and by our program, over the same files.

Writes a model of SmolLM2-135M's shape with random weights, pairs of random answers to random prompts, and questions. Both sides train
adapters of rank 8 with AdamW in fp32, each in a process of its own: TRL (over transformers and PEFT) as it is by default, which
recomputes activations, and for preferences also keeping them; our program (`FRUGAL_PROGRAM`) with its default budget.

- *DPO*: four pairs in a step; the reference is the model without its adapters. Tokens are those of prompts and answers.
- *GRPO*: two questions in a step with eight sampled answers each, of 64 tokens at most; an answer whose first word is an even number is
  rewarded. Tokens are those of the answers, and the time is that of the whole step: generation, rewards, update. Rewards are those of random
  answers, so that nothing is learned; both sides do the same work.

Recorded are the seconds from the start of the process to the end of the first step, tokens per second as the median over later steps, and
the most memory that the process held (`VmHWM`).
"""

import argparse
import json
import pathlib
import random
import re
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
PAIRS = 4
QUESTIONS, ANSWERS, LONGEST = 2, 8, 64
PROMPT = 32
# Of both sides, in words of our program.
OPTIONS = ["--lr", "1e-5", "--schedule", "constant", "--warmup", "0", "--weight-decay", "0", "--clip", "1", "--r", "8", "--alpha", "16"]
OPTIONS += ["--dropout", "0", "--accumulation", "1"]
EVEN = r"^\s*w\d*[02468]\b"


def write_files(folder, shape, length, seed):
    vocabulary = SHAPES[shape]["vocab_size"]
    write_model(folder / "model", SHAPES[shape], seed)
    write_tokenizer(folder / "model", vocabulary)
    draw = random.Random(seed)

    def words(count):
        return " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(count))

    # One epoch has more rows than all steps: as many as any run may take.
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(64 * PAIRS):
            row = {"prompt": words(PROMPT), "chosen": " " + words(length), "rejected": " " + words(length)}
            file.write(json.dumps(row) + "\n")
    with open(folder / "questions.jsonl", "w") as file:
        file.writelines(json.dumps({"question": words(PROMPT), "answer": EVEN}) + "\n" for _ in range(64 * QUESTIONS))


def train_with_trl(args):
    """Runs in a process of its own, and prints what it measured as JSON."""
    import torch
    import transformers
    from datasets import load_dataset
    from peft import LoraConfig

    ends, losses = [], []

    class Record(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.time())

        def on_log(self, arguments, state, control, logs=None, **__):
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder / "model")
    common = dict(
        output_dir=str(args.folder / "trl"), max_steps=args.steps, learning_rate=1e-5, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=False, fp16=False, use_cpu=True, logging_steps=1,
        report_to="none", save_strategy="no", seed=args.seed, disable_tqdm=True, gradient_accumulation_steps=1,
    )
    if args.variant == "TRL, activations kept":
        common["gradient_checkpointing"] = False
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    names = {"dpo": "pairs.jsonl", "grpo": "questions.jsonl"}
    rows = load_dataset("json", data_files=str(args.folder / names[args.objective]), split="train", cache_dir=str(args.folder / "cache"))
    shared = dict(model=model, train_dataset=rows, processing_class=tokenizer, peft_config=lora, callbacks=[Record()])
    if args.objective == "dpo":
        from trl import DPOConfig, DPOTrainer

        trainer = DPOTrainer(args=DPOConfig(per_device_train_batch_size=PAIRS, max_length=None, beta=0.1, **common), **shared)
    else:
        from trl import GRPOConfig, GRPOTrainer

        def is_even(completions, **_):
            return [float(re.search(EVEN, completion) is not None) for completion in completions]

        shared["train_dataset"] = rows.map(lambda row: {"prompt": f"Question: {row['question']}\nAnswer:"}, remove_columns=["question"])
        config = GRPOConfig(
            per_device_train_batch_size=QUESTIONS * ANSWERS, num_generations=ANSWERS, max_completion_length=LONGEST, beta=0.0,
            temperature=1.0, **common,
        )
        trainer = GRPOTrainer(reward_funcs=is_even, args=config, **shared)
    trainer.train()
    print_result(ends, losses)


def frugal(args, folder, objective):
    command = ["--model", "model", "--objective", objective, "--steps", str(args.steps), "--seed", str(args.seed), *OPTIONS]
    if objective == "dpo":
        command += ["--data", "pairs.jsonl", "--batch-size", str(PAIRS), "--held-out", "0", "--samples", "0"]
    else:
        command += ["--questions", "questions.jsonl", "--grader", "regex", "--batch-size", str(QUESTIONS * ANSWERS)]
        command += ["--group-size", str(ANSWERS), "--max-new-tokens", str(LONGEST)]
    return ours(command, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="SmolLM2-135M")
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--objective")
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

    records = Records(args.records, "objectives-vs-trl", environment(torch.device("cpu")))
    tokens = {"dpo": 2 * PAIRS * (PROMPT + args.length), "grpo": QUESTIONS * ANSWERS * LONGEST}
    runs = [(objective, variant) for objective in tokens for variant in ["TRL", "TRL, activations kept", "default"]]
    # Nothing is kept while answers are generated.
    runs.remove(("grpo", "TRL, activations kept"))
    with tempfile.TemporaryDirectory(prefix="objectives-") as name:
        folder = pathlib.Path(name)
        write_files(folder, args.shape, args.length, args.seed)
        for done, (objective, variant) in enumerate(runs):
            progress(done, len(runs), f"{objective}, {variant}")
            is_ours = variant == "default"
            if is_ours:
                result = frugal(args, folder, objective)
                print(f"{objective}: {result['plan']}", file=sys.stderr)
            else:
                words = ["--objective", objective, "--variant", variant, "--steps", str(args.steps), "--seed", str(args.seed)]
                result = peer(__file__, words, folder)
            case = {"impl": "frugal" if is_ours else "pytorch", "shape": args.shape, "objective": objective, "variant": variant}
            records.put(case, [
                metric("first_step_seconds", "s", [result["first"]]),
                metric("tokens_per_second", "tokens/s", [rate(tokens[objective], result)]),
                metric("process_bytes", "B", [result["peak"]]),
                metric("first_loss", "nat", result["losses"][:1]),
            ])


if __name__ == "__main__":
    main()
