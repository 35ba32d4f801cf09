"""What other programs compute from the pretrained GGUF files of `cargo xtask setup --models`, as small JSON files for our tests.

`gguf_models.py --models FOLDER --wikitext FILE --write FOLDER` writes, for each model, `NAME.json`:

- `texts`: hard texts with their tokens by llama.cpp (`xllamacpp`) and by transformers' conversion of the file; where `--originals` has
  the tokenizer that the model was published with, as NAME/tokenizer.json, by that, too. Where they differ, `ids` are the published
  tokenizer's, and the others' are listed under their names.
- `prompts`: tokens, the 64 that transformers adds greedily in fp32 (`gguf_file=`), the smallest margin of a chosen logit over the
  second, and logits of evenly spaced tokens after the prompt and after the last but one added token.
- `losses`: those of the first rows of the test split of WikiText-2: the text tokenized as a whole, rows of 512 tokens of which the first
  is the begin token, or where the model has none the last of the row before; the sum of the other 511 tokens' negative log-likelihoods.

A file that holds the embedding twice, in two types, is computed as it is (`untied`) and with the finer copy for both.

`NAME.tensors.txt` has a line for each tensor: its name, type, and the SHA-256 digest of its values in fp32, little-endian, as the
package `gguf` decodes them.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import urllib.request

import gguf
import torch
import transformers

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
    "qwen2.5": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
TEXTS = [
    "Hello, world!", " Hello", "Hello ", "  two  blanks  ", "   \n  \n\n lines\r\n\r\n and\rreturns \n",
    "\ttab\t\ttabs \t mixed\n\tindent", "for i in range(10):\n    if i % 2 == 0:\n\t\tprint(i)\n\n\n", "0 1 12 123 1234 12345 1234567890",
    "3.14159,2,718.28-1e-10 0x1F", "1\u00b2\u00bd\u2167\u0663\u0664\u0665 \u4e00\u4e8c\u4e09\u96f6",
    "I'm you're HE'LL we've D'you 'tis rock'n'roll it\u2019s", "Stra\u00dfe na\u00efve Zo\u00eb \u0130stanbul \u01c5 \ufb01ne",
    "e\u0301 o\u0308 n\u0303 A\u030a \u1e9b\u0323 (not composed)", "\u00e9 \u00f6 \u00f1 \u00c5 (composed)",
    "\u212b \u2126 \ufb03 \uff21\uff22\uff23 \uff11\uff12 \u2460",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0995\u09cd\u09b7",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u662f2026\u5e74\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u30ab\u30bf\u30ab\u30ca\u3002 \uff8a\uff9d\uff76\uff78",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5 \u1112\u1161\u11ab",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0628\u0650\u0633\u0652\u0645\u0650",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u1019\u103c\u1014\u103a\u1019\u102c",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0397\u03bb\u03ac\u03b4\u03b1",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44b\U0001f3fd "
    "\U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "a\u200bb\u200cc\u200dd\ufeffe\u00adf", "a\u00a0b\u2003c\u3000d\u2028e\u0085f", "x\u0000y\u0001z\u007f",
    "\U0001d400\U0001d401 \U00020000\U0002a6d6 \ue000 \U000f0000", "!!!???...---___***###$$$ ~~~``` \\\\ // <> {} [] () @@ && || ^^ %%",
    "https://example.com/a?b=c&d=%20e#f user@example.org", "a" * 60, " " * 40 + "x" + "\n" * 20, "\n", " ",
    "AaBbCCddEEEfff camelCaseHTTPServer2Go snake_case_v10", "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>",
    "text <|im_end|> text<|im_end|>", "<s> </s> <unk> <pad> <bos> <eos>", "<start_of_turn>user\nHi<end_of_turn>\n",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<tool_call>{\"a\": 1}</tool_call> <|im_start",
    "<unused1> <mask> [PAD0] <0x41> <h1>x</h1>\n\n\n\n<table>", "\u2581under\u2581score \u2581 \u0120\u010a",
]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    \"\"\"Return the n-th number.\"\"\"\n",
]
# Tokens added to a prompt.
ADDED = 64
ROW, ROWS = 512, 4


def llama_cpp_tokens(path, texts):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_gpu_layers, params.warmup, params.fit_params, params.verbosity = 256, 0, False, False, 0
    server = xllamacpp.Server(params)

    def tokens(text):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)["tokens"]

    return [tokens(text) for text in texts]


def texts(path, original):
    """The tokens of each text by all tokenizers, and whether they agree."""
    converted = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    by = {"llama_cpp": llama_cpp_tokens(path, TEXTS), "transformers": [converted.encode(text, add_special_tokens=False) for text in TEXTS]}
    if original:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(original))
        by["published"] = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    entries = []
    for at, text in enumerate(TEXTS):
        ids = {name: rows[at] for name, rows in by.items()}
        best = ids.get("published", ids["llama_cpp"])
        others = {name: row for name, row in ids.items() if row != best}
        entries.append({"text": text, "ids": best, **({"others": others} if others else {})})
        for name in others:
            print(f"{path.name}: {name} has other tokens for {text!r}: {others[name]} instead of {best}", file=sys.stderr)
    return entries


def rounded(values):
    return [float(f"{value:.7g}") for value in values]


def computed(model, prompts, rows):
    """Greedy texts and logits after prompts, and losses of rows."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sample = list(range(7, vocabulary, vocabulary // 24))
    of_prompts = []
    for prompt in prompts:
        ids = list(prompt)
        margins, logits = [], []
        past = None
        for step in range(ADDED):
            new = ids if past is None else ids[-1:]
            out = model(input_ids=torch.tensor([new]), past_key_values=past, use_cache=True)
            past, last = out.past_key_values, out.logits[0, -1]
            best = torch.topk(last, 2).values
            margins.append((best[0] - best[1]).item())
            if step in (0, ADDED - 1):
                logits.append(rounded(last[sample].tolist()))
            ids.append(last.argmax().item())
        of_prompts.append(
            {"ids": prompt, "added": ids[len(prompt):], "smallest_margin": min(margins), "sample": sample, "first": logits[0],
             "last": logits[1]}
        )
    losses = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(row[1:]), reduction="sum").item())
    return {"prompts": of_prompts, "losses": losses}


def rows_of(ids, begin):
    """Rows of 512 tokens, each with the begin token (a list of one or none)."""
    new = ROW - 1
    return [begin + ids[at * new : at * new + ROW - len(begin)] for at in range(ROWS)]


def write(name, path, wikitext, folder, original):
    entries = texts(path, original)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    fields = gguf.GGUFReader(path).fields
    begin = []
    if "tokenizer.ggml.add_bos_token" in fields and fields["tokenizer.ggml.add_bos_token"].contents():
        begin = [fields["tokenizer.ggml.bos_token_id"].contents()]
    prompts = [begin + tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    # Enough characters for all rows; the cut is at a line's end.
    text = wikitext.read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: text.index("\n", ROW * ROWS * 8)], add_special_tokens=False)
    rows = rows_of(ids, begin)
    assert len(rows[-1]) == ROW
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    result = {
        "file": path.name, "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}", "begin": begin,
        "texts": entries, "wikitext_ids": hashlib.sha256(torch.tensor(rows).numpy().astype("<i8").tobytes()).hexdigest(),
    }
    with torch.no_grad():
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if head.data_ptr() == embedding.data_ptr():
            result["tied"] = computed(model, prompts, rows)
        else:
            result["untied"] = computed(model, prompts, rows)
            # Of the one file that has both, the head is the finer copy.
            embedding.copy_(head)
            result["tied"] = computed(model, prompts, rows)
    (folder / f"{name}.json").write_text(json.dumps(result, ensure_ascii=True, indent=None, separators=(",", ":")) + "\n")


def digests(path):
    """The lines of `NAME.tensors.txt`."""
    lines = []
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4")
        lines.append(f"{tensor.name} {tensor.tensor_type.name} {hashlib.sha256(values.tobytes()).hexdigest()}\n")
    return "".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=pathlib.Path, required=True)
    parser.add_argument("--wikitext", type=pathlib.Path, required=True)
    parser.add_argument("--write", type=pathlib.Path, required=True)
    parser.add_argument("--originals", type=pathlib.Path)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, file in MODELS.items():
        if arguments.only in (None, name):
            path = arguments.models / file
            original = arguments.originals and arguments.originals / name / "tokenizer.json"
            (arguments.write / f"{name}.tensors.txt").write_text(digests(path))
            write(name, path, arguments.wikitext, arguments.write, original if original and original.is_file() else None)


if __name__ == "__main__":
    main()
