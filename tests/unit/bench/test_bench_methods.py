"""The comparison of methods: its reports, and the padded target that keeps its own layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from spec_plugin_conformance import tiny

from draft_training.layers import initialise
from draft_training.mtp import PREFIX, MtpShape
from draft_training.mtp_module import MtpKind
from examples.bench import common, methods_engines, methods_report, workload
from examples.bench.common import Spread


def cell(method: str, batch: int, speedup: float) -> methods_report.Cell:
    around = Spread(speedup, speedup - 0.1, speedup + 0.1, 3)
    return methods_report.Cell(method, batch, 3, 2.5, 2.0, around, around)


def test_table_and_picture_have_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = (
        "acceptance_length",
        "tokens_per_forward",
        "speculating",
        "speedup_realised",
        "draft_training_ms",
        "refresh_ms",
    )
    records = [{"step": float(i), **dict.fromkeys(names, 1.5)} for i in range(3)]
    cells = [cell(m, b, 1.2) for m in ("suffix", "suffix, seen before", "ngram") for b in (1, 8)]
    slow = Spread(0.93, 0.9, 0.99, 4)
    methods_report.report_controlled(
        [methods_report.Controlled("ngram", 8, slow, 0.95, [0.93] * 4, ["3/3/3!", "0/0/0"], 2.1, 1.1)]
    )
    methods_report.report_cells(cells)
    methods_report.report_runs({"suffix": records})
    shown = capsys.readouterr().out
    assert "1.20 (1.10-1.30)" in shown and "1.50 1.50 1.50" in shown
    assert "0.93 (0.90-0.99): missed" in shown and "3/3/3! 0/0/0" in shown
    methods_report.write_picture(cells, {"suffix": records}, tmp_path / "methods.png")
    assert (tmp_path / "methods.png").stat().st_size > 10_000


def test_a_padded_target_keeps_its_trained_layer(tmp_path: Path) -> None:
    target = tiny.make_target(tmp_path / "target", family="qwen2", num_hidden_layers=2)
    tiny.add_mtp_layer(target)
    shape = MtpShape.from_target(json.loads((target / "config.json").read_text()))
    trained = MtpKind(shape).build("cpu", torch.float32)
    initialise(trained, torch.Generator().manual_seed(9))
    (tmp_path / "trained").mkdir()
    MtpKind(shape).write(tmp_path / "trained", trained.state_dict())
    padded = tmp_path / "padded"
    padded.mkdir()
    hf = json.loads((target / "config.json").read_text())
    hf.pop("num_nextn_predict_layers")
    (padded / "config.json").write_text(json.dumps({**hf, "intermediate_size": 512}))
    state = {n: t for n, t in load_file(target / "model.safetensors").items() if not n.startswith(PREFIX)}
    save_file(workload.pad_state(state, 512), padded / "model.safetensors")
    out = methods_engines.with_layer(padded, tmp_path / "trained", 512)
    wide = MtpShape.from_target(json.loads((out / "config.json").read_text()))
    layer = MtpKind(wide).of_checkpoint(out)
    assert layer is not None, "which is checked against the wider shape"
    assert torch.equal(layer[PREFIX + "input_proj.weight"], trained.state_dict()[PREFIX + "input_proj.weight"])
    assert not layer[PREFIX + "mlp.down_proj.weight"][:, 128:].any()


def test_earlier_results_are_put_together_with_their_dates(tmp_path: Path) -> None:
    slow = methods_report.Controlled("ngram", 8, Spread(0.93, 0.9, 0.99, 4), 0.95, [0.93], ["0/0/0"], 2.1, 1.1)
    parts: list[dict[str, object]] = [
        {"engine": [cell("mtp", 1, 2.0)], "run": {"mtp": [{"step": 1.0}]}},
        {"control": [slow], "run": {"mtp": [{"step": 2.0}], "ngram": []}},
    ]
    files = []
    for i, part in enumerate(parts):
        where = {"date": f"2026-01-0{i + 1}T00:00:00", "cpu": "x", "load_average": [0.1], "commit": "c", "cores": 2}
        files.append(common.write_results("methods", {}, part, where, tmp_path))
    found = methods_report.read_results(files)
    assert found.engine == parts[0]["engine"] and found.control == [slow]
    assert found.run == {"mtp": [{"step": 2.0}], "ngram": []}
    assert {name: told["date"][:10] for name, told in found.sources.items()} == {
        "engine mtp": "2026-01-01",
        "control ngram": "2026-01-02",
        "run mtp": "2026-01-02",
        "run ngram": "2026-01-02",
    }
