"""What no data sheet says: how much of a card's peak is reached, and what each step costs beside arithmetic.

Every constant has a typical value, a range, and its source. What is reached of an H100's peaks was fitted to vLLM 0.10.1 with
Llama-3.1-8B, by "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580), whose simulator
(github.com/SpecDecode-Bench/simulator, ``predictor.py``) states a step as 5.886 ms + 21.01 us a token + 39.26 ns a token of the
KV cache + 1.207 ms of overhead, and three draft passes as 2.135 ms. What is beside it is our own H100's, with vLLM 0.26.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True)
class Constant:
    """A typical value with its range and its source."""

    low: float
    typical: float
    high: float
    unit: str
    meaning: str
    source: str

    def at(self, place: float) -> float:
        """A value of the range, 0 for its low end, 0.5 for the typical value, 1 for its high end; logarithmic between them."""
        low, high, here = (
            (self.low, self.typical, 2 * place) if place < 0.5 else (self.typical, self.high, 2 * place - 1)
        )
        return float(low ** (1 - here) * high**here)


#: the one card on which vLLM with the flag was measured
MEASURED_ON = "H100"
_CARD = "vLLM 0.26, H100, 8B: examples/bench/results/card-h100-vllm0.26.md"
_MEASURED = "arXiv 2601.11580, its simulator: vLLM, H100, Llama-3.1-8B"

#: name of a field of ``Constants`` -> what is known of it
KNOWN: dict[str, Constant] = {
    "weights_reached": Constant(
        *(0.60, 0.76, 0.90),
        "of the memory's peak",
        "while weights are read",
        f"{_MEASURED}: 15.0 GB in 5.886 ms of 3.35 TB/s",
    ),
    "cache_reached": Constant(
        *(0.70, 0.95, 1.00),
        "of the memory's peak",
        "while attention reads the KV cache",
        f"{_MEASURED}: 131072 bytes in 39.26 ns",
    ),
    "products_reached": Constant(
        *(0.12, 0.72, 0.85),
        "of the peak FLOP/s",
        "in forward passes of the engine",
        f"{_MEASURED}: 15.0 GFLOP in 21.01 us; low: what fits NeMo RL's rollouts on GB200, examples/bench/projection.py",
    ),
    "hidden": Constant(
        *(0.01, 0.50, 1.00),
        "of the shorter one",
        "of reading and multiplying, that is hidden behind the longer one",
        f"{_CARD}: what 127 more requests add to a plain step is half of their multiplying; low: {_MEASURED}, whose steps grow "
        "with their tokens from the first one on; high: the ideal of Williams et al., 2009",
    ),
    "step_s": Constant(
        *(0.5e-3, 0.7e-3, 2.4e-3),
        "s",
        "of each step: scheduling, sampling, what the host does between them",
        f"{_CARD}: a plain step of one request, 6.65 ms, less reading; high: twice the 1.207 ms of {_MEASURED}",
    ),
    "draft_pass_s": Constant(
        *(0.04e-3, 0.10e-3, 1.0e-3),
        "s",
        "of each draft pass beside reading and multiplying",
        f"between 0.04 ({_CARD}: seven passes in full graphs, 5.2 ms) and 0.13 ms ({_MEASURED}: (2.135 - 1.75 ms) / 3); high: "
        "passes without a graph, whose kernels the host launches one by one",
    ),
    "piecewise_s": Constant(
        *(0.5e-3, 2.5e-3, 8.0e-3),
        "s",
        "of each step with the flag on vLLM's V1 runner, drafting or not: piecewise graphs, not full ones",
        f"{_CARD}: 1.4 to 3.5 ms at k=0, 2.5 to 5.3 drafting; high: up to 9 ms drafting with vLLM 0.24",
    ),
    "full_graphs_s": Constant(
        *(0.05e-3, 0.3e-3, 2.5e-3),
        "s",
        "of each step with the flag on vLLM's V2 runner, whose graphs are full",
        "an estimate: nobody has measured V2 with a k that changes; with full graphs of one k on V1 an H100 showed none; high: "
        "as if they were piecewise",
    ),
    "verification_reads": Constant(
        *(0.001, 0.02, 0.3),
        "of a reading",
        "that attention reads the KV cache again for each drafted token",
        "0 where a kernel takes all queries of a request at once (FlashAttention 3 in the measurements); range: an estimate",
    ),
    "hop_s": Constant(
        *(4e-6, 9e-6, 15e-6),
        "s",
        "of one small all-reduce or all-to-all",
        "sgl-project/sglang pull request 2904: vLLM's of 512 bytes to 32 KB on H100, 8.5 to 11.8 us; SGLang's from 3.7",
    ),
    "link_reached": Constant(
        *(0.10, 0.20, 0.60),
        "of the link's peak",
        "in collectives of a megabyte",
        "the same: 1 MiB over 8 H100 in 45 us, less the small one's",
    ),
    "training_reached": Constant(
        *(0.20, 0.35, 0.50),
        "of the peak 16-bit FLOP/s",
        "in the trainer's forward and backward passes",
        "Llama 3, arXiv 2407.21783, table 4: 38 to 43 %; lower where responses are of unequal length",
    ),
    "recomputation": Constant(
        *(1.0, 4 / 3, 4 / 3),
        "of the FLOP of a training step",
        "for activation checkpointing",
        "Korthikanti et al., arXiv 2205.05198, section 5: one more forward pass at most",
    ),
    "prepare_s": Constant(
        *(0.5, 2.0, 5.0),
        "s",
        "of weight sync and preparation, a trainer's step",
        "arXiv 2604.26779, breakdown of the step: 1.6 to 2.1 s",
    ),
}


@dataclass(frozen=True)
class Constants:
    """One value of each; see ``KNOWN`` for what they mean."""

    weights_reached: float
    cache_reached: float
    products_reached: float
    hidden: float
    step_s: float
    draft_pass_s: float
    piecewise_s: float
    full_graphs_s: float
    verification_reads: float
    hop_s: float
    link_reached: float
    training_reached: float
    recomputation: float
    prepare_s: float

    @classmethod
    def typical(cls) -> Constants:
        """Every constant at its typical value."""
        return cls(**{name: constant.typical for name, constant in KNOWN.items()})

    @classmethod
    def draws(cls, count: int, rng: Random) -> list[Constants]:
        """So many sets: of each constant one value of each equal share of its range (a Latin hypercube), combined at random."""
        values = {}
        for name, constant in KNOWN.items():
            places = [(i + rng.random()) / count for i in range(count)]
            rng.shuffle(places)
            values[name] = [constant.at(place) for place in places]
        return [cls(**{name: drawn[i] for name, drawn in values.items()}) for i in range(count)]

    def with_the_flag(self, full_graphs: bool) -> Constants:
        """Of an engine with the flag, whose every step takes longer.

        Args:
            full_graphs: has it full CUDA graphs, as vLLM's V2 runner; else piecewise ones.
        """
        return self.but(step_s=self.step_s + (self.full_graphs_s if full_graphs else self.piecewise_s))

    def but(self, **known: float) -> Constants:
        """A copy with these values in place of its own."""
        return replace(self, **known)
