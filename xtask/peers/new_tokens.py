"""What transformers and PEFT compute from a run with new tokens that our program wrote: a line of JSON with the mean losses of its rows.

`new_tokens.py --base FOLDER --run FOLDER --merged FOLDER --rows FILE --end ID` reads the run's tokenizer with transformers, makes the
base's embedding as large as the tokenizer, and loads the adapter over it with PEFT; `peft` is the loss so, `merged_by_peft` after PEFT
has merged it, and `merged` that of the merged model that our program wrote. `tokens` are those of the text `--text`. A row is a prompt, a
completion and the token ID, and the last two are learned, as `frugal eval` has it.

A test of `frugal-cli` (`tests/new_tokens.rs`) runs this where `FRUGAL_PYTHON` has both packages.
"""

import argparse
import json

import peft
import torch
import transformers


def loss_of(model, tokenizer, rows, end):
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    total = count = 0
    for row in rows:
        ids = encode(row["prompt"] + row["completion"]) + [end]
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for at in range(len(encode(row["prompt"])), len(ids)):
            total -= logits[at - 1, ids[at]].item()
            count += 1
    return total / count


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["base", "run", "merged", "rows", "text"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--end", type=int, required=True)
    parser.add_argument("--rows-of-table", type=int, help="rows of the enlarged embedding [default: the tokenizer's tokens]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.run)
    with open(arguments.rows, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    base = load(arguments.base)
    size = arguments.rows_of_table or len(tokenizer)
    if size > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(size)
    adapted = peft.PeftModel.from_pretrained(base, arguments.run)
    with torch.no_grad():
        result = {"tokens": tokenizer(arguments.text, add_special_tokens=False)["input_ids"]}
        result["peft"] = loss_of(adapted, tokenizer, rows, arguments.end)
        result["merged_by_peft"] = loss_of(adapted.merge_and_unload(), tokenizer, rows, arguments.end)
        result["merged"] = loss_of(load(arguments.merged), tokenizer, rows, arguments.end)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
