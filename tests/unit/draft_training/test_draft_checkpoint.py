from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.drafts import TINY, make_document, make_policy
from safetensors.torch import load_file, save_file

from draft_training import (
    CheckpointError,
    Document,
    DraftConfig,
    DraftConfigError,
    DraftTrainer,
    HiddenBuffer,
    TrainSettings,
    digest,
    fingerprint,
    load_draft,
    save_draft,
)
from draft_training import draft as draft_module
from draft_training.checkpoint import replacing_folder, settled_folder

SETTINGS = TrainSettings(tokens_per_step=60, warmup_steps=3, ttt_steps=2)


def make_trainer(config: DraftConfig, settings: TrainSettings = SETTINGS, seed: int = 3) -> DraftTrainer:
    t = DraftTrainer(config, settings, device="cpu", seed=seed)
    t.update_policy(*make_policy(), 1)
    return t


def make_buffer() -> HiddenBuffer:
    b = HiddenBuffer(10_000, 1 << 30, 0)
    for i in range(12):
        b.add(make_document(12 + i, i, version=i % 2))
    return b


def write(folder, config: dict, tensors: dict) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))


def test_the_digest_depends_on_names_dtypes_shapes_and_bytes_only():
    a = {"x": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])}
    same = {"b": a["b"].clone(), "x": torch.arange(6.0).view(2, 3).t().contiguous().t()}
    assert digest(a) == digest(same) and len(digest(a)) == 64
    for other in (
        {"y": a["x"], "b": a["b"]},
        {**a, "x": a["x"].view(3, 2)},
        {**a, "x": a["x"].double()},
        {**a, "x": a["x"] + 1e-6},
        {**a, "x": a["x"].view(torch.int32)},
    ):
        assert digest(other) != digest(a)
    assert digest({"s": torch.tensor(1.0), "h": torch.ones(3, dtype=torch.bfloat16)})


@pytest.mark.parametrize("kind", ["tiny", "pruned"])
def test_a_saved_draft_comes_back_bit_by_bit(tmp_path, kind, request):
    config = request.getfixturevalue(kind)
    tensors = make_trainer(config).engine_tensors(torch.bfloat16)
    said = save_draft(tmp_path / "d", config, tensors)
    loaded, back = load_draft(tmp_path / "d")
    assert loaded == config and fingerprint(back) == said == fingerprint(tensors)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    assert DraftTrainer(loaded, SETTINGS, device="cpu", seed=9, tensors=back).draft.fc.weight.abs().sum() > 0


def test_a_save_that_fails_leaves_the_old_draft(tmp_path, tiny, monkeypatch):
    tensors = make_trainer(tiny).engine_tensors()
    said = save_draft(tmp_path / "d", tiny, tensors)
    with pytest.raises(DraftConfigError):
        save_draft(tmp_path / "d", tiny, {**tensors, "embed_tokens.weight": torch.zeros(2)})
    monkeypatch.setattr(draft_module, "write_tensors", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_draft(tmp_path / "d", tiny, make_trainer(tiny, seed=8).engine_tensors())
    assert fingerprint(load_draft(tmp_path / "d")[1]) == said and [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_crash_at_any_rename_leaves_a_whole_draft_to_read(tmp_path, tiny, monkeypatch):
    old, new = make_trainer(tiny).engine_tensors(), make_trainer(tiny, seed=8).engine_tensors()
    real = os.replace
    for crash_at in (0, 1):
        folder = tmp_path / f"case{crash_at}" / "d"
        save_draft(folder, tiny, old)
        calls = iter(range(10))

        def crashing(a, b, calls=calls, crash_at=crash_at):
            if next(calls) >= crash_at:
                raise KeyboardInterrupt  # nothing after this point runs in our code
            real(a, b)

        monkeypatch.setattr(os, "replace", crashing)
        with pytest.raises(KeyboardInterrupt):
            save_draft(folder, tiny, new)
        monkeypatch.setattr(os, "replace", real)
        assert digest(load_draft(folder)[1]) == digest(old)
        save_draft(folder, tiny, new)
        assert digest(load_draft(folder)[1]) == digest(new) and settled_folder(folder) == folder
        assert [p.name for p in folder.parent.iterdir()] == ["d"]


def test_an_existing_folder_with_other_files_is_replaced_whole(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "stale.bin").write_text("x")
    with replacing_folder(tmp_path / "d") as folder:
        (folder / "new").write_text("y")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["new"]


def test_drafts_of_other_makers_are_read(tmp_path, tiny, caplog):
    tensors = make_trainer(tiny).engine_tensors()
    foreign = {f"model.{n}": t for n, t in tensors.items()}
    foreign |= {"model.embed_tokens.weight": torch.zeros(40, 16), "lm_head.weight": torch.zeros(40, 16)}
    write(tmp_path / "eagle", tiny.to_hf(), foreign)
    with caplog.at_level(logging.WARNING):
        config, back = load_draft(tmp_path / "eagle")
    assert config == tiny and digest(back) == digest(tensors) and "lm_head is dropped" in caplog.text


def test_a_draft_of_another_shape_is_not_gone_on_with(tmp_path, tiny):
    make_trainer(tiny).save(tmp_path / "old")
    other = make_trainer(replace(tiny, intermediate_size=tiny.intermediate_size + 8))
    with pytest.raises(DraftConfigError, match="intermediate_size"):
        other.load(tmp_path / "old")


def test_speculators_layout_is_read(tmp_path, pruned):
    tensors = make_trainer(pruned).engine_tensors()
    named = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    raw = pruned.to_hf()
    layer = {k: raw[k] for k in raw if k in TINY or k in ("rope_theta", "rope_parameters", "hidden_act")}
    layer |= {"model_type": "llama", "num_hidden_layers": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 12,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": layer,
    }
    write(tmp_path / "s", config, {**named, "embed_tokens.weight": torch.zeros(40, 16)})
    loaded, back = load_draft(tmp_path / "s")
    assert loaded == pruned and digest(back) == digest(tensors)
    write(tmp_path / "q", {**config, "transformer_layer_config": {**layer, "model_type": "qwen3"}}, named)
    with pytest.raises(DraftConfigError, match="qwen3"):
        load_draft(tmp_path / "q")


def test_a_checkpoint_without_t2d_gets_it_from_d2t(tmp_path, pruned):
    t = make_trainer(pruned)
    t.select_vocabulary(torch.arange(40))
    tensors = t.engine_tensors()
    write(tmp_path / "d", pruned.to_hf(), {n: v for n, v in tensors.items() if n != "t2d"})
    assert torch.equal(load_draft(tmp_path / "d")[1]["t2d"], tensors["t2d"])


def test_pickled_checkpoints_are_refused(tmp_path, tiny):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text(json.dumps(tiny.to_hf()))
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DraftConfigError, match="only safetensors are read"):
        load_draft(tmp_path / "d")


def test_fused_missing_and_misshapen_tensors_are_refused(tmp_path, tiny):
    tensors = make_trainer(tiny).engine_tensors()
    at = "midlayer.self_attn."
    fused = {**tensors, at + "qkv_proj.weight": torch.zeros(64, 32)}
    write(tmp_path / "fused", tiny.to_hf(), fused)
    with pytest.raises(DraftConfigError, match="fused"):
        load_draft(tmp_path / "fused")
    write(tmp_path / "missing", tiny.to_hf(), {n: t for n, t in tensors.items() if n != "fc.weight"})
    with pytest.raises(DraftConfigError, match=r"missing \['fc.weight'\]"):
        load_draft(tmp_path / "missing")
    write(tmp_path / "heads", {**tiny.to_hf(), "num_key_value_heads": 4}, tensors)
    with pytest.raises(DraftConfigError, match=r"k_proj.* has shape .* implies .*2 of \d+ tensors are like it"):
        load_draft(tmp_path / "heads")


def test_torn_files_are_refused(tmp_path, tiny):
    save_draft(tmp_path / "d", tiny, make_trainer(tiny).engine_tensors())
    file = tmp_path / "d" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_draft(tmp_path / "d")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_draft(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no folder"):
        load_draft(file)


@pytest.mark.parametrize("kind", ["tiny", "pruned"])
def test_training_resumes_bit_by_bit(tmp_path, kind, request):
    config = request.getfixturevalue(kind)
    straight, b = make_trainer(config), make_buffer()
    straight.train_slice(b, 60, 4)

    first, b = make_trainer(config), make_buffer()
    first.train_slice(b, 60, 2)
    first.save(tmp_path / "c", {"buffer": b.state_dict()})
    second, b = DraftTrainer(config, SETTINGS, device="cpu", seed=77), make_buffer()
    b.load_state_dict(second.load(tmp_path / "c")["buffer"])
    assert (second.draft_version, second.policy_version) == (2, 1)
    second.update_policy(*make_policy(), 1)
    second.train_slice(b, 60, 2)
    assert digest(second.engine_tensors()) == digest(straight.engine_tensors())
    assert second.draft_version == 4
    straight.train_slice(make_buffer(), 60, 1), second.train_slice(make_buffer(), 60, 1)
    assert digest(second.engine_tensors()) == digest(straight.engine_tensors())


def test_a_torn_trainer_checkpoint_changes_nothing(tmp_path, tiny):
    a = make_trainer(tiny)
    a.train_slice(make_buffer(), 60, 2)
    a.save(tmp_path / "c")
    other = make_trainer(tiny, seed=8)
    other.train_slice(make_buffer(), 60, 2)
    other.save(tmp_path / "other")
    for name in ("trainer.safetensors", "draft/model.safetensors"):
        shutil.copytree(tmp_path / "c", tmp_path / "torn")
        shutil.copy(tmp_path / "other" / name, tmp_path / "torn" / name)
        fresh = make_trainer(tiny, seed=5)
        before = digest(fresh.engine_tensors())
        with pytest.raises(CheckpointError, match="digest"):
            fresh.load(tmp_path / "torn")
        assert digest(fresh.engine_tensors()) == before and fresh.draft_version == 0
        shutil.rmtree(tmp_path / "torn")


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, tiny, pruned):
    make_trainer(tiny).save(tmp_path / "c")
    with pytest.raises(DraftConfigError, match="draft_vocab_size"):
        make_trainer(pruned).load(tmp_path / "c")


def test_vllms_config_class_reads_what_we_write(tiny):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**tiny.to_hf())
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.head_dim == 8
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5] and config.draft_vocab_size == 40


#: a trainer's folder as it was written on 2026-11-24, before there was a ``TrainerState``: a pruned draft whose head was trained
#: (``train_head``), which none is any more: what is left of that in the folder is passed over
SAVED = Path(__file__).parent / "data" / "saved_2026_11_24"


def from_saved(folder: Path) -> tuple[DraftTrainer, dict]:
    config = DraftConfig.from_hf(json.loads((SAVED / "draft" / "config.json").read_text()))
    settings = TrainSettings(tokens_per_step=40, warmup_steps=3, first_steps=2)
    trainer = DraftTrainer(config, settings, device="cpu", seed=77)
    return trainer, trainer.load(folder)


def test_a_folder_that_earlier_code_wrote_is_read_and_written_again_bit_by_bit(tmp_path):
    trainer, extra = from_saved(SAVED)
    trainer.save(tmp_path / "again", extra)
    for name in ("trainer.json", "draft/config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (SAVED, tmp_path / "again"))
        for key in (
            "settings",
            "draft_digest",
            "trainer_digest",
            "unroll",
            "skipped",
        ):  # said otherwise; the last two are no state any more
            before.pop(key, None), after.pop(key, None)
        assert after == before, "versions, schedule, extra"
    before, after = (load_file(folder / "trainer.safetensors") for folder in (SAVED, tmp_path / "again"))
    of_the_head = {"head_base", *(f"{kind}.lm_head.weight" for kind in ("step", "exp_avg", "exp_avg_sq"))}
    assert of_the_head < before.keys() and digest(after) == digest({n: before[n] for n in before.keys() - of_the_head})
    assert (trainer.draft_version, trainer.schedule.newborn) == (5, True)


def test_a_folder_of_earlier_code_and_one_written_from_it_train_on_alike(tmp_path):
    first, extra = from_saved(SAVED)
    first.save(tmp_path / "again", extra)
    trained = []
    for trainer in (from_saved(SAVED)[0], from_saved(tmp_path / "again")[0]):
        g = torch.Generator().manual_seed(5)
        ids, mask = torch.randint(0, 12, (30,), generator=g), torch.ones(30, dtype=torch.bool)
        buffer = HiddenBuffer(10_000, 1 << 30, 0)
        buffer.add(Document(ids, torch.randn(30, 24, generator=g), torch.randn(30, 8, generator=g), mask, 3))
        head = torch.randn(12, 8, generator=g)
        trainer.update_policy(torch.randn(12, 8, generator=g), head, 4)
        assert torch.equal(trainer.draft.lm_head.weight, head[trainer.draft.vocabulary()])
        assert trainer.train_slice(buffer, 60, 3).steps == 3
        trained.append((digest(trainer.engine_tensors()), digest(trainer.state().own)))
    assert trained[0] == trained[1]


def test_a_state_makes_another_trainer_that_shares_no_memory_with_the_first(tiny):
    first, second = make_trainer(tiny), make_trainer(tiny, seed=8)
    first.train_slice(make_buffer(), 60, 2)
    second.restore(first.state())
    about = ("draft_version", "policy_version", "newborn")
    assert all(getattr(second.state(), name) == getattr(first.state(), name) for name in about)
    ours, theirs = ({**t.state().weights, **t.state().own} for t in (first, second))
    assert digest(ours) == digest(theirs)
    assert {t.data_ptr() for t in ours.values()}.isdisjoint(t.data_ptr() for t in theirs.values())
    first.train_slice(make_buffer(), 60, 1), second.train_slice(make_buffer(), 60, 1)
    assert digest(first.engine_tensors()) == digest(second.engine_tensors())
