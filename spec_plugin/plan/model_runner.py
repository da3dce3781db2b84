"""Which of vLLM's two model runners serves an engine: read in the installed vLLM's sources, never by its version.

V2 is vLLM's choice wherever it can serve; what it does not serve falls back to V1, for which a log line is all that vLLM says.
There a k that changes makes CUDA graphs piecewise. ``VLLM_USE_V2_MODEL_RUNNER=1`` makes vLLM refuse instead of falling back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from spec_plugin.api.diagnosis import device_type
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.plan.sources import folder_of, source_of

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
#: vLLM's V2 model runner loads drafts here: DFlash's, and all others
_V2_DFLASH_LOADER = ("v1/worker/gpu/spec_decode/dflash/utils.py", "load_dflash_model")
_V2_LOADER = ("v1/worker/gpu/spec_decode/eagle/utils.py", "load_eagle_model")
#: and here vLLM lists what V2 does not serve
_V2_GATE = ("config/vllm.py", "_get_v2_model_runner_unsupported_features")
_CHANGING, _ONE_PASS = "a k that changes while it runs", "drafts that are made in one pass (P-EAGLE)"
_OWN_PARALLEL = ("dflash", "dspark")  # their speculators on V2 draft all tokens in one pass
#: what each of our methods asks of vLLM
METHODS: Mapping[str, Mapping[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "mtp": {"method": "mtp"},
    "draft_model": {"method": "draft_model"},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "frozen: EAGLE-1 and EAGLE-3": {"method": "eagle"},
    "frozen: DFlash": {"method": "dflash", "parallel_drafting": True},
    "frozen: P-EAGLE": {"method": "eagle3", "parallel_drafting": True},
    "frozen: a causal LM": {"method": "draft_model"},
}
A_TRAINED_DRAFT = METHODS["eagle3"]  # where any of them stands for all that train one


#: vLLM's releases whose V2 runner changes k, and what it serves there (0.29's own list, which 0.32 has, too)
_V2_CHANGES_K, _V2_SERVES = (0, 25), ("eagle", "eagle3", "mtp", *_OWN_PARALLEL)


@dataclass(frozen=True)
class Cluster:
    """The machines that a run is judged for; nothing said is this one, and the vLLM that is installed here."""

    card: str = ""  # its name, or "cpu"
    vllm: str = ""  # a release, "0.26" or "0.26.1"

    def __post_init__(self) -> None:
        """Refuse what is no release.

        Raises:
            SpecConfigError: naming it.
        """
        if self.vllm and not re.fullmatch(r"\d+\.\d+[\w.+]*", self.vllm):
            raise SpecConfigError(f"--vllm {self.vllm}: give a release, such as 0.26 or 0.26.1")

    @property
    def device_type(self) -> str:
        """Of its engines: "cpu" or "cuda"."""
        return device_type() if not self.card else "cpu" if self.card.lower() == "cpu" else "cuda"

    def lacking(self, settings: Mapping[str, Any]) -> str:
        """What the V2 runner of its vLLM does not have for such an engine; empty: nothing that is known."""
        if not self.vllm:
            return _lacking(settings)
        method, one_pass = settings.get("method"), settings.get("parallel_drafting")
        if not self.changes_k_on_v2:
            return _CHANGING
        if method not in _V2_SERVES:
            return f"the method {method}"
        return _ONE_PASS if one_pass and method not in _OWN_PARALLEL else ""

    @property
    def changes_k_on_v2(self) -> bool:
        """May k change while the V2 runner of its vLLM runs."""
        if not self.vllm:
            return v2_takes_every_k()
        major, minor = self.vllm.split(".")[:2]
        return (int(major), int(re.match(r"\d+", minor)[0])) >= _V2_CHANGES_K  # type: ignore[index]

    def runner_of(self, settings: Mapping[str, Any]) -> Runner:
        """The runner that an engine gets there; this process's ``VLLM_USE_V2_MODEL_RUNNER`` counts for this machine alone."""
        if not self.card:
            return runner_of(settings, self.device_type) if not self.vllm else self._chosen(settings)
        return runner_of(settings, "cpu") if self.device_type == "cpu" else self._chosen(settings)

    def _chosen(self, settings: Mapping[str, Any]) -> Runner:
        lacks, which = self.lacking(settings), f" {self.vllm}" if self.vllm else " of this vLLM"
        return Runner(False, f"V2{which} lacks {lacks}") if lacks else Runner(True, "vLLM's own choice")


@dataclass(frozen=True)
class Runner:
    """The model runner that an engine gets, and why."""

    v2: bool
    why: str
    refused: bool = False  # vLLM would not start

    @property
    def words(self) -> str:
        """As ``spec-plugin check`` says it."""
        if self.refused:
            return f"none, vLLM will refuse to start: {self.why}"
        return f"{'V2' if self.v2 else 'V1'}: {self.why}"


def runner_of(settings: Mapping[str, Any], device_type: str) -> Runner:
    """The runner that this engine gets, as far as its speculation decides that.

    Args:
        settings: its ``speculative_config``; ``method`` and ``parallel_drafting`` are looked at.
        device_type: "cpu" or "cuda".
    """
    asked = os.environ.get(SWITCH)
    if asked == "0":
        return Runner(False, f"{SWITCH}=0")
    lacks = _lacking(settings)
    if asked:
        return (
            Runner(True, f"{SWITCH}={asked}, and V2 lacks {lacks}", refused=True)
            if lacks
            else Runner(True, f"{SWITCH}={asked}")
        )
    if not _has_triton(device_type):
        return Runner(False, "V2 needs Triton" + " with a backend for CPUs" * (device_type == "cpu"))
    if lacks:
        return Runner(False, f"V2 of this vLLM lacks {lacks}")
    return Runner(True, "vLLM's own choice")


def _lacking(settings: Mapping[str, Any]) -> str:
    """What this vLLM's V2 runner does not have for this engine; empty: nothing that its sources tell."""
    if not v2_takes_every_k():
        return _CHANGING
    gate, method = _function(*_V2_GATE), settings.get("method")
    served = next((names for names in re.findall(r"\.method not in [(\[{]([^)\]}]*)", gate) if '"eagle3"' in names), "")
    if served and f'"{method}"' not in served:
        return f"the method {method}"
    if settings.get("parallel_drafting") and method not in _OWN_PARALLEL and "parallel_drafting" in gate:
        return _ONE_PASS
    return ""


def v2_takes_every_k() -> bool:
    """May k change while vLLM's V2 model runner runs; where it may not, vLLM takes V1 for us."""
    return "dynamic speculative decoding" not in source_of("vllm", "config/vllm.py")


def v2_verifies_in_chunks() -> bool:
    """Does vLLM's V2 model runner copy the logits of no more than a GiB of a batch at once, to process them in float32."""
    return "MAX_CHUNK_BYTES = 2**30" in source_of("vllm", "v1/worker/gpu/spec_decode/rejection_sampler.py")


def loads_drafts_like_targets(method: str = "eagle3") -> bool:
    """Does vLLM's V2 model runner load a draft as it loads the target, whatever ``draft_load_config`` says.

    It does in 0.29; V1 and 0.33 do not.

    Args:
        method: by vLLM's name.
    """
    loader = _function(*(_V2_DFLASH_LOADER if method == "dflash" else _V2_LOADER))
    return bool(loader) and "draft_load_config" not in loader


def leaves_a_draft_unread(load_format: str, settings: Mapping[str, Any], device_type: str) -> bool:
    """Would this vLLM fill a draft with noise instead of reading its file, and put the target's head in the place of its own.

    Args:
        load_format: of the engine.
        settings: its ``speculative_config``.
        device_type: of the engine.
    """
    if load_format != "dummy" or not runner_of(settings, device_type).v2:
        return False
    return loads_drafts_like_targets(str(settings.get("method")))


def _function(file: str, name: str) -> str:
    """The text of one of vLLM's functions, up to the next definition in its file; empty where there is none."""
    _, found, rest = source_of("vllm", file).partition(f"def {name}(")
    return found + re.split(r"\n *(?:def |async def |class |@)", rest)[0]


def _has_triton(device_type: str) -> bool:
    """Is there a Triton that compiles for this device, to vLLM."""
    folder = folder_of("triton")
    if device_type != "cpu":
        return folder is not None
    named = any(entry.name == "cpu" for entry in entry_points(group="triton.backends"))
    return named or (folder is not None and (folder / "backends" / "cpu").is_dir())
