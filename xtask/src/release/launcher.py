"""Finds the torch that `import torch` would find, without importing it, and becomes the program."""

import os
import sys

TORCH = "@TORCH@"
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "frugal")
REMEDY = f"run: {sys.executable} -m pip install torch=={TORCH}"


def torch_folder():
    for folder in sys.path:
        torch = os.path.join(folder or ".", "torch")
        if os.path.isfile(os.path.join(torch, "version.py")):
            return os.path.abspath(torch)
    sys.exit(f"error: {sys.executable} has no torch, and frugal computes with it; {REMEDY}")


def version(torch):
    with open(os.path.join(torch, "version.py"), encoding="utf-8") as lines:
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and name.split(":")[0].strip() == "__version__":
                return value.strip().strip("'\"")
    return "of an unknown version"


def main():
    torch = torch_folder()
    found = version(torch)
    # The part after "+" names the devices of a build: the program works with each of them.
    if found.split("+")[0] != TORCH:
        sys.exit(f"error: this frugal needs torch {TORCH}, and the torch in {torch} is {found}; {REMEDY}")
    libraries = os.path.join(torch, "lib")
    # The program looks in ../../torch/lib, from its real folder: a package manager may have linked it from a cache, and torch may
    # lie in another environment.
    reached = os.path.join(os.path.dirname(os.path.realpath(PROGRAM)), "..", "..", "torch", "lib")
    if not (os.path.isdir(reached) and os.path.samefile(reached, libraries)):
        rest = os.environ.get("LD_LIBRARY_PATH")
        os.environ["LD_LIBRARY_PATH"] = libraries + (":" + rest if rest else "")
    # Another program that is called frugal may come first on PATH: workers are started by this path.
    os.execv(PROGRAM, ["frugal", *sys.argv[1:]])


if __name__ == "__main__":
    main()
