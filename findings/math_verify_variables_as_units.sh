#!/usr/bin/env bash
# math-verify drops a variable behind a number if a unit is called by that letter.
#
# Expected: 3t and 3m are products with a variable, as 5x is, so they do not equal 3: "how far after t seconds?" has the
# answer 3t.
# Seen, math-verify 0.9.0: t (tons) and m (meters) are dropped as units, so 3t parses as 3 and verifies against it;
# 5x is kept as a product.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "math-verify[antlr4_13_2]==0.9.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^math-verify=="
cat > probe.py <<'PROBE'
from math_verify import parse, verify

for answer, number, dropped in (("$3t$", "$3$", True), ("$3m$", "$3$", True), ("$5x$", "$5$", False)):
    found = parse(answer)
    print(f"{answer}: {found[0]!r}, equal to {number}: {verify(parse(number), found)}")
    assert verify(parse(number), found) is dropped
PROBE
env/bin/python probe.py
