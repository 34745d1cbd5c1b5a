#!/usr/bin/env bash
# One call on a machine with a GPU and without network: what is there, whether it is right, what it costs. At most ten
# minutes: 60 s to look, 270 s to check, 210 s to measure. Nothing is installed: PACKAGES names a folder of wheels and
# .tar.xz archives of unpacked ones that serve this run where the machine lacks them. Beside torch and numpy it needs
#   pip download --no-deps -d wheels safetensors llguidance pytest pluggy iniconfig packaging pygments
# and, for the flash backend, tokenspeed-fa3 in the version that pyproject.toml names.
#
#   OUT=results PACKAGES=wheels tests/gpu/run.sh
#
# Writes $OUT/{machine,checks,timings}.txt and $OUT/timings.json. The exit code is that of the checks.
set -uo pipefail
cd "$(dirname "$0")/../.."
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

echo "== what is there"
{
    nvidia-smi 2>&1 || echo "nvidia-smi does not run"
    timeout 60 $PYTHON tests/gpu/machine.py 2>&1
} | tee "$OUT/machine.txt"

if ! $PYTHON -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch finds no GPU: nothing to check or to measure" >&2
    exit 2
fi

echo "== checks"
if $PYTHON -c 'import pytest' 2>/dev/null; then
    timeout 270 $PYTHON -m pytest -c tests/gpu/pytest.ini --confcutdir=tests/gpu -rfEs --continue-on-collection-errors tests/gpu 2>&1 | tee "$OUT/checks.txt"
    code=$?
else
    echo "skipped: pytest is not installed, and no wheel of it is in PACKAGES" | tee "$OUT/checks.txt"
    code=1
fi

echo "== timings"
timeout 210 $PYTHON -m verdraft.bench.gpu --seconds 180 --out "$OUT/timings.json" 2>&1 | tee "$OUT/timings.txt"

echo "== in short"
tail -n 3 "$OUT/checks.txt"
grep '^#' "$OUT/checks.txt" "$OUT/timings.txt"
exit $code
