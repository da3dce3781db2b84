#!/bin/bash
# transformers 5.15.0 and 5.24.0, a config.json that transformers 5 saved, to which `rope_scaling` is added by hand, as is usual to let
# a model of Qwen's read texts beyond the length that it was trained on.
#
# A good guess: YaRN over the model's own base. The file says `"rope_parameters": {"rope_theta": 1000000.0, ...}`, the addition
#   names no base; with the same addition it keeps the base of a file that says `"rope_theta": 1000000.0`.
# Seen: of a file with a top-level `rope_theta` the base is kept; of a file as transformers 5 itself saves it the addition replaces
#   `rope_parameters` whole, and the base is 10000.0 (a default), without a word. All rotations of the model are then other ones.
# So the same recipe works on the hub's file and spoils the model in a checkpoint that a trainer has saved from it.
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/ask.py" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from transformers import AutoConfig, Qwen3Config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
folder = Path(sys.argv[1]) / version("transformers")
base = {"rope_type": "default", "rope_theta": 1000000.0}
Qwen3Config(rope_parameters=base, max_position_embeddings=40960).save_pretrained(folder)
file = folder / "config.json"
saved = json.loads(file.read_text())
assert saved["rope_parameters"] == base and "rope_theta" not in saved
hubs = {name: value for name, value in saved.items() if name != "rope_parameters"} | {"rope_theta": 1000000.0}
for what, config in (("top-level rope_theta", hubs), ("as transformers 5 saves it", saved)):
    file.write_text(json.dumps(config | {"rope_scaling": YARN}))
    rope = AutoConfig.from_pretrained(folder).rope_parameters
    print(f"{version('transformers')} {what}: {rope['rope_type']} over {rope['rope_theta']}")
PY
for version in 5.15.0 5.24.0; do
  python3 -m venv "$folder/env-$version"
  "$folder/env-$version/bin/pip" install -q "transformers==$version"
  "$folder/env-$version/bin/python" "$folder/ask.py" "$folder" 2> "$folder/log" | tee "$folder/said-$version"
  grep -qx "$version top-level rope_theta: yarn over 1000000.0" "$folder/said-$version"
  grep -qx "$version as transformers 5 saves it: yarn over 10000.0" "$folder/said-$version"
done
