"""Every drafting method on one target, and in one GRPO run: what is accepted, what that gains, and what it costs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# so that this file runs by path, from anywhere; less its own folder, where numba (for ngram) would find our coverage.py for its
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent)]

from examples.bench import common, workload  # noqa: E402
from examples.bench.common import Spread, interleave, paired, say, show  # noqa: E402
from examples.quickstart import report as quickstart  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy, policy_folder  # noqa: E402
from examples.quickstart.trainers import TRAINERS, Start  # noqa: E402
from spec_plugin import SpecConfig  # noqa: E402
from spec_plugin.events import TargetInfo  # noqa: E402
from spec_plugin.manager import built_in_method  # noqa: E402
from spec_plugin.method import Method  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

HELP = """Compare the drafting methods.

\b
engine  each method's engine against one without spec-plugin, in turn, on the width-padded target, a draft trained by our own
        loop where there is one; k fixed. "seen before": suffix, with four rollouts of each prompt in its memory.
run     the quickstart's GRPO run in verl with each method, from a newborn draft, the controller deciding; suffix and ngram
        on 24 prompts, so that each comes back every second step.
"""

METHODS = ("eagle3", "draft_model", "mtp", "suffix", "ngram")
#: rollouts of a prompt that suffix remembers of the epoch before
_SAMPLES = 4
_SPEC = "+actor_rollout_ref.rollout.custom.spec."


@dataclass(frozen=True)
class Cell:
    """One method at one batch size and k."""

    method: str
    batch: int
    k: int
    acceptance_length: float  # vLLM's: of forward passes that had a draft
    tokens_per_forward: float  # of all
    speedup: Spread  # against an engine without spec-plugin whose weights can change
    against_off: Spread  # against the same engine with k=0


@dataclass(frozen=True)
class Subject:
    """A method and what it is measured on."""

    name: str
    target: Path
    spec: Mapping[str, Any]
    remembers: bool = False
    about: Mapping[str, float] = field(default_factory=dict)


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS, help="May be repeated."
)
@click.option("--part", "parts", multiple=True, type=click.Choice(["engine", "run"]), default=("engine", "run"))
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: 101M parameters).")
@click.option("--k", "ks", multiple=True, type=int, default=(3, 8), help="Drafted tokens; may be repeated.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), help="Batch size; may be repeated.")
@click.option("--rounds", default=4, help="Rounds that count; one more warms up.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--steps", default=8, help="GRPO steps of each run.")
@click.option("--rollouts", default=500, help="Rollouts that a draft is trained on.")
@click.option("--train-steps", default=300, help="Optimizer steps of draft training.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, methods = options.pop("out"), options["methods"]
    common.prepare_process(options["threads"])
    where = common.environment("cpu")
    cells: list[Cell] = []
    runs: dict[str, list[quickstart.Record]] = {}
    if "engine" in options["parts"]:
        for name in methods:
            cells += measure(subject_of(name, options), options)
            report_cells(cells)
            common.write_results("methods", options, {"engine": [asdict(c) for c in cells]}, where, out)
    if "run" in options["parts"]:
        for name in methods:
            runs[name] = grpo(name, options["steps"], out)
        report_runs(runs)
    content = {"engine": [asdict(c) for c in cells], "run": runs}
    file = common.write_results("methods", options, content, where, out)
    if cells and runs:
        write_picture(cells, runs, file.with_suffix(".png"))
        say(f"picture: {file.with_suffix('.png')}")


# ------------------------------------------------------------------------------------------------ engines


def subject_of(name: str, options: Mapping[str, Any]) -> Subject:
    """The method on its target, with a trained draft where it has one."""
    plain = workload.default_target()
    if name in ("suffix", "ngram"):
        padded = workload.padded_target(plain, options["width"], "float32")
        return Subject(name, padded, {"method": name}, remembers=name == "suffix")
    target = mimo_target() if name == "mtp" else plain
    settings = workload.DraftSettings(rollouts=options["rollouts"], steps=options["train_steps"], k=max(options["ks"]))
    trained = workload.trained_draft(
        target, lambda n: workload.addition_prompts(target, n, 1), settings, "cpu", method_on(target, name)
    )
    padded = workload.padded_target(target, options["width"], "float32")
    if name == "mtp":
        return Subject(name, with_layer(padded, trained.path, options["width"]), {"method": name})
    return Subject(name, padded, {"method": name, "draft": str(trained.path)})


def method_on(target: Path, name: str) -> Method:
    """What the method says of a target."""
    hf = json.loads((target / "config.json").read_text())
    info = TargetInfo(str(target), hf, "float32", load_format="dummy")
    found = built_in_method(SpecConfig.parse({"method": name}), info)
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
        partial = workload.partial_folder(out)
        shutil.copytree(padded, partial, dirs_exist_ok=True)
        hf = json.loads((partial / "config.json").read_text())
        hf |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (partial / "config.json").write_text(json.dumps(hf))
        layer = workload.pad_state(load_file(trained / "model.safetensors"), width)
        save_file(load_file(partial / "model.safetensors") | layer, partial / "model.safetensors", {"format": "pt"})
        partial.rename(out)
    return out


def measure(subject: Subject, options: Mapping[str, Any]) -> list[Cell]:
    """All batch sizes and k of a method; of one that remembers, prompts at first sight and seen before."""
    from examples.bench.engines import EngineSettings, Remote  # slow to import

    say(f"{subject.name}: starting two engines")
    settings = EngineSettings(max_num_seqs=max(64, *options["batches"]))
    threads, most = options["threads"], max(options["ks"])
    live = Remote(threads, "live", subject.target, settings)
    flag = Remote(threads, "flag", subject.target, settings, None, most, subject.spec)
    live.wait()
    flag.wait()
    cells = []
    for batch in options["batches"]:
        for seen in (False, True) if subject.remembers else (False,):
            cells += Bench(subject, live, flag, batch, seen, options).measure()
    live.close()
    flag.close()
    return cells


class Bench:
    """All arms of one method and batch size."""

    def __init__(
        self, subject: Subject, live: Remote, flag: Remote, batch: int, seen: bool, options: Mapping[str, Any]
    ) -> None:
        self.subject, self.live, self.flag, self.batch, self.seen = subject, live, flag, batch, seen
        self.tokens, self.rounds, self.ks = options["tokens"], options["rounds"], options["ks"]
        self.prompts = workload.addition_prompts(subject.target, batch * (self.rounds + 1), seed=700 + batch)
        self.forwards: dict[int, list[int]] = {k: [] for k in self.ks}
        self.before: list[list[int]] = []  # responses of the epoch before, _SAMPLES for each prompt
        if seen:
            many = [p for p in self.prompts for _ in range(_SAMPLES)]
            self.before = live.run(many, 1.0, self.tokens).outputs

    def measure(self) -> list[Cell]:
        """Every arm in every round."""
        arms: dict[str, Callable[[int], Timing]] = {"live": lambda i: self.live.run(self._asked(i), 1.0, self.tokens)}
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

    def _asked(self, index: int) -> workload.Prompts:
        return self.prompts[index * self.batch : (index + 1) * self.batch]

    def _drafting(self, index: int, k: int) -> Timing:
        if self.subject.remembers:  # what another arm has just sampled must not be known
            self.flag.rpc("spec_forget_rollouts")
        if self.seen:
            rows = range(index * self.batch * _SAMPLES, (index + 1) * self.batch * _SAMPLES)
            pairs = [(self.prompts[i // _SAMPLES], self.before[i]) for i in rows]
            self.flag.rpc("spec_remember", [(_bytes(p), _bytes(r)) for p, r in pairs])
        self.flag.set_k(k)
        self.flag.take_steps()
        timing = self.flag.run(self._asked(index), 1.0, self.tokens)
        if k:
            self.forwards[k].append(sum(s.batch * s.steps for s in self.flag.take_steps() if s.k > 0))
        return timing


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


# ------------------------------------------------------------------------------------------------ runs


def grpo(name: str, steps: int, out: Path) -> list[quickstart.Record]:
    """The quickstart's run in verl with this method."""
    settings = replace(QUICKSTART, family="mimo" if name == "mtp" else "qwen3")
    cache = common.CACHE.parent / "quickstart"
    cached_policy(cache, settings)
    overrides = [f"{_SPEC}method={name}"]
    if name in ("suffix", "ngram"):
        overrides.append("data.train_max_samples=24")
    folder = out / f"methods-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    start = Start(
        policy_folder(cache, settings),
        cache / f"data-{settings.digest}",
        settings,
        folder,
        steps,
        False,
        tuple(overrides),
    )
    say(f"a GRPO run of {steps} steps with {name}: {folder}")
    trainer = TRAINERS["verl"]
    run = trainer.run(start)
    return [quickstart.record(step, metrics, trainer) for step, metrics in run.follow()]


# ------------------------------------------------------------------------------------------------ reports


def report_cells(cells: Sequence[Cell]) -> None:
    """Print the engines' table."""
    rows = [
        [
            c.method,
            str(c.batch),
            str(c.k),
            f"{c.acceptance_length:.2f}",
            f"{c.tokens_per_forward:.2f}",
            c.speedup.text(".2f"),
            c.against_off.text(".2f"),
        ]
        for c in cells
    ]
    head = ["method", "batch", "k", "acceptance\nlength", "tokens per\nforward", "/ plain", "/ k=0"]
    show("Each method's engine against one without spec-plugin: medians (quartiles) of tokens per second", head, rows)


def report_runs(runs: Mapping[str, Sequence[quickstart.Record]]) -> None:
    """Print the runs' table."""
    names = {
        "speculating": ".0f",
        "acceptance_length": ".2f",
        "tokens_per_forward": ".2f",
        "speedup_realised": ".2f",
        "draft_training_ms": ".0f",
        "refresh_ms": ".0f",
    }
    rows = []
    for method, records in runs.items():
        rows += [
            [method, n.replace("_", " "), " ".join(quickstart.show(r[n], f) for r in records)] for n, f in names.items()
        ]
    show("The quickstart's GRPO run with each method, step by step", ["method", "what", "by step"], rows)


def write_picture(cells: Sequence[Cell], runs: Mapping[str, Sequence[quickstart.Record]], file: Path) -> None:
    """Left: speed by batch size, each method's best k. Right: tokens per forward along the run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    methods = list(dict.fromkeys(c.method for c in cells))
    batches = sorted({c.batch for c in cells})
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        tops = [
            max((c for c in cells if (c.method, c.batch) == (method, b)), key=lambda c: c.speedup.median)
            for b in batches
        ]
        heights = [c.speedup.median for c in tops]
        spans = [
            [h - c.speedup.low for h, c in zip(heights, tops, strict=True)],
            [c.speedup.high - h for h, c in zip(heights, tops, strict=True)],
        ]
        places = [x + (i - (len(methods) - 1) / 2) * width for x in range(len(batches))]
        left.bar(places, heights, width, label=method, yerr=spans, error_kw={"lw": 0.8, "ecolor": "gray"})
    left.axhline(1.0, color="gray", lw=0.8, ls=":")
    left.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
    left.set_ylabel("rollout speed (plain: 1), best k")
    left.set_title("An engine with a trained draft")
    left.legend(fontsize=8)
    for method, records in runs.items():
        right.plot(*quickstart.series(records, "tokens_per_forward"), marker="o", ms=3, label=method)
    right.set_xlabel("GRPO step")
    right.set_ylabel("tokens per forward pass while drafting")
    right.set_title("The quickstart's run, from nothing")
    right.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
