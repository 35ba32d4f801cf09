"""Forward and backward through decoder layers of a Llama in transformers, and with Liger's kernels where they are installed.

The step is that of `training layers`: tokens of one row to the hidden states after the last norm, backward from a given gradient to
all weights, gradients dropped between steps. bf16 on CUDA, fp32 on a CPU. Writes one JSON record per figure.
"""

import argparse
import json
import sys
import time

import torch
import transformers

from records import environment, metric, peak_of, synchronize

VOCABULARY = 256


def model_of(args, kind, device):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, max_position_embeddings=args.tokens,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device(device):
            return transformers.LlamaModel(config).train()
    finally:
        torch.set_default_dtype(before)


def with_liger():
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return False
    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=False)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    cuda = device.type == "cuda"
    kind = torch.bfloat16 if cuda else torch.float32
    args.tokens = 8192 if cuda else 512
    args.hidden, args.intermediate, args.heads, args.kv_heads = (4096, 14336, 32, 8) if cuda else (896, 4864, 14, 2)
    where = environment(device)
    row = torch.randint(VOCABULARY, (1, args.tokens), device=device)
    upstream = torch.randn(1, args.tokens, args.hidden, device=device, dtype=kind)

    def step(model):
        synchronize(device)
        start = time.perf_counter()
        y = model(input_ids=row).last_hidden_state
        synchronize(device)
        middle = time.perf_counter()
        y.backward(upstream)
        synchronize(device)
        end = time.perf_counter()
        model.zero_grad(set_to_none=True)
        return middle - start, end - middle

    with open(args.records, "a") as records:
        for done, variant in enumerate(["eager", "liger"]):
            print(f"@progress {done} 2 {variant}", file=sys.stderr, flush=True)
            if variant == "liger" and not (cuda and with_liger()):
                continue
            model = model_of(args, kind, device)
            step(model)
            step(model)
            times = [step(model) for _ in range(args.repeats)]
            figures = [
                metric("forward_seconds", "s", [forward for forward, _ in times]),
                metric("backward_seconds", "s", [backward for _, backward in times]),
                metric("step_seconds", "s", [forward + backward for forward, backward in times]),
                metric("peak_above_bytes", "B", [peak_of(lambda: step(model), device)]),
            ]
            case = {
                "variant": variant, "dtype": "bf16" if cuda else "fp32", "tokens": args.tokens, "hidden": args.hidden,
                "layers": args.layers,
            }
            for figure in figures:
                record = {"experiment": "layers", "case": case, "metric": figure, "environment": where}
                records.write(json.dumps(record) + "\n")
            records.flush()
            del model


if __name__ == "__main__":
    main()
