"""The draft_model method: a small language model with the target's tokenizer drafts, given or born in the run."""

from __future__ import annotations

from pathlib import Path

from draft_training.outside import logit_cap
from draft_training.small_lm import SmallLmShape
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.methods.sample_method import draft_sample_method
from spec_plugin.methods.served import starting_folder
from spec_plugin.methods.tables import common_settings, refuse_options_of_a_shape
from spec_plugin.plan.refusals import refusing


class DraftModelMethod:
    """Distilled online from the policy's own samples (forward KL; DistillSpec, arXiv 2310.08461, section 3.2)."""

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """``spec.draft`` is the folder of a dense causal LM; without one a small one is born.

        vLLM reads the draft's first weights as it reads the target's, so that under ``load_format=dummy`` they are noise:
        the first weight sync sends them, trained or not.

        Raises:
            SpecConfigError: naming the option.
        """
        if config.method != "draft_model":
            return None
        refuse_options_of_a_shape(config, "the method draft_model")
        draft = _starting_draft(config, target)
        settings = {
            "method": "draft_model",
            **common_settings(config, target),
            "draft_sample_method": draft_sample_method(config, target, "draft_model"),
        }
        return Method(
            name=config.method,
            settings=settings,
            model=lambda: starting_folder(draft, config.seed, target.dtype),
            harvest=(),
            draft=draft,
            pretrained=config.draft is not None,
        )


def _starting_draft(config: SpecConfig, target: TargetInfo) -> StartingDraft:
    with refusing(f"spec.draft={config.draft!r} cannot draft for this target"):
        logit_cap(target.hf_config, target.file)  # refuses what cannot be learned
        if config.draft is None:
            born = SmallLmShape.from_target(target.hf_config, target.file, length=target.length)
            return StartingDraft(born, most_unrolled=1)
        from draft_training.small_lm_module import load_small_lm  # with torch and transformers, which take seconds

        shape, tensors = load_small_lm(Path(config.draft), target.hf_config, target.file)
        return StartingDraft(shape, tensors, most_unrolled=1)
