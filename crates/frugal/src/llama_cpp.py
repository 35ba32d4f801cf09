"""Log-probabilities and tokens that llama.cpp computes, for a request on standard input.

The request is JSON: `model` and `lora` (paths of GGUF files; `lora` may be null), `prompts` (lists of tokens), `texts`, `forced` (a token
whose text is plain), `vocabulary` (the number of tokens) and `threads`. The answer is a line of JSON: `rows`, for each prompt the
log-probability of every token after it, and `tokens`, those of each text without the one that begins a text, or null where the package has
no server that tokenizes. The cache is in fp32 and flash attention, which llama.cpp computes in fp16, is off.
"""

import json
import sys
import urllib.request


def tokens(server, text):
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    address = server.listening_address + "/tokenize"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    # Never by a proxy: the server is of this process.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)["tokens"]


def main():
    import xllamacpp

    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = 256
    params.n_gpu_layers = 0
    params.warmup = False
    params.fit_params = False
    params.verbosity = 0
    params.cpuparams.n_threads = request["threads"]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if request["lora"]:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["lora"], 1.0)]
    server = xllamacpp.Server(params)
    rows = []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": 1,
                "n_probs": request["vocabulary"],
                "temperature": 0.0,
                "cache_prompt": False,
                # The probabilities are those before this bias. Without it the next token might end the text or be half a character, and
                # the answer would have none.
                "logit_bias": [[request["forced"], 1000.0]],
            }
        )
        row = [None] * request["vocabulary"]
        for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[token["id"]] = token["logprob"]
        rows.append(row)
    read = [tokens(server, text) for text in request["texts"]] if hasattr(server, "listening_address") else None
    print(json.dumps({"rows": rows, "tokens": read}))


if __name__ == "__main__":
    main()
