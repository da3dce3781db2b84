"""The EAGLE-3 method: which draft the run starts from, and how the engine is told to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draft_training.config import DraftConfig, validate_draft
from draft_training.outside import logit_cap
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.methods.sample_method import draft_sample_method
from spec_plugin.methods.served import INSTEAD, starting_folder
from spec_plugin.methods.tables import common_settings
from spec_plugin.plan.engine_class import refuse_unreadable
from spec_plugin.plan.model_runner import METHODS, leaves_a_draft_unread
from spec_plugin.plan.refusals import refusing

Tensors = Mapping[str, Any]


def starting_draft(config: SpecConfig, target: TargetInfo) -> tuple[DraftConfig, Tensors | None]:
    """The user's draft checkpoint, checked against the target, or a new draft shaped after the target, without tensors.

    Raises:
        SpecConfigError: if the checkpoint does not fit the target, or no draft can be made for it.
    """
    with refusing():
        if config.draft is not None:
            return _given_draft(config, config.draft, target)
        logit_cap(target.hf_config, target.file)  # refuses what cannot be learned
        made = DraftConfig.from_target(
            target.hf_config,
            draft_vocab_size=config.draft_vocab_size,
            aux_layers=config.aux_layers,
            length=target.length,
            where=target.file,
        )
        if config.draft_vocab_size is None and not _reads_no_file(target):
            made = replace(made, draft_vocab_size=made.fitting_vocabulary)
        return made, None


def _reads_no_file(target: TargetInfo) -> bool:
    """Would the engine take the target's head for that of a pruned draft."""
    return leaves_a_draft_unread(target.load_format, METHODS["eagle3"], target.device_type)


def _given_draft(config: SpecConfig, folder: str, target: TargetInfo) -> tuple[DraftConfig, Tensors]:
    from draft_training.eagle3 import load_draft

    with refusing(f"spec.draft={folder!r} cannot draft for this target"):
        draft_config, tensors = load_draft(folder, target.hf_config, target.file)
        validate_draft(draft_config, target.hf_config, target.file)
        logit_cap(target.hf_config, target.file)
    for name in ("draft_vocab_size", "aux_layers"):
        asked, has = getattr(config, name), getattr(draft_config, name)
        if asked is not None and asked != has:
            raise SpecConfigError(
                f"spec.{name}={asked!r} has no effect on a draft that is given: that in {folder} has {has!r}; leave one of the "
                "two options out"
            )
    return draft_config, tensors


class Eagle3Method:
    """EAGLE-3 (arXiv 2503.01840): one layer drafts from the target's hidden states, trained along the run."""

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """One decoder layer over the target's hidden states; born in the run, or the user's.

        The folder that vLLM loads holds the draft in vLLM's own layout, whatever the user gave. The table of k per batch size
        makes k changeable while the engine runs.

        Raises:
            SpecConfigError: naming the option.
        """
        if config.method != "eagle3":
            return None
        refuse_unreadable(target.hf_config, config.draft is None, INSTEAD)
        try:
            shape, tensors = starting_draft(config, target)
        except SpecConfigError:
            if config.draft is not None and not config.train:
                return None  # one that cannot be trained may still be served as it is
            raise
        draft = StartingDraft(shape, tensors)
        if shape.pruned and _reads_no_file(target):
            raise SpecConfigError(
                f"a draft with a pruned vocabulary ({shape.draft_vocab_size} of {shape.vocab_size} tokens) under "
                f"load_format={target.load_format}: the installed vLLM's V2 model runner then leaves the draft's file unread and "
                "takes the target's head for the draft's own, so every refresh would be refused: set the engine's load_format to "
                "auto, or VLLM_USE_V2_MODEL_RUNNER=0 in its environment, or leave draft_vocab_size out: "
                f"{INSTEAD}"
            )
        return Method(
            name=config.method,
            settings={
                "method": "eagle3",
                **common_settings(config, target),
                "draft_load_config": {"load_format": "auto"},
                "draft_sample_method": draft_sample_method(config, target, "eagle3"),
            },
            model=lambda: starting_folder(draft, config.seed, target.dtype),
            harvest=shape.aux_layers,
            draft=draft,
            pretrained=config.draft is not None,
        )
