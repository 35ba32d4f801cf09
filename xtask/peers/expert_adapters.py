"""Adapters on the experts of mixtures, by PEFT: logits, loss, every gradient, merged logits and the files.

`--write FOLDER` makes the cases of the tests of `lora`, over the models in `crates/models/tests/fixtures/families`.
"""

import argparse
import pathlib
import shutil

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

FAMILIES = pathlib.Path(__file__).parents[2] / "crates/models/tests/fixtures/families"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Name: the model, and the options of its adapter.
CASES = {
    "qwen3_moe": ("qwen3_moe", dict(target_modules=["q_proj", "v_proj"], target_parameters=BOTH)),
    "qwen3_moe_down": ("qwen3_moe_some", dict(target_modules=[], target_parameters=["down_proj"], use_rslora=True)),
    "qwen3_5_moe_gate_up": ("qwen3_5_moe", dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])),
    "gpt_oss": ("gpt_oss", dict(
        target_modules=["k_proj", "o_proj"], target_parameters=BOTH, rank_pattern={"experts.down_proj": 3}, alpha_pattern={"gate_up_proj": 5})),
}


def load(family):
    config = transformers.AutoConfig.from_pretrained(FAMILIES / family)
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(FAMILIES / family, config=config, dtype=torch.float32).eval()


def forward(model, inputs):
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=inputs["input_ids"], attention_mask=mask, position_ids=positions, labels=inputs["labels"], use_cache=False)


def make(folder, family, options, seed):
    if folder.exists():
        shutil.rmtree(folder)
    inputs = {name: load_file(FAMILIES / family / "cases.safetensors")[name] for name in ("input_ids", "attention_mask", "labels")}
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(load(family), peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    adapted = peft.PeftModel.from_pretrained(load(family), folder / "adapter", is_trainable=True).eval()
    outputs = forward(adapted, inputs)
    outputs.loss.backward()
    tensors = {"logits": outputs.logits.detach().contiguous(), "loss": outputs.loss.detach()[None]}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            tensors["grad." + name.replace(".default", "")] = parameter.grad.contiguous()
    with torch.no_grad():
        base = forward(load(family), inputs).logits
        tensors["merged_logits"] = forward(adapted.merge_and_unload(), inputs).logits.contiguous()
    print(f"{folder.name}: the adapter moves logits by {(tensors['logits'] - base).abs().max():.2f}")
    save_file(tensors, folder / "cases.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER", required=True, help="make the cases of the tests")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for case, (family, options) in CASES.items():
        make(args.write / case, family, options, 5)


if __name__ == "__main__":
    main()
