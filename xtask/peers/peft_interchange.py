"""Adapters that PEFT writes and we read, and the other way round.

For each case, PEFT writes a tiny base model with an adapter (every trained value moved at random) and the logits that it computes with
it. Our program (`FRUGAL_PROGRAM`) loads each, compares, draws an adapter of its own from the same configuration, and saves it beside
with its logits. PEFT loads those and compares. Writes one JSON record per case and direction: the largest difference of a logit.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from records import environment, metric

TOLERANCE = 1e-4
# How far an adapter must move a logit for its being read right to mean something.
EFFECT = 1e-2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "plain": ("llama", dict(r=4, lora_alpha=12, target_modules=ATTENTION)),
    "rslora": ("qwen2", dict(r=4, lora_alpha=12, lora_dropout=0.1, use_rslora=True, target_modules=["q_proj", "down_proj"])),
    "dora": ("qwen2", dict(r=3, lora_alpha=5, use_dora=True, target_modules=ATTENTION)),
    "patterns": (
        "llama",
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, rank_pattern={"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6},
             alpha_pattern={"o_proj": 3.5}),
    ),
    "layers": ("qwen2", dict(r=2, target_modules=["q_proj", "up_proj"], layers_to_transform=[0, 2])),
    "layers_pattern": ("qwen2", dict(r=2, target_modules=["q_proj"], layers_to_transform=1, layers_pattern="layers")),
    "expression": ("llama", dict(r=2, target_modules=r".*\.1\..*(up|down)_proj")),
    "all_linear": ("qwen2", dict(r=2, target_modules="all-linear", exclude_modules=["o_proj"])),
    "head": ("llama", dict(r=4, target_modules=["q_proj", "lm_head"])),
    "saved_head": ("llama", dict(r=4, target_modules=ATTENTION, modules_to_save=["lm_head", "model.norm"])),
    "saved_tied_head": ("qwen2", dict(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"])),
    "tied_head": ("qwen2", dict(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"], ensure_weight_tying=True)),
    "tied_embedding": ("qwen2", dict(r=4, target_modules=ATTENTION, modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "adapted_biases": ("qwen2", dict(r=4, target_modules=["q_proj"], bias="lora_only")),
    "all_biases": ("qwen2", dict(r=4, target_modules=["q_proj"], bias="all")),
    "gaussian": ("llama", dict(r=4, target_modules=ATTENTION, init_lora_weights="gaussian")),
    "random": ("llama", dict(r=4, target_modules=ATTENTION, init_lora_weights=False)),
    "pissa": ("llama", dict(r=4, lora_alpha=6, target_modules=ATTENTION, init_lora_weights="pissa")),
    "olora": ("qwen2", dict(r=4, lora_alpha=6, target_modules=ATTENTION, init_lora_weights="olora")),
    "orthogonal": ("llama", dict(r=4, target_modules=ATTENTION, init_lora_weights="orthogonal")),
}
COMMON = dict(
    vocab_size=97, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def base(name):
    rope = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    if name == "qwen2":
        config = transformers.Qwen2Config(**COMMON, **rope, tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**COMMON, **rope, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float().eval()


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits.contiguous()


def make(root):
    for case, (name, options) in CASES.items():
        folder = root / case
        base(name).save_pretrained(folder / "base")
        model = load_base(folder)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter += 0.3 * torch.randn_like(parameter)
        adapted.save_pretrained(folder / "theirs")
        # What PEFT gives after loading, since that is what others get.
        adapted = peft.PeftModel.from_pretrained(load_base(folder), folder / "theirs")
        tokens = torch.randint(3, COMMON["vocab_size"], (2, 9))
        save_file({"tokens": tokens, "logits": logits(adapted, tokens)}, folder / "theirs.safetensors")


def load_base(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager")


def check(root, records):
    where = environment(torch.device("cpu"))
    for case in CASES:
        folder = root / case
        model = peft.PeftModel.from_pretrained(load_base(folder), folder / "ours")
        ours, tokens = load_file(folder / "ours.safetensors"), load_file(folder / "theirs.safetensors")["tokens"]
        found = (logits(model, tokens) - ours["logits"]).abs().max().item()
        effect = (logits(load_base(folder), tokens) - ours["logits"]).abs().max().item()
        if effect < EFFECT:
            sys.exit(f"{case}: the adapter moves no logit by {EFFECT}, only by {effect:.1e}")
        merged = (logits(model.merge_and_unload(), tokens) - ours["logits"]).abs().max().item()
        read = ours["difference"].item()
        for direction, value in [("we write, PEFT reads", found), ("we write, PEFT merges", merged), ("PEFT writes, we read", read)]:
            record = {
                "experiment": "peft-interchange", "case": {"adapter": case, "direction": direction},
                "metric": metric("largest_logit_difference", "", [value]), "environment": where,
            }
            records.write(json.dumps(record) + "\n")
            if not value <= TOLERANCE:
                sys.exit(f"{case}, {direction}: logits differ by {value:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("FRUGAL_PROGRAM"), help="our `experiments`")
    parser.add_argument("--device", default="cpu", help="the processor, always")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()
    if not args.program:
        parser.error("give --program, the path of our `experiments`")
    torch.manual_seed(17 + args.seed)
    with tempfile.TemporaryDirectory() as root, open(args.records, "a") as records:
        make(pathlib.Path(root))
        subprocess.run([args.program, "lora", "interchange", "--folder", root], check=True)
        check(pathlib.Path(root), records)


if __name__ == "__main__":
    main()
