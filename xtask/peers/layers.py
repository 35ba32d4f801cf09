"""Forward and backward through decoder layers of a Llama in transformers, and with Liger's kernels where they are installed.

The step is that of `training layers`: tokens of one row to the hidden states after the last norm, backward from a given gradient to
all weights, gradients dropped between steps. `--dtype` defaults to bf16 on CUDA and to fp32 on a CPU. Variants: eager, compiled
(`torch.compile`), and Liger's kernels (`liger`), in a process of their own, since they replace transformers' classes. Where they cannot
run, the record says why. Writes one JSON record per figure.
"""

import argparse
import sys
import time

import torch
import transformers

from records import DTYPES, Delegate, Records, Turns, busy_of, environment, metric, not_measured, peak_of, synchronize

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


def liger_missing(device):
    """Why Liger's kernels cannot run, or None."""
    if device.type != "cuda":
        return "not compared: Liger's kernels need a GPU"
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError:
        return "not compared: liger-kernel is not installed"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="of the one row; 8192 on CUDA, 512 on a CPU")
    parser.add_argument("--shape", help="HIDDEN,INTERMEDIATE,HEADS,KV_HEADS; Llama-3-8B's on CUDA, Qwen2.5-0.5B's on a CPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", help=f"one or more of {', '.join(DTYPES)}")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a round")
    parser.add_argument("--variants", default="eager,liger", help="one or more of eager, torch.compile, liger")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's caches and measure nothing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    cuda = device.type == "cuda"
    args.dtype = args.dtype or ("bf16" if cuda else "fp32")
    args.tokens = args.tokens or (8192 if cuda else 512)
    args.shape = args.shape or ("4096,14336,32,8" if cuda else "896,4864,14,2")
    args.hidden, args.intermediate, args.heads, args.kv_heads = (int(size) for size in args.shape.split(","))
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
        names = ["tokens", "shape", "layers", "dtype", "repeats", "device", "seed", "records"]
        flags = [text for name in names for text in (f"--{name}", str(getattr(args, name)))]
        delegate = Delegate([*flags, "--variants", "liger"])

    row = torch.randint(VOCABULARY, (1, args.tokens), device=device)

    def step(model, forward, upstream):
        synchronize(device)
        start = time.perf_counter()
        y = forward(input_ids=row).last_hidden_state
        synchronize(device)
        middle = time.perf_counter()
        y.backward(upstream)
        synchronize(device)
        end = time.perf_counter()
        model.zero_grad(set_to_none=True)
        return middle - start, end - middle

    turns = Turns(len(dtypes))
    for dtype in dtypes:
        kind = DTYPES[dtype]
        upstream = torch.randn(1, args.tokens, args.hidden, device=device, dtype=kind)
        case = {"dtype": dtype, "tokens": args.tokens, "hidden": args.hidden, "layers": args.layers}
        if lacking and not alone:
            records.put({"variant": "liger"} | case, [not_measured("step_seconds", "s", lacking)])
        # In turns all variants are prepared first; else one after the other.
        for group in [own] if turns.count else [[variant] for variant in own]:
            ready = []
            for variant in group:
                print(f"@progress {turns.done} {turns.total} {dtype}, {variant}", file=sys.stderr, flush=True)
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
                    records.put({"variant": variant} | case, [
                        metric("forward_seconds", "s", [forward for forward, _ in times]),
                        metric("backward_seconds", "s", [backward for _, backward in times]),
                        metric("step_seconds", "s", [forward + backward for forward, backward in times]),
                        metric("peak_above_bytes", "B", [peak_of(lambda: step(model, forward, upstream), device)]),
                    ], turn)
                    if turns.is_last(turn):
                        busy = busy_of(lambda: step(model, forward, upstream), device)
                        records.put({"variant": variant} | case, [busy])
                if delegate:
                    delegate.turn()
            del ready


if __name__ == "__main__":
    main()
