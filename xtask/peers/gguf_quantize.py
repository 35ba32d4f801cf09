"""Digests of a model's tensors as llama.cpp's own quantiser writes them: the oracle of our q4_k_m, q5_k_m, q6_k and q8_0.

`gguf_quantize.py MODEL.gguf --libraries FOLDER [--keep FOLDER]` decodes the model's tensors to fp32 (once a matrix that the file has
twice, with the values of the output head), has `llama_model_quantize` write each type from that, and prints for each type the SHA-256
digest over all tensors in the order of their names: for each its name, the name of its type and its bytes. FOLDER has `libllama`,
`libggml` and `libggml-base` of one release, as the package `@node-llama-cpp/linux-x64` (bins/linux-x64); `xllamacpp` has no quantiser of
whole files. `--keep` leaves the files.
"""

import argparse
import ctypes
import hashlib
import pathlib
import sys
import tempfile

import gguf
import numpy as np

# llama.cpp's numbers of types of files.
TYPES = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "q8_0": 7}


class Params(ctypes.Structure):
    """`llama_model_quantize_params`: its first two fields, and room for the others."""

    _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int32), ("others", ctypes.c_char * 504)]


def library(folder):
    for name in ["libggml-base", "libggml", "libllama"]:
        path = next(path for path in sorted(folder.glob(f"{name}.*so*")))
        found = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    found.llama_model_quantize_default_params.restype = Params
    found.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    found.llama_backend_init()
    return found


def write_decoded(source, target):
    """The same model with every tensor in fp32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if not key.startswith(left_out):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    names = {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        name = tensor.name
        if "output.weight" in names and name == "token_embd.weight":
            continue
        name = "token_embd.weight" if name == "output.weight" else name
        writer.add_tensor(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(path):
    sha256 = hashlib.sha256()
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.name):
        sha256.update(f"{tensor.name} {tensor.tensor_type.name}\n".encode())
        sha256.update(np.ascontiguousarray(tensor.data).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--libraries", type=pathlib.Path, required=True)
    parser.add_argument("--keep", type=pathlib.Path)
    arguments = parser.parse_args()
    llama = library(arguments.libraries)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or pathlib.Path(scratch)
        source = folder / "f32.gguf"
        write_decoded(arguments.model, source)
        for name, number in TYPES.items():
            params = llama.llama_model_quantize_default_params()
            params.nthread, params.ftype = 1, number
            target = folder / f"{name}.gguf"
            if llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
                sys.exit(f"llama.cpp does not write {target}")
            print(arguments.model.name, name, digest(target), flush=True)


if __name__ == "__main__":
    main()
