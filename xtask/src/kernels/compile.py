"""Compiles CUDA C++ by NVRTC: a request in JSON on standard input, the result in JSON on standard output."""

import ctypes
import json
import sys
from pathlib import Path


def main():
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    # NVRTC asks for its builtins by their bare name, which the loader knows once they are open.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))
    program = ctypes.c_void_p()

    def check(status, what):
        if status != 0:
            sys.exit(f"{what}: NVRTC error {status}: {text('ProgramLog')}")

    def result(what):
        size = ctypes.c_size_t()
        if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) != 0:
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def text(what):
        return result(what).split(b"\0")[0].decode()

    def array(texts):
        return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])

    headers = request["headers"]
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        request["text"].encode(),
        b"kernel.cu",
        len(headers),
        array(list(headers.values())),
        array(list(headers)),
    )
    check(status, "nvrtcCreateProgram")
    for expression in request["expressions"]:
        check(nvrtc.nvrtcAddNameExpression(program, expression.encode()), expression)
    options = request["options"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), array(options)), "nvrtcCompileProgram")
    names = []
    for expression in request["expressions"]:
        name = ctypes.c_char_p()
        check(nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name)), expression)
        names.append(name.value.decode())
    if request["cubin"]:
        Path(request["cubin"]).write_bytes(result("CUBIN"))
    json.dump({"ptx": text("PTX"), "log": text("ProgramLog"), "names": names}, sys.stdout)


main()
