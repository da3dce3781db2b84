"""SGLang's own configuration and loader on a CPU, in a process of its own: ``python sglang_loads.py TARGET DRAFT OUT``.

Its compiled kernels do not run here, and nothing asks for one: what is loaded is looked at and not run.
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


class _Kernels(types.ModuleType):
    """In the place of ``sgl_kernel``, which has no build for a CPU on an index."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: sys.exit(f"sgl_kernel.{name} was asked for")


def declared_operations() -> Any:
    """Beside a CPU's torch, an index's torchvision describes two operations that its CUDA library does not define; to be kept."""
    found = version("torchvision") if find_spec("torchvision") else "none"
    if "+cpu" not in torch.__version__ or "+cpu" in found or found == "none":
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operation in ("nms", "qnms"):
        library.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main(target: str, draft: str, out: Path) -> None:
    """Load both, and write what SGLang made of the draft to ``out``: about.json and loaded.safetensors."""
    from safetensors.torch import save_file
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=target,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        speculative_draft_attention_backend="intel_amx",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=draft,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{out / 'meeting'}", 0, backend="gloo")
    initialize_model_parallel()

    def load(path: str, is_draft: bool) -> tuple[Any, Any]:
        config = ModelConfig.from_server_args(args, model_path=path, is_draft_model=is_draft)
        return config.hf_config, get_model(
            model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
        )

    _, policy = load(target, False)
    config, model = load(draft, True)
    policy.set_eagle3_layers_to_capture(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
    ids = model.hot_token_id
    about = {
        "captured": policy.model.layers_to_capture,  # by whose input
        "head_of_target": model.load_lm_head_from_target,
        "tokens": None if ids is None else ids.tolist(),
        "norm_output": model.model.norm_output,
    }
    save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, out / "loaded.safetensors")
    (out / "about.json").write_text(json.dumps(about))


if __name__ == "__main__":
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")
    if find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _Kernels("sgl_kernel")
    kept = declared_operations()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
