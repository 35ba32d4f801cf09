"""Every family of decoders that we read, against transformers and PEFT.

For each case, transformers makes a random model with every option of its family, and computes logits, the loss and its gradients for
left-padded rows, logits of packed documents, and greedy tokens; PEFT adapts it and writes the adapter. Our program
(`FRUGAL_PROGRAM`) reads each folder, compares, and writes the model and an adapter of its own beside it. transformers and PEFT load those and
compare. Writes one JSON record per case and measurement.

`--write FOLDER` makes the cases of this project's tests instead.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from records import environment, metric

TOLERANCE = 1e-4
# How far an adapter must move a logit for its being read right to mean something.
EFFECT = 1e-2
# How far the best logit of a greedy token must be from the next, so that rounding does not decide.
MARGIN = 1e-3
# How far transformers' own logits may be from those in fp64, so that a difference of TOLERANCE is more than rounding.
ROUNDING = TOLERANCE / 4
COMMON = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def cases(wide):
    """Name, class, and options of each case: tiny ones for tests, wider ones of more layers for a comparison."""
    heads, groups, head, layers, window = (8, 2, 16, 6, 11) if wide else (4, 2, 8, 2, 5)
    hidden = 48 if wide else 16
    sizes = dict(
        vocab_size=131 if wide else 40, hidden_size=hidden, intermediate_size=hidden + 8, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=256, **COMMON,
    )
    own = dict(sizes, head_dim=head)
    experts = dict(moe_intermediate_size=20 if wide else 12, num_experts=8 if wide else 4, num_experts_per_tok=3 if wide else 2)
    pattern = [SLIDING if (layer + 1) % (3 if wide else 2) else FULL for layer in range(layers)]
    # Heads of 8; 4 columns, two pairs, rotate.
    phi = dict(sizes, hidden_size=4 * heads, num_attention_heads=heads // 2, num_key_value_heads=groups // 2)
    long = dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.25], long_factor=[3.0, 5.5],
        original_max_position_embeddings=12, partial_rotary_factor=0.5,
    )
    partial = dict(DEFAULT, partial_rotary_factor=0.5)
    deltas = dict(
        own, num_hidden_layers=5 if wide else 3, linear_num_key_heads=2, linear_key_head_dim=head, linear_value_head_dim=head + 4,
    )
    yarn = dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=4.0, truncate=False,
        mscale=0.5, mscale_all_dim=1.5,
    )
    sink_yarn = dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0, truncate=False,
    )
    # Half of a head of layers that attend in full rotates.
    proportional = dict(rope_type="proportional", rope_theta=1000000.0, partial_rotary_factor=0.5)
    gemma4 = dict(
        own, sliding_window=window, global_head_dim=2 * head, vocab_size_per_layer_input=sizes["vocab_size"],
        rope_parameters={FULL: proportional, SLIDING: DEFAULT},
    )
    llama3 = dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    return {
        "llama": ("Llama", dict(sizes, rope_parameters=llama3, attention_bias=True, mlp_bias=True)),
        "qwen2": ("Qwen2", dict(
            sizes, rope_parameters=DEFAULT, use_sliding_window=True, sliding_window=window, max_window_layers=1,
            tie_word_embeddings=True)),
        "qwen3": ("Qwen3", dict(
            own, rope_parameters=DEFAULT, use_sliding_window=True, sliding_window=window, max_window_layers=1,
            attention_bias=True, tie_word_embeddings=True)),
        "qwen3_yarn": ("Qwen3", dict(own, rope_parameters=yarn)),
        # Of four experts, two for each token; every layer, and the second alone.
        "qwen3_moe": ("Qwen3Moe", dict(
            own, rope_parameters=DEFAULT, use_sliding_window=True, sliding_window=window, attention_bias=True, **experts,
            norm_topk_prob=True)),
        "qwen3_moe_some": ("Qwen3Moe", dict(
            own, rope_parameters=DEFAULT, **experts, norm_topk_prob=False, decoder_sparse_step=2 if wide else 1,
            mlp_only_layers=[0, 3] if wide else [0], tie_word_embeddings=True)),
        # Two value heads for each key head; one for each.
        "qwen3_5": ("Qwen3_5", dict(
            deltas, rope_parameters=partial, layer_types=[FULL if layer == 1 else LINEAR for layer in range(deltas["num_hidden_layers"])],
            linear_num_value_heads=4, linear_conv_kernel_dim=4, attention_bias=True, tie_word_embeddings=True)),
        "qwen3_5_equal": ("Qwen3_5", dict(
            deltas, rope_parameters=partial, layer_types=[FULL if layer == 2 else LINEAR for layer in range(deltas["num_hidden_layers"])],
            linear_num_value_heads=2, linear_conv_kernel_dim=3)),
        "qwen3_5_moe": ("Qwen3_5Moe", dict(
            {name: value for name, value in deltas.items() if name != "intermediate_size"}, rope_parameters=partial,
            layer_types=[FULL if layer == 1 else LINEAR for layer in range(deltas["num_hidden_layers"])],
            linear_num_value_heads=4, **experts, shared_expert_intermediate_size=experts["moe_intermediate_size"] + 4)),
        # Windows in every other layer, the first among them; limits that clamp some numbers.
        "gpt_oss": ("GptOss", dict(
            own, intermediate_size=hidden + 4, num_hidden_layers=layers + 1, num_local_experts=8 if wide else 4,
            num_experts_per_tok=3 if wide else 2, rope_parameters=sink_yarn, sliding_window=window, swiglu_alpha=1.5, swiglu_limit=2.0)),
        "mistral": ("Mistral", dict(own, rope_parameters=DEFAULT, sliding_window=window)),
        "smollm3": ("SmolLM3", dict(
            sizes, rope_parameters=DEFAULT, no_rope_layers=[int(layer != 1) for layer in range(layers)], use_sliding_window=True,
            sliding_window=window, attention_bias=True, mlp_bias=True)),
        "granite": ("Granite", dict(
            sizes, rope_parameters=DEFAULT, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.7,
            logits_scaling=2.5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
        "olmo2": ("Olmo2", dict(sizes, rope_parameters=DEFAULT, attention_bias=True)),
        "gemma3": ("Gemma3", dict(
            own, rope_parameters={FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}, SLIDING: DEFAULT},
            layer_types=pattern, sliding_window=window, query_pre_attn_scalar=5, final_logit_softcapping=6.0,
            attention_bias=True)),
        "phi3": ("Phi3", dict(phi, rope_parameters=dict(DEFAULT, partial_rotary_factor=0.5), sliding_window=window)),
        "phi3_long": ("Phi3", dict(phi, rope_parameters=long, original_max_position_embeddings=12)),
        "gemma2": ("Gemma2", dict(
            own, rope_parameters=DEFAULT, sliding_window=window, query_pre_attn_scalar=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0)),
        # The last layers attend to the keys of the last layer of their type before them.
        "gemma4": ("Gemma4", dict(
            gemma4, num_hidden_layers=8 if wide else 5, layer_types=[SLIDING, FULL, SLIDING, *([SLIDING, FULL, SLIDING] if wide else []), SLIDING, FULL],
            num_kv_shared_layers=3 if wide else 2, use_double_wide_mlp=True, hidden_size_per_layer_input=32,
            final_logit_softcapping=6.0, attention_bias=True)),
        # Values that are keys, in fewer heads, and no second embedding.
        "gemma4_k_eq_v": ("Gemma4", dict(
            gemma4, num_hidden_layers=layers + 1, layer_types=[SLIDING, FULL, *[SLIDING] * (layers - 2), FULL], attention_k_eq_v=True,
            num_global_key_value_heads=1, hidden_size_per_layer_input=0, tie_word_embeddings=False)),
    }


def config_of(name, options):
    kind = f"{name}TextConfig" if name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else f"{name}Config"
    return getattr(transformers, kind)(**options)


def load(folder, where="."):
    config = transformers.AutoConfig.from_pretrained(folder / where)
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(folder / where, config=config, dtype=torch.float32).eval()


def summary(gradient):
    """The norm of a gradient and its products with two vectors."""
    flat = gradient.flatten().double()
    index = torch.arange(flat.numel(), dtype=torch.float64)
    return torch.stack([flat.norm(), flat @ torch.sin(index + 1), flat @ torch.cos(0.7 * index)])


def of_experts(name, gradient, transposed):
    """Names and gradients of the experts' own tensors, for a tensor that holds those of all experts."""
    for expert, one in enumerate(gradient):
        if transposed:
            base, kind = (name[: -len("_bias")], "bias") if name.endswith("_bias") else (name, "weight")
            if base.endswith("gate_up_proj"):
                for part, half in zip(("gate_proj", "up_proj"), (one[..., 0::2], one[..., 1::2])):
                    yield base.replace("gate_up_proj", f"{expert}.{part}.{kind}"), half.t().contiguous()
            else:
                yield base.replace("down_proj", f"{expert}.down_proj.{kind}"), one.t().contiguous()
        elif name.endswith("gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), one.chunk(2)):
                yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), half
        else:
            yield name.replace("down_proj", f"{expert}.down_proj.weight"), one


def summaries(model):
    """Those of every trained tensor, in the order of their names."""
    trained = {}
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            name = name.replace(".default", "")
            transposed = model.config.model_type == "gpt_oss"
            trained |= dict(of_experts(name, tensor.grad, transposed)) if ".experts." in name else {name: tensor.grad}
    return torch.stack([summary(trained[name]) for name in sorted(trained)])


def forward(model, inputs):
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=inputs["input_ids"], attention_mask=mask, position_ids=positions, labels=inputs["labels"], use_cache=False)


def greedy(model, inputs, new):
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=new, do_sample=False,
            pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits).topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).min().item()
    return out.sequences[:, inputs["input_ids"].shape[1]:].contiguous(), margin


def rounding(model, inputs):
    """The largest difference of a logit from the same model in fp64, whose norms transformers computes in fp32; changes the model."""
    rows = [row[mask.bool()][None] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    with torch.no_grad():
        single = [model(input_ids=row).logits for row in rows]
        model.double()
        return max((model(input_ids=row).logits - logits).abs().max().item() for row, logits in zip(rows, single))


def make(folder, name, options, wide, seed):
    """Makes a case; returns the least margin of its greedy tokens, and the rounding error of its logits."""
    torch.manual_seed(seed)
    if folder.exists():
        shutil.rmtree(folder)
    config = config_of(name, options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("sinks"):
                # As large as scores.
                parameter.normal_()
                continue
            if path.endswith("A_log"):
                # Slow decays, with which a leak between documents or a wrong state shows.
                parameter.uniform_(-4, -2)
                continue
            width = parameter.shape[-1]
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            else:
                # In more layers weights of this size would enlarge rounding errors to differences.
                parameter.normal_(0, (1.2 if wide else 1.6) / width**0.5)
        for path, buffer in model.named_buffers():
            if path.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    # Weights of 16 bits, in which both sides read the same numbers.
    model.to(torch.bfloat16).save_pretrained(folder)
    model = load(folder)

    rows, length, new = (2, 44, 24) if wide else (2, 19, 12)
    vocabulary = options["vocab_size"]
    inputs = {"input_ids": torch.randint(3, vocabulary, (rows, length)), "attention_mask": torch.ones(rows, length, dtype=torch.int64)}
    inputs["attention_mask"][0, :6] = 0
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, :9] = -100
    outputs = forward(model, inputs)
    outputs.loss.backward()
    tensors = dict(inputs, logits=outputs.logits.detach().contiguous(), loss=outputs.loss.detach()[None])
    tensors["gradients"] = summaries(model)
    tensors["greedy"], margin = greedy(model, inputs, new)
    short = {"input_ids": inputs["input_ids"][:, -5:], "attention_mask": torch.ones(rows, 5, dtype=torch.int64)}
    tensors["short_greedy"], other = greedy(model, short, new)

    lengths = [8, 3, 11, 9] if wide else [7, 3, 9]
    packed = torch.randint(3, vocabulary, (1, sum(lengths)))
    with torch.no_grad():
        parts = [model(input_ids=part).logits for part in packed.split(lengths, 1)]
    tensors |= {"packed_ids": packed, "lengths": torch.tensor(lengths), "packed_logits": torch.cat(parts, 1).contiguous()}
    save_file(tensors, folder / "cases.safetensors")

    torch.manual_seed(seed + 1)
    adapted = peft.get_peft_model(load(folder), peft.LoraConfig(
        r=2, lora_alpha=6, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"] if name in ("Qwen3Moe", "GptOss") else "all-linear")).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    adapted = peft.PeftModel.from_pretrained(load(folder), folder / "adapter", is_trainable=True).eval()
    outputs = forward(adapted, inputs)
    outputs.loss.backward()
    tensors = {"logits": outputs.logits.detach().contiguous(), "loss": outputs.loss.detach()[None]}
    tensors["gradients"] = summaries(adapted)
    save_file(tensors, folder / "adapter_cases.safetensors")
    return min(margin, other), max(rounding(adapted, inputs), rounding(load(folder), inputs))


def make_mxfp4(folder, seed):
    """A gpt-oss with experts in random blocks of MXFP4, as published files have them, and the logits of transformers, which dequantizes."""
    torch.manual_seed(seed)
    if folder.exists():
        shutil.rmtree(folder)
    experts, hidden, inner = 3, 32, 64
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, num_local_experts=experts, num_experts_per_tok=2, sliding_window=5, **COMMON)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if not path.endswith("norm.weight"):
                parameter.normal_(0, 0.4)
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            rows, columns = (2 * inner, hidden) if "gate_up" in name else (hidden, inner)
            blocks = (experts, rows, columns // 32)
            state[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.randint(121, 127, blocks, dtype=torch.uint8)
        else:
            state[name] = tensor.contiguous()
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads(config.to_json_string()) | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = config._experts_implementation = "eager"
    read = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)).float().eval()
    tokens = torch.randint(3, 40, (2, 13))
    with torch.no_grad():
        logits = read(input_ids=tokens).logits
    save_file({"input_ids": tokens, "logits": logits.contiguous()}, folder / "cases.safetensors")


def make_all(root, wide, seed):
    for case, (name, options) in cases(wide).items():
        for attempt in range(20):
            margin, error = make(root / case, name, options, wide, seed + 100 * attempt)
            if margin > MARGIN and error < ROUNDING:
                break
        else:
            sys.exit(f"{case}: no seed gives greedy tokens and logits that rounding does not decide")


def check(root, wide, records):
    where = environment(torch.device("cpu"))

    def record(case, what, value):
        line = {
            "experiment": "model-families", "case": {"family": case, "comparison": what},
            "metric": metric("largest_difference", "", [value]), "environment": where,
        }
        records.write(json.dumps(line) + "\n")
        if not value <= TOLERANCE:
            sys.exit(f"{case}, {what}: differs by {value:.2e}")

    for case in cases(wide):
        folder = root / case
        for what, value in json.loads((folder / "ours.json").read_text()).items():
            record(case, what, value)
        inputs = load_file(folder / "cases.safetensors")
        counts = inputs["attention_mask"][..., None]
        difference = lambda model, expected: ((forward(model, inputs).logits - expected) * counts).abs().max().item()
        again = json.loads((folder / "ours" / "config.json").read_text())
        for key, value in json.loads((folder / "config.json").read_text()).items():
            if key not in ("transformers_version", "dtype") and again.get(key) != value:
                sys.exit(f"{case}: `{key}` of config.json is {value} and was written as {again.get(key)}")
        with torch.no_grad():
            record(case, "we write, transformers reads", difference(load(folder, "ours"), inputs["logits"]))
            ours = load_file(folder / "ours.safetensors")
            adapted = peft.PeftModel.from_pretrained(load(folder), folder / "ours_adapter")
            record(case, "we write an adapter, PEFT reads", difference(adapted, ours["logits"]))
            effect = difference(load(folder), ours["logits"])
            if effect < EFFECT:
                sys.exit(f"{case}: the adapter moves no logit by {EFFECT}, only by {effect:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("FRUGAL_PROGRAM"), help="our `experiments`")
    parser.add_argument("--device", default="cpu", help="the processor, always")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records")
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER", help="make the cases of the tests")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if args.write:
        make_all(args.write, False, 11)
        make_mxfp4(args.write / "gpt_oss_mxfp4", 11)
        return
    if not args.program or not args.records:
        parser.error("give --program, the path of our `experiments`, and --records")
    with tempfile.TemporaryDirectory() as root, open(args.records, "a") as records:
        root = pathlib.Path(root)
        make_all(root, True, 17 + 1000 * args.seed)
        subprocess.run([args.program, "lora", "families", "--folder", root], check=True)
        check(root, True, records)


if __name__ == "__main__":
    main()
