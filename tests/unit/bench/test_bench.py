"""The benchmarks' parts that need no engine: statistics, interleaving, padding, counting of memory, results."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders.bench import HF
from builders.paths import ROOT
from safetensors.torch import load_file

from draft_training import DraftConfig, DraftTrainer, TrainSettings, save_draft
from examples.bench import async_run, common, harvest, off_cost, refresh, run_all, speedup, workload
from spec_plugin.api.events import HiddenStates
from spec_plugin.policy.online_training import documents_of
from spec_plugin.trainer.decoder import find_decoder


def tiny_model(intermediate: int = 24) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options = {k: v for k, v in HF.items() if k != "model_type"} | {"intermediate_size": intermediate}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**options)).eval()


def test_spread_is_median_and_quartiles() -> None:
    assert common.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == common.Spread(3.0, 2.0, 4.0, 5)
    assert common.spread([7.0]) == common.Spread(7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="nothing"):
        common.spread([])


def test_spread_is_not_moved_by_one_disturbed_round() -> None:
    calm, disturbed = [1.0] * 9, [1.0] * 8 + [100.0]
    assert common.spread(disturbed).median == common.spread(calm).median == 1.0


def test_paired_ratio_cancels_a_machine_that_slows_down() -> None:
    b = [100.0, 50.0, 25.0]
    assert common.paired([2 * x for x in b], b) == common.Spread(2.0, 2.0, 2.0, 3)
    with pytest.raises(ValueError):
        common.paired([1.0], [1.0, 2.0])


def test_interleave_runs_every_arm_once_a_round_and_turns_the_order() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str):  # type: ignore[no-untyped-def]
        return lambda index: calls.append((name, index)) or index

    results = common.interleave({n: arm(n) for n in "abc"}, rounds=3, warmup=1)
    assert results == {n: [1, 2, 3] for n in "abc"}
    assert ["".join(n for n, i in calls if i == r) for r in range(4)] == ["abc", "bca", "cab", "abc"]


def test_seconds_add_and_subtract_by_either_clock() -> None:
    a, b = common.Seconds(3.0, 2.0), common.Seconds(1.0, 0.5)
    assert a + b == common.Seconds(4.0, 2.5) and a - b == common.Seconds(2.0, 1.5)
    spent = common.timed(lambda: sum(range(100_000)))
    assert spent.cpu > 0 and spent.wall > 0


def test_limit_is_one_at_break_even() -> None:
    assert common.limit(1.7, 1.7) == 1.0
    assert common.limit(4.0, 1.25) == pytest.approx(3.2)


def test_results_name_machine_versions_threads_and_date(tmp_path: Path) -> None:
    where = common.environment("cpu")
    rows = [common.spread([1.0, 2.0])]
    file = common.write_results("x", {"target": tmp_path}, {"rows": rows}, where, tmp_path / "new")
    read = json.loads(file.read_text())
    assert read["environment"].keys() >= {"date", "device", "cpu", "cores", "threads", "versions", "load_average"}
    assert read["environment"]["versions"]["torch"] == torch.__version__
    assert read["settings"]["target"] == str(tmp_path)
    assert read["results"]["rows"][0]["median"] == 1.5
    assert file.name.startswith("x-20")


@torch.no_grad()
def test_padding_changes_the_width_and_no_output() -> None:
    small, large = tiny_model(), tiny_model(100)
    large.load_state_dict(workload.pad_state(small.state_dict(), 100))
    ids = torch.arange(12)[None]
    assert torch.allclose(small(ids).logits, large(ids).logits, atol=1e-6)
    assert large.model.layers[0].mlp.gate_proj.weight[24:].abs().min() > 0, "padding must do real arithmetic"


def test_digest_of_a_cache_folder_follows_settings_and_files(tmp_path: Path) -> None:
    first = workload.digest_of(tmp_path, {"a": 1})
    assert first == workload.digest_of(tmp_path, {"a": 1}) != workload.digest_of(tmp_path, {"a": 2})
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert workload.digest_of(tmp_path, {"a": 1}) != first


def test_split_gives_back_the_documents_of_a_harvest() -> None:
    states = torch.arange(5.0)[:, None]
    hidden = HiddenStates(torch.arange(5), states.repeat(1, 3), states, torch.ones(5, dtype=torch.bool), (2, 3), 7)
    documents = documents_of(hidden)
    assert [d.input_ids.tolist() for d in documents] == [[0, 1], [2, 3, 4]]
    assert documents[1].last[:, 0].tolist() == [2.0, 3.0, 4.0] and documents[1].policy_version == 7


def test_live_bytes_finds_the_peak_and_ignores_views_and_what_was_there_before() -> None:
    before = torch.zeros(1000)

    def work() -> None:
        a = torch.ones(100)  # 400 bytes
        b = a.view(10, 10)[1:]
        del a
        c = b * 2.0  # 90 values, 360 bytes
        del b, c
        before.view(10, 100).mul_(2.0)
        torch.ones(50).sum()

    assert harvest.peak_bytes(work) == 400 + 360


def test_capture_leaves_no_hook_behind() -> None:
    model = tiny_model()
    taps = harvest.Taps.of(find_decoder(model), (2, 4, 5))
    assert harvest.hooks(model, taps) == (4, 0)


@torch.no_grad()
def test_log_probs_are_those_of_the_tokens_themselves() -> None:
    model, ids = tiny_model(), torch.tensor([[3, 1, 4, 1, 5]])
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(harvest.log_probs(model, ids), want, atol=1e-5)


def test_refreshes_alternate_between_a_spoiled_and_the_real_draft(tmp_path: Path) -> None:
    config = DraftConfig.from_target(HF)
    trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0)
    save_draft(tmp_path / "draft", config, trainer.engine_tensors())
    first, second, third = islice(refresh.drafts(tmp_path / "draft", tmp_path), 3)
    assert first == third and first["digest"] != second["digest"]
    assert torch.equal(load_file(second["path"])["fc.weight"], trainer.engine_tensors()["fc.weight"])


def timing(rate: float, step: float, drafts: int = 0, accepted: int = 0) -> SimpleNamespace:
    clocked = {"rate": lambda _: rate, "step": lambda _: step, "prefill": lambda _: 0.1}
    return SimpleNamespace(**clocked, steps=[step] * 4, drafts=drafts, accepted=accepted)


def test_speed_up_is_paired_and_the_limit_follows_from_steps_and_acceptance() -> None:
    runs = {
        "plain": [timing(100, 0.010), timing(50, 0.020)],
        "draft": [timing(240, 0.013, 10, 25), timing(120, 0.026, 10, 25)],
        "off": [timing(80, 0.0125), timing(40, 0.025)],
    }
    row = speedup.summarize(1, runs, "wall")  # type: ignore[arg-type]
    assert row.speedup.median == pytest.approx(2.4) and row.against_off.median == pytest.approx(3.0)
    assert row.acceptance_length == 3.5 and row.break_even.median == pytest.approx(1.3)
    assert row.limit == pytest.approx(3.5 / 1.3)


def test_cost_of_the_flag_is_paired_with_plain_in_every_arm() -> None:
    runs = {"plain": [timing(100, 0.01), timing(50, 0.02)], "off": [timing(90, 0.011), timing(45, 0.022)]}
    row = off_cost.summarize("1.3M", 8, runs | {"paused": runs["plain"]}, "wall")  # type: ignore[arg-type]
    assert row.ratios["off"].median == pytest.approx(0.9) and row.ratios["paused"].median == 1.0
    assert "plain" not in row.ratios and row.step_ms["plain"].median == pytest.approx(15.0)
    off_cost.report([row], {"dtype": "float32"})


def test_every_benchmark_that_run_all_names_is_there_and_takes_its_quick_options() -> None:
    for name in run_all.NAMES:
        source = (ROOT / "examples" / "bench" / f"{name}.py").read_text()
        assert f'"{run_all.quick_options(name)[0]}"' in source


def test_acceptance_is_compared_step_by_step_within_a_repeat_where_both_drafted() -> None:
    base = [[9.0, 1.0, 2.0, None, 3.0], [9.0, 2.0, 3.0, 3.0, 4.0]]
    mine = [[9.0, 1.5, 2.5, 4.0, 3.5], [9.0, 2.5, 3.5, None, 4.5]]
    length, away = async_run.compared(mine, base, 2)
    assert away == common.Spread(0.5, 0.5, 0.5, 6)
    assert length.n == 6 and length.median == 3.0
