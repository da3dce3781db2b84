"""The suffix method: drafts are what was sampled before, above all in answer to the same prompt in the last epoch."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import numpy as np

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import LatestRollouts, Rollout
from spec_plugin.methods.tables import common_settings, refuse_options_of_a_draft

logger = logging.getLogger(__name__)

#: vLLM takes the trees from there
PACKAGE = "arctic_inference"
INSTALL = (
    "pip install 'nanobind==2.9.2' cmake, then pip install --no-deps --no-build-isolation 'arctic-inference==0.3.0' (half a "
    "minute, with a C++20 compiler; with build isolation it would fetch a torch of its own)"
)
#: longest end of the text that is looked up, and longest draft
_DEPTH = 24
_FILE = "rollouts.safetensors"


class SuffixMethod:
    """SuffixDecoding (Oliaro et al., arXiv 2411.04975) with a tree for each prompt, kept over epochs and in checkpoints.

    Nothing is trained. In the first epoch there is little to find; from the second on a rollout is drafted from those of the
    same prompt in the epochs before. The first actor rank keeps what all engines have sampled, tells each what the others
    have, and writes it into the checkpoint.
    """

    def __init__(self) -> None:
        self._latest: LatestRollouts | None = None
        self._rollouts: dict[int, Rollout] = {}
        self._numbers, self._phase = count(), 0

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """Any target, any k; served from the first rollout, as long as it pays. Its memory has room for ``spec.memory_tokens``.

        Raises:
            SpecConfigError: if options of a draft are set, or the package with the trees is missing.
        """
        if config.method != "suffix":
            return None
        refuse_options_of_a_draft(config)
        if importlib.util.find_spec(PACKAGE) is None:
            raise SpecConfigError(f"spec.method='suffix' needs the package arctic-inference: {INSTALL}")
        self._latest = LatestRollouts(config.memory_tokens)
        settings = {
            "method": "suffix",
            **common_settings(config, target),
            "suffix_decoding_max_tree_depth": _DEPTH,
            "suffix_decoding_max_cached_requests": 0,  # by vLLM's own cache, in the place of which ours is put
        }
        return Method(
            "suffix",
            settings,
            pretrained=True,
            variable_length=True,
            proposer="spec_plugin.engine.vllm.suffix.proposer:prepare",
            proposer_options={"most_tokens": config.memory_tokens},
            memory=self,
        )

    def keep(self, rollouts: Iterable[Rollout]) -> None:
        """Add a phase's rollouts; the oldest of a prompt make room, see ``LatestRollouts``."""
        assert self._latest is not None
        self._phase += 1
        for rollout in rollouts:
            number = next(self._numbers)
            self._rollouts[number] = rollout
            for _, old in self._latest.add(rollout.prompt, number, rollout.tokens, self._phase):
                del self._rollouts[old]

    def recall(self) -> list[Rollout]:
        """The rollouts that are kept, those of the prompt used last at the end."""
        assert self._latest is not None
        return [self._rollouts[number] for _, number in self._latest]

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Tokens of the rollouts that are kept; no metric before there were any."""
        return {"spec/memory_tokens": float(self._latest.tokens)} if self._latest and self._phase else {}

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """All of them, as one file that appears whole or not at all."""
        if not self._phase:
            return
        from safetensors.numpy import save_file

        kept = self.recall()
        tokens = np.frombuffer(b"".join(part for r in kept for part in (r.prompt, r.response)), dtype=np.int32)
        lengths = np.array([[len(r.prompt) // 4, len(r.response) // 4] for r in kept], dtype=np.int64).reshape(-1, 2)
        path.mkdir(parents=True, exist_ok=True)
        fresh = path / f"{_FILE}.partial"  # of a save that was killed, too
        save_file({"tokens": tokens.copy(), "lengths": lengths}, fresh, {"format": json.dumps({"version": 1})})
        os.replace(fresh, path / _FILE)

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """Restore the saved rollouts; a file that cannot be read is a warning, and the memory begins empty."""
        if self._latest is None or not (path / _FILE).exists():
            return
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            found = load_file(path / _FILE)
            tokens, lengths = found["tokens"], found["lengths"]
            if tokens.dtype != np.int32 or (lengths < 0).any() or lengths.sum() != len(tokens):
                raise ValueError("its lengths do not add up to its tokens")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            logger.warning(
                "spec-plugin: the rollouts saved in %s cannot be read, so suffix begins without any: %s", path, error
            )
            return
        parts = np.split(tokens, lengths.ravel().cumsum()[:-1])
        self.keep(Rollout(p.tobytes(), r.tobytes()) for p, r in zip(parts[::2], parts[1::2], strict=True))
