"""Which passes of verl's actor are the policy's own: those are harvested and judged, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
from builders.training import TARGET
from spec_plugin_verl.actor import SpecActor
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from spec_plugin import SpecConfig
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.spec_run import SpecRun


class Stock:
    """What the mix-in asks of verl's engine; a log-prob pass notes what it was told."""

    engine_config = SimpleNamespace(forward_only=False)
    module = torch.nn.Linear(1, 1)

    def __init__(self) -> None:
        self.passes: list[dict[str, Any]] = []
        self.adapters = True

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.adapters = False
        yield
        self.adapters = True

    def infer_batch(self, data: Any, loss_function: Any) -> dict[str, Any]:
        told = {name: tu.get(data, key=name, default=None) for name in ("distillation_use_topk", "distillation_only")}
        self.passes.append({"adapters": self.adapters, "loss": loss_function, **told})
        rows = [torch.zeros(len(row)) for row in data["input_ids"].unbind()]
        return {"model_output": {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}}


class Harvest:
    """Counts the passes that may be harvested."""

    def __init__(self) -> None:
        self.opened = self.closed = self.delivered = 0

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.closed += 1

    def deliver(self) -> None:
        self.delivered += 1


class Actor(SpecActor, Stock):
    """The mix-in before it; what it judges is counted."""

    def __init__(self) -> None:
        super().__init__()
        manager = create_manager(load_entry_points=False, block=["controller", "metrics"])
        session = SpecSession(SpecConfig(bypass_check_sequences=2), TARGET, manager)
        self.harvest = Harvest()
        self._run = SpecRun(session, None, harvest=lambda _: self.harvest)
        self.judged = 0
        session.check_logprobs = self._counted  # type: ignore[method-assign]

    def _counted(self, *_: Any) -> None:
        self.judged += 1


@pytest.fixture
def actor() -> Actor:
    return Actor()


def batch(**options: Any) -> TensorDict:
    rows = {"input_ids": [torch.zeros(4).long()] * 2, "response_mask": [torch.ones(2).long()] * 2}
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    data = TensorDict(nested, batch_size=[2])
    tu.assign_non_tensor(data, **options)
    return data


def test_the_policys_log_prob_pass_is_harvested_and_judged(actor: Actor) -> None:
    assert actor.infer_batch(batch()) is not None
    assert (actor.harvest.opened, actor.harvest.closed, actor.harvest.delivered, actor.judged) == (1, 1, 1, 1)


def test_the_references_pass_through_a_lora_actor_is_left_alone(actor: Actor) -> None:
    """verl 0.9.1 asks the actor for both, with rollout log-probs in the batch: the base's are not the samples'."""
    with actor.disable_adapter():
        assert actor.infer_batch(batch()) is not None
    assert [one["adapters"] for one in actor.passes] == [False]
    assert (actor.harvest.opened, actor.judged) == (0, 0)
    actor.infer_batch(batch())
    assert (actor.harvest.opened, actor.judged) == (1, 1), "the policy's next pass is"


def test_a_references_pass_that_fails_leaves_the_next_one_to_be_judged(actor: Actor) -> None:
    with pytest.raises(ValueError, match="planted"), actor.disable_adapter():
        raise ValueError("planted")
    actor.infer_batch(batch())
    assert actor.judged == 1


def test_where_the_pass_is_bypassed_log_probs_are_computed_whatever_the_update_distils(actor: Actor) -> None:
    data = batch(distillation_use_topk=True, distillation_only=True)
    actor._check_sample(actor._run, data, actor._responses(actor._run, data))
    assert actor.passes == [
        {"adapters": True, "loss": None, "distillation_use_topk": False, "distillation_only": False}
    ]
    assert (actor.harvest.opened, actor.judged) == (1, 1)
