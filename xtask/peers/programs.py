"""Runs of two programs that train from the same files, each in a process of its own."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# The first step allocates; our program tells its prediction after three.
WARM_UP = 3


def write_tokenizer(folder, vocabulary):
    """A tokenizer whose words `w0`, `w1`, … are the tokens 0, 1, …; `w0` ends a text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w0", pad_token="w0",
    )
    tokenizer.save_pretrained(folder)


def write_model(folder, shape, seed):
    """A Llama of this shape with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def resident_peak(process):
    """The most memory that a process (`self`, or its number) has held, in bytes; 0 for one that is gone."""
    try:
        with open(f"/proc/{process}/status") as file:
            return max((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), default=0)
    except OSError:
        return 0


def print_result(ends, losses):
    """Prints what a peer's process has measured: when each step ended, and its loss."""
    print("@result " + json.dumps({"ends": ends, "losses": losses, "peak": resident_peak("self")}), flush=True)


def peer(script, arguments, folder):
    """Runs a script that ends with `print_result`; seconds and losses of its steps, and its peak."""
    command = [sys.executable, "-W", "ignore", script, "--folder", str(folder), "--records", "none", *arguments]
    start = time.time()
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@result ")]
    if ended.returncode or not lines:
        raise SystemExit(f"{' '.join(arguments)} failed with {ended.returncode}:\n{ended.stderr[-3000:]}")
    result = json.loads(lines[-1].removeprefix("@result "))
    ends = result["ends"]
    seconds = [after - before for before, after in zip(ends, ends[1:])][WARM_UP - 1:]
    return dict(first=ends[0] - start, seconds=seconds, peak=result["peak"], losses=result["losses"])


def ours(arguments, folder):
    """Runs `frugal finetune` (`FRUGAL_PROGRAM`) with these words; `None` where nothing fits its budget."""
    records, out = folder / "records.jsonl", folder / "out"
    command = [str(pathlib.Path(os.environ["FRUGAL_PROGRAM"])), "finetune", *arguments]
    command += ["--out", "out", "--json", "--records", "records.jsonl", "--log-every", "1"]
    start = time.time()
    with open(folder / "said", "w+") as said, open(folder / "printed", "w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=said, cwd=folder)
        first, peak = None, 0
        while process.poll() is None:
            if first is None and records.exists() and "step_seconds" in records.read_text():
                first = time.time() - start
            peak = max(peak, resident_peak(process.pid))
            time.sleep(0.02)
        said.seek(0), printed.seek(0)
        text, lines = said.read(), printed.read().splitlines()
    if process.returncode == 3:
        return None
    if process.returncode:
        raise SystemExit(f"frugal failed with {process.returncode}:\n{text[-3000:]}")
    values = {"step_seconds": {}, "loss": {}}
    for record in map(json.loads, records.read_text().splitlines()):
        values.get(record["metric"]["name"], {})[record["case"]["step"]] = record["metric"]["value"]
    records.unlink()
    subprocess.run(["rm", "-rf", str(out)], check=True)
    plans = [found["plan"]["chosen"] for found in map(json.loads, lines) if found.get("plan")]
    seconds = [value for _, value in sorted(values["step_seconds"].items())][WARM_UP:]
    losses = [value for _, value in sorted(values["loss"].items())]
    return dict(first=first, seconds=seconds, peak=peak, losses=losses, plan=(plans or [""])[0])


def rate(tokens, result):
    """Tokens per second as the median over steps."""
    return tokens / statistics.median(result["seconds"])
