"""Greedy generation of a pretrained model by llama.cpp (`xllamacpp`), one and several prompts at a time.

`frugal`, beside our program of measurements (`FRUGAL_PROGRAM`), writes the model's GGUF file (`FRUGAL_MODELS`) in each type, and llama.cpp
reads that. A token's time is that of `n` new tokens less that of one, over n − 1, so reading the prompts is left out; several prompts are in
as many slots of one server. The record names what llama.cpp's build uses of the processor. Writes one JSON record per figure.
"""

import argparse
import os
import pathlib
import subprocess
import tempfile
import threading
import time

import torch
import xllamacpp

from records import Records, add_arguments, environment, metric, not_measured, progress


def server_of(file, rows, tokens):
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = rows * tokens, rows, 0
    params.fit_params, params.verbosity = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    return xllamacpp.Server(params)


def seconds(server, prompts, new):
    """Time of `new` tokens after each prompt, all requests at once."""
    answers = [None] * len(prompts)

    def ask(row):
        answers[row] = server.handle_completions(
            {"prompt": prompts[row], "n_predict": new, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        )

    threads = [threading.Thread(target=ask, args=(row,)) for row in range(len(prompts))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    for answer in answers:
        assert answer["timings"]["predicted_n"] == new, answer
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a file of the folder FRUGAL_MODELS")
    parser.add_argument("--types", default="bf16,q8_0,q4_k_m")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()

    where = environment(torch.device(args.device))
    where["packages"] = where["packages"] | {"xllamacpp": xllamacpp.__version__}
    records = Records(args.records, "generation", where)
    # The measurements' program, with the user's beside it.
    program = pathlib.Path(os.environ["FRUGAL_PROGRAM"]).with_name("frugal")
    model = pathlib.Path(os.environ.get("FRUGAL_MODELS", "")) / args.model
    if not model.exists():
        why = f"{args.model} is not installed; run `cargo xtask setup --models`"
        records.put({"impl": "llama.cpp"}, [not_measured("tokens_per_second", "tokens/s", why)])
        return
    types, batches = args.types.split(","), [int(batch) for batch in args.batch.split(",")]
    features = " ".join(xllamacpp.get_system_info().split())
    for done, kind in enumerate(types):
        with tempfile.TemporaryDirectory() as scratch:
            file = pathlib.Path(scratch) / "model.gguf"
            words = ["export", "--format", "gguf", "--model", str(model), "--type", kind, "--out", str(file)]
            subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)
            for batch in batches:
                progress(done, len(types), f"{kind}, {batch} at a time")
                server = server_of(file, batch, args.prompt + args.new_tokens + 16)
                ids = lambda row: [(row * 7919 + place * 104_729 + 13) % 150_000 for place in range(args.prompt)]
                prompts = [ids(row) for row in range(batch)]
                seconds(server, prompts, 2)
                times = [
                    (seconds(server, prompts, args.new_tokens) - seconds(server, prompts, 1)) / (args.new_tokens - 1)
                    for _ in range(args.repeats)
                ]
                case = {"model": args.model, "type": kind, "batch": batch, "impl": "llama.cpp"}
                records.put(case, [
                    metric("token_seconds", "s", times),
                    metric("tokens_per_second", "tokens/s", [batch / time_of for time_of in times])
                    | {"note": f"llama.cpp's build uses: {features}"},
                ])
                del server


if __name__ == "__main__":
    main()
