"""Forward and backward of a Llama over one long sequence, with weights and gradients on the host by FSDP2.

`fully_shard` with `CPUOffloadPolicy` in a world of one rank moves each layer to the GPU for its use and its gradients back;
transformers' gradient checkpointing keeps each layer's input. The step is that of `offload long-context`: next-token loss of random
tokens over all weights, in bf16, no update. *plain* has all logits at once, *liger* Liger's fused loss where it is installed. On a CPU,
which is no device beside its host, the model is whole. Writes one JSON record per figure.
"""

import argparse
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from decoders import liger_missing
from measure import peak_of, synchronize
from records import Records, add_arguments, environment, metric, progress

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths [default: 32768 on CUDA, 64 and 128 on a CPU]")
    parser.add_argument("--repeats", type=int, default=1)
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    shape = SHAPES[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Gloo for what is on the host.
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    variants = ["plain"] + (["liger"] if liger_missing(device) is None else [])
    lengths = args.tokens or TOKENS[device.type]
    records = Records(args.records, "long-context", environment(device))
    for done, (variant, tokens) in enumerate((variant, tokens) for variant in variants for tokens in lengths):
        progress(done, len(variants) * len(lengths), f"{variant}, {tokens} tokens")
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
        loss = "fused" if variant == "liger" else "plain"
        case = {"variant": variant, "model": shape["name"], "tokens": tokens, "loss": loss, "shows": "step"}
        records.put(case, [
            metric("step_seconds", "s", [step() for _ in range(args.repeats)]),
            metric("peak_bytes", "B", [peak_of(step, device)]),
        ])
        del model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
