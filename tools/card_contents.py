"""What travels to a machine without a network, and what stays behind and why: for ``pack_card.py``.

For a dense model in 16 bits on a card of generation 9 (H100, H200). ``--keep`` takes back what is named here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path

import tomllib
from card_fatbin import without_other_cards

ROOT = Path(__file__).resolve().parent.parent
CARD = 90  # compute capability times ten
TRAINERS: Mapping[str, tuple[str, ...]] = {"trl": ("trl==1.16.0", "datasets"), "verl": ("verl==0.9.1",)}
#: newer ones ask for another apache-tvm-ffi than vLLM does
PINS = {"xgrammar": "==0.2.1"}

_OTHER_KERNELS = "kernels for mixtures, quantised weights, MLA or Blackwell cards"
_HERE = "the machine's own goes with its torch"
_TOOL = "a command line that nobody calls there"
#: distributions by canonical name
NEVER: Mapping[str, str] = {
    **dict.fromkeys(("torch", "torchvision", "torchaudio", "triton"), _HERE),
    "numpy": "the machine's own goes with its numba; only mistral-common asks for an older one",
    "setuptools": "the machine's own; vLLM asks for an older one to build with",
    **dict.fromkeys(
        ("flashinfer-python", "flashinfer-cubin", "nvidia-cudnn-frontend"), "VLLM_USE_FLASHINFER_SAMPLER=0"
    ),
    **dict.fromkeys(
        ("tilelang", "nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"), _OTHER_KERNELS
    ),
    "fastsafetensors": "a load format of its own",
    **dict.fromkeys(("torchcodec", "pynvvideocodec"), "sound and video"),
    **dict.fromkeys(("mistral-common", "pycountry"), "tokenizers in Mistral's own format"),
    **dict.fromkeys(("py-spy", "virtualenv"), "a profiler and environments that Ray starts when asked"),
    "wandb": "there is no network to log to",
    **dict.fromkeys(("fastapi-cli", "fastapi-cloud-cli"), _TOOL),
}
#: files by their path in the folder
LEFT_OUT: Mapping[str, str] = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "FlashAttention 3 serves this generation",
    "vllm/vllm_flash_attn/cute/*": "FlashAttention 4, for Blackwell; needs nvidia-cutlass-dsl",
    "vllm/vllm-rs": "the front end in Rust",
    "vllm/_rust_tool_parser.abi3.so": "tool calls",
    "vllm/_moe_C_stable_libtorch.abi3.so": _OTHER_KERNELS,
    "vllm/_flashmla*": _OTHER_KERNELS,
    "vllm/_qutlass_C.abi3.so": _OTHER_KERNELS,
    "vllm/third_party/fmha_sm100/*": _OTHER_KERNELS,
    "vllm/third_party/tml_fa4/*": _OTHER_KERNELS,
    "vllm/third_party/deep_gemm/*": _OTHER_KERNELS,
    "vllm/entrypoints/serve/instrumentator/static/*": "the page that documents the server",
    "ray/dashboard/client/*": "the dashboard's page",
    "ray/jars/*": "Ray in Java",
    "ray/rllib/*": "another trainer",
    "*.a": "to link with",
    "*.pyi": "for type checkers",
    "*.jpg": "a picture",
    "*/tests/*": "tests",
}
#: libraries of which nine tenths are for a debugger
DEBUGGED = ("xgrammar/libxgrammar_bindings.so",)


def roots(trainers: Collection[str], vllm: str) -> dict[str, list[str]]:
    """Requirements by archive: vLLM and this project's own in the first, then one for each trainer.

    Args:
        trainers: of ``TRAINERS``.
        vllm: its version.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return {"vllm": [f"vllm=={vllm}", *project["dependencies"]]} | {
        trainer: [*TRAINERS[trainer], *extras[trainer]] for trainer in trainers
    }


def trim(site: Path, keep: Collection[str], card: int | None) -> tuple[int, int]:
    """Remove from a folder what stays behind.

    Args:
        site: the folder.
        keep: patterns of ``LEFT_OUT`` that are kept.
        card: whose GPU code is kept in vLLM's libraries; None: of every card.

    Returns:
        Bytes removed, and of GPU code that became zeros.
    """
    removed = zeroed = 0
    for path in (site / name for name in DEBUGGED if (site / name).is_file()):
        before = path.stat().st_size
        subprocess.run(["strip", "--strip-debug", str(path)], check=True)
        removed += before - path.stat().st_size
    for path in sorted(site.rglob("*")):
        if not path.is_file():
            continue
        inside = path.relative_to(site).as_posix()
        if any(fnmatch(inside, pattern) for pattern in LEFT_OUT if pattern not in keep):
            removed += path.stat().st_size
            path.unlink()
        elif card is not None and inside.startswith("vllm/") and path.suffix == ".so":
            data, zeros = without_other_cards(path.read_bytes(), card)
            if zeros:
                path.write_bytes(data)
                zeroed += zeros
    return removed, zeroed
