"""verl's two layouts of a batch say the same, in a process in which verl is on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not (find_spec("verl") and find_spec("vllm")), reason="needs verl and vLLM")

SCRIPT = """
    import json, os
    from types import SimpleNamespace

    os.environ.update(VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu", VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
    import numpy as np
    import torch
    from spec_plugin_verl import batches, rollout, standalone
    from verl import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    from spec_plugin import SpecConfigError

    documents = [[11, 12, 13, 21, 22], [14, 23, 24, 25, 26], [15, 16, 27]]  # of which the second ten are responses
    masks = [[1, 1], [1, 0, 0, 1], [1]]  # a tool has written two tokens in the midst of the second
    nested = lambda rows, dtype=torch.long: torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)
    beside = [{"min_global_steps": 3, "max_global_steps": 4},
              {"min_global_steps": 3, "max_global_steps": 3}, {}]
    prompts = [[t for t in row if t < 20] for row in documents]
    answers = [[t for t in row if t > 20] for row in documents]
    left = lambda rows, n: torch.tensor([[0] * (n - len(row)) + list(row) for row in rows])
    right = lambda rows, n: torch.tensor([list(row) + [0] * (n - len(row)) for row in rows])
    ids = torch.cat([left(prompts, 3), right(answers, 4)], 1)
    there = (ids > 0).long()
    columns = {name: np.array([b.get(name) for b in beside], dtype=object)
               for name in ("min_global_steps", "max_global_steps")}
    old = DataProto.from_dict(
        tensors={"prompts": left(prompts, 3), "responses": right(answers, 4), "input_ids": ids, "attention_mask": there,
                 "position_ids": (there.cumsum(1) - 1).clamp(min=0), "response_mask": right(masks, 4)},
        non_tensors=columns).to_tensordict()
    layouts = {"nested": {"input_ids": nested(documents), "response_mask": nested(masks), "extra_fields": beside},
               "padded": left_right_2_no_padding(old)}
    values = nested([[t / 10 for t in row[1:]] + [0.0] for row in documents], torch.float32)

    found = {}
    for name, data in layouts.items():
        first, last = batches.versions(batches.said(data))
        wholes, inside = batches.documents(data)
        found[name] = {
            "starts": batches.starts(data), "sampled": batches.sampled(data).tolist(),
            "responses": batches.responses(values, data).tolist(), "versions": [first.tolist(), last.tolist()],
            "said": [dict(b) for b in batches.said(data)],
            "documents": [d.tolist() for d in wholes], "inside": [m.tolist() for m in inside]}
    found["silent"] = [batches.said({"input_ids": 0}), batches.versions([])]

    servers = {"vllm_server_0_0": SimpleNamespace()}
    standalone.ray = SimpleNamespace(
        get_actor=servers.get, util=SimpleNamespace(list_named_actors=lambda: ["vllm_server_0_0", "something"]))
    try:
        standalone.Standalone("float32", None)
    except SpecConfigError as error:
        found["stock servers"] = str(error)
    made = []
    rollout.SpecServerAdapter = lambda *a: made.append("ours")
    rollout.ServerAdapter = lambda *a: made.append("verl's")
    rollout.server_adapter(config=1, model_config=2, device_mesh=3)
    rollout.server_adapter(config=1, model_config=2, device_mesh=None, replica_rank=0)
    print("FOUND", json.dumps(found | {"made": made}))
"""


@pytest.fixture(scope="module")
def found(found_by) -> dict[str, Any]:
    return found_by(SCRIPT)


def test_both_layouts_give_the_same_documents_responses_and_versions(found):
    assert found["padded"] == found["nested"]
    assert found["nested"]["starts"] == [3, 1, 2]
    assert found["nested"]["sampled"] == [[True, True, False, False], [True, False, False, True], [True] + 3 * [False]]
    assert found["nested"]["versions"] == [[3, 3, -1], [4, 3, -1]]
    assert found["nested"]["documents"][1] == [14, 23, 24, 25, 26]
    assert found["nested"]["inside"][1] == [0, 1, 0, 0, 1]
    assert found["nested"]["responses"][2] == pytest.approx([2.7, 0, 0, 0])


def test_a_batch_beside_which_nothing_is_said_tells_no_versions(found):
    assert found["silent"] == [[], None]


def test_an_actor_whose_servers_are_verls_own_says_which_flag_reaches_them(found):
    assert "VERL_USE_EXTERNAL_MODULES=spec_plugin_verl" in found["stock servers"]


def test_beside_a_standalone_rollout_verls_own_adapter_takes_the_weights(found):
    assert found["made"] == ["ours", "verl's"]
