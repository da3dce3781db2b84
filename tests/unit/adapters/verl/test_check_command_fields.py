"""``spec-plugin check verl`` on options that hydra takes, or would take with a ``+``, and verl's dataclasses do not."""

from __future__ import annotations

import pytest
from builders.check_command import MODEL, PATH, ROLLOUT, VLLM, a_qwen3, needs_verl
from omegaconf import OmegaConf
from spec_plugin_verl_check import fields

from spec_plugin.commands.check import judge_run

pytestmark = needs_verl
LOSS, MEGATRON = "actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.actor.megatron"


def test_an_option_that_the_dataclass_lacks_is_verls_own_refusal() -> None:
    (said,) = judge_run("verl", [PATH, VLLM, f"+{LOSS}.tau_pos=1.0"], a_qwen3).objections
    assert said.by == "verl" and said.reason.startswith("arguments that verl")
    assert "its PolicyLossConfig has no tau_pos" in str(said) and f"(+{LOSS}.tau_pos=1.0): remove it" in str(said)


@pytest.mark.parametrize(
    "given",
    [
        f"+{MEGATRON}.override_transformer_config.anything=1",  # a mapping, whatever is in it
        f"+{ROLLOUT}engine_kwargs.vllm.anything=1",
        f"+{ROLLOUT}custom.anything=1",
        f"+{ROLLOUT}enable_sleep_mode=False",  # a field that verl's own file leaves out
        f"+{MODEL}override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}",
    ],
)
def test_what_the_dataclass_has_or_holds_in_a_mapping_is_taken(given: str) -> None:
    found = judge_run("verl", [PATH, VLLM, "model_engine=megatron" if MEGATRON in given else VLLM, given], a_qwen3)
    assert found.accepted, list(map(str, found.objections))


def test_what_hydra_has_refused_is_said_once_and_a_plus_is_not_advised() -> None:
    (said,) = judge_run(
        "verl", [PATH, VLLM, "model_engine=megatron", f"{MEGATRON}.grad_offload=True"], a_qwen3
    ).objections
    assert "Could not override" in said.why and "+" not in said.instead and "remove it" in said.instead


def test_fields_are_those_of_verls_dataclasses_and_of_all_above_them() -> None:
    from dataclasses import fields as of

    from verl.workers import config

    for name in ("FSDPActorConfig", "McoreEngineConfig", "RolloutConfig", "HFModelConfig", "PolicyLossConfig"):
        theirs = {field.name for field in of(getattr(config, name)) if not field.name.startswith("_")}
        assert fields.fields_of(name) == theirs, name
    assert fields.fields_of("NoSuchConfig") is None


def test_a_section_that_is_missing_is_no_concern_of_this() -> None:
    assert list(fields.unknown_fields(OmegaConf.create({"actor_rollout_ref": {"actor": None}}))) == []
