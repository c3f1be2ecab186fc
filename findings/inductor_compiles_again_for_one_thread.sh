#!/usr/bin/env bash
# Inductor's cache of a process with several CPU threads is of no use to a process with one, and the other way round.
#
# Expected: the loops that it generates say only that they are parallel, not by how many threads, so that processes of
# any number of threads share one cache folder, as trainers and their workers do.
# Seen, torch 2.13.0: with 2 and with 3 threads the same files; with 1 thread other code for the same loop, without
# OpenMP: what was compiled before is not found, and the loop is compiled again.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^torch=="
cat > probe.py <<'PROBE'
import torch


@torch.compile
def gate(x, y):
    return torch.nn.functional.silu(x) * y


gate(torch.ones(1 << 20), torch.ones(1 << 20))
PROBE
export TORCHINDUCTOR_CACHE_DIR=$work/cache
files() {
    OMP_NUM_THREADS=$1 env/bin/python probe.py
    find cache -name "*.cpp" | sort > "$1"
    echo "$1 threads: $(wc -l < "$1") sources, with OpenMP $(xargs grep -l "omp parallel" < "$1" | wc -l)"
}
files 2
files 3
files 1
cmp 2 3
new=$(comm -13 2 1)
echo "new for 1 thread: $(grep -c "void *kernel" $new) loop, with OpenMP $(grep -c "omp parallel" $new || true)"
[ "$(wc -l <<< "$new")" -eq 1 ] && grep -q "silu\|exp" $new && ! grep -q "omp parallel" $new
