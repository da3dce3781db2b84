"""What of the prefix cache an engine built to draft reads anew, and that its text is the same where it does not have to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import small
from vllm import SamplingParams
from vllm.config import SpeculativeConfig

from draft_training.eagle3 import save_draft
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER
from spec_plugin.methods.tables import whole_hits

pytestmark = pytest.mark.engine
BLOCK, SHARED, OWN, TOKENS = 32, 96, 40, 32
_ALIVE: list[Any] = []  # an engine that is collected takes vLLM's groups of ranks from the others of its process
KNOWN = "disable_eagle_block_drop" in {field.name for field in dataclasses.fields(SpeculativeConfig)}


def prompts() -> list[list[int]]:
    """Three whole blocks alike, and then at once other tokens in each; the first prompt comes again."""
    shared = [(11 * i + i * i) % small.VOCAB for i in range(SHARED)]
    found = [shared + [(5 * i * (n + 2) + 17 * n + 3) % small.VOCAB for i in range(OWN)] for n in range(3)]
    return [*found, found[0]]


def texts(llm: Any) -> tuple[list[list[int]], list[int]]:
    """Greedy answers one after the other, and tokens of each prompt that the cache had."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    done = [llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in prompts()]
    return [list(o.outputs[0].token_ids) for o in done], [o.num_cached_tokens for o in done]


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.skipif(not KNOWN, reason="vLLM 0.31"))])
def test_law_2_text_behind_a_hit_is_the_policys_and_what_is_read_anew_is_counted(
    request, target, config, tmp_path, kept
):
    # asked for by name, so that this comes behind the shared engine's tests: the engine below takes its counters away
    expected, _ = texts(request.getfixturevalue("llm"))  # has no prefix cache, and a draft that is never right
    save_draft(tmp_path / "draft", config, small.good_tensors(config))
    speculation = {
        "method": "eagle3",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [(1, 16, 3)],
        **(whole_hits() if kept else {}),
    }
    found = small.start_engine(
        target,
        tmp_path / "draft",
        speculative_config=speculation,
        scheduler_cls=SCHEDULER,
        enable_prefix_caching=True,
        block_size=BLOCK,
        num_gpu_blocks_override=256,
    )
    _ALIVE.append(found)
    core = found.llm_engine.engine_core.engine_core
    answers, cached = texts(found)
    assert answers == expected
    core.spec_take_steps()
    *_, (read, anew) = core.spec_rest_of_steps()
    whole = SHARED + OWN - (SHARED + OWN) % BLOCK  # the last prompt was there before, 128 tokens of it
    assert cached == ([0, SHARED, SHARED, whole] if kept else [0, SHARED - BLOCK, SHARED - BLOCK, whole - BLOCK])
    assert anew == (0 if kept else 3 * BLOCK) and read == 4 * (SHARED + OWN) - sum(cached)
