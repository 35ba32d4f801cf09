"""Forward and backward of a Llama over one long sequence, with weights and gradients on the host by FSDP2.

`fully_shard` with `CPUOffloadPolicy` in a world of one rank moves each layer to the GPU for its use and its gradients back;
transformers' gradient checkpointing keeps each layer's input. The step is that of `offload long-context`: next-token loss of random
tokens over all weights, in bf16, no update. *plain* has all logits at once, *liger* Liger's fused loss where it is installed. On a CPU,
which is no device beside its host, the model is whole. Writes one JSON record per figure.
"""

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from records import environment, metric, peak_of, synchronize

SHAPES = {
    "cuda": {"name": "Llama-3-8B", "vocabulary": 128256, "hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8},
    "cpu": {"name": "tiny", "vocabulary": 512, "hidden": 128, "inner": 704, "layers": 4, "heads": 2, "kv_heads": 1},
}
TOKENS = {"cuda": [32768], "cpu": [64, 128]}


def model_of(shape, tokens, device, liger):
    config = transformers.LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=tokens, bos_token_id=0, eos_token_id=1, use_cache=False, tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = transformers.LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if device.type == "cuda":
        for layer in model.model.layers:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
    return model


def has_liger():
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths [default: 32768 on CUDA, 64 and 128 on a CPU]")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    shape = SHAPES[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Gloo for what is on the host.
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    variants = ["plain"] + (["liger"] if device.type == "cuda" and has_liger() else [])
    where = environment(device)
    lengths = args.tokens or TOKENS[device.type]
    with open(args.records, "a") as records:
        for done, (variant, tokens) in enumerate((variant, tokens) for variant in variants for tokens in lengths):
            print(f"@progress {done} {len(variants) * len(lengths)} {variant}, {tokens} tokens", file=sys.stderr, flush=True)
            model = model_of(shape, tokens, device, variant == "liger")
            row = torch.randint(shape["vocabulary"], (1, tokens), device=device)

            def step():
                synchronize(device)
                start = time.perf_counter()
                loss = model(input_ids=row, labels=row).loss
                loss.backward()
                synchronize(device)
                seconds = time.perf_counter() - start
                model.zero_grad(set_to_none=True)
                return seconds

            step()
            figures = [
                metric("step_seconds", "s", [step() for _ in range(args.repeats)]),
                metric("peak_bytes", "B", [peak_of(step, device)]),
            ]
            loss = "fused" if variant == "liger" else "plain"
            case = {"variant": variant, "model": shape["name"], "tokens": tokens, "loss": loss, "shows": "step"}
            for figure in figures:
                record = {"experiment": "long-context", "case": case, "metric": figure, "environment": where}
                records.write(json.dumps(record) + "\n")
            records.flush()
            del model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
