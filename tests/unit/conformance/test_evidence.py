from __future__ import annotations

from fake_driver import Driver

from spec_plugin.conformance.evidence import Evidence
from spec_plugin.conformance.faults import SHORT, STEPS
from spec_plugin.conformance.plants import SELF_TEST, Plants


def seen(folder, **what):
    """Evidence whose driver notes how it is asked to run."""
    runs = {}

    class Seen(Driver):
        engine_version = "somewhere:Engine.version"

        def launch(self, run):
            runs[run.out.name] = run
            yield from super().launch(run)

    return Evidence(Seen, folder, **what), runs


def test_checks_of_the_whole_tour_have_it_go_on_from_the_killed_run(tmp_path):
    evidence, runs = seen(tmp_path, asked={"save_kill_resume"})
    evidence.run("faults")
    assert runs["faults"].resume_from == runs["main"]
    assert "faults:FaultTour=" in runs["faults"].options["plugins"][1]
    assert runs["faults"].options["self_test"] and runs["faults"].steps >= STEPS
    assert not runs["main"].options["self_test"]


def test_other_checks_get_a_short_one_without_start_up_tests(tmp_path):
    evidence, runs = seen(tmp_path, asked={"planted_errors_reach_the_guard"})
    evidence.run("faults")
    assert list(runs) == ["faults"]
    assert "faults:ShortTour=" in runs["faults"].options["plugins"][1]
    assert not runs["faults"].options["self_test"] and runs["faults"].steps == SHORT


def test_the_engine_of_the_refused_run_fails_its_self_test_and_the_others_do_not(tmp_path):
    evidence, runs = seen(tmp_path)
    for name in ("main", "refused"):
        evidence.run(name)
        plants = Plants(tmp_path / "records" / name)
        assert plants.planted(SELF_TEST) == (name == "refused")
        assert plants.place_of_version == "somewhere:Engine.version"
    assert runs["refused"].steps == 1
