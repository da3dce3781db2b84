"""Counting what an engine samples, by rank in the policy: requests of random prompts, and whether the shares are the policy's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import runner
import small
import torch

K, TOKENS = 3, 32
ROWS = 24 if runner.V2 else 96  # Triton's interpreter takes its time
#: favourite tokens first: a policy's mass lies there, and so does what a wrong acceptance rule would take from it
RANKS = torch.tensor([1, 2, 5, 20])
#: of each of some fifty shares: one in 1.7 million is further off by chance; 3,000 tokens see 4 % of the probability moved
SIGMAS = 5.0
#: token ids of a prompt, and of what was sampled behind it
Row = tuple[list[int], list[int]]

#: of drafts, and the names of requests; each once a process
versions = itertools.count(1)


def put_in_force(llm: Any, tensors: Any, draft_temperature: float) -> None:
    """Install a draft, and the temperature at which its proposals are drawn."""
    report = small.install(llm, tensors, next(versions), draft_temperature=draft_temperature, force=True)
    assert report["installed"], report["reason"]


def asked(llm: Any, **sampling: Any) -> list[str]:
    """Give it ``ROWS`` requests; their names."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, **sampling)
    generator = torch.Generator().manual_seed(7)
    names = [f"{next(versions)}" for _ in range(ROWS)]
    for name in names:
        prompt = torch.randint(2, small.VOCAB, (6,), generator=generator).tolist()
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return names


def finished(llm: Any, between: Callable[[int], Any] = lambda step: None) -> list[Row]:
    """Step it until nothing is left to do, with a call before each step."""
    rows: list[Row] = []
    for step in itertools.count():
        if not llm.llm_engine.has_unfinished_requests():
            break
        between(step)
        rows += [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in llm.llm_engine.step() if o.finished]
    return rows


def drafted(llm: Any) -> tuple[float, float]:
    """Verification steps and accepted tokens since the engine began."""
    from vllm.v1.metrics.reader import Counter

    found = {m.name: m.value for m in llm.get_metrics() if isinstance(m, Counter)}
    return found["vllm:spec_decode_num_drafts"], found["vllm:spec_decode_num_accepted_tokens"]


def assert_the_policys(rows: list[Row], policy: Any, temperature: float, top_p: float = 1.0) -> None:
    """The shares of tokens by rank in the policy, behind the first of each response, which is never drafted."""
    ids = torch.tensor([prompt + response for prompt, response in rows])
    begin = ids.shape[1] - TOKENS
    with torch.no_grad():
        logits = policy(ids.to(policy.device)).logits[:, begin:-1].flatten(0, 1).float().cpu() / temperature
    law, order = logits.softmax(-1).sort(-1, descending=True)
    law = law * ((law.cumsum(-1) - law) < top_p)
    law = law / law.sum(-1, keepdim=True)
    rank = (order == ids[:, begin + 1 :].reshape(-1, 1)).int().argmax(-1)
    of_rank = torch.bucketize(torch.arange(small.VOCAB), RANKS, right=True)
    seen = torch.bincount(of_rank[rank], minlength=len(RANKS) + 1)
    shares = torch.stack([law[:, of_rank == i].sum(-1) for i in range(len(RANKS) + 1)])
    far = (seen - shares.sum(-1)) / (shares * (1 - shares)).sum(-1).clamp_min(1.0).sqrt()
    assert float(far.abs().max()) < SIGMAS, (far, seen, shares.sum(-1))
