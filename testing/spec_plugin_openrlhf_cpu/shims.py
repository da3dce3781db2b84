"""What OpenRLHF's driver and Ray workers need on a CPU; the package's docstring lists each symbol with its reason."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from spec_plugin_cpu.deepspeed import collectives_by_gloo
from spec_plugin_cpu.shims import Shims
from torch import Tensor

from spec_plugin.api.errors import PatchError

_ADVICE = "install OpenRLHF 0.11.2 with the pins of tools/requirements-openrlhf.txt, or report this"
shims = Shims("spec_plugin_openrlhf_cpu", _ADVICE)
replace = shims.replace
#: in a checkpoint's client state, torch's random state
RANDOM = "spec_plugin_openrlhf_cpu_random"


def install() -> None:
    """Change everything that the driver and Ray's workers need; safe to call again.

    Raises:
        PatchError: if a symbol is gone or no longer looks as expected.
    """
    stub_flash_attn()
    for name, function in _CUDA.items():
        replace("torch.cuda", name, functools.partial(_instead, function))
    replace("torch.distributed.device_mesh", "init_device_mesh", _mesh_on_cpu, parameters=("device_type",))
    replace(
        "transformers.modeling_utils",
        "PreTrainedModel._check_and_adjust_attn_implementation",
        _sdpa_for_flash,
        parameters=("self", "attn_implementation"),
    )
    replace(
        "openrlhf.utils.distributed_util",
        "stateless_init_process_group",
        functools.partial(_instead, gloo_group),
        parameters=("master_address", "master_port", "rank", "world_size", "device"),
        landmarks=("PyNcclCommunicator",),
    )
    replace(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.get_optimizer_configuration",
        _torchs_adam,
        parameters=("self", "optimizer_parameters"),
        landmarks=("TORCH_ADAM_PARAM", "FusedAdam"),
    )
    collectives_by_gloo(shims)
    replace(
        "openrlhf.utils.deepspeed.deepspeed",
        "DeepspeedStrategy.save_ckpt",
        _with_random_state,
        parameters=("self", "model", "save_dir", "tag", "max_num", "max_mem", "client_state"),
        landmarks=("client_state=client_state",),
    )
    late = sys.modules.get("openrlhf.trainer.ray.ppo_actor")
    if late is not None and late.stateless_init_process_group is not gloo_group:
        raise PatchError(
            "openrlhf.trainer.ray.ppo_actor was imported before spec_plugin_openrlhf_cpu could change it: start the run with "
            "python -m spec_plugin_openrlhf_cpu, and import nothing of OpenRLHF before"
        )


def _instead(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return function


# ------------------------------------------------------------------------------------------------ torch.cuda


class _Device(str):
    """The device "cpu" that reads "0" inside of an f-string: OpenRLHF writes ``f"cuda:{current_device()}"`` too."""

    def __format__(self, spec: str) -> str:
        return "0"


def _current_device() -> str:
    return _Device("cpu")


def _do_nothing() -> Callable[..., None]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing  # one for each name: dynamo has different rules for them, and refuses one object under two


_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": _current_device,
    **{name: _do_nothing() for name in ("set_device", "empty_cache", "synchronize", "current_stream")},
}


# ------------------------------------------------------------------------------------------------ mesh, attention, sync


def _mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def _sdpa_for_flash(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that keeps packed documents apart: sdpa does, by position ids, when it gets no attention mask."""

    def check_and_adjust(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        wanted = "sdpa" if attn_implementation == "flash_attention_2" else attn_implementation
        return original(self, wanted, *args, **kwargs)

    return check_and_adjust


def _torchs_adam(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's own choice ``torch_adam``, made here: OpenRLHF has no flag for it."""

    def get_optimizer_configuration(self: Any, optimizer_parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        optimizer_parameters["torch_adam"] = True
        return original(self, optimizer_parameters, *args, **kwargs)

    return get_optimizer_configuration


def _with_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_ckpt(
        self: Any,
        model: Any,
        save_dir: str,
        tag: Any = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        state = {**(client_state or {}), RANDOM: torch.get_rng_state()}
        return original(self, model, save_dir, tag, max_num, max_mem, state, **kwargs)

    return save_ckpt


class GlooBroadcast:
    """The one method of vLLM's NCCL communicator that OpenRLHF's weight sync calls, over gloo."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send ``tensor`` from rank ``src`` to all others, which receive into theirs."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


def gloo_group(master_address: str, master_port: int, rank: int, world_size: int, device: Any) -> GlooBroadcast:
    """A group of the trainer's first rank and every engine worker, beside the processes' own groups."""
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    return GlooBroadcast(
        stateless_init_torch_distributed_process_group(
            host=master_address, port=master_port, rank=rank, world_size=world_size, backend="gloo"
        )
    )


# ------------------------------------------------------------------------------------------------ flash_attn


def stub_flash_attn() -> None:
    """Register a ``flash_attn`` with the padding helpers that OpenRLHF imports, unless the real one is installed."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    rearrange = importlib.import_module("einops").rearrange
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {"__version__": "0.0.0", "__path__": []},
        "flash_attn.bert_padding": {f.__name__: f for f in (index_first_axis, unpad_input, pad_input, rearrange)},
        "flash_attn.utils": {"__path__": []},
        "flash_attn.utils.distributed": {"all_gather": _no_ring_attention},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package="__path__" in content)
        module.__dict__.update(content)
        sys.modules[name] = module


def _no_ring_attention(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("ring attention does not run on a CPU: set --ds.ring_attn_size 1")


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of ``x`` [N, …] at ``indices`` [M]."""
    return x[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop padding.

    Args:
        hidden_states: [B, S, …].
        attention_mask: [B, S], 1 for tokens.

    Returns:
        The tokens' rows [M, …], their places in [B * S], the documents' borders [B + 1], the longest length, all lengths.
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten()).flatten()
    borders = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, borders, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: rows [M, …] at ``indices`` of zeros [batch, seqlen, …]."""
    shape = hidden_states.shape[1:]
    padded = hidden_states.new_zeros((batch * seqlen, *shape)).index_copy(0, indices, hidden_states)
    return padded.reshape(batch, seqlen, *shape)
