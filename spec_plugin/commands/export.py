"""``spec-plugin export``: a draft's folder, written once more as another engine or library loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spec_plugin.api.errors import SpecPluginError
from spec_plugin.commands.check import find_model
from spec_plugin.commands.terminal import Refused, echo, visible
from spec_plugin.plan.run_plan import Model

if TYPE_CHECKING:
    from draft_training import DraftConfig

_HELP = """Write a draft as vLLM, SGLang or speculators loads it.

DRAFT is the folder of an EAGLE-3 draft: "draft" in a run's checkpoint, of "spec-plugin train", or of another maker (EAGLE,
NVIDIA, speculators). Nothing of it is changed. The new folder holds config.json and model.safetensors with the same numbers; what
differs is how the three name layers and tensors:

\b
  vllm         {"method": "eagle3", "model": OUT}; also spec.draft=OUT of a run
  sglang       --speculative-algorithm EAGLE3 --speculative-draft-model-path OUT; auxiliary layers by their output, and the
               target's head unless the vocabulary is pruned (checked with 0.5.23)
  speculators  SpeculatorModel.from_pretrained(OUT), to train it further, or "vllm serve OUT"; it names its target and, unless
               the vocabulary is pruned, holds the target's head, so that --target is needed (checked with 0.9.0)

\b
Examples:
  spec-plugin export DRAFT --to sglang --out draft-for-sglang
  spec-plugin export DRAFT --to speculators --target Qwen/Qwen3-8B --k 5 --out draft-for-speculators

OUT must not exist, and appears whole or not at all. Drafts of other kinds (a small model, MTP layers) are refused: the former
is an ordinary model that every engine loads as it is.

Exit code: 0 written, 2 refused, with the reason.
"""


@click.command(help=_HELP)
@click.argument("draft", type=click.Path(path_type=Path))
@click.option(
    "--to", "layout", required=True, type=click.Choice(["vllm", "sglang", "speculators"]), help="Who loads it."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The new folder.")
@click.option("--target", help="The policy that it drafts for: a folder, or OWNER/NAME in the hub's local cache.")
@click.option(
    "--k",
    default=3,
    show_default=True,
    type=click.IntRange(1, 16),
    help='Tokens that "vllm serve" drafts; speculators only.',
)
def export(draft: Path, layout: str, out: Path, target: str | None, k: int) -> None:
    """Export one draft; the help text is ``_HELP``."""
    if out.exists() or out.is_symlink():
        raise Refused(f"--out {out} exists: name a folder that does not, or remove it")
    if layout == "speculators" and target is None:
        raise Refused(
            "--to speculators needs --target, the policy's folder or name: such a draft names it and takes its embedding"
        )
    with _refused():
        config = _export(draft, layout, out, _target(target), k)
    vocabulary = f"{config.draft_vocab_size} of {config.vocab_size} tokens" if config.pruned else "the whole vocabulary"
    numbers = f"{config.parameters / 1e6:.1f} million numbers, {vocabulary}, reads what enters layers {list(config.aux_layers)}"
    echo(f"a draft for {layout} ({numbers}) is in {out.absolute()}")


def _export(draft: Path, layout: str, out: Path, target: Model, k: int) -> DraftConfig:
    from draft_training import load_draft, validate_draft
    from draft_training.exports import Verifier, for_sglang, for_speculators, for_vllm, target_head, write_export

    _refuse_other_kinds(draft)
    config, tensors = load_draft(draft, target.config, target.source)
    if target.config is not None:
        validate_draft(config, target.config, target.source)
    architectures = (target.config or {}).get("architectures") or ()
    hf = {
        "vllm": lambda: for_vllm(config),
        "sglang": lambda: for_sglang(config),
        "speculators": lambda: for_speculators(config, Verifier(target.name, [*map(str, architectures)]), k),
    }[layout]()
    whole = layout == "speculators" and not config.pruned
    write_export(out, config, hf, tensors, target_head(Path(target.source).parent, config) if whole else None)
    return config


def _refuse_other_kinds(draft: Path) -> None:
    """Drafts that are no EAGLE-3, before ``load_draft`` says that they cannot be trained.

    Raises:
        Refused: naming the kind.
        CheckpointError: if there is no config.json that can be read.
    """
    from draft_training.checkpoint import settled_folder
    from draft_training.exports import kind_named
    from draft_training.files import read_json

    file = settled_folder(draft) / "config.json"
    if named := kind_named(read_json(file)):
        raise Refused(
            f"{file} is of {named}: only EAGLE-3 drafts are exported; a small model that drafts is loaded by vLLM and SGLang as "
            "it is"
        )


def _target(name: str | None) -> Model:
    """The target's config.json, looked for as ``check`` does; of a folder its whole path, which is read from elsewhere later.

    Raises:
        Refused: if it is not on this machine.
    """
    if name is None:
        return Model("", None, "the target's config.json")
    found = find_model(str(Path(name).absolute()) if Path(name).is_dir() else name)
    if found.config is None:
        raise Refused(f"--target {name}: {found.source}; give a folder with its config.json, or download it before")
    return found


@contextmanager
def _refused() -> Iterator[None]:
    """What is wrong with a draft, as one sentence."""
    from draft_training import CheckpointError, DraftConfigError

    try:
        yield
    except (CheckpointError, DraftConfigError, SpecPluginError) as error:
        raise Refused(error) from error
    except OSError as error:
        where = visible(str(error.filename)) if error.filename else "the folder"
        raise Refused(f"{where} cannot be read or written: {error.strerror or error}") from error
