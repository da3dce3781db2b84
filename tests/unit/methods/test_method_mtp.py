"""The layer for multi-token prediction: which targets have one, where it comes from, and what is sent to the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_training import Document, DraftConfigError, DraftTrainer, HiddenBuffer, TrainSettings
from draft_training.batch import pack
from draft_training.layers import initialise
from draft_training.mtp import MtpShape
from draft_training.mtp_module import MtpKind
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.methods.mtp import MtpMethod

HF = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
}


def layer_of(folder: Path, files: int = 1) -> dict[str, torch.Tensor]:
    """A checkpoint with a random layer; its tensors, by their names there."""
    shape = MtpShape.from_target(HF)
    module = MtpKind(shape).build("cpu", torch.float32)
    initialise(module, torch.Generator().manual_seed(3))
    named = {f"model.mtp_layers.0.{n}": p.detach().clone() for n, p in module.named_parameters()}
    named["model.norm.weight"] = torch.ones(64)
    names = sorted(named)
    parts = [names[i::files] for i in range(files)]
    places = {}
    for i, part in enumerate(parts):
        file = "model.safetensors" if files == 1 else f"model-{i}.safetensors"
        save_file({n: named[n] for n in part}, folder / file)
        places |= dict.fromkeys(part, file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return module.state_dict()


def method(path: Path | str = "m", hf: dict[str, Any] = HF, load_format: str = "auto", **options: Any) -> Method:
    target = TargetInfo(str(path), hf, "float32", max_num_seqs=8, load_format=load_format)
    found = MtpMethod().spec_method(SpecConfig.parse({"method": "mtp", **options}), target)
    assert found is not None
    return found


@pytest.mark.parametrize("files", [1, 3])
def test_the_checkpoints_own_layer_is_served_and_trained_on(tmp_path: Path, files: int) -> None:
    expected = layer_of(tmp_path, files)
    found = method(tmp_path)
    check_speculative_config(found.speculative_config())
    assert "model" not in found.speculative_config(), "vLLM takes the target's own"
    assert found.pretrained and not found.newborn and found.harvest == (5,), (
        "what enters the norm behind the fifth layer"
    )
    assert found.draft is not None and found.draft.tensors is not None
    assert found.draft.tensors.keys() == expected.keys()
    assert all(torch.equal(expected[n], t) for n, t in found.draft.tensors.items())
    assert "model.mtp_layers.0.self_attn.q_proj.bias" in expected and "model.mtp_layers.0.input_proj.weight" in expected
    assert found.draft.config.parameters == sum(t.numel() for t in expected.values())


def test_a_layer_that_is_not_there_is_born_where_the_trainer_sends_it(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    newborn = method(tmp_path, load_format="dummy")
    assert newborn.newborn and not newborn.pretrained
    with pytest.raises(SpecConfigError, match=r"holds no tensors named model\.mtp_layers"):
        method(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nextn_predict_layers": 3}, "one MTP layer can"),
        ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers=None"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM cannot be trained yet"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling"),
    ],
)
def test_what_cannot_be_trained_is_said_at_once(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    layer_of(tmp_path)
    with pytest.raises(SpecConfigError, match=said):
        method(tmp_path, {**HF, **changes})


def test_another_layer_than_config_json_says_is_refused(tmp_path: Path) -> None:
    layer_of(tmp_path)
    with pytest.raises(SpecConfigError, match=r"has shape .* implies \[256, 64\]"):
        method(tmp_path, {**HF, "intermediate_size": 256})


def test_others_are_served_as_they_are() -> None:
    deepseek = {**HF, "architectures": ["DeepseekV3ForCausalLM"]}
    found = method(hf=deepseek, train=False)
    assert found.pretrained and found.harvest is None and found.draft is None
    with pytest.raises(SpecConfigError, match="load_format to auto"):
        method(hf=deepseek, train=False, load_format="dummy")


OTHERS = {
    "DeepseekV3ForCausalLM": "model.layers.5.eh_proj.weight",
    "Ernie4_5_MoeForCausalLM": "model.mtp_block.0.mlp.up_proj.weight",
    "Qwen3NextForCausalLM": "mtp.fc.weight",
}


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_layer_that_others_have_dropped_is_missed_before_the_engine_starts(
    architecture: str, indexed: bool, tmp_path: Path
) -> None:
    hf, own, theirs = {**HF, "architectures": [architecture]}, "model.layers.4.mlp.up_proj.weight", OTHERS[architecture]

    def write(*names: str) -> None:
        save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
        if indexed:
            places = dict.fromkeys(names, "model.safetensors")
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    write(own, theirs)
    assert method(tmp_path, hf, train=False).pretrained
    with pytest.raises(SpecConfigError, match=r"names no layer for multi-token prediction \(num_nextn_predict_layers"):
        method(tmp_path, {**hf, "num_nextn_predict_layers": 0}, train=False)
    assert method(
        tmp_path, {**hf, "num_nextn_predict_layers": None, "mtp_num_hidden_layers": 1}, train=False
    ).pretrained
    write(own)
    with pytest.raises(SpecConfigError, match=r"holds no tensors of an MTP layer \(named mtp, or layers\.5\)"):
        method(tmp_path, hf, train=False)
    (tmp_path / "model.safetensors").write_text("{")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(SpecConfigError, match=r"model\.safetensors"):
        method(tmp_path, hf, train=False)


def test_it_learns_what_a_policy_says_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    """A policy that counts: its state is the token's embedding, and what follows is the next embedding's neighbour."""
    torch.manual_seed(0)
    shape, vocab = MtpShape.from_target(HF), 96
    embed = torch.nn.functional.normalize(torch.randn(vocab, 64), dim=1) * 8
    following = (torch.arange(vocab) * 5 + 1) % vocab
    buffer, documents = HiddenBuffer(1 << 20, 1 << 30, 0), []
    for start in range(24):
        ids = [start]
        for _ in range(19):
            ids.append(int(following[ids[-1]]))
        states = embed[following[torch.tensor(ids)]]
        documents.append(Document(torch.tensor(ids), states, states, torch.ones(20, dtype=torch.bool), 0))
    for document in documents[4:]:
        buffer.add(document)
    trainer = DraftTrainer(shape, TrainSettings(ttt_steps=3), device="cpu", seed=0)
    trainer.update_policy(embed, embed.clone(), 0)
    before = trainer.evaluate(documents[:4], 3).acceptance_length
    trainer.train_slice(buffer, float("inf"), 60)
    after = trainer.evaluate(documents[:4], 3).acceptance_length
    assert before < 1.5 and after > 3.0, (before, after)
    trainer.save(tmp_path / "draft")
    resumed = DraftTrainer(shape, TrainSettings(ttt_steps=3), device="cpu", seed=1)
    resumed.update_policy(embed, embed.clone(), 0)
    resumed.load(tmp_path / "draft")
    assert resumed.draft_version == 60
    ours, theirs = trainer.engine_tensors(), resumed.engine_tensors()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_no_token_stands_before_the_first() -> None:
    """vLLM clears the embedding of position 0: whatever token follows the first one changes nothing there."""
    shape = MtpShape.from_target(HF)
    layer = MtpKind(shape).build("cpu", torch.float32)
    initialise(layer, torch.Generator().manual_seed(0))
    embed, states = torch.randn(96, 64), torch.randn(6, 64)

    def rows(second: int, third: int) -> torch.Tensor:
        ids = torch.tensor([3, second, third, 6, 7, 8])
        document = Document(ids, states, states, torch.ones(6, dtype=torch.bool), 0)
        (step,) = layer.states(pack([document]), embed, 1)
        return step.detach()

    assert torch.equal(rows(4, 5), rows(40, 5))
    assert torch.equal(rows(4, 5)[0], rows(4, 50)[0]) and not torch.allclose(rows(4, 5)[1], rows(4, 50)[1])


def test_the_first_token_of_a_window_is_not_the_first_of_its_rollout() -> None:
    """A window from the midst of a long rollout: the engine clears the embedding of the rollout's position 0 alone."""
    shape = MtpShape.from_target(HF)
    layer = MtpKind(shape).build("cpu", torch.float32)
    initialise(layer, torch.Generator().manual_seed(0))
    embed, states = torch.randn(96, 64), torch.randn(9, 64)

    def first_row(second: int) -> torch.Tensor:
        ids = torch.tensor([3, 4, 5, 6, second, 8, 9, 10, 11])
        document = Document(ids, states, states, torch.ones(9, dtype=torch.bool), 0)
        window = document.window(2, 9).window(1, 6)
        batch = pack([document.window(0, 4), window])
        assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7]
        (step,) = layer.states(batch, embed, 1)
        return step.detach()[4]

    assert not torch.allclose(first_row(4), first_row(40))


def test_what_the_buffer_draws_of_a_long_rollout_knows_where_it_stood() -> None:
    n = 50
    document = Document(
        torch.arange(n), torch.arange(n)[:, None].float(), torch.zeros(n, 4), torch.ones(n, dtype=torch.bool), 0
    )
    buffer = HiddenBuffer(1 << 20, 1 << 30, 0)
    buffer.add(document.window(5, n))
    for _ in range(20):
        for drawn in (part.cut() for part in buffer.sample(8, 0.0)):
            assert drawn.offset == int(drawn.input_ids[0]) >= 5


def test_a_layer_that_holds_no_numbers_is_refused_where_it_is_read(tmp_path: Path) -> None:
    layer_of(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.mtp_layers.0.input_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(DraftConfigError, match="not finite"):
        MtpKind(MtpShape.from_target(HF)).of_checkpoint(tmp_path)
