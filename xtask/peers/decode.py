"""Greedy decoding of a Qwen2 with transformers' `generate` and its cache.

A token's time is that of `n` new tokens less that of one, over n − 1, so reading the prompt is left out. Writes one JSON record per
figure.
"""

import argparse
import time

import torch

from decoders import NAMES, SHAPES, qwen2
from measure import synchronize
from records import DTYPES, Records, add_arguments, environment, metric, progress


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="fp32", help="of " + ", ".join(DTYPES))
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    add_arguments(parser)
    args = parser.parse_args()

    device = torch.device(args.device)
    records = Records(args.records, "lora-decode", environment(device))
    dtypes, batches = args.dtype.split(","), [int(batch) for batch in args.batch.split(",")]
    with torch.no_grad():
        for done, dtype in enumerate(dtypes):
            torch.manual_seed(args.seed)
            model = qwen2(args.shape, dtype, device).eval()
            for batch in batches:
                progress(done, len(dtypes), f"{dtype}, {batch} at a time")
                ids = torch.randint(2, SHAPES[args.shape]["vocab_size"], (batch, args.prompt), device=device)

                def seconds(new):
                    synchronize(device)
                    start = time.perf_counter()
                    model.generate(
                        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                        do_sample=False, pad_token_id=0,
                    )
                    synchronize(device)
                    return time.perf_counter() - start

                seconds(2)
                times = [(seconds(args.new_tokens) - seconds(1)) / (args.new_tokens - 1) for _ in range(args.repeats)]
                case = {"shape": NAMES[args.shape], "dtype": dtype, "batch": batch, "prompt": args.prompt}
                records.put(case, [
                    metric("token_seconds", "s", times),
                    metric("tokens_per_second", "tokens/s", [batch / time_of for time_of in times]),
                ])
            del model


if __name__ == "__main__":
    main()
