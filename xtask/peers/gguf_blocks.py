"""Blocks of every type of GGUF, and their values as the Python package `gguf` decodes them.

`--write FILE` makes the cases of `gguf`'s tests: for each type, random blocks with scales that are negative, zero, subnormal and large.
`--digests MODEL` prints for each tensor of a GGUF file the SHA-256 of its decoded values in fp32, little-endian."""

import argparse
import hashlib

import gguf
import numpy as np
from safetensors.numpy import save_file

# The places of the f16 scales in a block, in bytes.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def random_blocks(kind, random):
    """Random bytes, but for scales that are finite."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (1024 // values, size), dtype=np.uint8)
    special = [0.0, -0.0, 6e-8, -3e-6, 6.1e-5, -1.0, 1000.0, -65504.0]
    for at in SCALES.get(kind.name, []):
        scales = (random.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        count = min(len(special), len(blocks) // 2 + 1)
        scales[:count] = random.permutation(special)[:count]
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:8, 0] = [0, 1, 2, 3, 126, 127, 128, 254]
    return blocks


def write(path):
    random = np.random.default_rng(51)
    tensors = {}
    for name in ["F16", "BF16", *SCALES]:
        kind = gguf.GGMLQuantizationType[name]
        if name in SCALES:
            blocks = random_blocks(kind, random)
        else:
            patterns = random.integers(0, 1 << 16, 512, dtype=np.uint16)
            exponent = 0x7C00 if name == "F16" else 0x7F80
            blocks = patterns[(patterns & exponent) != exponent][:400].view(np.uint8).reshape(1, -1)
        tensors[f"{name}.bytes"] = blocks.reshape(-1)
        with np.errstate(over="ignore"):
            tensors[f"{name}.values"] = gguf.quants.dequantize(blocks, kind).astype(np.float32).reshape(-1)
    save_file(tensors, path)


def digests(path):
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4")
        print(tensor.name, tensor.tensor_type.name, values.size, hashlib.sha256(values.tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write")
    parser.add_argument("--digests")
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
    if arguments.digests:
        digests(arguments.digests)
