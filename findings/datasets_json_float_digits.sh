#!/usr/bin/env bash
# A float of an object loses digits on the way from JSONL through `datasets` to Parquet, if the objects' keys differ.
#
# Expected: the same number, as where the objects have the same keys, which become a struct of doubles.
# Seen, datasets 5.2.0 with pyarrow 26.0.1: objects with different keys become texts of JSON (Arrow's type arrow.json), in
# which a float has ten digits: 0.45913173191066836 is 0.4591317319. With equal keys it keeps all of them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "datasets==5.2.0" "pyarrow==26.0.1" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(datasets|pyarrow)=="
cat > probe.py <<'PROBE'
import json

import datasets
from pyarrow import parquet

datasets.disable_progress_bars()
number = 0.45913173191066836


def stored(name, rows):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps({"arguments": row}) + "\n" for row in rows)
    data = datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train", cache_dir="cache")
    data.to_parquet(f"{name}.parquet")
    column = parquet.read_table(f"{name}.parquet").column("arguments")
    value = column[0].as_py()
    value = json.loads(value) if isinstance(value, str) else value
    print(f"{name}: {column.type}, {value['x']!r}")
    return value["x"]


assert stored("equal_keys", [{"x": number}, {"x": 1.5}]) == number
assert stored("other_keys", [{"x": number}, {"y": "text"}, {"x": "text"}]) == 0.4591317319
PROBE
env/bin/python probe.py
