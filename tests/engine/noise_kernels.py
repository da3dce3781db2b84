"""A script: vLLM's own kernels, of any version's sources, draw proposals and what replaces them, in Triton's interpreter.

    SPEC_PLUGIN_CPU_RUNNER=v2 python noise_kernels.py FOLDER REQUESTS

``FOLDER`` holds a package ``vllm`` whose two files of kernels and ``sample_draft`` are taken; all else is the installed one's.
Prints JSON, for proposals as vLLM drew them before its repair (``before``) and with ours (``after``): ``same``, the share of
requests whose proposal from even logits is the token that the target draws there; ``tokens``, how often each token was emitted
where each of the requests verifies one proposal; and ``expected``, the policy's own share of each.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import spec_plugin_cpu.v2_runner.in_force  # noqa: F401  # before Triton
import torch

from spec_plugin.engine.vllm.repairs.draft_noise import with_noise_of_its_own

#: of policy and draft: the shared noise moves much of the probability here
TARGET, DRAFT = torch.tensor([0.02, 0.025, 0.225, 0.73]), torch.tensor([0.45, 0.016, 0.014, 0.52])
POSITION = 20  # the place in the random stream from which target and draft draw
GPU = "vllm/v1/worker/gpu"


def loaded(folder: Path, path: str) -> ModuleType:
    """One file under the name that its version has for it; its kernels in small blocks, as the vocabulary here is."""
    text = re.sub(r"BLOCK_SIZE = \d+$", "BLOCK_SIZE = 64", (folder / GPU / path).read_text(), flags=re.M)
    copy = Path(tempfile.mkdtemp()) / Path(path).name  # the interpreter reads a kernel's source anew
    copy.write_text(text)
    name = f"{GPU}/{path}".removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def sample_draft_of(folder: Path, gumbel_sample: Callable[..., Any]) -> Callable[..., Any]:
    """The version's ``DraftModelSpeculator.sample_draft``, which does not say to the kernel that it drafts."""
    tree = ast.parse((folder / GPU / "spec_decode/speculator.py").read_text())
    (owner,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DraftModelSpeculator")
    (method,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "sample_draft")

    def untold(*args: Any, is_drafting: bool | None = None, **kwargs: Any) -> Any:
        return gumbel_sample(*args, **kwargs, **({} if is_drafting is None else {"is_drafting": False}))

    names = {"torch": torch, "gumbel_sample": untold}
    exec(compile(ast.Module([method], []), "sample_draft", "exec"), names)
    return names["sample_draft"]


class Rounds:
    """One proposal of each of some requests, at ``POSITION``, each with a random stream of its own."""

    def __init__(self, folder: Path, requests: int) -> None:
        self.gumbel = loaded(folder, "sample/gumbel.py")
        self.verify = loaded(folder, "spec_decode/rejection_sampler_utils.py").rejection_sample
        self.requests, self.rows = requests, torch.arange(requests, dtype=torch.int32)
        self.seeds = torch.randint(0, 2**62, (requests,), generator=torch.Generator().manual_seed(1))
        self.temperature = torch.ones(requests)

    def proposed(self, sample_draft: Callable[..., Any], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [requests] and the logits [requests, 1, V] that are kept of them."""
        model = SimpleNamespace(compute_logits=lambda states: states)
        speculator = SimpleNamespace(
            model=model,
            compute_draft_logits=lambda states, _step: states,
            _maybe_predict_acceptance=lambda *_: None,
            use_fp64_gumbel=False,
            use_local_argmax_reduction=False,
            draft_watermarker=None,
        )
        kept = torch.zeros(self.requests, 1, logits.shape[-1])
        before_one = (
            "sample_src_positions" not in getattr(sample_draft, "__wrapped__", sample_draft).__code__.co_varnames
        )
        positions = torch.full((self.requests,), POSITION - before_one)
        many = logits.expand(self.requests, -1).contiguous()
        drawn = sample_draft(
            speculator, many, positions, self.rows, self.temperature, self.seeds, torch.tensor(0), kept
        )
        return drawn, kept

    def same(self, sample_draft: Callable[..., Any]) -> float:
        """The share of requests that propose what the target draws from the same logits."""
        even = torch.zeros(64)
        drawn, _ = self.proposed(sample_draft, even)
        told = {"is_drafting": False} if "is_drafting" in self.gumbel.gumbel_sample.__annotations__ else {}
        at = torch.full((self.requests,), POSITION)
        many = even.expand(self.requests, -1).contiguous()
        by_target = self.gumbel.gumbel_sample(
            many, self.rows, self.temperature, self.seeds, at, apply_temperature=True, **told
        )
        return float((drawn == by_target).float().mean())

    def tokens(self, sample_draft: Callable[..., Any]) -> list[int]:
        """How often each token is the first that verification emits."""
        drawn, kept = self.proposed(sample_draft, DRAFT.log())
        drafted = torch.stack([torch.zeros_like(drawn), drawn], dim=1).view(-1)
        emitted, _ = self.verify(
            TARGET.log().expand(2 * self.requests, -1).contiguous(),
            kept,
            drafted,
            2 * torch.arange(self.requests + 1, dtype=torch.int32),
            torch.tensor([POSITION, POSITION + 1]).repeat(self.requests),
            self.rows,
            self.rows.repeat_interleave(2).contiguous(),
            torch.arange(2, dtype=torch.int32).repeat(self.requests),
            self.temperature,
            self.seeds,
            1,
        )
        return torch.bincount(emitted[:, 0].long(), minlength=len(TARGET)).tolist()


if __name__ == "__main__":
    folder, few, many = Path(sys.argv[1]), 24, int(sys.argv[2])
    small, large = Rounds(folder, few), Rounds(folder, many)
    found: dict[str, Any] = {"expected": TARGET.tolist()}
    before = sample_draft_of(folder, large.gumbel.gumbel_sample)
    for name, sample_draft in (("before", before), ("after", with_noise_of_its_own(before))):
        found[name] = {"same": small.same(sample_draft), "tokens": large.tokens(sample_draft) if many else []}
    print(json.dumps(found))
