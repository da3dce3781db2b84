"""Whatever way verl sends a document to the loss, it is looked at before: one table of ways, and of what is wrong with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
from builders.batches import span_of
from spec_plugin_verl.actor import SpecActor
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.api.events import EngineSchedule, TargetInfo
from spec_plugin.api.spans import Spans
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun

#: where the control group's stretch lies in a response
STRETCH = slice(20, 84)
#: prompt and response tokens, sequences of a mini-batch, mini-batches of a step
PROMPT, TOKENS, ROWS, MINI = 3, 120, 24, 2
VOCABULARY = 50


class Policy(torch.nn.Module):
    """Predicts the next token from the current one; ``step`` is an update."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.moves = torch.Generator().manual_seed(1)

    def log_probs(self, ids: Tensor) -> Tensor:
        """[n] ids -> [n] log-probs, one behind each token as verl has it, the last one meaningless."""
        found = self.table[ids[:-1]].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([found, found.new_zeros(1)])

    def step(self) -> None:
        """Move, by some hundredths of a nat."""
        with torch.no_grad():
            self.table += 0.05 * torch.randn(self.table.shape, generator=self.moves)


class Stock:
    """What the mix-in asks of verl's engine: both calls run the policy over micro-batches of all rows."""

    engine_config = SimpleNamespace(forward_only=False)

    def __init__(self) -> None:
        self.module = Policy()
        self.recomputed: list[int] = []  # rows of each pass

    def infer_batch(self, data: Any, _loss: Any = None) -> dict[str, Any]:
        rows = [self.module.log_probs(ids) for ids in data["input_ids"].unbind()]
        self.recomputed.append(len(rows))
        return {"model_output": {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}}

    def train_batch(self, data: Any, _loss: Any) -> dict[str, Any]:
        if tu.get(data, key="update_lr_scheduler", default=False):
            self.module.step()
        return {"metrics": {}}


class Actor(SpecActor, Stock):
    """The mix-in before it."""

    def spec_reported(self, metrics: Any) -> Any:
        return {}


class NoHarvest:
    """Of a method that harvests nothing."""

    def open(self) -> None:
        pass

    close = deliver = open


class Run(SpecRun):
    """Of a rank without a link, in phases that draft."""

    def __init__(self, session: SpecSession, lags: bool) -> None:
        super().__init__(session, None, harvest=lambda _: NoHarvest())  # type: ignore[arg-type, return-value]
        self.lags, self.policy_version, self.asked = lags, 0, 0
        session.engines = EngineSchedule()

    def _engine_spans(self, responses: Responses) -> Spans:
        self.asked += not self._asked
        self._asked = True
        return self._spans

    def agree(self, failed_before: bool = False) -> bool:
        return False


class Trainer:
    """One of verl's trainers: its steps, each of mini-batches, with or without a log-prob pass; weights synced every so often."""

    def __init__(self, lags: bool, sync_every: int, bypass: bool, older: bool | None = None) -> None:
        target = TargetInfo(path="", hf_config={"vocab_size": VOCABULARY}, dtype="float32")
        manager = create_manager(load_entry_points=False, block=["eagle3", "trainer", "controller", "metrics"])
        session = SpecSession(SpecConfig.parse({"method": "ngram"}), target, manager)
        self.actor, self.run = Actor(), Run(session, lags)
        self.actor._run = self.run
        self.older, self.sync_every, self.bypass = lags if older is None else older, sync_every, bypass
        self._rng, self.steps = random.Random(0), 0
        self._sampler = Policy()  # the engine's copy

    def step(self, wrong: dict[tuple[int, int], str] | None = None, controlled: int = 6) -> None:
        """One step; ``wrong`` says what is wrong with sequences, by mini-batch and row."""
        if self.steps % self.sync_every == 0:
            self.run.policy_version += 1
            self.run._ahead, self.run._asked = 0, False  # as ``weights_synced`` has it
            self._older = self._sampler
            self._sampler = Policy()
            self._sampler.load_state_dict(self.actor.module.state_dict())
        self.steps += 1
        batches = [self._batch(m, wrong or {}, controlled) for m in range(MINI)]
        if not self.bypass:
            self._pass(batches)
        for m, data in enumerate(batches):
            tu.assign_non_tensor(data, update_lr_scheduler=m == MINI - 1)
            self.actor.train_batch(data, None)

    def _pass(self, batches: list[Any]) -> None:
        """verl puts the weights of the last sync back for it."""
        now = {name: value.clone() for name, value in self.actor.module.state_dict().items()}
        self.actor.module.load_state_dict(self._sampler.state_dict())
        for data in batches:
            self.actor.infer_batch(data)
        self.actor.module.load_state_dict(now)

    def _batch(self, m: int, wrong: dict[tuple[int, int], str], controlled: int) -> Any:
        sampler, version = (self._older, self.run.policy_version - 1) if self.older else (self._sampler, None)
        version = self.run.policy_version if version is None else version
        ids = [torch.tensor([self._rng.randrange(VOCABULARY) for _ in range(PROMPT + TOKENS)]) for _ in range(ROWS)]
        with torch.no_grad():
            stated = [sampler.log_probs(row)[PROMPT - 1 : -1] for row in ids]
        said = []
        for r in range(ROWS):
            fault, beside = wrong.get((m, r)), version
            if fault == "NaN":
                stated[r][7] = float("nan")
            elif fault == "version":
                beside += 2
            elif fault == "another model":
                stated[r] = stated[r] - 4.0
            said.append({"min_global_steps": beside, "max_global_steps": beside})
            stretch = (0, 0)
            if r % 4 == 1 and r < 4 * controlled:
                stretch = PROMPT + STRETCH.start, PROMPT + STRETCH.stop
                stated[r][STRETCH] += 4.0 * (fault == "another model")  # what was not drafted is right
            document = ids[r].tolist()
            self.run._spans.add([span_of(document[:PROMPT], document[PROMPT:], version, stretch)], version)
        nested = {
            "input_ids": ids,
            "response_mask": [torch.ones(TOKENS, dtype=torch.long)] * ROWS,
            "rollout_log_probs": stated,
        }
        data = TensorDict(
            {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in nested.items()},
            batch_size=[ROWS],
        )
        tu.assign_non_tensor_stack(data, "extra_fields", said)
        return data


#: name: (asynchronous, steps a sync, no log-prob pass, is the text older than the last sync)
WAYS = {
    "a log-prob pass": (False, 1, False),
    "bypassed": (False, 1, True),
    "one step off, a log-prob pass": (True, 1, False),
    "one step off, bypassed": (True, 1, True),
    "several steps a sync, a log-prob pass": (True, 3, False),
    "several steps a sync, bypassed": (True, 3, True),
    "several steps a sync, bypassed, text of the last one": (True, 3, True, False),
}


@pytest.fixture(params=list(WAYS))
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    yield Trainer(*WAYS[request.param])


def test_a_correct_run_is_not_stopped_in_any_way(trainer: Trainer) -> None:
    for _ in range(12):
        trainer.step()
    assert trainer.run.session.metrics()["spec/logprob_alarms"] == 0


@pytest.mark.parametrize("row", [0, ROWS - 1])
@pytest.mark.parametrize("mini", range(MINI))
@pytest.mark.parametrize("step", [0, 1, 2, 5])
@pytest.mark.parametrize("fault", ["NaN", "version"])
def test_law_3_one_wrong_sequence_is_seen_whatever_way_it_came(
    trainer: Trainer, fault: str, step: int, mini: int, row: int
) -> None:
    for _ in range(step):
        trainer.step()
    with pytest.raises(LogprobProvenanceError):
        trainer.step({(mini, row): fault})


@pytest.mark.parametrize("step", [1, 4, 5])
def test_law_3_another_models_log_probs_are_seen_in_each_step(trainer: Trainer, step: int) -> None:
    for _ in range(step):
        trainer.step()
    with pytest.raises(LogprobProvenanceError, match="not the target's"):
        trainer.step({(m, r): "another model" for m in range(MINI) for r in range(ROWS)})


@pytest.mark.parametrize("trainer", ["bypassed", "several steps a sync, bypassed"], indirect=True)
def test_where_the_pass_is_bypassed_a_few_are_recomputed_once_a_step(trainer: Trainer) -> None:
    for _ in range(4):
        trainer.step()
    assert trainer.actor.recomputed == [8] * 4
    assert trainer.run.asked == 4, "and the engines are asked for what they sampled as often"
