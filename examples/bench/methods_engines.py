"""Each drafting method in an engine of its own, against one without spec-plugin: with k fixed, and under the controller."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from examples.bench import common, workload
from examples.bench.common import interleave, paired, say, spread
from examples.bench.methods_report import Cell, Controlled
from examples.bench.steering import Steered, calibrate
from examples.quickstart.policy import cached_policy, made_whole
from spec_plugin import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.lifecycle.manager import built_in_method

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

#: rollouts of a prompt that suffix remembers of the epoch before
_SAMPLES = 4
#: of a calibration, which is to take about as long as the self-test: runs of each k, and steps of each
_REPEATS, _STEPS = 2, 6


@dataclass(frozen=True)
class Subject:
    """A method and what it is measured on."""

    name: str
    small: Path  # the policy
    target: Path  # the same, padded: every output is what it was
    spec: Mapping[str, Any]
    remembers: bool = False


def subject_of(name: str, options: Mapping[str, Any]) -> Subject:
    """The method on its target, with a trained draft where it has one."""
    plain = workload.default_target()
    if name in ("suffix", "ngram"):
        padded = workload.padded_target(plain, options["width"], "float32")
        return Subject(name, plain, padded, {"method": name}, remembers=name == "suffix")
    target = mimo_target() if name == "mtp" else plain
    settings = workload.DraftSettings(rollouts=options["rollouts"], steps=options["train_steps"], k=max(options["ks"]))
    trained = workload.trained_draft(
        target, lambda n: workload.addition_prompts(target, n, 1), settings, "cpu", method_on(target, {"method": name})
    )
    padded = workload.padded_target(target, options["width"], "float32")
    if name == "mtp":
        return Subject(name, target, with_layer(padded, trained.path, options["width"]), {"method": name})
    return Subject(name, target, padded, {"method": name, "draft": str(trained.path)})


def method_on(target: Path, spec: Mapping[str, Any]) -> Method:
    """What the method of these options says of a target."""
    hf = json.loads((target / "config.json").read_text())
    info = TargetInfo(str(target), hf, "float32", load_format="dummy")
    found = built_in_method(SpecConfig.parse(spec), info)
    assert found is not None
    return found


def mimo_target() -> Path:
    """The careful policy as a Qwen2, with a layer for multi-token prediction that knows nothing."""
    return cached_policy(common.CACHE, replace(workload.CAREFUL, family="mimo"))


def with_layer(padded: Path, trained: Path, width: int) -> Path:
    """The padded target, which transformers has written without its layer, with the trained one, padded likewise."""
    from safetensors.torch import load_file, save_file

    out = padded.with_name(f"{padded.name}-{trained.name}")
    if not out.exists():
        with made_whole(out) as partial:
            shutil.copytree(padded, partial, dirs_exist_ok=True)
            hf = json.loads((partial / "config.json").read_text())
            hf |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
            (partial / "config.json").write_text(json.dumps(hf))
            layer = workload.pad_state(load_file(trained / "model.safetensors"), width)
            save_file(load_file(partial / "model.safetensors") | layer, partial / "model.safetensors", {"format": "pt"})
    return out


class Engines:
    """Of each method in turn, and one without spec-plugin, which stays as long as the target does."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._live: tuple[Path, Remote] | None = None
        self._flag: Remote | None = None

    def start(self, subject: Subject) -> tuple[Remote, Remote]:
        """The one without, and the method's; the method's before it is ended."""
        from examples.bench.engines import EngineSettings, Remote  # slow to import

        settings = EngineSettings(max_num_seqs=max(self._options["seats"], *self._options["batches"]))
        threads, most = self._options["threads"], max(self._options["ks"])
        if self._flag is not None:
            self._flag.close()
        if self._live is not None and self._live[0] != subject.target:
            self._live[1].close()
            self._live = None
        say(f"{subject.name}: starting {'an engine' if self._live else 'two engines'}")
        live = self._live[1] if self._live else Remote(threads, "live", subject.target, settings)
        flag = Remote(threads, "flag", subject.target, settings, None, most, subject.spec)
        if self._live is None:
            live.wait()
        self._live, self._flag = (subject.target, live), flag.wait()
        return live, self._flag

    def close(self) -> None:
        """End all."""
        for engine in (self._flag, self._live and self._live[1]):
            if engine:
                engine.close()


def measure(subject: Subject, engines: Engines, options: Mapping[str, Any]) -> list[Cell]:
    """All batch sizes and k of a method; of one that remembers, prompts at first sight and seen before."""
    live, flag = engines.start(subject)
    cells = []
    for batch in options["batches"]:
        for seen in (False, True) if subject.remembers else (False,):
            cells += Bench(subject, live, flag, batch, seen, options).measure()
    return cells


class Bench:
    """All arms of one method and batch size, k fixed."""

    def __init__(
        self, subject: Subject, live: Remote, flag: Remote, batch: int, seen: bool, options: Mapping[str, Any]
    ) -> None:
        self.subject, self.live, self.flag, self.batch, self.seen = subject, live, flag, batch, seen
        self.tokens, self.rounds, self.ks = options["tokens"], options["rounds"], options["ks"]
        self.prompts = workload.addition_prompts(subject.target, batch * (self.rounds + 1), seed=700 + batch)
        self.forwards: dict[int, list[int]] = {k: [] for k in self.ks}
        self.before = before(subject.small, self.prompts, self.tokens) if seen else []

    def measure(self) -> list[Cell]:
        """Every arm in every round; the one that warms up is short."""
        arms: dict[str, Callable[[int], Timing]] = {"live": self._plain}
        for k in (0, *self.ks):
            arms[f"k={k}"] = lambda i, k=k: self._drafting(i, k)  # type: ignore[misc]
        name = f"{self.subject.name}, seen before" if self.seen else self.subject.name
        runs = interleave(arms, self.rounds, 1, f"{name}, batch {self.batch}: {', '.join(arms)} in turn")
        rates = {arm: [t.rate("wall") for t in timings] for arm, timings in runs.items()}
        cells = []
        for k in self.ks:
            drafts, accepted = (sum(getattr(t, n) for t in runs[f"k={k}"]) for n in ("drafts", "accepted"))
            passes = max(drafts, sum(self.forwards[k][-self.rounds :]))
            speedup, against = (paired(rates[f"k={k}"], rates[arm]) for arm in ("live", "k=0"))
            per_draft, per_pass = (1 + accepted / n if n else 1.0 for n in (drafts, passes))
            cells.append(Cell(name, self.batch, k, per_draft, per_pass, speedup, against))
        return cells

    def _asked(self, index: int) -> tuple[workload.Prompts, int]:
        """Prompts and tokens of a round."""
        tokens = self.tokens if index else max(2, self.tokens // 4)
        return self.prompts[index * self.batch : (index + 1) * self.batch], tokens

    def _plain(self, index: int) -> Timing:
        prompts, tokens = self._asked(index)
        return self.live.run(prompts, 1.0, tokens)

    def _drafting(self, index: int, k: int) -> Timing:
        if self.subject.remembers:  # what another arm has just sampled must not be known
            self.flag.rpc("spec_forget_rollouts")
        if self.seen:
            rows = range(index * self.batch * _SAMPLES, (index + 1) * self.batch * _SAMPLES)
            pairs = [(self.prompts[i // _SAMPLES], self.before[i]) for i in rows]
            self.flag.rpc("spec_remember", [(_bytes(p), _bytes(r)) for p, r in pairs])
        self.flag.set_k(k)
        self.flag.take_steps()
        prompts, tokens = self._asked(index)
        timing = self.flag.run(prompts, 1.0, tokens)
        if k:
            self.forwards[k].append(sum(s.batch * s.steps for s in self.flag.take_steps() if s.k and s.alike))
        return timing


def before(small: Path, prompts: workload.Prompts, tokens: int) -> list[list[int]]:
    """Responses of the epoch before, ``_SAMPLES`` of each prompt, by the policy that was not padded: it says the same."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    torch.manual_seed(7)
    many = [p for p in prompts for _ in range(_SAMPLES)]
    return [response for _, response in workload.sample(model, many, workload.DraftSettings(tokens=tokens))]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


# ------------------------------------------------------------------------------------------------ the controller


def control(subject: Subject, engines: Engines, options: Mapping[str, Any]) -> list[Controlled]:
    """All batch sizes of a method, a controller of its own for each; every prompt comes twice, in two epochs."""
    live, flag = engines.start(subject)
    sizes, k = sorted(options["batches"]), max(options["ks"])
    method = method_on(subject.target, subject.spec)
    say(f"{subject.name}: what steps cost")
    told = workload.addition_prompts(subject.target, sizes[-1], seed=5)
    steps = calibrate(flag, told, sizes, k, repeats=_REPEATS, steps=_STEPS)
    found = []
    for batch in options["batches"]:
        if subject.remembers:
            flag.rpc("spec_forget_rollouts")
        steered = Steered(flag, steps, None, k=k, max_num_seqs=max(options["seats"], *sizes), method=method)
        found.append(_steered(subject, live, steered, batch, options))
    return found


def _steered(subject: Subject, live: Remote, steered: Steered, batch: int, options: Mapping[str, Any]) -> Controlled:
    rounds, tokens = options["phases"], options["tokens"]
    epoch = (rounds + 1) // 2
    prompts = workload.addition_prompts(subject.target, batch * epoch, seed=300 + batch)

    def asked(index: int) -> workload.Prompts:
        return prompts[index % epoch * batch : (index % epoch + 1) * batch]

    arms: dict[str, Callable[[int], Timing]] = {
        "live": lambda i: live.run(asked(i), 1.0, tokens),
        "controller": lambda i: steered.run(i, asked(i), 1.0, (tokens,) * batch),
    }
    live.run(asked(0), 1.0, max(2, tokens // 4))  # its first batch of this size
    runs = interleave(arms, rounds, 0, f"{subject.name}, batch {batch}: plain and the controller in turn")
    rates = {arm: [t.rate("wall") for t in timings] for arm, timings in runs.items()}
    took = {arm: sum(t.total.wall for t in timings) for arm, timings in runs.items()}
    drafts, accepted = (sum(getattr(t, n) for t in runs["controller"]) for n in ("drafts", "accepted"))
    passes = max(drafts, steered.forwards)
    by_round = [a / b for a, b in zip(rates["controller"], rates["live"], strict=True)]
    per_draft, per_pass = (1 + accepted / n if n else 1.0 for n in (drafts, passes))
    whole = took["live"] / took["controller"]  # as many tokens in both
    chosen = steered.chosen
    return Controlled(subject.name, batch, spread(by_round), whole, by_round, chosen, per_draft, per_pass)
