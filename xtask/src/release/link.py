#!@PYTHON@
"""A linker for rustc that links with zig's stubs of an old glibc, and with the machine's own libstdc++ and libgcc_s.

zig replaces `-lstdc++` and `-lgcc_s` by libraries of its own with another ABI, so all libraries are given as paths. `@…@` are
replaced where this file is written."""

import os
import sys

LIBRARIES = {
    "-lstdc++": "@STDCXX@",
    "-lgcc_s": "@GCC_S@",
    "-lgomp": "@TORCH@/libgomp.so.1",
    "-ltorch_cpu": "@TORCH@/libtorch_cpu.so",
    "-lc10": "@TORCH@/libc10.so",
}
# Choices of another linker, and parts of torch that the program does not need.
DROPPED = ("-m64", "-nodefaultlibs", "-ltorch", "-ltorch_cuda", "-Wl,-O1")
DROPPED_PREFIXES = ("-B", "-fuse-ld", "-Wl,-rpath")

words, given = [], set()
for word in sys.argv[1:]:
    if word in DROPPED or word.startswith(DROPPED_PREFIXES):
        continue
    library = LIBRARIES.get(word)
    if library in given:
        continue
    if library:
        given.add(library)
    words.append(library or word)
words += ["@COMPAT@", "-Wl,-rpath,@SEARCH@", "-Wl,--allow-shlib-undefined"]
zig = [sys.executable, "-m", "ziglang"]
os.execv(sys.executable, [*zig, "cc", "-target", "@TARGET@", *words])
