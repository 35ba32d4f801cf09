#!/bin/sh
# Runs the programs of this bundle on the libtorch of this machine's Python:
#
#   ./run.sh test                         every test
#   ./run.sh run-all --device cuda        every experiment; the report goes to reports/ in this folder
#   ./run.sh gpu-day                      tests, timings and comparisons on a GPU, in 10 minutes; to gpu-day/<GPU>/
#   ./run.sh gpu-day --plan help          the plans of such a day, with their parts and deadlines
#   ./run.sh compare --device cuda        against PyTorch
#
# FRUGAL_PYTHON chooses another Python than python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
FRUGAL_PYTHON=${FRUGAL_PYTHON:-python3}
export FRUGAL_PYTHON
if ! command -v "$FRUGAL_PYTHON" >/dev/null 2>&1; then
    echo "error: $FRUGAL_PYTHON was not found; set FRUGAL_PYTHON to a Python that has torch @TORCH_SERIES@" >&2
    exit 1
fi
found=$("$FRUGAL_PYTHON" - <<'END'
import glob, os, sys
try:
    import torch
except ImportError as error:
    sys.exit(f"error: {sys.executable} has no torch ({error}); set FRUGAL_PYTHON to a Python that has torch @TORCH_SERIES@")
package = os.path.dirname(os.path.abspath(torch.__file__))
nvidia = sorted(glob.glob(os.path.join(os.path.dirname(package), "nvidia", "*", "lib")))
print(torch.__version__)
print(":".join([os.path.join(package, "lib"), *nvidia]))
END
) || exit 1
version=$(printf '%s\n' "$found" | sed -n 1p)
folders=$(printf '%s\n' "$found" | sed -n 2p)
case $version in
    @TORCH_SERIES@.*) ;;
    *)
        echo "error: $FRUGAL_PYTHON has torch $version, and these programs need @TORCH_SERIES@; set FRUGAL_PYTHON to a Python that has it" >&2
        exit 1
        ;;
esac
echo "torch $version in ${folders%%:*}" >&2
LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/bin/xtask" "$@"
