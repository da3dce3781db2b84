"""The benchmark of one card: its parts, records, limits and tables. What they measure is looked at elsewhere."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.paths import ROOT
from click.testing import CliRunner

from examples.bench import card
from examples.bench.card_parts import __main__ as child
from examples.bench.card_parts import compare, record, report, score, setup, smoke
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.selftest.self_test_plan import Sampled

WHERE = {"card": None, "card_memory": None, "cpu": "some", "versions": {}, "date": "today", "commit": "c"}
#: what a part does, without the seconds that importing torch takes
ROW = "c = json.load(open(f)); c['rows'].append({'kind': 'step', 'n': 1}); json.dump(c, open(f, 'w')); "
DONE = ROW + "c['status'] = 'done'; json.dump(c, open(f, 'w'))"


def settings(tmp_path: Path, **more: object) -> dict[str, object]:
    given = {"minutes": 5.0, "shape": None, "dtype": None, "eager": False, "threads": 1}
    given |= {"small": tmp_path, "work": tmp_path / "work", "k": 3, "nats": (1.0,)}
    return {**card.settings_of(given, WHERE), **card.limits(300.0), **more}


def begun(tmp_path: Path, **more: object) -> record.Record:
    return record.begin(tmp_path / "start.json", "start", settings(tmp_path, **more), WHERE)


def script(file: Path, body: str) -> list[str]:
    return [sys.executable, "-c", f"import json, os, time; f = {str(file)!r}; {body}"]


# ---------------------------------------------------------------------------------------------------- records


def test_a_row_is_in_the_file_as_soon_as_it_is_added_and_no_half_file_is_ever_seen(tmp_path) -> None:
    found = begun(tmp_path)
    replaced = []
    before = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: (replaced.append(json.loads(Path(a).read_text())), before(a, b)))
        found.row(kind="step", ms=1.5)
        found.row(kind="step", ms=2.5)
    assert [len(content["rows"]) for content in replaced] == [1, 2]
    assert [row["ms"] for row in record.resume(found.file).content["rows"]] == [1.5, 2.5]


def test_a_record_says_where_it_was_made_and_what_it_is_no_claim_about(tmp_path) -> None:
    assert "no claim" in begun(tmp_path).content["claim"]
    on_a_card = record.begin(tmp_path / "b.json", "start", {}, {**WHERE, "card": "NVIDIA H200"})
    assert "claim" not in on_a_card.content
    assert {"device", "card", "driver", "commit", "versions", "date"} <= record.machine("abc").keys()
    assert record.machine("abc")["commit"] == "abc"


def test_the_card_is_read_from_nvidia_smi() -> None:
    assert record.card_of("NVIDIA H200, 580.159.03, 143771 MiB") == ("NVIDIA H200", "580.159.03", "143771 MiB")
    assert record.card_of(None) == record.card_of("No devices were found") == (None, None, None)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": []}'])
def test_what_is_no_record_is_refused_with_what_to_do(tmp_path, text) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json holds no record of a part .*run the part anew"):
        record.resume(tmp_path / "x.json")


def test_nothing_new_is_begun_when_time_is_short_and_that_is_noted(tmp_path) -> None:
    found = begun(tmp_path)
    found.limit(5.0)
    assert not found.enough_for(60.0, "batch 256")
    assert found.enough_for(0.0, "batch 1")
    assert record.resume(found.file).content["notes"] == ["left out for want of time: batch 256"]


# ---------------------------------------------------------------------------------------------------- processes


def test_a_part_at_its_limit_is_ended_with_all_its_processes_and_keeps_its_rows(tmp_path) -> None:
    found = begun(tmp_path, hard_seconds=4.0)
    grandchild = "import subprocess; p = subprocess.Popen(['sleep', '600']); open(f + '.pid', 'w').write(str(p.pid)); "
    status = card.run_part(found, script(found.file, ROW + grandchild + "time.sleep(600)"))
    assert status == "ended"
    content = record.resume(found.file).content
    assert len(content["rows"]) == 1 and "at its limit" in content["why"]
    pid = int(Path(f"{found.file}.pid").read_text())
    for _ in range(100):  # the kernel takes a moment, and whoever inherits it may not ask after it
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("a process of the part lives on")


@pytest.mark.parametrize("body", [ROW + "raise SystemExit(3)", ROW + "os.kill(os.getpid(), 9)"])
def test_a_part_that_dies_keeps_its_rows_and_is_said_to_have_failed(tmp_path, body) -> None:
    found = begun(tmp_path)
    assert card.run_part(found, script(found.file, body)) == "failed"
    content = record.resume(found.file).content
    assert len(content["rows"]) == 1 and "ended with status" in content["why"]


def test_a_part_that_is_stopped_from_outside_leaves_no_process_and_says_so(tmp_path, monkeypatch) -> None:
    found, waited = begun(tmp_path), []
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waited.append(process)
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        card.run_part(found, script(found.file, "time.sleep(600)"))
    assert waited[0].returncode == -9
    content = record.resume(found.file).content
    assert content["status"] == "ended" and "from outside" in content["why"]


def test_a_part_that_fails_leaves_the_others_going(tmp_path) -> None:
    bodies = {"models": DONE, "start": "raise SystemExit(1)", "rollouts": DONE}

    def command(found: record.Record) -> list[str]:
        return script(found.file, bodies[found.content["part"]])

    assert not card.run_parts(tuple(bodies), settings(tmp_path), WHERE, tmp_path, command)
    assert record.resume(tmp_path / "start.json").content["status"] == "failed"
    assert record.resume(tmp_path / "rollouts.json").content["status"] == "done"
    assert not (tmp_path / "models.json").exists()


def test_without_models_no_part_is_begun(tmp_path) -> None:
    def command(found: record.Record) -> list[str]:
        return script(found.file, "raise SystemExit(1)")

    assert not card.run_parts(("models", "start"), settings(tmp_path), WHERE, tmp_path, command)
    assert not (tmp_path / "start.json").exists()


def test_the_parts_stay_within_the_minutes_of_a_card(tmp_path, capsys) -> None:
    """A card that is lent for minutes: no part is begun for which too little is left, nor runs beyond them."""
    asked, found = {}, settings(tmp_path, minutes=None)

    def command(of: record.Record) -> list[str]:
        asked[of.content["part"]] = of.settings["hard_seconds"]
        return script(of.file, DONE + "; time.sleep(1.0)")

    assert card.run_parts(("head",), found, WHERE, tmp_path, command, seconds=1000.0)
    assert asked == {"head": 60.0}
    assert not card.run_parts(("smoke", "trl"), found, WHERE, tmp_path, command, seconds=45.5)
    assert 45.0 < asked["smoke"] < 45.5 and "trl" not in asked
    assert "trl: not begun" in " ".join(capsys.readouterr().out.split())


def test_what_is_done_here_with_these_sources_is_not_done_again(tmp_path) -> None:
    found, where = settings(tmp_path), {**WHERE, "card": "NVIDIA H200"}
    file = tmp_path / "start.json"
    assert not card.is_done(file, found, where)
    record.begin(file, "start", found, where).finish("done")
    assert card.is_done(file, found, where)
    assert not card.is_done(file, {**found, "nats": [0.5]}, where)
    assert not card.is_done(file, found, {**where, "card": "NVIDIA H100"})
    assert not card.is_done(file, found, {**where, "commit": "d"})
    record.begin(file, "start", found, where).finish("ended", "at its limit")
    assert not card.is_done(file, found, where)


def test_where_nothing_is_installed_adapters_are_found_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(card.common, "CACHE", tmp_path)
    folder = card._declared()
    found = list(card.metadata.distributions(path=[str(folder)]))
    points = {(p.group, p.name): p.value for one in found for p in one.entry_points}
    assert points["spec_plugin_adapters", "trl"] == "spec_plugin_trl"
    assert points["spec_plugin_cpu_repairs", "vllm"] == "spec_plugin_cpu.repairs.compat"


def test_what_a_part_raises_is_in_its_record_beside_its_rows(tmp_path, monkeypatch) -> None:
    found = begun(tmp_path)

    def models(of: record.Record, device: str) -> None:
        of.row(kind="step", n=1)
        raise RuntimeError("no such model")

    monkeypatch.setattr(setup, "models", models)
    assert child.main(found.file) == 1
    content = record.resume(found.file).content
    assert content["status"] == "failed" and "no such model" in content["why"] and len(content["rows"]) == 1


# ---------------------------------------------------------------------------------------------------- options


def test_a_card_gets_the_large_shape_and_a_cpu_the_tiny_one(tmp_path) -> None:
    given = {"shape": None, "dtype": None, "eager": False, "small": tmp_path, "work": tmp_path, "nats": (1.0,)}
    on_a_card = card.settings_of(given, {**WHERE, "card": "NVIDIA H200"})
    assert [on_a_card[name] for name in ("shape", "dtype", "cuda", "eager")] == ["8b", "bfloat16", True, False]
    on_a_cpu = card.settings_of(given, WHERE)
    assert [on_a_cpu[name] for name in ("shape", "dtype", "cuda", "eager")] == ["tiny", "float32", False, True]
    assert card.limits(600.0) == {"soft_seconds": 570.0, "hard_seconds": 600.0}
    assert card.limits(30.0)["soft_seconds"] == 15.0
    assert card.settings_of({**given, "shape": "tiny"}, {**WHERE, "card": "x"})["shape"] == "tiny"


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        (["--part", "smoke", "--part", "trl", "--part", "start"], ["smoke", "trl", "models", "start"]),
        (["--part", "head", "--part", "memory"], ["head", "models", "memory"]),
        (["--part", "head"], ["head"]),
        (["--prepare"], ["models"]),
    ],
)
def test_the_large_models_are_made_before_the_first_part_that_needs_them(tmp_path, monkeypatch, asked, run) -> None:
    found: list[str] = []
    monkeypatch.setattr(card, "run_parts", lambda parts, *_, **__: found.extend(parts) or True)
    assert CliRunner().invoke(card.main, [*asked, "--out", str(tmp_path)]).exit_code == 0
    assert found == run


def test_help_teaches_and_an_unknown_part_is_refused() -> None:
    runner = CliRunner()
    help_text = runner.invoke(card.main, ["--help"]).output
    assert all(f"\n    {part} " in help_text for part in card.PARTS)
    assert "Each part has a process and a time limit of its own" in help_text and "--prepare --small DIR" in help_text
    refused = runner.invoke(card.main, ["--part", "speed"])
    assert refused.exit_code == 2 and "'speed' is not one of" in refused.output


def test_every_part_has_a_module_and_a_table() -> None:
    assert set(report.TABLES) == set(card.PARTS)
    for part in card.PARTS:
        assert (
            "def measure(record: Record, models: Models"
            in (ROOT / "examples" / "bench" / "card_parts" / f"{part}.py").read_text()
        )


def test_tables_are_made_of_what_there_is(tmp_path) -> None:
    assert "No part has run" in report.write(tmp_path, card.PARTS).read_text()
    found = begun(tmp_path)
    found.row(kind="step", batch=8, arm="off", ms={"median": 2.0, "low": 1.0, "high": 3.0, "n": 4})
    found.finish("ended", "at its limit")
    text = report.write(tmp_path, card.PARTS).read_text()
    assert "no claim" in text and "| 8 | off | 2 (1-3) |" in text and "ended after" in text


def test_the_records_of_all_parts_go_into_one_file(tmp_path) -> None:
    begun(tmp_path).row(kind="step", n=1)
    report.merge(tmp_path, card.PARTS, tmp_path / "all.json")
    (part,) = json.loads((tmp_path / "all.json").read_text())["parts"]
    assert part["part"] == "start" and part["rows"] == [{"kind": "step", "n": 1}]
    assert str(tmp_path) not in (tmp_path / "all.json").read_text()


def test_the_rehearsal_in_this_repository_is_said_to_be_no_claim_and_has_all_parts() -> None:
    folder = ROOT / "examples" / "bench" / "results"
    parts = json.loads((folder / "card-cpu-tiny.json").read_text())["parts"]
    assert [part["part"] for part in parts] == list(card.PARTS)
    assert all("no claim" in part["claim"] and part["status"] in ("done", "ended") for part in parts)
    assert [part["part"] for part in parts if not part["rows"]] == ["fp8"], "which no CPU serves, and that says so"
    assert (folder / "card-cpu-tiny.md").read_text().startswith("**This is a rehearsal on a CPU")


# ---------------------------------------------------------------------------------------------------- the first two minutes


def group_of_items(pipe: Any, task: Any) -> None:
    """(A process) One item that runs, one that is wrong, one that raises, one within which the process dies."""
    items = smoke.Items(pipe)
    with items.item("runs") as seen:
        seen["ms"] = 1.23456
    with items.item("is wrong"):
        raise smoke.Wrong("another text")
    with items.item("raises"):
        raise OSError("no such device")
    with items.item("dies"):
        os._exit(1) if task is None else time.sleep(60)
    with items.item("never begins"):
        pass


@pytest.mark.parametrize("task", [None, "it hangs"])
def test_each_item_of_the_smoke_has_a_row_whatever_becomes_of_its_process(tmp_path, task) -> None:
    found = begun(tmp_path)
    began = time.monotonic()
    for row in smoke._rows(group_of_items, task, 60.0 if task is None else 5.0, "fork"):
        smoke._put(found, {"kind": "smoke", "group": "g", **row})
    assert time.monotonic() - began < 50
    rows = record.resume(found.file).content["rows"]
    results = {row["item"]: row["result"] for row in rows}
    assert results == {"runs": "ran", "is wrong": "WRONG", "raises": "failed", "dies": "unfinished" if task else "died"}
    assert [row["seen"] for row in rows][:2] == ["ms 1.23", "why another text"] and "OSError" in rows[2]["seen"]
    (table,) = report.TABLES["smoke"]({"rows": rows})
    assert [row[2] for row in table[2]] == ["ran", "WRONG", "failed", results["dies"]]
    assert table[2][2][4] == "OSError: no such device", "of a traceback the last line"


# ---------------------------------------------------------------------------------------------------- numbers


def sampled(tokens: list[int], gap: float = 1.0, best: float = -0.5) -> Sampled:
    """Each place has its own token as the best, and token 9 so many nats below."""
    top = np.array([[best, best - gap]] * len(tokens))
    ids = np.array([[token, 9] for token in tokens])
    return Sampled(0, tuple(tokens), top[:, 0], top, ids)


def test_the_gap_is_taken_where_two_texts_part() -> None:
    base = [sampled([1, 2, 3], 0.25), sampled([1, 2, 3])]
    assert compare.gaps_at_parting([sampled([1, 9, 9], best=-0.1), sampled([1, 2, 3])], base) == [0.25]
    assert compare.gaps_at_parting([sampled([1, 2, 3])] * 2, base) == []


def test_drafted_text_is_compared_with_plain_text_and_plain_with_plain() -> None:
    arms = {"plain 8": [sampled([1, 2])], "drafted 8": [sampled([1, 9])], "plain 2": [sampled([1, 2])]}
    arms["drafted 2"] = [sampled([1, 2])]
    rows = {(row["of"], row["against"]): row for row in compare.compare_greedy(arms, torch.bfloat16)}
    pairs = {(of, base) for of in ("drafted 8", "drafted 2") for base in ("plain 8", "plain 2")}
    assert set(rows) == {*pairs, ("plain 2", "plain 8")}
    wrong = rows["drafted 8", "plain 8"]
    assert wrong["gaps"] == [1.0] and wrong["beyond_fixed"] == 1 and not wrong["self_test_would_pass"]
    assert rows["plain 2", "plain 8"]["identical"] == 1 and rows["plain 2", "plain 8"]["self_test_would_pass"]


def test_quantiles_are_said_only_of_tokens_that_are_there() -> None:
    row = compare.logprob_row([[-1.0] * 10, [-2.0] * 90], [[-1.5] * 10, [-2.0] * 90])
    assert row["tokens"] == 100 and row["mean"] == pytest.approx(0.05) and row["max"] == 0.5
    assert list(row["quantiles"]) == ["0.5", "0.9", "0.99"]
    assert row["sequence_means"] == {
        "10": {"sequences": 1, "median": 0.5, "max": 0.5},
        "90": {"sequences": 1, "median": 0.0, "max": 0.0},
    }


def test_the_guard_is_asked_and_refuses_what_is_not_the_policy() -> None:
    target = TargetInfo("", {}, "bfloat16", sampling={"temperature": 1.0}, actor_dtype="bfloat16")
    rng = random.Random(0)

    def pair(error: float) -> compare.Pair:
        true = [[-rng.expovariate(1.0) for _ in range(64)] for _ in range(128)]
        return [[v - rng.expovariate(1.0 / error) for v in row] for row in true], true

    right = {row["run"]: row["refused"] for row in compare.judge(target, pair(0.01), pair(0.01))}
    assert right == {"plain first": 0, "drafted only": 0, "plain only": 0}
    wrong = {row["run"]: row["refused"] for row in compare.judge(target, pair(0.01), pair(0.5))}
    assert wrong["plain first"] > 0 and wrong["drafted only"] > 0 and wrong["plain only"] == 0


def test_every_row_is_scored_once_in_passes_of_bounded_size() -> None:
    rows = [([0] * (i % 7 + 1), [0] * (400 * (i % 5) + 1)) for i in range(60)]
    parts = list(score.portions(rows))
    assert sorted(i for part in parts for i in part) == list(range(60)) and len(parts) > 1
    assert all(len(part) * max(sum(map(len, rows[i])) for i in part) <= score.ROWS for part in parts)


def test_scores_are_the_log_probs_of_the_response_at_that_temperature(tmp_path) -> None:
    from spec_plugin_conformance import tiny

    scorer = score.Scorer(tiny.make_target(tmp_path / "target"), "float32", "cpu")
    prompt, response = [5, 6, 7], [8, 9]
    with torch.no_grad():
        logits = scorer.model(torch.tensor([prompt + response])).logits[0].float() / 0.6
    expected = [float(torch.log_softmax(logits[i], -1)[t]) for i, t in ((2, 8), (3, 9))]
    found = scorer.score([(prompt, response), ([5, 6], [7] * 20)], 0.6)
    assert found[0] == pytest.approx(expected, abs=1e-5) and len(found[1]) == 20
