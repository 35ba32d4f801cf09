"""Forward and backward through decoder layers of a Llama in transformers, and with Liger's kernels where they are installed.

The step is that of `training layers`: tokens of one row to the hidden states after the last norm, backward from a given gradient to
all weights, gradients dropped between steps. `--dtype` defaults to bf16 on CUDA and to fp32 on a CPU. Variants: eager, compiled
(`torch.compile`), and Liger's kernels (`liger`), in a process of their own, since they replace transformers' classes. Where they cannot
run, the record says why. Writes one JSON record per figure.
"""

import argparse

import torch
import transformers

from decoders import liger_missing
from measure import busy_of, forward_and_backward, peak_of, phases
from records import DTYPES, Records, add_arguments, environment, metric, not_measured, progress
from turns import Delegate, Turns

VOCABULARY = 256


def sizes(args):
    """Hidden size, intermediate size, heads and key-value heads."""
    return [int(size) for size in args.shape.split(",")]


def model_of(args, kind, device):
    hidden, intermediate, heads, kv_heads = sizes(args)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=args.tokens,
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="of the one row; 8192 on CUDA, 512 on a CPU")
    parser.add_argument("--shape", help="HIDDEN,INTERMEDIATE,HEADS,KV_HEADS; Llama-3-8B's on CUDA, Qwen2.5-0.5B's on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", help=f"one or more of {', '.join(DTYPES)}")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a round")
    parser.add_argument("--variants", default="eager,liger", help="one or more of eager, torch.compile, liger")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's caches and measure nothing")
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    cuda = device.type == "cuda"
    args.dtype = args.dtype or ("bf16" if cuda else "fp32")
    args.tokens = args.tokens or (8192 if cuda else 512)
    args.shape = args.shape or ("4096,14336,32,8" if cuda else "896,4864,14,2")
    hidden = sizes(args)[0]
    variants, dtypes = args.variants.split(","), args.dtype.split(",")
    alone = variants == ["liger"]
    lacking = liger_missing(device) if "liger" in variants else None
    if alone and lacking is None:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
    own = variants if alone and lacking is None else [variant for variant in variants if variant != "liger"]
    records = Records(args.records, "layers", environment(device))
    delegate = None
    if "liger" in variants and not alone and lacking is None and not args.compile_only:
        delegate = Delegate(args, variants="liger")

    row = torch.randint(VOCABULARY, (1, args.tokens), device=device)

    def step(model, forward, upstream):
        result = lambda: forward(input_ids=row).last_hidden_state
        seconds = forward_and_backward(result, lambda y: y.backward(upstream), device)
        model.zero_grad(set_to_none=True)
        return seconds

    turns = Turns(len(dtypes))
    for dtype in dtypes:
        kind = DTYPES[dtype]
        upstream = torch.randn(1, args.tokens, hidden, device=device, dtype=kind)
        case = {"dtype": dtype, "tokens": args.tokens, "hidden": hidden, "layers": args.layers}
        if lacking and not alone:
            records.put({"variant": "liger"} | case, [not_measured("step_seconds", "s", lacking)])
        # In turns all variants are prepared first; else one after the other.
        for group in [own] if turns.count else [[variant] for variant in own]:
            ready = []
            for variant in group:
                progress(turns.done, turns.total, f"{dtype}, {variant}")
                model = model_of(args, kind, device)
                forward = torch.compile(model, dynamic=False) if variant == "torch.compile" else model
                for _ in range(2):
                    step(model, forward, upstream)
                ready.append((variant, model, forward))
            if args.compile_only:
                continue
            for turn in turns.rounds():
                for variant, model, forward in ready:
                    times = [step(model, forward, upstream) for _ in range(args.repeats)]
                    peak = peak_of(lambda: step(model, forward, upstream), device)
                    figures = [*phases(times), metric("peak_above_bytes", "B", [peak])]
                    records.put({"variant": variant} | case, figures, turn)
                    if turns.is_last(turn):
                        busy = busy_of(lambda: step(model, forward, upstream), device)
                        records.put({"variant": variant} | case, [busy])
                if delegate:
                    delegate.turn()
            del ready


if __name__ == "__main__":
    main()
