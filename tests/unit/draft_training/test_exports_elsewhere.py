"""An exported draft in the libraries that it was exported for; each test is skipped where its library is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.drafts import TINY

from draft_training import DraftConfig, Eagle3Draft
from draft_training.exports import Verifier, for_speculators, target_head, write_export
from draft_training.layers import initialise

STEPS, TOKENS = 3, 12


def make_target(folder: Path) -> Any:
    """A random policy of the tiny shape, saved where a draft's verifier is looked for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    target = Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=False)).eval()
    target.save_pretrained(folder)
    return target


def make_draft(vocabulary: int | None, lm_head: torch.Tensor) -> Eagle3Draft:
    """Random; of a pruned one, tokens from all over the vocabulary."""
    draft = Eagle3Draft(DraftConfig.from_target(TINY, draft_vocab_size=vocabulary))
    initialise(draft, torch.Generator().manual_seed(2))
    if vocabulary:
        draft.set_vocabulary(
            torch.randperm(TINY["vocab_size"], generator=torch.Generator().manual_seed(3))[:vocabulary]
        )
        draft.refresh_head(lm_head)
    return draft


@pytest.mark.parametrize("vocabulary", [None, 12])
def test_speculators_loads_an_export_and_drafts_the_tokens_that_we_draft(
    tmp_path: Path, vocabulary: int | None
) -> None:
    speculators = pytest.importorskip("speculators", reason="pip install speculators (checked with 0.9.0)")
    target = make_target(tmp_path / "target")
    embed, lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    draft = make_draft(vocabulary, lm_head)
    hf = for_speculators(draft.config, Verifier(str(tmp_path / "target"), ["Qwen3ForCausalLM"]), STEPS)
    head = None if vocabulary else target_head(tmp_path / "target", draft.config)
    write_export(tmp_path / "out", draft.config, hf, draft.state_dict(), head)
    config = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path / "out"))
    config.transformer_layer_config._attn_implementation = "eager"  # its own one is compiled
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "out"), config=config).eval()
    assert model.target_layer_ids == list(draft.config.aux_layers)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == STEPS

    aux = torch.randn(TOKENS, 3 * TINY["hidden_size"], generator=torch.Generator().manual_seed(4))
    following = torch.randint(0, TINY["vocab_size"], (TOKENS + STEPS,), generator=torch.Generator().manual_seed(5))
    rows = torch.stack([following[j : j + TOKENS] for j in range(STEPS)])
    with torch.no_grad():
        matrix, ids = draft.head(lm_head)
        ours = [(states @ matrix.T).argmax(-1) for states in draft.unroll(aux, rows, (TOKENS,), embed, STEPS)]
        theirs = model(aux[None], following[None, :TOKENS], torch.zeros(1, TOKENS, dtype=torch.long), ttt_steps=STEPS)
    assert ids is None or torch.equal(torch.arange(12) + model.d2t, ids)
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        seen = TOKENS - step  # beyond it its tokens are padding
        assert mine[:seen].tolist() == other[0, :seen].tolist(), step
    assert len({*ours[0].tolist()}) > 3, "a draft that says one thing always would prove nothing"
