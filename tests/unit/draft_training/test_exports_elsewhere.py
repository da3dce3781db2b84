"""An exported draft in the libraries that it was exported for; each test is skipped where its library is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.drafts import TINY
from builders.paths import ROOT
from builders.sglang_loads import declared_operations
from safetensors.torch import load_file

from draft_training import DraftConfig, Eagle3Draft
from draft_training.exports import Verifier, for_sglang, for_speculators, target_head, write_export
from draft_training.layers import initialise

STEPS, TOKENS = 3, 12
DECLARED = declared_operations()  # before transformers' models are imported


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


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (checked with 0.5.23)")
@pytest.mark.parametrize("vocabulary", [None, 12])
def test_sglangs_own_loader_reads_layers_head_and_every_number_of_an_export(
    tmp_path: Path, vocabulary: int | None
) -> None:

    target = make_target(tmp_path / "target")
    draft = make_draft(vocabulary, target.lm_head.weight.detach())
    write_export(tmp_path / "draft", draft.config, for_sglang(draft.config), draft.state_dict())
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, str(ROOT / "tests" / "builders" / "sglang_loads.py")]
    command += [str(tmp_path / "target"), str(tmp_path / "draft"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    about = json.loads((out / "about.json").read_text())
    assert about["captured"] == list(draft.config.aux_layers), "it counts as we do, from its own count of outputs"
    assert about["head_of_target"] == (vocabulary is None) and about["norm_output"] is True
    assert about["tokens"] == (draft.vocabulary().tolist() if vocabulary else None)
    theirs, ours = load_file(out / "loaded.safetensors"), draft.state_dict()
    part = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
    stacked = {
        "model.layers.0.self_attn.qkv_proj.weight": [part[0].format(name) for name in "qkv"],
        "model.layers.0.mlp.gate_up_proj.weight": [part[1].format(name) for name in ("gate", "up")],
    }
    expected = {name: torch.cat([ours[part] for part in parts]) for name, parts in stacked.items()}
    for name in ours.keys() - {part for parts in stacked.values() for part in parts} - {"d2t", "t2d"}:
        expected[name if name == "lm_head.weight" else f"model.{name.replace('midlayer', 'layers.0')}"] = ours[name]
    for name, tensor in expected.items():
        assert torch.equal(theirs[name][: len(tensor)], tensor), name  # its head has rows of padding behind
