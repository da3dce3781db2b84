"""The counted memory of draft training, against what torch's profiler saw of a real step."""

from __future__ import annotations

import pytest
import torch
from builders.drafts import TINY
from torch.profiler import ProfilerActivity, profile

from draft_training import Document, DraftConfig, DraftTrainer, TrainSettings, training_memory


def taken(trainer: DraftTrainer, tokens: int) -> int:
    """Bytes that one optimizer step allocates at its peak, as the CPU's allocator reports them."""
    config = trainer.config
    document = Document(
        torch.randint(0, config.vocab_size, (tokens,)),
        torch.randn(tokens, len(config.aux_layers) * config.hidden_size),
        torch.randn(tokens, config.hidden_size),
        torch.ones(tokens, dtype=torch.bool),
        0,
    )
    trainer._step(lambda: [document])  # the optimizer's state is there from then on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer._step(lambda: [document])
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("sizes", "tokens", "steps"),
    [
        ({"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2000}, 512, 3),
        ({"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2000}, 512, 7),
        ({"hidden_size": 64, "intermediate_size": 128, "vocab_size": 40_000}, 600, 2),  # the head's part, in two chunks
    ],
)
def test_a_step_takes_no_more_than_was_counted_and_not_much_less(sizes, tokens, steps):
    config = DraftConfig.from_target({**TINY, **sizes})
    trainer = DraftTrainer(config, TrainSettings(ttt_steps=steps, first_steps=steps), device="cpu", seed=0)
    policy = torch.randn(2, config.vocab_size, config.hidden_size)
    trainer.update_policy(policy[0], policy[1], 0)
    counted, found = training_memory(config, tokens, steps, 4, tied=False), taken(trainer, tokens)
    print(f"\ncounted {counted.step / 1e6:.1f} MB, taken {found / 1e6:.1f} MB")
    assert found <= counted.step <= 1.5 * found
    state = sum(t.nbytes for t in (*trainer._optimizer.state().values(), *trainer._policy()) if t.numel() > 1)
    assert counted.slices == state and counted.weights == sum(p.nbytes for p in trainer.draft.parameters())


def test_tied_policy_tensors_are_counted_once():
    config = DraftConfig.from_target(TINY)
    both, one = (training_memory(config, 16, 2, 2, tied).slices for tied in (False, True))
    assert both - one == config.vocab_size * config.hidden_size * 2


def test_on_a_card_the_embedding_stays_with_the_host_and_documents_come_along():
    config = DraftConfig.from_target(TINY)
    here, there = (training_memory(config, 16, 2, 2, False, on_card=on, documents=1000 * on) for on in (False, True))
    assert here.slices - there.slices == config.vocab_size * config.hidden_size * 2 - 1000
