#!/usr/bin/env bash
# One call on a machine with a GPU and without network: what is there, whether it is right, what it costs. At most ten
# minutes; whatever fails or hangs is named in a line, and the rest goes on. Nothing is installed: PACKAGES names a
# folder of wheels and .tar.xz archives of unpacked ones that serve this run where the machine lacks them. Beside torch
# and numpy it needs
#   pip download --no-deps -d wheels safetensors llguidance pytest pluggy iniconfig packaging pygments
# and, for the flash backend, tokenspeed-fa3 in the version that pyproject.toml names.
#
#   OUT=results PACKAGES=wheels tests/gpu/run.sh
#
# Writes $OUT/{machine,checks,timings}.txt and $OUT/timings.json. The exit code is that of the checks. `--device cpu`
# rehearses every part with tiny sizes where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
DEVICE=cuda
if [ $# -gt 0 ]; then
    [ "$*" = "--device cpu" ] || { echo "usage: $0 [--device cpu]" >&2; exit 2; }
    DEVICE=cpu
fi
OUT=${OUT:-build/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
# The package asks for its own version, as if it were installed.
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
mkdir "$SCRATCH/verdraft-$VERSION.dist-info"
printf 'Metadata-Version: 2.1\nName: verdraft\nVersion: %s\n' "$VERSION" > "$SCRATCH/verdraft-$VERSION.dist-info/METADATA"
if [ -n "${PACKAGES:-}" ]; then
    for file in "$PACKAGES"/*.whl; do [ -e "$file" ] && $PYTHON -m zipfile -e "$file" "$SCRATCH"; done
    for file in "$PACKAGES"/*.tar.xz; do [ -e "$file" ] && tar -xJf "$file" -C "$SCRATCH"; done
fi
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
# Behind what is installed, so that nothing of it is replaced.
export PYTHONPATH="$PYTHONPATH:$($PYTHON -c 'import site; print(":".join(site.getsitepackages()))'):$SCRATCH"
unset TRITON_INTERPRET

# limited SECONDS COMMAND...: asks it to end, so that it can say what it knows, and ends it soon after.
limited() { timeout --signal=INT --kill-after=5 "$@"; }

echo "== what is there"
{
    limited 20 nvidia-smi 2>&1 || echo "nvidia-smi does not run"
    limited 40 $PYTHON tests/gpu/machine.py 2>&1
} | tee "$OUT/machine.txt"

if [ $DEVICE = cuda ] && ! limited 40 $PYTHON -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch finds no GPU: nothing to check or to measure" >&2
    exit 2
fi

# check SECONDS FILE: in a process of its own, since after some errors a process cannot use its GPU any more.
code=0
check() {
    limited "$1" $PYTHON -m pytest -c tests/gpu/pytest.ini --confcutdir=tests/gpu -rfEs --device $DEVICE "tests/gpu/$2" 2>&1
    local ended=$?
    [ $ended = 0 ] || { code=$ended; echo "# $2: ended with code $ended (124 or 137: no time after $1 s)"; }
}
echo "== checks"
if $PYTHON -c 'import pytest' 2>/dev/null; then
    exec 3>&1 > >(tee "$OUT/checks.txt")
    check 80 test_ops.py
    check 80 test_attention.py
    check 120 test_law.py
    exec >&3 3>&-
    wait
else
    echo "# checks: skipped, since pytest is not installed and no wheel of it is in PACKAGES" | tee "$OUT/checks.txt"
    code=1
fi

echo "== timings"
LEFT=$((570 - SECONDS))
limited $((LEFT + 10)) $PYTHON -m verdraft.bench.gpu --device $DEVICE --seconds $LEFT --out "$OUT/timings.json" 2>&1 |
    tee "$OUT/timings.txt" | sed '/^[a-z]*, us /,$d'

echo "== in short"
grep -E '^#|(passed|failed|error|skipped).* in ' "$OUT/checks.txt"
grep '^#' "$OUT/timings.txt"
sed -n '/^[a-z]*, us /,$p' "$OUT/timings.txt"
exit $code
