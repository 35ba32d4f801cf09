"""A tiny model in a GGUF file of many types, an adapter for it, and what PEFT makes of both: the fixture of merges over blocks.

`gguf_merge.py FOLDER` writes there

- `base.gguf`: a Llama of one layer with random weights, its matrices in Q4_K, Q5_K, Q6_K, Q8_0, Q5_0, Q5_1 and Q4_0 by llama.cpp's
  quantiser (`xllamacpp`), with a tokenizer of bytes;
- `adapter/`: a LoRA adapter on all seven projections, as PEFT saves it;
- `expected.safetensors`: by transformers (`gguf_file=`, fp32) and PEFT, `tokens`, `base_logits`, `adapted_logits` and, after
  `merge_and_unload`, of each merged matrix every 16th row, `NAME.rows`.
"""

import pathlib
import sys

import gguf
import numpy as np
import peft
import torch
import transformers
from safetensors.torch import save_file

from gguf_blocks import encode

HIDDEN, HEADS, KEYS, HEAD, WIDE, VOCABULARY = 256, 2, 1, 64, 32, 260
# Widths that are no multiple of 256 have types of 32.
TYPES = {
    "token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q5_1", "ffn_gate": "Q4_K", "ffn_up": "Q8_0",
    "ffn_down": "Q5_0",
}
SHAPES = {
    "token_embd": (VOCABULARY, HIDDEN), "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (KEYS * HEAD, HIDDEN), "attn_v": (KEYS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
}


def write_model(path, random):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(c) for c in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "ab", "<pad>", "<s>", "</s>"])
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(257)
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_add_bos_token(False)
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape) / np.sqrt(shape[1]) * (1.0 if name == "token_embd" else 0.7)
        kind = gguf.GGMLQuantizationType[TYPES[name]]
        blocks = encode(values.astype(np.float32), TYPES[name]).reshape(shape[0], -1)
        prefix = "" if name == "token_embd" else "blk.0."
        writer.add_tensor(f"{prefix}{name}.weight", blocks, raw_shape=blocks.shape, raw_dtype=kind)
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(51)
    torch.set_num_threads(1)
    write_model(folder / "base.gguf", np.random.default_rng(51))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="base.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.arange(20)[None] * 11 % 256
    with torch.no_grad():
        base = model(input_ids=tokens).logits[0]
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=10, target_modules=targets, rank_pattern={"o_proj": 2}, alpha_pattern={"down_proj": 3},
        )
        adapted = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
        logits = adapted(input_ids=tokens).logits[0]
        adapted.peft_config["default"].base_model_name_or_path = "base.gguf"
        adapted.save_pretrained(folder / "adapter")
        (folder / "adapter" / "README.md").unlink()
        merged = adapted.merge_and_unload()
    expected = {"tokens": tokens[0], "base_logits": base, "adapted_logits": logits}
    for name, parameter in merged.named_parameters():
        if name.endswith("_proj.weight"):
            expected[f"{name}.rows"] = parameter[::16].detach().clone()
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
