"""CPU time of the engine's front end: what log-probs of every sampled token cost it, and what is noted of each request."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common  # noqa: E402
from examples.bench.common import show  # noqa: E402
from spec_plugin.api.spans import Spans  # noqa: E402
from spec_plugin.engine.flight import RequestTracker  # noqa: E402

HELP = """Measure the CPU time of an engine's front end, without a model.

\b
vLLM's own OutputProcessor is driven with the outputs of an engine whose steps emit 1 to 4 tokens of each request (k=3), with
the options that a trainer may ask for: no log-probs, those of the sampled tokens, and the same in flat lists, each with the
text put together and without. Then what the engine's front end, and the first actor rank, note of each request.
"""

PROMPT, VOCABULARY, MOST = 512, 151_936, 4


@dataclass(frozen=True)
class Row:
    """One arm: CPU seconds of a million tokens."""

    what: str
    seconds: float


def tokenizer() -> Any:
    """A fast tokenizer with as many words as Qwen3 has tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f" w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def outputs(requests: int, tokens: int, log_probs: bool, rng: np.random.Generator) -> Iterator[list[EngineCoreOutput]]:
    """What an engine's core says of requests of so many tokens, step by step."""
    left = np.full(requests, tokens)
    while (left > 0).any():
        step = []
        for i in np.flatnonzero(left > 0).tolist():
            n = min(int(rng.integers(1, MOST + 1)), int(left[i]))
            left[i] -= n
            ids = rng.integers(0, VOCABULARY, (n, 1))
            said = LogprobsLists(ids, -rng.random((n, 1), np.float32), np.ones(n, np.int64)) if log_probs else None
            ends = FinishReason.LENGTH if left[i] == 0 else None
            step.append(EngineCoreOutput(str(i), ids[:, 0].tolist(), said, finish_reason=ends))
        yield step


def front_seconds(requests: int, tokens: int, reader: Any, log_probs: bool, **options: Any) -> tuple[float, list[Any]]:
    """CPU seconds of vLLM's front end for so many requests side by side, and their completed outputs."""
    params = SamplingParams(
        max_tokens=tokens, logprobs=0 if log_probs else None, detokenize=reader is not None, **options
    )
    processor = OutputProcessor(reader, log_stats=False)
    for i in range(requests):
        asked = EngineCoreRequest(str(i), list(range(PROMPT)), None, params, None, 0.0, None, None, None)
        asked.external_req_id = str(i)
        processor.add_request(asked, None)
    took, done = 0.0, []
    for step in outputs(requests, tokens, log_probs, np.random.default_rng(0)):
        began = time.process_time()
        answers = processor.process_outputs(step).request_outputs
        took += time.process_time() - began
        done += [answer.outputs[0] for answer in answers if answer.finished]
    return took, done


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of it."""
    began = time.process_time()
    work()
    return time.process_time() - began


def kept(requests: int, tokens: int, asked: bool) -> tuple[float, float, float]:
    """CPU seconds of what the front end notes of so many requests, of the first rank's ``Spans.add``, and of its ``Spans.of``."""
    rng, tracker, spans = np.random.default_rng(1), RequestTracker(), Spans()
    prompt = list(range(PROMPT))
    said = [(rng.integers(0, VOCABULARY, tokens).tolist(), (-rng.random(tokens)).tolist()) for _ in range(requests)]

    def note() -> None:
        for response, log_probs in said:
            with tracker.request(1) as request:
                request.completed(response, 1, log_probs, asked=asked)
            tracker.completed(request, prompt, 1, True)

    noted = seconds(note)
    documents = [torch.tensor(prompt + response) for response, _ in said]
    added = seconds(lambda: spans.add(tracker.take_spans(), 1))
    mask = torch.ones(requests, tokens, dtype=torch.bool)
    return noted, added, seconds(lambda: spans.of(documents, [PROMPT] * requests, mask))


@click.command(help=HELP)
@click.option("--requests", default=32, show_default=True, help="side by side, in the measurement.")
@click.option("--tokens", default=4096, show_default=True, help="of a response, in the measurement of vLLM's part.")
@click.option("--out", type=click.Path(path_type=Path), default=common.RESULTS, help="Folder of the JSON file.")
def main(requests: int, tokens: int, out: Path) -> None:
    """Measure and print."""
    rows, reader = [], tokenizer()
    for text, arm in (("text", reader), ("no text", None)):
        for name, log_probs, options in (
            ("no log-probs", False, {}),
            ("log-probs", True, {}),
            ("log-probs, flat", True, {"flat_logprobs": True}),
        ):
            took, _ = front_seconds(requests, tokens, arm, log_probs, **options)
            rows.append(Row(f"vLLM's front end: {name}, {text}", took * 1e6 / (requests * tokens)))
    for length in (tokens, 4 * tokens):
        for asked in (True, False):
            noted, added, found = kept(requests, length, asked)
            per = 1e6 / (requests * length)
            words = "" if asked else " and their log-probs, which the trainer did not ask for"
            rows.append(Row(f"front end: spans of responses of {length}{words}", noted * per))
        rows.append(Row(f"first rank: spans of responses of {length} taken up", added * per))
        rows.append(Row(f"first rank: spans of responses of {length} found", found * per))
    columns = ["what", "CPU seconds of a million tokens", "of 1024 x 4096", "of 1024 x 16384"]
    table = [[row.what, *(f"{row.seconds * n:.3f}" for n in (1.0, 4.194304, 16.777216))] for row in rows]
    show("Front end of one engine", columns, table)
    settings = {"requests": requests, "tokens": tokens}
    common.write_results("front", settings, [asdict(row) for row in rows], common.environment("cpu"), out)


if __name__ == "__main__":
    main()
