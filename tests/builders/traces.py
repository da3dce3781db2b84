"""A trace as a right adapter leaves it; each test breaks one thing in it."""

from __future__ import annotations

from typing import Any

import torch
from spec_plugin_conformance.faults import HARMLESS, TOUR, WRONG
from spec_plugin_conformance.plants import PLANTED
from torch import Tensor

from draft_training import row_digests

Event = dict[str, Any]


class Trace:
    """Events of one session, numbered as they come."""

    def __init__(self, first_version: int = 0, steps: int = 4, draft: int = 0) -> None:
        self.events: list[Event] = []
        engine = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "tensor_parallel": 1}
        engine |= {"device_type": "cpu", "load_format": "auto"}
        self.add("spec_configure", aux_layers=[2, 4, 5], actor_dtype="float32", sampling={}, engine=engine)
        self.add("spec_method")
        options = {"logprobs_mode": "processed_logprobs", "pipeline_parallel_size": "1"}
        self.add("engine_configured", session="e", **engine, has=options, shown=dict(options), options={})
        if draft:
            self.add("spec_load", found=True, path="x")
        for version in range(first_version, first_version + steps):
            self.sync(version, draft + version - first_version)
            if version == first_version:
                checks = [{"name": "greedy", "passed": True, "detail": "8 of 8", "out_of_time": False}]
                self.add("engine_request_begins", session="e", test=True, engine=0)
                self.add("spec_engine_ready", checks=checks)
            self.step(version, draft + version - first_version)

    def add(self, hook: str, session: str = "a", **what: Any) -> None:
        number = len(self.events)
        self.events.append({"hook": hook, "session": session, "pid": 1, "event": number, "time": number, **what})

    def kept_in_half_precision(self) -> None:
        """The engine answers in single precision, of which the trainer keeps less."""
        for event in self.events:
            if event["hook"] == "engine_request":
                event["log_probs"] = [v + 1e-5 for v in event["log_probs"]]
            if event["hook"] == "spec_check_logprobs":
                event["rollout_dtype"] = "bfloat16"

    @staticmethod
    def weights(version: int) -> dict[str, Tensor]:
        """Of the policy; the norm never changes."""
        return {"matrix": torch.arange(6.0).view(2, 3) + version / 3, "norm": torch.ones(3)}

    @classmethod
    def rows(cls, version: int) -> dict[str, dict[str, list[str]]]:
        held = cls.weights(version)
        own = {name: row_digests(tensor) for name, tensor in held.items()}
        return {"own": own, "bfloat16": {name: row_digests(tensor.bfloat16()) for name, tensor in held.items()}}

    def audit(self, moment: str, policy: int, draft: int, digest: int) -> None:
        state = {"draft_version": draft, "draft_digest": f"d{draft}", "target_digest": f"t{digest}", "admitted": 0}
        state |= {"embed_digest": f"e{digest}", "head_digest": f"h{digest}"}
        self.add("engine_state", session="e", engine=0, moment=moment, policy_version=policy, **state)
        self.add("audit", moment=moment, policy_version=policy, **state)

    def sync(self, version: int, draft: int) -> None:
        self.audit("synced", version - 1, draft - 1, version)
        digests = {"embed_digest": f"e{version}", "head_digest": f"h{version}"}
        self.add("spec_weight_sync", policy_version=version, **digests)
        self.add("spec_draft_weights", policy_version=version, published=[draft, f"d{draft}"])
        sent = {"sent_version": draft, "sent_digest": f"d{draft}", "draft_version": draft}
        self.add("spec_refreshed", policy_version=version, installed=True, reason="", **sent)
        self.audit("refreshed", version - 1, draft, version)

    def step(self, version: int, draft: int) -> None:
        self.add("spec_schedule", policy_version=version, k=3)
        self.add("engine_schedule", session="e", engine=0, table=[3, 3, 0])
        self.audit("rollout", version, draft, version)
        self.add("engine_rows", session="e", engine=0, policy_version=version, rows=self.rows(version))
        self.add("engine_phase", session="e", engine=0, policy_version=version)
        self.add("spec_rollout_start", policy_version=version)
        rows = [[-(i + 1 + version) / 64 for i in range(n)] for n in (5, 7)]
        began = len(self.events)
        for _ in rows:
            self.add("engine_request_begins", session="e", test=False, engine=0, clock="own")
        for row in rows:
            asked = {"engine": 0, "began": began, "asked": {"max_tokens": 8}}
            self.add("engine_request", session="e", test=False, sampling={}, prompt=3, log_probs=row, plain=0, **asked)
        self.add("spec_rollout_end", policy_version=version, drafts=40, tokens=12, seconds=3.0)
        self.audit("rolled out", version, draft, version)
        self.add("harvest_opened")
        self.add("spec_target_forward", policy_version=version, dtype="float32", log_probs=rows)
        caught = dict.fromkeys(
            ("nan recomputed", "nan rollout", "another model", "the next token", "stale versions"), True
        )
        self.add(
            "spec_check_logprobs",
            policy_version=version,
            response_lengths=[5, 7],
            rollout=True,
            versions=[[version], [version]],
            caught={"unchanged": False, **caught},
            rows={"rollout": rows, "recomputed": rows},
            rollout_dtype="float32",
            differences={"0": 1e-6},
            speculating=True,
            lag_allowed=False,
            rollout_in_loss=False,
            plain=0,
        )
        self.add("policy_update", optimizer="AdamW")
        self.add("spec_train_draft", step=version, changed=[])
        self.add("spec_metrics", failure=None)
        self.add("handed_metrics", values=handed(version + 1))
        self.add("spec_save", path="x")

    def find(self, hook: str, index: int = 0, **what: Any) -> Event:
        """One event, to be changed in place."""
        return [e for e in self.events if e["hook"] == hook and all(e[k] == v for k, v in what.items())][index]

    def drop(self, hook: str, index: int = 0) -> Trace:
        self.events.remove(self.find(hook, index))
        return self

    def swap(self, first: str, second: str, index: int = 0) -> Trace:
        """Exchange the order of two events."""
        a, b = self.find(first, index), self.find(second, index)
        a["event"], b["event"] = b["event"], a["event"]
        return self


def handed(step: int) -> dict[str, float]:
    """What the session hands out in a step."""
    values = {"failed": 0.0, "on": 1.0, "acceptance_length": 2.5, "draft_loss": 7.0 - step, "refresh_refused": 0.0}
    return {f"spec/{name}": value for name, value in values.items()}


def metrics(prefix: str = "") -> dict[int, dict[str, float]]:
    """What three steps log."""
    out = {}
    for step in (1, 2, 3):
        out[step] = {f"{prefix}{name}": value for name, value in handed(step).items()} | {"loss": 3.0}
    return out


def tour() -> list[Event]:
    """What a whole tour writes."""
    events: list[Event] = []
    version = 0
    for hook in TOUR:
        events.append({"event": "broken", "hook": hook, "policy_version": version})
        plain = {"drafts": 0, "tokens": 50, "why": f"x: {hook} broken: {PLANTED}"}
        if hook in HARMLESS:
            plain |= {"drafts": 40, "why": "None"}
        events.append({"event": "plain", "hook": hook, "policy_version": version + 1, **plain})
        events.append({"event": "drafting", "policy_version": version + 2, "drafts": 40})
        version += 2
    for what in WRONG:
        events.append({"event": "planted", "what": what, "policy_version": version})
        events.append(
            {"event": "refused", "what": what, "policy_version": version, "why": "rollout log-probs are not finite"}
        )
    events.append({"event": "violation", "policy_version": version})
    return events


def one_problem(problems: list[str], text: str) -> None:
    """Exactly one problem, and it says this."""
    assert len(problems) == 1, problems
    assert text in problems[0]
