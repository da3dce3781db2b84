"""The mtp method: the layer drafts that the target was trained with to predict one token more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.mtp import TRAINED, MtpShape
from draft_training.outside import Depth, Fields, ModelBasics, read
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.methods.checkpoints import tensor_names
from spec_plugin.methods.sample_method import draft_sample_method
from spec_plugin.methods.tables import common_settings, refuse_options_of_a_draft
from spec_plugin.plan.refusals import refusing

F = TypeVar("F", bound=Fields)


class MtpMethod:
    """Multi-token prediction (Gloeckle et al., arXiv 2404.19737; as in DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Trainers drop the layer when they load the policy, and no weight sync brings it: without a refresh it stays what it was
    before the run. Here it is trained on, and sent with each sync.
    """

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """A target that has such a layer; one that cannot be trained is served as it is, with ``spec.train=false``.

        Raises:
            SpecConfigError: naming the option, or what the target lacks.
        """
        if config.method != "mtp":
            return None
        refuse_options_of_a_draft(config)
        settings = {
            "method": "mtp",
            **common_settings(config, target),
            "draft_sample_method": draft_sample_method(config, target, "mtp"),
        }
        (architecture, *_) = _read(ModelBasics, target.hf_config, target).architectures or ["none"]
        if architecture not in TRAINED and not config.train:
            return self._as_it_is(settings, target, architecture)
        draft = self._starting_draft(target)
        return Method(
            name="mtp",
            settings=settings,
            harvest=(int(target.hf_config["num_hidden_layers"]),),
            draft=draft,
            pretrained=draft.tensors is not None,
        )

    @staticmethod
    def _as_it_is(settings: dict[str, object], target: TargetInfo, architecture: str) -> Method:
        if target.load_format == "dummy":
            raise SpecConfigError(
                f"spec.method='mtp' with load_format=dummy: the MTP layer of {architecture} would stay as vLLM initialises "
                "it, at random, since no weight sync brings it: set the engine's load_format to auto"
            )
        if missing := _lacks(target):
            raise SpecConfigError(f"spec.method='mtp' cannot draft for this target: {missing}; use another method")
        return Method(name="mtp", settings=settings, hf_config=target.hf_config, pretrained=True)

    @staticmethod
    def _starting_draft(target: TargetInfo) -> StartingDraft:
        from draft_training.mtp_module import MtpKind  # with torch, whose import takes seconds

        with refusing("spec.method='mtp' cannot draft for this target"):
            shape = MtpShape.from_target(target.hf_config, target.file)
            tensors = MtpKind(shape).of_checkpoint(Path(target.path))
        if tensors is None and target.load_format != "dummy":
            raise SpecConfigError(
                f"spec.method='mtp': {target.path} holds no tensors named model.mtp_layers.0.…, which the engine wants: take a "
                "checkpoint that has them (a trainer that loads and saves one drops them), or set the engine's "
                "load_format=dummy for a new layer"
            )
        return StartingDraft(shape, tensors)


def _lacks(target: TargetInfo) -> str | None:
    """What is missing for a layer of a kind that is not known here, in words; None if it seems to be there.

    Families give their number of layers by many names, and keep the tensors by others: DeepSeek and GLM behind the last of
    the target's own, most others under ``mtp``.
    """
    hf = target.hf_config
    text = _read(ModelBasics, target.hf_config, target).text_config or hf
    if not any(value for name, value in (*hf.items(), *text.items()) if "nextn" in name or "mtp" in name):
        return "its config.json names no layer for multi-token prediction (num_nextn_predict_layers, or the like)"
    try:
        names = tensor_names(Path(target.path))
    except FileNotFoundError:  # not on this disk, or in another format: the engine will see
        return None
    except (CheckpointError, DraftConfigError) as error:
        return str(error)
    behind = _read(Depth, text, target).num_hidden_layers
    if any("mtp" in name or _layer_of(name) >= behind for name in names):
        return None
    return (
        f"{target.path} holds no tensors of an MTP layer (named mtp, or layers.{behind}), although its config.json has one: a "
        "trainer that loads and saves a checkpoint drops them"
    )


def _read(kind: type[F], hf: Mapping[str, Any], target: TargetInfo) -> F:
    with refusing():
        return read(kind, hf, target.file)


def _layer_of(name: str) -> int:
    found = re.search(r"\blayers\.(\d+)\.", name)
    return int(found[1]) if found else -1
