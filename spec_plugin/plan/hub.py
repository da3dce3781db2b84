"""Drafts by name (``spec.draft``): a model of the Hugging Face hub, or a folder.

Only config files, safetensors and DFlash's one vector are fetched, and what the configs name as code is left out: nothing of a
draft is code that runs here (law 8). The hub's own environment variables hold: ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT``.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from draft_training.errors import CheckpointError
from draft_training.files import MASK_EMBEDDING, configs_with_code
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.plan.own_folders import disk, own_folder

logger = logging.getLogger(__name__)

_FILES = ("*.json", "*.safetensors", MASK_EMBEDDING)
#: what the hub's client raises, and what is said then
_ANSWERS = {
    "GatedRepoError": "asks for consent: accept its terms on the hub, and log in",
    "RevisionNotFoundError": "has no revision {revision}; leave @{revision} out for the newest",
    "RepositoryNotFoundError": "is not there, or you may not see it: correct the name, or log in if it is private",
}
#: owner/name, and a branch, tag or commit
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class DraftNotHereError(SpecConfigError):
    """A draft of the hub that is not on this machine, and was not to be fetched."""


def draft_folder(draft: str, fetch: bool) -> str:
    """The folder of a draft; one of the hub comes into the hub's own cache.

    Args:
        draft: ``spec.draft``: a folder, ``owner/name`` or ``owner/name@revision`` of the hub.
        fetch: what is not here.

    Returns:
        ``draft`` itself where it is a folder, or looks like one that is not there: of that its reader says so.

    Raises:
        DraftNotHereError: if it is not here and not to be fetched.
        SpecConfigError: if the hub does not give it, or it has no safetensors.
    """
    try:
        folder = Path(draft).expanduser()
        if folder.exists():
            return str(folder) if draft.startswith("~") else draft
    except (OSError, RuntimeError) as error:  # of a name that no path can be, or of a user who is not there
        raise SpecConfigError(f"spec.draft={draft!r} is no path: {error}") from error
    name = _NAME.fullmatch(draft)
    return draft if name is None else _of_hub(draft, name["repo"], name["revision"], fetch)


def _of_hub(draft: str, repo: str, revision: str | None, fetch: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    said = f"spec.draft={draft!r}: no folder of that name is here, and the hub's model {repo}"
    try:
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(_FILES), local_files_only=not fetch)
        )
    except LocalEntryNotFoundError as error:
        if not fetch:
            raise DraftNotHereError(f"{said} is not in this machine's cache: the run fetches it") from None
        raise SpecConfigError(
            f"{said} is neither in this machine's cache nor could it be fetched (offline mode, or no "
            f"network): run `hf download {repo}` where there is a network, or give a folder"
        ) from error
    except Exception as error:
        # of the network, whatever the hub's client makes of it; its text may hold a mirror's password
        kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
        what = f"could not be fetched: {kind}" + (f", status {status}" if status is not None else "")
        raise SpecConfigError(f"{said} {_ANSWERS.get(kind, what).format(revision=revision)}") from None
    if not any(folder.glob("*.safetensors")):
        if not fetch:
            raise DraftNotHereError(f"{said} is in this machine's cache only in part: the run fetches the rest")
        raise SpecConfigError(
            f"{said} has no *.safetensors: weights in other formats are not loaded, they could run code"
        )
    if revision is None:
        logger.info(
            "spec-plugin: the draft %s is %s@%s: name it so, and each node and each start takes the same",
            *(draft, repo, folder.name),
        )
    return str(folder_without_code(folder))


@cache
def folder_without_code(folder: Path) -> Path:
    """The folder, or where its configs name code a copy for this process, in which they do not.

    What speculators writes names a class of its own for transformers, which neither vLLM nor we need.
    """
    try:
        clean = configs_with_code(folder)
    except CheckpointError:  # its reader says so, in its own words
        return folder
    if not clean:
        return folder
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    copy = until_the_end.enter_context(own_folder(disk()))
    for file in folder.iterdir():
        if file.name in clean:
            (copy / file.name).write_text(json.dumps(clean[file.name], indent=1), encoding="utf-8")
        else:
            (copy / file.name).symlink_to(file.resolve())
    return copy
