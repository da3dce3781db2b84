"""Mistakes in a refresh: where the draft's weights lie, how new ones get there, and what a worker holds until all agree."""

from __future__ import annotations

from mutants.mutation import Mutation

_SWAP, _LAYOUT = "spec_plugin/engine/refresh/swap.py", "spec_plugin/engine/refresh/layout.py"
_EXTENSION, _FRONT, _FOLDERS = (
    "spec_plugin/engine/extension.py",
    "spec_plugin/engine/front.py",
    "draft_training/folders.py",
)

MUTATIONS = (
    Mutation(
        "spec_plugin/engine/refresh/swap.py",
        "        if reason is not None and backup:",
        "        if reason is not None:",
        "a rank without memory for the previous draft dies of putting it back, instead of saying so",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        "spec_plugin/actor/links.py",
        '                    await self.all("spec_settle", False)\n',
        "                    pass\n",
        "law 5: where one replica raises the others go on with a draft that it does not have",
        ("test_ranks.py",),
    ),
    Mutation(
        _SWAP,
        "if version <= served_version and not force",
        "if version < served_version and not force",
        "law 5: a draft of the same version is installed again unasked",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "cast = tensor.to(slot.dtype)",
        "cast = tensor",
        "law 5: a value that overflows in the served dtype is served",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "(ids < layout.vocab_size)",
        "(ids <= layout.vocab_size)",
        "law 5: a draft token one past the target's vocabulary is served",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _SWAP,
        "return None if found == digest else",
        "return None if len(found) == len(digest) else",
        "law 5: what arrived is not compared with what was sent",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "else mismatch(layout, tensors)",
        "else None",
        "law 5: running weights are not read back",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        'reason: str | None = "interrupted"',
        "reason: str | None = None",
        "law 5: an interrupted swap leaves half a draft",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "if not agree(reason is None):",
        "if reason is not None:",
        "law 5: ranks serve different drafts when one cannot install it",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        "            restore(layout, backup)\n            settle()",
        "            restore(layout, backup)",
        "law 5: kernels compute with the refused draft's packed copies",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _SWAP,
        "(chunk * (place * 2_654_435_761 + 1)).sum()",
        "chunk.sum()",
        "rows that change places in a running draft are not noticed",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _SWAP,
        'tensor.detach().to("cpu", copy=True).contiguous()',
        'tensor.detach().to("cpu").contiguous()',
        "law 5: a staged draft changes when the transport reuses its buffer",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _LAYOUT,
        "rank // m.num_kv_head_replicas * kv",
        "rank * kv",
        "law 5: ranks that share a key-value head serve another one's",
        ("engine/test_refresh_checks.py",),
    ),
    Mutation(
        _EXTENSION,
        "(before, backup[0]) if hold else None",
        "None",
        "law 5: a draft that another engine refused stays in this one",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _EXTENSION,
        "if keep or previous is None:",
        "if previous is None:",
        "every refresh of several engines is taken back",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _EXTENSION,
        "state.served, backup = previous",
        "_, backup = previous",
        "law 5: a draft that was taken back is still said to be served",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _EXTENSION,
        "return refresh.fingerprint(layout.parameters.values()) != state.served.fingerprint",
        "return state.served.fingerprint is None",
        "law 5: a draft that sleep has dropped is served",
        ("engine/test_refresh_held.py",),
    ),
    Mutation(
        _FRONT,
        "        sweep_own()\n",
        "",
        "drafts of killed runs fill the memory of the machine",
        ("engine/test_front_phase.py",),
    ),
    Mutation(
        _FOLDERS,
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "pass",
        "the draft that another run is loading is removed: nobody locks it",
        ("test_folders.py",),
    ),
    Mutation(
        _FOLDERS,
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        "the draft that another run is loading is removed: nobody asks for its lock",
        ("test_folders.py",),
    ),
    Mutation(
        _FOLDERS,
        "if not ours or time.time() - found.st_mtime < _YOUNG_S:",
        "if not ours:",
        "a folder that was just made, and is not locked yet, is removed",
        ("test_folders.py",),
    ),
    Mutation(
        "draft_training/checkpoint.py",
        '    sweep(target.parent, f".{glob.escape(target.name)}.*.new")\n',
        "",
        "halves of saves that were killed fill the checkpoints",
        ("test_folders.py",),
    ),
)
