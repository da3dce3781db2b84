"""docs/explain/a-step.md, the picture of a step, says what the code does."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch
from builders.law6_faults import LINK_CALLS
from builders.paths import ROOT
from builders.spec_run import Engines
from builders.training import TARGET, sync
from torch import Tensor, nn

from spec_plugin import SpecConfig
from spec_plugin.api import events, hookspecs, spans
from spec_plugin.api.events import RolloutStats
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Memory
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.extension import SpecWorkerExtension
from spec_plugin.engine.vllm.schedule import scheduler, utilities
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.trainer.decoder import Decoder
from spec_plugin.trainer.engine_control import EngineControl
from spec_plugin.trainer.harvest import DecoderHarvest
from spec_plugin.trainer.links import ActorsLink, EngineLink, LocalLink
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun

PAGE = (ROOT / "docs" / "explain" / "a-step.md").read_text()
PICTURE = re.findall(r"```mermaid\n(.*?)```", PAGE, re.S)[0]
HOOKS = {name for name in vars(hookspecs) if name.startswith("spec_")}
#: who has what is called at an arrow that ends there; the control reaches the front through a link
CALLED: dict[str, tuple[Any, ...]] = {
    "C": (SpecRun,),
    "P": (hookspecs, Memory, BreakEvenController),
    "F": (EngineLink, EngineFront),
    "K": (utilities,),
    "W": (SpecWorkerExtension,),
}
ARROW = re.compile(r"(\w)(-?->>)(\w): (.*)")


def arrows(text: str) -> list[tuple[str, str, str]]:
    """(from, to, text) of each."""
    found = [ARROW.fullmatch(line.strip()) for line in text.splitlines()]
    return [(m[1], m[3], m[4]) for m in found if m]


def calls(text: str) -> list[str]:
    return re.findall(r"(\w+)\(", text)


def always(text: str) -> str:
    """Without what does not happen in every step."""
    return re.sub(r"^ *opt .*?^ *end\n", "", text, flags=re.M | re.S)


def test_every_name_at_an_arrow_is_one_of_whom_it_points_to():
    for source, target, text in arrows(PICTURE):
        for name in calls(text):
            assert any(hasattr(owner, name) for owner in CALLED[target]), f"{target} has no {name}"
        for name in re.findall(r"[A-Z][a-z]+[A-Z]\w+|\bSpan\b|\bSchedule\b", text):
            assert hasattr(events, name) or hasattr(spans, name), name
        assert calls(text) or target in "ATC" or source in "FK", f"nothing is called: {text}"
    assert len(arrows(PICTURE)) == PICTURE.count(">>"), "one was not understood"


@pytest.mark.parametrize("name", re.findall(r"participant \w as (\w+[A-Z]\w+)", PICTURE))
def test_every_participant_is_a_class(name):
    assert name in {c.__name__ for owners in CALLED.values() for c in owners} | {scheduler.SpecScheduler.__name__}


def test_every_hook_occurs():
    assert set(re.findall(r"spec_[a-z_]+", PAGE)) >= HOOKS


def test_every_name_in_code_font_exists():
    names = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", PAGE)
    known = {
        c.__name__: c
        for c in (
            EngineLink,
            EngineFront,
            ActorsLink,
            LocalLink,
            SpecRun,
            EngineControl,
            DecoderHarvest,
            SpecSession,
            RolloutStats,
        )
    }
    assert names and all(not inner or hasattr(known[name], inner) for name, inner in names)


def tracing(trace: list[str]) -> object:
    """A plugin that writes down which hooks are fired, and has no opinion."""

    def implementation(name: str) -> Any:
        def hook(self: object) -> dict[str, float] | None:
            trace.append(name)
            return {} if name == "spec_metrics" else None

        return hookimpl(hook, tryfirst=True)

    return type("Tracing", (), {name: implementation(name) for name in HOOKS})()


class Traced(Engines):
    """A link that is asked what the picture says it is."""

    def __init__(self, trace: list[str]) -> None:
        super().__init__()
        self.trace = trace

    def __getattribute__(self, name: str) -> Any:
        if name in LINK_CALLS:
            self.trace.append(name)
        return super().__getattribute__(name)


class Model(nn.Module):
    """Something with layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(TARGET.hf_config["num_hidden_layers"])])
        self.norm, self.embed = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_a_step_makes_these_calls_in_this_order():
    trace: list[str] = []
    manager = create_manager(load_entry_points=False)
    manager.register(tracing(trace))
    session = SpecSession(SpecConfig(self_test=False, serve="always"), TARGET, manager)
    model = Model()
    decoder = Decoder(model.layers, model.norm, model.embed, "model")
    run = SpecRun(session, Traced(trace), lambda run: DecoderHarvest(run, lambda: decoder))
    weight = sync(0).embed
    asyncio.run(run.weights_synced(0, weight, weight))
    trace.clear()  # the first step begins with more
    asyncio.run(run.weights_synced(1, weight, weight))
    documents = [torch.arange(8)], [torch.arange(8) > 3]
    with run.logprob_pass(lambda: documents):
        model(torch.randn(1, 8, TARGET.hf_config["hidden_size"]))
    values, versions = torch.full((1, 4), -1.0), torch.tensor([1])
    run.check(Responses(documents[0], [4], values < 0, values, (versions, versions)), values)
    run.policy_updated(1)
    run.metrics()
    assert not session.failed, session.failure
    drawn = [calls(text) for source, target, text in arrows(always(PICTURE)) if target in "PF" and source == "C"]
    assert trace == [name for names in drawn for name in names]
