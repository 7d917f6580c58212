#!/bin/sh
# sh tests/gpu/check.sh FOLDER: run tests/gpu, then `bench gpu`, on a machine with a GPU, in less than nine minutes.
# It installs nothing: PYTHON (default python3) must have a torch that sees a GPU, and what `pip install '.[test,cuda13]'` (or
# cuda12) installs. FOLDER gets machine.txt, tests.txt, bench.txt and gpu.json. The exit code is 0 if both have passed, and 2,
# before anything runs, if something is missing.

folder=${1:?the folder for the output is missing: sh tests/gpu/check.sh FOLDER}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

"$python" - <<'END' || exit 2
import sys
from importlib.util import find_spec

needed = {"torch": "torch", "numpy": "numpy", "numba": "numba", "cupy": "cupy", "pytest": "pytest", "hypothesis": "hypothesis"}
needed |= {"pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist"}
if missing := [name for module, name in needed.items() if find_spec(module) is None]:
    sys.exit(f"tests/gpu/check.sh: {sys.executable} lacks {', '.join(missing)}: pip install '.[test,cuda13]' (or cuda12)")
import torch

if not torch.cuda.is_available():
    sys.exit(f"tests/gpu/check.sh: torch {torch.__version__} sees no GPU")
END

{
    git describe --always --dirty --abbrev=12
    nvidia-smi
    "$python" -c "import cupy, torch; print('torch', torch.__version__, 'CuPy', cupy.__version__)"
    ip -V && tc -V && unshare --net --uts --mount true && echo "network namespaces can be made"
} >"$folder/machine.txt" 2>&1

run() { # NAME SECONDS COMMAND...
    name=$1 limit=$2
    shift 2
    timeout --kill-after 10 "$limit" "$@" >"$folder/$name.txt" 2>&1
    code=$?
    tail -n 60 "$folder/$name.txt"
    echo "== $name: exit code $code (124: it had not ended after $limit s)"
    [ "$code" -eq 0 ] || failed=1
}

failed=0
run tests 190 "$python" -m pytest tests/gpu -v -ra -n 6 --dist worksteal --durations 10 -p no:cacheprovider
run bench 330 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m gradwire.bench gpu --json "$folder/gpu.json"
exit "$failed"
