"""The checksum by which a refresh is checked within a step: what it notices, and that it says the same wherever tensors lie."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from draft_training import attention, checkpoint, digest, digest_like, fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
BLOCK = checkpoint._BLOCK


def some(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=own) * 8).to(dtype)


def test_it_depends_on_names_dtypes_shapes_and_bytes_only() -> None:
    a = {"x": some(torch.float32, 6, 4), "y": some(torch.bfloat16, 5)}
    same = {"y": a["y"].clone(), "x": a["x"].t().contiguous().t()}
    assert fingerprint(a) == fingerprint(same)
    others = [
        {"z": a["x"], "y": a["y"]},
        {**a, "x": a["x"].view(4, 6)},
        {**a, "y": a["y"].view(torch.float16)},
        {"x": a["x"]},
        {**a, "z": torch.zeros(0)},
        {"x": a["y"], "y": a["x"]},
    ]
    assert len({fingerprint(one) for one in (a, *others)}) == 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (BLOCK - 1,), (2 * BLOCK + 3,)])
def test_every_single_changed_number_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(dtype, *shape)
    clean = fingerprint({"": tensor})
    for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
        flat = tensor.reshape(-1).clone()
        data = flat[at : at + 1].view(torch.uint8)
        for byte in range(data.numel()):
            for bit in range(8):
                data[byte] ^= 1 << bit
                assert fingerprint({"": flat.view(shape)}) != clean, (at, byte, bit)
                data[byte] ^= 1 << bit
        assert fingerprint({"": flat.view(shape)}) == clean


def _swap_blocks(x: Tensor) -> Tensor:
    x[:BLOCK], x[BLOCK : 2 * BLOCK] = x[BLOCK : 2 * BLOCK].clone(), x[:BLOCK].clone()
    return x


def _transposed_words(x: Tensor) -> Tensor:
    """Word i of block j against word j of block i."""
    x[1 * BLOCK + 0], x[0 * BLOCK + 1] = x[0 * BLOCK + 1].clone(), x[1 * BLOCK + 0].clone()
    return x


def _swap_words(x: Tensor) -> Tensor:
    x[[3, 9]] = x[[9, 3]]
    return x


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "nan": lambda x: torch.full_like(x, float("nan")),
    "all signs": lambda x: -x,
    "two signs": lambda x: torch.cat([-x[:2], x[2:]]),
    "half of the signs": lambda x: torch.where(torch.arange(len(x)) % 2 == 0, -x, x),
    "reversed": lambda x: x.flip(0),
    "shifted": lambda x: x.roll(1),
    "shifted by a block": lambda x: x.roll(BLOCK),
    "words of a block swapped": _swap_words,
    "blocks swapped": _swap_blocks,
    "words of two blocks swapped": _transposed_words,
    "the last repeats the first": lambda x: torch.cat([x[:-1], x[:1]]),
    "half of it the draft before": lambda x: torch.cat([x[: len(x) // 2], x[len(x) // 2 :] * 1.01]),
    "rounded": lambda x: x.bfloat16().float(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_happens_to_weights_is_noticed(fault: str) -> None:
    clean = some(torch.float32, 3 * BLOCK + 17)
    assert fingerprint({"": FAULTS[fault](clean.clone())}) != fingerprint({"": clean})


def test_signs_of_two_numbers_that_end_a_word_of_64_bits_do_not_cancel() -> None:
    """As they would if words of 64 bits were summed: the highest bit is the same whatever it is multiplied by."""
    clean = some(torch.bfloat16, 4096)
    for first in range(3, 400, 4):
        spoiled = clean.clone()
        spoiled[[first, first + 4]] *= -1
        assert fingerprint({"": spoiled}) != fingerprint({"": clean})


def test_it_says_the_same_however_many_blocks_are_summed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = some(torch.bfloat16, 5 * BLOCK + 9)
    split = torch.split
    found = fingerprint({"": tensor})
    monkeypatch.setattr(torch, "split", lambda of, size: split(of, 256 if size == 1 else size))
    assert fingerprint({"": tensor}) == found


def test_a_part_of_a_tensor_that_begins_within_a_word() -> None:
    whole = some(torch.bfloat16, 40)
    assert fingerprint({"": whole[1:]}) == fingerprint({"": whole[1:].clone()})


def test_the_receiver_answers_in_kind() -> None:
    tensors = {"x": some(torch.float32, 9)}
    assert digest_like(digest(tensors), tensors) == digest(tensors) != fingerprint(tensors)
    assert digest_like(fingerprint(tensors), tensors) == fingerprint(tensors)
    assert digest_like("", tensors) == digest(tensors)


def test_no_random_stream_is_touched() -> None:
    checkpoint._factors.cache_clear()
    attention.proven_kernel.cache_clear()

    def streams() -> tuple[list[int], list[int], object]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = streams()
    fingerprint({"x": torch.ones(3)})
    assert attention.proven_kernel(torch.device("cpu"), torch.float32, 32) is not None
    assert streams() == before
