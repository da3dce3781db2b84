"""verl's own classes with ours on top, in a process in which verl is on a CPU; engines, transport and actor left out."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not (find_spec("verl") and find_spec("vllm")), reason="needs verl and vLLM")

SCRIPT = """
    import asyncio, json, os
    from types import SimpleNamespace

    os.environ.update(VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu", VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
    import torch
    from spec_plugin_verl.rollout import SpecServerAdapter
    from spec_plugin_verl.server import SpecHttpServer, _cheaply_stated
    from spec_plugin_verl.weights import PolicyStream
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    found = {}

    server = object.__new__(SpecHttpServer)
    server.config, server.model_config = SimpleNamespace(mtp=None), SimpleNamespace(lora_rank=0, lora={})
    found["verl's sleep level"] = vLLMHttpServer._resolve_sleep_level(server)
    for level in (1, 2):
        server._spec_front = SimpleNamespace(session=SimpleNamespace(config=SimpleNamespace(sleep_level=level)))
        found[f"sleep level {level}"] = server._resolve_sleep_level()

    class Run:
        policy_version, link, session = -1, None, SimpleNamespace(copy_of=torch.clone, target=SimpleNamespace(hf_config={}))

        async def weights_synced(self, version, embed, head, *, copied, rollouts_begin):
            assert copied and not rollouts_begin  # it sleeps: the rollouts begin when it wakes
            self.policy_version = version

    async def transport(self, weights, **more):
        async for _ in weights:
            pass

    class Server:  # its actor
        alive, asked = True, 0

        def remote(self):
            self.asked += 1
            return asyncio.sleep(0) if self.alive else dead()

    async def dead():
        raise RuntimeError("the actor is dead")

    server = Server()
    ServerAdapter.update_weights = transport
    ServerAdapter._ensure_server_handle = lambda adapter: adapter.server_handle is not None
    ready = SimpleNamespace(__ray_ready__=server)
    found["stated"] = [_cheaply_stated({"logprobs": asked, **more}) for asked, more in ((0, {}), (1, {"stop": ["."]}))]
    found["versions"] = []
    for steps in ([None, 0, None, 1, 2, None], [7, None, 8]):
        adapter = object.__new__(SpecServerAdapter)
        adapter.config, adapter.server_handle = SimpleNamespace(free_cache_engine=True), ready
        adapter._syncs, adapter._run, adapter._policy = 0, Run(), PolicyStream(Run.session)
        seen = []
        for step in steps:
            weights = iter([("model.embed_tokens.weight", torch.zeros(2, 2))])
            asyncio.run(adapter.update_weights(weights, global_steps=step))
            seen.append(adapter._run.policy_version)
        found["versions"].append(seen)
    adapter._run = Run()
    found["adapters"] = []
    for done in (False, True, True):
        weights = iter([("model.embed_tokens.weight" if not done else "q_proj.lora_A.weight", torch.zeros(2, 2))])
        adapter._run.policy_version = -1
        asyncio.run(adapter.update_weights(weights, global_steps=3, peft_config=object(), base_sync_done=done))
        found["adapters"].append(adapter._run.policy_version)
    found["asked"] = server.asked
    server.alive = False
    weights = iter([("model.embed_tokens.weight", torch.zeros(2, 2))])
    try:
        asyncio.run(adapter.update_weights(weights, global_steps=9))
    except RuntimeError as error:
        found["dead"] = [str(error), len(list(weights))]
    adapter.server_handle = None  # of a rank that has no server
    asyncio.run(adapter.update_weights(weights, global_steps=10))
    print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(found_by) -> dict[str, Any]:
    return found_by(SCRIPT)


def test_the_weights_stay_in_the_hosts_memory_while_verls_engine_sleeps(found):
    assert [found[name] for name in ("verl's sleep level", "sleep level 1", "sleep level 2")] == [2, 1, 2]


def test_a_weight_sync_without_a_step_is_of_the_same_policy(found):
    """verl's, on the way to validation, after a reward model had the cards; its servers go on naming the step before."""
    assert found["versions"] == [[0, 0, 0, 1, 2, 2], [7, 7, 8]]


def test_with_adapters_in_the_engine_a_sync_is_announced_when_they_have_come(found):
    assert found["adapters"] == [-1, 3, 3]


def test_no_weight_is_sent_to_an_engine_that_has_died(found):
    assert found["asked"] == 12, "before each sync"
    assert found["dead"] == ["the actor is dead", 1]


def test_log_probs_are_asked_for_in_flat_lists_and_a_text_only_where_it_ends_a_response(found):
    """A dictionary, an object and a text for each token took several times as long as all else in vLLM's front end."""
    cheap = {"logprobs": True, "flat_logprobs": True}
    assert found["stated"] == [{**cheap, "detokenize": False}, {**cheap, "detokenize": True}]
