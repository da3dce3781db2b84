"""How many drafted tokens an engine's sampler has memory for, beside what vLLM has counted when it made its KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_plugin.step_cost.model import Numbers

#: bytes that the sampler may take on a card, outside of what vLLM has counted: its ``gpu_memory_utilization`` leaves more, but
#: what of that the trainer's own tensors hold while rollouts run nobody tells
ROOM = 2 << 30
#: bytes for each logit of a request with which vLLM profiles its V1 rejection sampler, and those that V2 processes at once
_V1_PROFILED, _CHUNK = 30, 1 << 30


def fit_sampler_memory(
    table: Sequence[int],
    vocab_size: int,
    room: int = ROOM,
    v2: bool = False,
    in_chunks: bool = False,
    ranks: int = 1,
    sampled: bool = False,
) -> tuple[int, ...]:
    """A table with k cut to where the sampler's tensors fit into what vLLM's memory profile has seen of them, and ``room``.

    The profile samples for ``max_num_seqs`` requests, whatever ``gpu_memory_utilization`` is; a step of b requests verifies
    b * (k + 1) rows of V logits. Bytes for each of the V, in vLLM 0.29 with bfloat16 logits and log-probs of the samples:

    ======  ================================================================  ==================  ===================
    runner  live at once                                                      a step              seen in the profile
    ======  ================================================================  ==================  ===================
    V1      logits 2 a row; of the bonus row its copy 2 and raw logits 4; of  14 b (k + 1) + 8 b  30 max_num_seqs: it
            drafted rows raw and processed logits 4 + 4; of all rows again    k + 6 b             verifies k = 1
            for their log-probs, as one, chosen, and log_softmax: 4 + 4 + 4
    V2      logits 2 a row, and with tensor parallelism while they are        2 g b (k + 1)       2 g max_num_seqs
            gathered two copies and a shard (g = 2 + 1 / ranks, else 1);      and 1 GiB
            processed logits 4 in chunks of a GiB at most
    ======  ================================================================  ==================  ===================

    Where V2 knows no chunks the processed logits of all rows are counted; vLLM 0.26 processes the logits in place, without them.

    Args:
        table: k for each batch size from 0 to ``max_num_seqs``.
        vocab_size: of the target.
        room: bytes that a card has beside what vLLM counts.
        v2: is it the V2 runner.
        in_chunks: of a vLLM whose V2 verifies in chunks.
        ranks: of tensor parallelism.
        sampled: are proposals drawn: V1 then keeps what each of the b * k was drawn from, 4 bytes, and copies it to verify; V2
            has taken that at start.
    """
    most = len(table) - 1
    gathered = 2.0 if ranks == 1 else 2.0 * (2.0 + 1.0 / ranks)

    def bytes_of(b: Numbers, k: int) -> Numbers:
        rows: Numbers = vocab_size * b * (k + 1)
        if not v2:
            return 14 * rows + vocab_size * ((8 + 8 * sampled) * b * k + 6 * b)
        processed = np.minimum(4 * rows, _CHUNK) if in_chunks else 4 * rows
        most_at_once: Numbers = np.maximum(gathered * rows, 2 * rows + processed)
        return most_at_once

    seen = vocab_size * most * (gathered if v2 else _V1_PROFILED)
    batches: Numbers = np.arange(most + 1, dtype=np.float64)
    ks, cut = np.array(table), np.zeros(most + 1, np.int64)
    for k in range(1, max(table) + 1):  # a longer draft takes more, so the last that fits is the longest
        cut += (ks >= k) & (bytes_of(batches, k) <= seen + room)
    return tuple(cut.tolist())
