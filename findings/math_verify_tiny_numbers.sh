#!/usr/bin/env bash
# math-verify takes tiny numbers for equal, whatever they are.
#
# Expected: 10^{-20} is not 10^{-21}, and 1/2^{99} is not 1/2^{98}: exact values, and each twice or ten times the other.
# Seen, math-verify 0.9.0: both pairs verify, since numbers are compared after rounding to a number of decimal places,
# not of digits. The same ratios between larger numbers are told apart.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "math-verify[antlr4_13_2]==0.9.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^math-verify=="
cat > probe.py <<'PROBE'
from math_verify import parse, verify


def equal(gold, answer):
    found = verify(parse(gold), parse(answer))
    print(f"{gold} and {answer}: {'equal' if found else 'different'}")
    return found


assert equal(r"$\frac{1}{2^{99}}$", r"$\frac{1}{2^{98}}$")
assert equal("$10^{-20}$", "$10^{-21}$")
assert not equal(r"$\frac{1}{2^{9}}$", r"$\frac{1}{2^{8}}$")
assert not equal("$10^{20}$", "$10^{21}$")
PROBE
env/bin/python probe.py
