"""One run of TRL's trainer, step by step: which of its passes is judged, and what it must not leave unchecked (law 3)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spec_plugin_trl.trainer import TrlRun

from spec_plugin.adapter import PatchError, WrongOrderError

B, T = 2, 3


class Run:
    """``SpecRun``, of which only the order of calls is of interest."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.harvested: list[Any] = []  # of each forward pass what the policy sampled, row by row
        self.policy_version = -1
        method, ledger = SimpleNamespace(draft=object()), SimpleNamespace(spending=nullcontext)
        self.session = SimpleNamespace(method=method, copy_of=lambda t: t.clone(), ledger=ledger)

    async def weights_synced(self, version: int, embed: Any, head: Any, copied: bool) -> None:
        self.policy_version = version
        self.calls.append(("synced", version, head is embed))

    async def rollouts_begin(self) -> None:
        self.calls.append("begin")

    async def rollouts_end(self) -> None:
        self.calls.append("end")

    @contextmanager
    def logprob_pass(self) -> Any:
        self.calls.append("pass begins")
        yield
        self.calls.append("pass ends")

    def micro_batch(self, documents: Any, rows: Any) -> Any:
        self.harvested.append([mask.int().tolist() for mask in documents()[1]])
        return nullcontext()

    def check(self, responses: Any, recomputed: torch.Tensor, rollout_in_loss: bool) -> None:
        self.cut = responses.cut
        self.calls.append(("check", float(recomputed[0, 0]), rollout_in_loss))

    def policy_updated(self, step: int) -> None:
        self.calls.append("updated")

    def metrics(self) -> dict[str, float]:
        return {"spec/state": float(len(self.calls)), "spec/k": 1.0}


class Model(torch.nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> Any:
        return self.embed

    def get_output_embeddings(self) -> Any:
        return self.head


def batch() -> dict[str, torch.Tensor]:
    ones = torch.ones(B, T, dtype=torch.long)
    return {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones, "completion_mask": ones}


class Trainer:
    """As much of TRL's as ``TrlRun`` touches, in its order."""

    def __init__(self, tied: bool = False, **fields: Any) -> None:
        settings = {
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 1,
            "vllm_importance_sampling_correction": True,
            "off_policy_mask_threshold": None,
        }
        self.args = SimpleNamespace(**settings | fields)
        self.num_iterations = fields.get("num_iterations", 1)
        self.model = Model(tied)
        self.reference: Any = None  # None: with an adapter, the same model
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model, keep_torch_compile: model, device="cpu")
        self._metrics: Any = {"train": defaultdict(list)}
        self.generation = SimpleNamespace(_dist=SimpleNamespace(gather_params=lambda _: nullcontext()))
        self.run = Run()
        self.spec = TrlRun(self, self.generation, self.run)  # type: ignore[arg-type]
        self.kl = False
        self.user: Any = None  # what a function of the user's answers, in the place of TRL's generation
        self.tools: Any = None  # which tokens of each completion the policy sampled, where tools answer

    def logps(self, model: Any, value: float) -> None:
        ids = torch.ones(B, 2 * T, dtype=torch.long)
        self.spec.get_per_token_logps_and_entropies(
            lambda *_, **__: (torch.full((B, T), value), None, torch.tensor(1.0)), model, ids, ids, T, batch_size=1
        )

    def generate_and_score(self, _inputs: Any) -> dict[str, torch.Tensor]:
        if self.state.global_step != self.spec.synced:
            self.spec.sync_weights(lambda: None)
        if self.user is None:
            self.spec.generate(lambda: None)
        else:
            self.spec.rollout(lambda prompts, trainer: self.user, [], self)
        if self.tools is not None:
            self.spec.tool_call_loop(lambda: (self.tools, [], [[1] * T] * B, None, 0, 0, []))
        with torch.no_grad():
            correction = getattr(self.args, "vllm_importance_sampling_correction", True)
            every = self.args.steps_per_generation * self.num_iterations
            if correction or self.args.gradient_accumulation_steps % every:
                self.logps(self.model, -1.0)
            if self.kl:
                self.logps(self.reference or self.model, -9.0)
        return self.batch()

    def batch(self) -> dict[str, torch.Tensor]:
        return batch() | ({} if self.tools is None else {"tool_mask": torch.tensor(self.tools)})

    def step(self, generate: bool = True) -> None:
        if generate:
            self.spec.generate_and_score_completions(self.generate_and_score, {})
        for _ in range(self.args.gradient_accumulation_steps):
            self.spec.compute_loss(lambda model, inputs: self.logps(model, -2.0), self.model, self.batch())
        self.state.global_step += 1
        self.spec.on_step_end(self.args, self.state, None)


def test_a_batch_is_judged_before_its_loss_and_versions_rise_by_one() -> None:
    trainer = Trainer()
    for _ in range(2):
        trainer.step()
    of_a_step = ["pass begins", "pass ends", "end", ("check", -1.0, True), "updated"]
    assert trainer.run.calls == [("synced", 0, False), *of_a_step, ("synced", 1, False), *of_a_step]


@pytest.mark.parametrize("kl", [False, True])
def test_where_trl_recomputes_nothing_the_losses_own_first_passes_are_judged_and_never_the_references(kl: bool) -> None:
    trainer = Trainer(vllm_importance_sampling_correction=False, gradient_accumulation_steps=2, steps_per_generation=2)
    trainer.kl = kl  # the reference is the policy without its adapter: the same module
    trainer.step()
    check = ("check", -2.0, False)
    expected = [("synced", 0, False), "end", "pass begins", check, check, "pass ends", "updated"]
    assert trainer.run.calls == expected


@pytest.mark.parametrize("before_loss", [True, False])
def test_what_a_tool_said_is_no_text_of_the_policys_for_the_draft_to_learn(before_loss: bool) -> None:
    trainer = Trainer(vllm_importance_sampling_correction=before_loss)
    trainer.max_completion_length = T  # type: ignore[attr-defined]
    trainer.step()
    whole = [[[0] * T + [1] * T]] * B
    assert trainer.run.harvested == whole  # a row a pass
    trainer.tools = [[1, 0, 0], [1, 0, 1]]
    trainer.step()
    assert trainer.run.harvested[B:] == [[[0] * T + row] for row in trainer.tools]
    trainer.tools = None  # the next batch has none of the last one's
    trainer.step()
    assert trainer.run.harvested[2 * B :] == whole


def test_a_function_of_the_users_begins_a_phase_and_says_which_tokens_are_the_policys() -> None:
    trainer = Trainer()
    trainer.step()
    trainer.run.calls.clear()
    trainer.model.eval()
    trainer.user = {"env_mask": [[1, 0, 1]] * B}
    for _ in range(2):
        trainer.spec.generate_and_score_completions(trainer.generate_and_score, {})
    assert trainer.run.calls == [("synced", 1, False), "end", "begin", "end"]
    trainer.model.train()
    trainer.step()
    assert trainer.run.harvested[B:] == [[[0] * T + [1, 0, 1]]] * B
    trainer.user = {}  # it need not
    trainer.step()
    assert trainer.run.harvested[2 * B :] == [[[0] * T + [1] * T]] * B


def test_law_3_only_what_trls_own_loop_may_have_cut_behind_a_tool_is_told_as_cut() -> None:
    trainer = Trainer()
    trainer.max_completion_length = T  # type: ignore[attr-defined]
    trainer.tools = [[1, 1, 1], [1, 0, 1]]  # both are as long as they may be
    trainer.step()
    assert trainer.run.cut.tolist() == [False, True]
    marks, trainer.tools = trainer.tools, None
    trainer.user = {"env_mask": marks}  # a function of the user's is not cut by anybody
    trainer.batch = lambda: batch() | {"tool_mask": torch.tensor(marks)}  # type: ignore[method-assign]
    trainer.step()
    assert trainer.run.cut is None


def test_a_trl_that_answers_something_else_to_its_tools_is_said_to() -> None:
    trainer = Trainer()
    trainer.tools = [[1] * (T + 1)] * B
    with pytest.raises(PatchError, match="_tool_call_loop answers something else"):
        trainer.step()


def test_log_probs_of_the_engine_that_mask_the_loss_count_as_in_it() -> None:
    trainer = Trainer(vllm_importance_sampling_correction=False, off_policy_mask_threshold=0.5)
    trainer.step()
    assert ("check", -2.0, True) in trainer.run.calls


def test_a_batch_that_lasts_several_updates_is_judged_once_and_has_one_version() -> None:
    trainer = Trainer(steps_per_generation=2, num_iterations=2)
    for step in range(8):
        trainer.step(generate=step % 4 == 0)
    assert [c for c in trainer.run.calls if c[0] == "synced"] == [("synced", 0, False), ("synced", 1, False)]
    assert trainer.run.calls.count("updated") == 2
    resumed = Trainer(steps_per_generation=2, num_iterations=2)
    resumed.state.global_step = 8
    resumed.step()
    assert resumed.run.calls[0] == ("synced", 2, False)


def test_rloo_asks_for_no_log_probs_and_recomputes_always() -> None:
    trainer = Trainer()
    del trainer.args.vllm_importance_sampling_correction, trainer.args.off_policy_mask_threshold
    trainer.step()
    assert ("check", -1.0, False) in trainer.run.calls


class Replacing(Trainer):
    """A user's, whose rollouts and log-probs are its own."""

    def step(self, generate: bool = True) -> None:
        self.generate_and_score({})
        self.state.global_step += 1
        self.spec.on_step_end(self.args, self.state, None)


def test_law_3_rollouts_that_nobody_has_checked_stop_the_run_with_the_class_that_replaces_trls() -> None:
    trainer = Replacing()
    with pytest.raises(WrongOrderError, match=r"Replacing trained on rollouts whose log-probs nobody has checked"):
        trainer.step()


def test_an_evaluation_is_a_phase_of_its_own_and_nothing_of_it_is_judged() -> None:
    trainer = Trainer()
    trainer.step()
    trainer.run.calls.clear()
    trainer.model.eval()
    trainer.spec.generate_and_score_completions(trainer.generate_and_score, {})
    trainer.spec.generate_and_score_completions(trainer.generate_and_score, {})
    trainer.model.train()
    trainer.step()
    assert trainer.run.calls[:4] == [("synced", 1, False), "end", "begin", "end"]
    assert trainer.run.calls[4:] == ["begin", "pass begins", "pass ends", "end", ("check", -1.0, True), "updated"]


def test_an_engine_that_slept_between_two_turns_gets_its_weights_and_no_refresh() -> None:
    trainer = Trainer()
    trainer.spec.sync_weights(lambda: None)
    sent: list[str] = []
    trainer.spec.sync_weights(lambda: sent.append("weights"))
    assert sent == ["weights"] and trainer.run.calls == [("synced", 0, False)]


def test_a_tied_head_is_told_as_the_embedding_and_a_method_without_a_draft_gets_no_copies() -> None:
    trainer = Trainer(tied=True)
    trainer.step()
    assert trainer.run.calls[0] == ("synced", 0, True)
    bare = Trainer()
    bare.run.session.method.draft = None
    bare.generation._dist = None  # nothing is gathered
    bare.step()
    assert bare.run.calls[0] == ("synced", 0, True)  # both are None


def test_of_several_steps_trl_logs_the_mean_of_what_has_one_and_the_last_of_codes() -> None:
    trainer = Trainer()
    for _ in range(3):
        trainer.step()
    logged = trainer._metrics["train"]
    assert logged["spec/k"] == [1.0] * 3 and len(logged["spec/state"]) == 1
