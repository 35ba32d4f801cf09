"""Trainings of adapters with PEFT over a base in bf16 and in NF4, beside the same training in fp64.

`--write FOLDER` makes the cases of this project's tests, over the base that `nf4.py` made (`--base`): per base an adapter as it begins,
batches, and 20 steps of AdamW on each. PEFT trains in its two ways: `autocast`, in which PyTorch's autocast casts each product's operands to
bf16, and `fp32 adapters`, in which the adapter's products are in fp32 and the base's in bf16. The reference is the same training in fp64,
over the weights as bf16 or NF4 stores them. The file has the reference's losses and its gradients at the first and last step, and of PEFT the
losses and the relative errors of those gradients.

A product with NF4 is that of a dense matrix in bf16, as bitsandbytes dequantizes it on a GPU: its kernels for a CPU differ by processor.
"""

import argparse
import contextlib
import json
import pathlib

import bitsandbytes.functional as bnb
import peft
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file

STEPS, BATCHES = 20, 3
OPTIMIZER = dict(lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
# 1.5: its product with a number in bf16 is rounded.
ADAPTER = dict(r=2, lora_alpha=3, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def dense(base, dtype):
    """The model whose weights are those that bf16 stores."""
    config = transformers.AutoConfig.from_pretrained(base / "model")
    del config.quantization_config
    model = transformers.Qwen2ForCausalLM(config)
    missing = model.load_state_dict(load_file(base / "original.safetensors"), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys, missing
    model.tie_weights()
    return model.to(dtype)


def quantized(base, dtype):
    """The model whose weights are those that NF4 stores, as dense matrices in `dtype`."""
    stored = transformers.AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.bfloat16, device_map="cpu")
    model = dense(base, dtype)
    with torch.no_grad():
        for name, module in stored.named_modules():
            if isinstance(module, Linear4bit):
                state = module.weight.quant_state
                # Unrounded for the reference, and in bf16 as a GPU multiplies them.
                state.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
                model.get_submodule(name).weight.copy_(bnb.dequantize_4bit(module.weight.data, state))
    return model


def trained(model):
    pairs = ((name.replace(".default", ""), tensor) for name, tensor in model.named_parameters() if tensor.requires_grad)
    return dict(sorted(pairs))


def train(base, adapter, tokens, autocast):
    """The losses, and the gradients at the first and last step."""
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    weights = trained(model)
    optimizer = torch.optim.AdamW(weights.values(), **OPTIMIZER)
    losses, gradients = [], []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach().double())
        if step in (0, STEPS - 1):
            gradients.append({name: tensor.grad.double().clone() for name, tensor in weights.items()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses), gradients


def errors(gradients, reference):
    """`[2, tensors]`: the relative error of each gradient, in the order of the names."""
    return torch.stack([
        torch.stack([(step[name] - exact[name]).norm() / exact[name].norm() for name in exact])
        for step, exact in zip(gradients, reference)
    ])


def write(base, folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(23)
    adapted = peft.get_peft_model(dense(base, torch.float32), peft.LoraConfig(**ADAPTER))
    with torch.no_grad():
        for name, tensor in trained(adapted).items():
            # B begins at 0, and then A has no gradient.
            if "lora_B" in name:
                tensor.normal_(0, 0.1)
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    # The path of the base is of no use elsewhere.
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}, indent=2))

    vocabulary = adapted.config.vocab_size
    tokens = torch.randint(3, vocabulary, (BATCHES, 2, 24))
    tensors = {"tokens": tokens}
    for name, load in [("bf16", dense), ("nf4", quantized)]:
        for batch in range(BATCHES):
            run = lambda dtype, autocast: train(load(base, dtype), folder / "adapter", tokens[batch], autocast)
            losses, reference = run(torch.float64, False)
            key = f"{name}.{batch}"
            tensors[f"{key}.losses"] = losses
            for at, step in zip(("first", "last"), reference):
                # Rounding to fp32 is far below an error of bf16.
                tensors[f"{key}.{at}"] = torch.cat([gradient.flatten() for gradient in step.values()]).float()
            for how, autocast in [("autocast", True), ("fp32_adapters", False)]:
                theirs, gradients = run(torch.bfloat16, autocast)
                tensors[f"{key}.{how}.losses"] = theirs
                tensors[f"{key}.{how}.errors"] = errors(gradients, reference)
                of_loss = (theirs - losses).square().mean().sqrt()
                of_gradients = tensors[f"{key}.{how}.errors"].square().mean(1).sqrt()
                print(f"{key} {how}: loss {losses[0]:.4f} to {losses[-1]:.4f}, error {of_loss:.2e}, gradients {of_gradients.tolist()}")
    save_file(tensors, folder / "cases.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=pathlib.Path, required=True, help="the folder that nf4.py wrote")
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    write(arguments.base, arguments.write)
