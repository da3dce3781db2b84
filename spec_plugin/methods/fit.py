"""What every draft must be, whoever chose it: as long as the engine, still there when it has slept, of one policy."""

from __future__ import annotations

from pathlib import Path

from draft_training.files import places
from draft_training.outside import text_part
from draft_training.rope import derived_length
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import CannotDraft, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.plan.refusals import refusing

#: vLLM's names of methods that load nothing
_NO_WEIGHTS = ("ngram", "suffix")


def refuse_unfit(method: Method, config: SpecConfig, target: TargetInfo) -> None:
    """Refuse what would end drafting in the middle of a run, and a draft with which vLLM would not start.

    vLLM's V1 model runner asks once a step, for the whole batch, whether the longest text still fits the draft
    (``effective_drafter_max_model_len``), and lets the policy verify noughts for every request where it does not.

    Args:
        method: what drafts.
        config: of the run.
        target: the policy and its engine.

    Raises:
        SpecConfigError: naming the option or the file.
    """
    reads = None if method.draft_config is None else derived_length(method.draft_config)
    if reads is not None and target.length is not None and reads[1] < target.length:
        whose = "the target's own layer, whose" if config.draft is None else f"spec.draft={config.draft!r}, whose"
        raise SpecConfigError(
            f"{whose} config.json makes it read texts of {reads[1]} tokens ({reads[0]}, and the scaling of its rope), is shorter "
            f"than the engine's texts of {target.length}: one longer text would end drafting for the whole batch. Raise "
            f"{reads[0]} in that file if the draft's rope reaches as far, set the engine's max_model_len to {reads[1]}, or take "
            "another draft"
        )
    if config.sleep_level > 1 and method.draft is None and method.settings.get("method") not in _NO_WEIGHTS:
        raise SpecConfigError(
            f"spec.sleep_level={config.sleep_level}: the engine would drop a draft that no refresh brings back (method "
            f"{method.name}): leave sleep_level out"
        )
    _refuse_heads(method, target)


def _refuse_heads(method: Method, target: TargetInfo) -> None:
    """Of the draft, that tensor parallel ranks cannot share out; of the policy's own vLLM says so itself."""
    ranks, configs = target.tensor_parallel, (method.draft_config, target.hf_config)
    heads, policys = (text_part(config or {}).get("num_attention_heads") for config in configs)
    if not (isinstance(heads, int) and isinstance(policys, int) and ranks > 0):
        return
    if heads % ranks and not policys % ranks and method.settings.get("draft_tensor_parallel_size") != 1:
        raise CannotDraft(
            "attention heads of the draft that tensor parallel ranks cannot share out",
            f"vLLM would refuse to start: {ranks} tensor parallel ranks cannot share out the draft's {heads} attention heads",
            f"set the engine's tensor parallel size to a divisor of {heads}",
        )


def refuse_two_policies(target: TargetInfo) -> None:
    """Refuse a folder whose one weights file and whose shards may be two policies: actor and engine would read one each.

    Raises:
        SpecConfigError: naming both.
    """
    if target.load_format != "dummy":  # then the trainer sends all weights
        with refusing(f"the target {target.path} is refused"):
            places(Path(target.path))
