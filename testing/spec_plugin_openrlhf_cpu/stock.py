"""What a run without the plugin imports on a CPU: the conformance kit looks whether anything of the adapter comes along."""

from __future__ import annotations

import importlib
import os

from spec_plugin_openrlhf_cpu import setup_worker

os.environ.setdefault("DS_ACCELERATOR", "cpu")
setup_worker()

for _module in ("trainer.ppo_trainer", "trainer.ray.ppo_actor", "trainer.ray.vllm_engine"):
    importlib.import_module(f"openrlhf.{_module}")
