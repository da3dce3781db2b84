"""The worker extension inside vLLM: verl's own, plus draft refresh over verl's transport."""

from __future__ import annotations

from typing import Any

import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from spec_plugin.engine.extension import SpecWorkerExtension


class TimedReceiver(BucketedWeightReceiver):  # type: ignore[misc]
    """verl's receiver, which gives up when the sender is gone."""

    def __init__(self, zmq_handle: str, device: torch.device, use_shm: bool, timeout_s: float) -> None:
        super().__init__(zmq_handle=zmq_handle, device=device, use_shm=use_shm)
        self._timeout_ms = int(timeout_s * 1e3)

    def _init_socket(self) -> None:
        super()._init_socket()
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self.socket.setsockopt(option, self._timeout_ms)


class SpecWorker(SpecWorkerExtension, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Mixed into vLLM's worker when, and only when, the flag is on."""

    def spec_receive_draft(
        self, use_shm: bool, version: int, digest: str, names: list[str], force: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Receive, verify and install one draft; a refused one leaves the previous draft in place."""
        receiver = TimedReceiver(self._get_zmq_handle() + ".draft", self.device, use_shm, timeout_s)
        self.spec_receive(version, lambda on_bucket: receiver.receive_weights(on_bucket_received=on_bucket))
        return self.spec_install(version, digest, names=names, force=force)
