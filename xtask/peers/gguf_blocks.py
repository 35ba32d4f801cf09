"""Blocks of every type of GGUF, their values as the Python package `gguf` decodes them, and values as llama.cpp encodes them.

`--write FILE` makes the cases of `gguf`'s tests: for each type, random blocks with scales that are negative, zero, subnormal and large;
`encoded.values`, and for each type that is written their bytes by `ggml_quantize_chunk` of the library in `xllamacpp`.
`--digests MODEL` prints for each tensor of a GGUF file the SHA-256 of its decoded values in fp32, little-endian."""

import argparse
import ctypes
import hashlib

import gguf
import numpy as np
import xllamacpp.xllamacpp
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


WRITTEN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


def values_to_encode(random):
    """Blocks of 256: normal, with heavy tails, of one sign, constant, zero, tiny, large, on a grid, and with groups of unlike sizes."""
    normal = (random.standard_normal((6, 256)) * 0.02).astype(np.float32)
    groups = np.exp(random.uniform(-12, 0, (3, 8))).repeat(32, axis=1).astype(np.float32)
    return np.concatenate([
        normal, (random.standard_t(3, (6, 256)) * 0.02).astype(np.float32), np.abs(normal[:2]) + 0.01, -np.abs(normal[:2]),
        np.zeros((1, 256), np.float32), np.full((1, 256), 0.3, np.float32), np.full((1, 256), -0.3, np.float32), normal[:2] * 1e-6,
        normal[:1] * 1e-30, normal[:2] * 1e5, np.round(normal[:3] * 50) / 50, normal[:3] * groups,
        np.where(np.arange(256) < 32, normal[:1] * 1e-9, normal[:1]),
    ]).astype(np.float32)


def encode(values, name):
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros(values.size // block * size, np.uint8)
    written = library.ggml_quantize_chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, 1, values.size, None)
    assert written == out.size
    return out


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
    tensors["encoded.values"] = values_to_encode(random).reshape(-1)
    for name in WRITTEN:
        tensors[f"{name}.encoded"] = encode(tensors["encoded.values"], name)
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
