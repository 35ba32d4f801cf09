"""Weights in NF4 as bitsandbytes quantizes, dequantizes, stores and multiplies them on a CPU.

`--write FOLDER` makes the cases of this project's tests: matrices with their codes, scales and dequantized values, and a small model that
transformers quantized and saved, with its logits. `--check ORIGINAL WRITTEN` loads a model that `frugal export --format nf4` wrote with
transformers, and compares every weight and the logits with those of the original model, which transformers quantizes itself."""

import argparse
import pathlib
import shutil
import tempfile

import bitsandbytes.functional as bnb
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from safetensors.torch import save_file


def matrices():
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    values = bnb.get_4bit_type("nf4", device="cpu")
    middles = (values[:-1] + values[1:]) / 2
    denormal = normal(3, 64) * 1e-41
    mixed = normal(6, 64)
    mixed[1], mixed[2], mixed[3] = 0.0, mixed[2] * 3e37, mixed[3] * 1e-37
    mixed[4, 1:] = 0.0
    return {
        "normal": normal(24, 128),
        "wide_range": normal(10, 192) * torch.exp(4 * normal(10, 1)),
        "not_whole_blocks": normal(37, 22),
        "one_partial_block": normal(5, 6),
        "smallest": normal(1, 2),
        "zeros": torch.zeros(3, 70),
        "denormal": denormal,
        "huge_and_tiny": mixed,
        # Every value of the table, and every middle of two, with a largest of 1 in each block.
        "ties": torch.cat([values, middles, -middles, values.new_ones(18)]).view(1, 64),
        # More than 256 blocks, so that nested scales have two factors.
        "bfloat16": normal(52, 320).bfloat16(),
    }


def quantized(name, matrix, nested):
    codes, state = bnb.quantize_4bit(matrix, blocksize=64, compress_statistics=nested, quant_type="nf4")
    prefix = f"{name}.{'nested' if nested else 'float'}"
    tensors = {f"{prefix}.weight": codes}
    for key, value in state.as_dict(packed=True).items():
        tensors[f"{prefix}.weight.{key}"] = value
    for dtype in {torch.bfloat16, matrix.dtype}:
        state.dtype = dtype
        tensors[f"{prefix}.{str(dtype).removeprefix('torch.')}"] = bnb.dequantize_4bit(codes, state)
    return tensors


def load(folder, quantize):
    options = dict(dtype=torch.float32, device_map="cpu")
    if quantize:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model):
    """With dense weights, because on some CPUs the products of bitsandbytes are in bf16."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            dense = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None)
            dense.weight.data = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            if module.bias is not None:
                dense.bias.data = module.bias.data.float()
            model.set_submodule(name, dense)
    with torch.no_grad():
        return model(tokens(model.config.vocab_size)).logits.float()


def tokens(vocabulary):
    return (torch.arange(24).view(2, 12) * 7 + 3) % vocabulary


def write(folder):
    tensors = {}
    for name, matrix in matrices().items():
        tensors[f"{name}.original"] = matrix
        for nested in (False, True):
            tensors |= quantized(name, matrix, nested)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "matrices.safetensors")

    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    with tempfile.TemporaryDirectory() as original:
        # Values that bf16 has too, so that a model in bf16 is quantized to the same codes.
        transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(original)
        model = load(original, True)
        shutil.rmtree(folder / "model", ignore_errors=True)
        model.save_pretrained(folder / "model")
        shutil.copy(pathlib.Path(original) / "model.safetensors", folder / "original.safetensors")
    save_file({"tokens": tokens(config.vocab_size), "logits": logits(model)}, folder / "model" / "cases.safetensors")


def check(original, written):
    ours, theirs = load(written, False), load(original, True)
    own, other = (dict(model.named_parameters()) for model in (ours, theirs))
    assert own.keys() == other.keys(), own.keys() ^ other.keys()
    differing = 0
    for name, tensor in own.items():
        values = [
            bnb.dequantize_4bit(one.data, one.quant_state) if hasattr(one, "quant_state") else one.data
            for one in (tensor, other[name])
        ]
        differing += int((values[0].float() != values[1].float()).sum())
    difference = (logits(ours) - logits(theirs)).abs().max().item()
    print(f"{len(own)} tensors, {differing} values differ, logits by at most {difference:.3g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--check", nargs=2, metavar=("ORIGINAL", "WRITTEN"))
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
    if arguments.check:
        check(*arguments.check)
