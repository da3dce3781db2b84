"""Classes of vLLM's that our engine completes: registered in the worker, and not where vLLM goes on with its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.repairs.hidden_states import complete_target
from spec_plugin.plan.completable import COMPLETABLE

pytestmark = pytest.mark.engine
FAMILIES = {"seed_oss": "SeedOssForCausalLM", "glm4": "Glm4ForCausalLM", "glm4v": "Glm4vForConditionalGeneration"}


@pytest.fixture
def registered() -> Iterator[None]:
    """vLLM's models from outside, put back afterwards."""
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import utils

    before = dict(ModelRegistry.models)
    yield
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)
    utils._MODEL_ARCH_BY_HASH.clear()


def engine_of(folder: Path, family: str) -> Any:
    from vllm.config import ModelConfig

    target = small.make_target(folder, family)
    return SimpleNamespace(model_config=ModelConfig(str(target), dtype="float32", skip_tokenizer_init=True))


def own_class(engine: Any) -> type[Any]:
    from vllm.model_executor.model_loader.utils import get_model_cls

    return get_model_cls(engine.model_config)


def test_every_class_has_a_family_here() -> None:
    assert set(FAMILIES.values()) == set(COMPLETABLE)


@pytest.mark.parametrize("family", ["seed_oss", "glm4"])
def test_a_target_is_served_by_a_subclass_that_hands_out_states(family: str, tmp_path: Path, registered: None) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3, supports_lora

    engine = engine_of(tmp_path / "target", family)
    own = own_class(engine)  # asked for before, as vLLM's own processes may have
    assert complete_target(engine) == FAMILIES[family]
    served = own_class(engine)
    assert issubclass(served, own) and served.__name__ == own.__name__
    assert supports_eagle3(served) and not supports_eagle3(own) and supports_lora(served)
    assert complete_target(engine) is None, "it is complete"


def test_a_class_with_the_interface_is_left_alone(tmp_path: Path, registered: None) -> None:
    engine = engine_of(tmp_path / "target", "qwen3")
    own = own_class(engine)
    assert complete_target(engine) is None and own_class(engine) is own


def test_it_fails_loudly_where_vllm_goes_on_with_its_own(
    tmp_path: Path, registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry

    engine = engine_of(tmp_path / "target", "glm4")
    monkeypatch.setattr(type(ModelRegistry), "register_model", lambda *_: None)
    with pytest.raises(PatchError, match="goes on serving Glm4ForCausalLM by its own"):
        complete_target(engine)
