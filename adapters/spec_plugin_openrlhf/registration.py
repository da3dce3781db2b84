"""Puts the adapter's two Ray actors in the place of OpenRLHF's, in the driver only; Ray ships them to the workers.

This is the adapter's one patch module. Two module attributes change, and only with ``--spec.enable``:

============================================================ =======================================================
symbol                                                       reason
============================================================ =======================================================
``openrlhf.trainer.ray.vllm_engine.RolloutRayActor``         speculative engine arguments, versions, self-test, k
``openrlhf.trainer.ray.ppo_actor.PolicyModelActor``          harvest, log-prob checks, draft training, refresh
============================================================ =======================================================

Versions: checked on OpenRLHF 0.11.2. Guard: ``PatchError`` if either is not a Ray actor class with the methods that we extend.
Upstream: no issue; OpenRLHF has no registry and no callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from spec_plugin.adapter import create_manager, method_of, read_config, refuse
from spec_plugin_openrlhf.options import LEAVE_OUT, of_states, read_target


def install(theirs: Sequence[str], ours: Mapping[str, Any]) -> None:
    """Check the options, then swap the two classes.

    Args:
        theirs: OpenRLHF's arguments.
        ours: raw options of spec-plugin.

    Raises:
        SpecConfigError: if an option is wrong, or the run has something that is not supported.
        PatchError: if OpenRLHF's actors have changed.
    """
    config, target = read_config(dict(ours)), read_target(theirs)
    refuse(of_states(target.path, target.hf_config, config), LEAVE_OUT)
    method_of(config, target, create_manager(config.block, config.plugins))  # refuses now what would fail later

    # only now: what is refused is refused before the seconds that these take
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    from spec_plugin_openrlhf.engine import SpecRolloutRayActor
    from spec_plugin_openrlhf.policy import SpecPolicyModelActor

    given = {"spec_config": config, "spec_target": target}  # classes made here travel by value, and so do these
    vllm_engine.RolloutRayActor = ray.remote(type("SpecRolloutRayActor", (SpecRolloutRayActor,), given))
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(type("SpecPolicyModelActor", (SpecPolicyModelActor,), given))
