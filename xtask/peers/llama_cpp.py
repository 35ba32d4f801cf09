"""GGUF files that we write, computed by llama.cpp, against transformers.

For each case, transformers writes a tiny model of a family with random weights, and for some PEFT an adapter. Our program
(`FRUGAL_PROGRAM`) converts each to GGUF. llama.cpp (`xllamacpp`) computes from those the log-probability of every token after three
prompts. Writes one JSON record per case and type: the largest difference from transformers'. In the last case q and k have rows of
another order, which llama.cpp loads without a word; there the difference must be large.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import transformers
import xllamacpp
from transformers import (
    Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, GptOssConfig, GraniteConfig, LlamaConfig, MistralConfig, Olmo2Config, Phi3Config, Qwen2Config,
    Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig, SmolLM3Config,
)

from records import environment, metric

# The largest differences that are no error of a file; a wrong order of rows must differ by more than the last.
LIMITS = {"f32": 1e-3, "adapter": 1e-3, "f16": 1e-2, "bf16": 1e-1, "q8_0": 1e-1}
# Rounding is larger through the states of linear attention: measured 0.14 in q8_0.
WIDER = {"qwen35moe": 2.0}
WRONG = 1e-2
VOCABULARY = 300
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=256, eos_token_id=257, tie_word_embeddings=False,
)


def rope(theta=10000.0, kind="default", **options):
    return dict(rope_parameters={"rope_type": kind, "rope_theta": theta, **options})


LONG = dict(long_factor=[1.5] * 6, short_factor=[1.1, 1.2, 1.3, 1.4, 1.5, 1.6], partial_rotary_factor=0.75)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
YARN = dict(factor=4.0, original_max_position_embeddings=64, truncate=False)
GPT_OSS = dict(
    head_dim=32, num_hidden_layers=4, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
SHORT, BEYOND = (3, 17, 60), (70, 85, 100)
# Configuration, options, targets of an adapter, lengths of the prompts.
CASES = {
    "llama": (LlamaConfig, dict(**rope(5e5), attention_bias=True, mlp_bias=True), ATTENTION + MLP, SHORT),
    "llama 3 scaling": (
        LlamaConfig,
        dict(**rope(1e4, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
             head_dim=32, tie_word_embeddings=True),
        ATTENTION, SHORT,
    ),
    "llama linear": (LlamaConfig, rope(1e4, "linear", factor=4.0), None, SHORT),
    "llama yarn": (LlamaConfig, rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=64), None, SHORT),
    # Of an adapted embedding llama.cpp looks up rows of A, where the head is not tied to it.
    "mistral": (MistralConfig, dict(**rope(), head_dim=32, sliding_window=None), ATTENTION + ["embed_tokens"], SHORT),
    "granite": (
        GraniteConfig,
        dict(**rope(), attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0),
        ATTENTION, SHORT,
    ),
    "smollm3": (SmolLM3Config, dict(**rope(), num_hidden_layers=5), ATTENTION, SHORT),
    "qwen2": (Qwen2Config, dict(**rope(1e6), tie_word_embeddings=True), ATTENTION + MLP, SHORT),
    "qwen2 yarn": (Qwen2Config, rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=64), None, SHORT),
    "qwen3": (Qwen3Config, dict(**rope(1e6), head_dim=32), ATTENTION, SHORT),
    "qwen3moe": (
        Qwen3MoeConfig,
        dict(**rope(1e6), head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True), ATTENTION,
        SHORT,
    ),
    "qwen35moe": (
        Qwen3_5MoeTextConfig,
        dict(**rope(1e6, partial_rotary_factor=0.5, mrope_section=[3, 3, 2]), head_dim=32, num_hidden_layers=4, num_experts=4,
             num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48, linear_num_key_heads=2,
             linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32),
        ATTENTION, SHORT,
    ),
    # With this base the bounds of yarn's ramp are those of all pairs; other ones llama.cpp rounds, which this family's models do not.
    "gpt-oss": (GptOssConfig, dict(**GPT_OSS, **rope(3.0, "yarn", **YARN, beta_fast=32.0, beta_slow=1.0)), ATTENTION, SHORT),
    "olmo2": (Olmo2Config, rope(), ATTENTION, SHORT),
    "phi3": (Phi3Config, dict(**rope(), original_max_position_embeddings=256, sliding_window=None), ["qkv_proj", "gate_up_proj"], SHORT),
    # llama.cpp's context is 256 here: within the original context it takes the short factors, beyond it the long ones.
    "phi3 short": (
        Phi3Config,
        dict(**rope(1e4, "longrope", **LONG, original_max_position_embeddings=256), original_max_position_embeddings=256,
             max_position_embeddings=1024, sliding_window=None),
        None, SHORT,
    ),
    "phi3 long": (
        Phi3Config,
        dict(**rope(1e4, "longrope", **LONG, original_max_position_embeddings=64), original_max_position_embeddings=64, sliding_window=None),
        None, BEYOND,
    ),
    "gemma2": (
        Gemma2Config,
        dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8, num_hidden_layers=4, tie_word_embeddings=True), ATTENTION, SHORT,
    ),
    "gemma3": (
        Gemma3TextConfig,
        dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8, num_hidden_layers=7, tie_word_embeddings=True), ATTENTION, SHORT,
    ),
    # The last layers attend to the keys of the two before.
    "gemma4": (
        Gemma4TextConfig,
        dict(head_dim=16, global_head_dim=32, sliding_window=8, num_hidden_layers=6, num_kv_shared_layers=2, use_double_wide_mlp=True,
             hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCABULARY, tie_word_embeddings=True, final_logit_softcapping=6.0,
             layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
        ATTENTION + MLP + ["per_layer_input_gate", "per_layer_projection"], SHORT,
    ),
    "gemma4 k_eq_v": (
        Gemma4TextConfig,
        dict(head_dim=16, global_head_dim=32, sliding_window=8, num_hidden_layers=6, attention_k_eq_v=True, num_global_key_value_heads=1,
             hidden_size_per_layer_input=0),
        ATTENTION, SHORT,
    ),
    "wrong order of rows": (LlamaConfig, rope(5e5), None, SHORT),
}


def tokenizer():
    """A byte-level tokenizer: 256 bytes and two special tokens; the other rows of the embedding are filled up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(c) for c in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    special = [
        dict(id=256 + n, content=text, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
        for n, text in enumerate(["<s>", "</s>"])
    ]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
        byte_fallback=False, ignore_merges=False, vocab={text: n for n, text in enumerate(alphabet)}, merges=[],
    )
    return dict(
        version="1.0", truncation=None, padding=None, normalizer=None, added_tokens=special, pre_tokenizer=level, post_processor=None,
        decoder=level, model=model,
    )


def randomize(model):
    """Weights whose products keep the size of their input about, so that every part of the model matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() == 1:
                parameter += 0.1 * noise
            else:
                scale = 0.35 if "embed" in name or "lm_head" in name else 0.7
                parameter.copy_(scale / math.sqrt(parameter.shape[1]) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)


class TableOfGelu(torch.nn.Module):
    """llama.cpp's GELU: a table over fp16, whose rounding moves log-probabilities of a Gemma 4 by some 1e-3."""

    def forward(self, x):
        looked_up = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, looked_up))


def turn_rows(model):
    """Gives q and k the order of rows from which a conversion makes that of Hugging Face."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                turned = parameter.view(-1, 8, 2, parameter.shape[1]).transpose(1, 2).reshape(parameter.shape)
                parameter.copy_(turned.clone())


def log_probabilities(model, prompts):
    with torch.no_grad():
        rows = [model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1].double() for prompt in prompts]
    return [torch.log_softmax(row, -1) for row in rows]


def make(root):
    """Writes the models and adapters; returns for each case its prompts and what transformers computes."""
    expected = {}
    for case, (config, options, targets, lengths) in CASES.items():
        folder = root / case.replace(" ", "-")
        model = transformers.AutoModelForCausalLM.from_config(config(**{**COMMON, **options}), attn_implementation="eager")
        model = model.float().eval()
        randomize(model)
        if config is Gemma4TextConfig:
            for module in model.modules():
                if hasattr(module, "act_fn"):
                    module.act_fn = TableOfGelu()
                if hasattr(module, "q_norm"):
                    # Scores have no factor: a steep softmax would enlarge every rounding.
                    module.q_norm.weight.data *= 0.25
        prompts = [torch.randint(0, 256, (length,)).tolist() for length in lengths]
        rows = {"model": log_probabilities(model, prompts)}
        if case == "wrong order of rows":
            turn_rows(model)
        model.save_pretrained(folder / "model")
        (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer()))
        if targets:
            # Another scale for one projection, which the file has in B.
            adapted = peft.get_peft_model(
                model,
                peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules=targets, alpha_pattern={targets[0]: 5.0}),
            )
            with torch.no_grad():
                for parameter in adapted.parameters():
                    if parameter.requires_grad:
                        parameter += 0.1 * torch.randn_like(parameter)
            adapted.save_pretrained(folder / "adapter")
            rows["adapter"] = log_probabilities(adapted, prompts)
        expected[case] = (folder, prompts, rows)
    return expected


def largest_difference(file, adapter, prompts, rows):
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_gpu_layers, params.warmup, params.fit_params, params.verbosity = 256, 0, False, False, 0
    params.cpuparams.n_threads = torch.get_num_threads()
    # In fp32 throughout: flash attention rounds values to fp16.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    largest = 0.0
    for prompt, row in zip(prompts, rows):
        # The token 64, a letter, is forced: another could be half a character, for which there is no answer. The probabilities are those
        # before the bias.
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "n_probs": VOCABULARY, "temperature": 0.0, "cache_prompt": False,
             "logit_bias": [[64, 1000.0]]}
        )
        tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        if len(tokens) != VOCABULARY:
            sys.exit(f"{file}: llama.cpp gave {len(tokens)} log-probabilities of {VOCABULARY}")
        largest = max(largest, *(abs(token["logprob"] - row[token["id"]].item()) for token in tokens))
    return largest


def check(expected, records):
    where = environment(torch.device("cpu"))
    for case, (folder, prompts, rows) in expected.items():
        is_wrong = case == "wrong order of rows"
        kinds = ["f32"] if is_wrong else [kind for kind in LIMITS if kind != "adapter" or "adapter" in rows]
        for kind in kinds:
            adapter = folder / "adapter.gguf" if kind == "adapter" else None
            file = folder / ("f32.gguf" if adapter else f"{kind}.gguf")
            value = largest_difference(file, adapter, prompts, rows["adapter" if adapter else "model"])
            record = {
                "experiment": "gguf-llama-cpp", "case": {"model": case, "type": "f32, wrong" if is_wrong else kind},
                "metric": metric("largest_difference", "", [value]), "environment": where,
            }
            records.write(json.dumps(record) + "\n")
            if is_wrong and value < WRONG:
                sys.exit(f"rows of another order change a log-probability by {value:.1e} alone, so the comparison shows nothing")
            if not is_wrong and not value <= LIMITS[kind] * WIDER.get(case, 1.0):
                sys.exit(f"{case}, {kind}: log-probabilities differ by {value:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("FRUGAL_PROGRAM"), help="our `experiments`")
    parser.add_argument("--device", default="cpu", help="the processor, always")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", required=True)
    args = parser.parse_args()
    if not args.program:
        parser.error("give --program, the path of our `experiments`")
    torch.manual_seed(29 + args.seed)
    with tempfile.TemporaryDirectory() as root, open(args.records, "a") as records:
        expected = make(pathlib.Path(root))
        subprocess.run([args.program, "gguf", "convert", "--folder", root], check=True)
        check(expected, records)


if __name__ == "__main__":
    main()
