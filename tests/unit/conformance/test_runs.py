from __future__ import annotations

from builders.fake_driver import Driver
from spec_plugin_conformance.faults import SHORT, STEPS
from spec_plugin_conformance.journal import Journal
from spec_plugin_conformance.plants import SELF_TEST, PlantedErrors
from spec_plugin_conformance.runs import KitRuns


def seen(folder, **what):
    """KitRuns whose driver notes how it is asked to run."""
    asked_of_driver = {}

    class Seen(Driver):
        engine_version = "somewhere:Engine.version"

        def launch(self, run):
            asked_of_driver[run.out.name] = run
            yield from super().launch(run)

    return KitRuns(Seen, folder, **what), asked_of_driver


def test_checks_of_the_whole_tour_have_it_go_on_from_the_killed_run(tmp_path):
    runs, asked_of_driver = seen(tmp_path, asked={"save_kill_resume"})
    runs.run("faults")
    assert asked_of_driver["faults"].resume_from == asked_of_driver["main"]
    assert "faults:FaultTour=" in asked_of_driver["faults"].options["plugins"][1]
    assert asked_of_driver["faults"].options["self_test"] and asked_of_driver["faults"].steps >= STEPS
    assert not asked_of_driver["main"].options["self_test"]


def test_other_checks_get_a_short_one_without_start_up_tests(tmp_path):
    runs, asked_of_driver = seen(tmp_path, asked={"planted_errors_reach_the_guard"})
    runs.run("faults")
    assert list(asked_of_driver) == ["faults"]
    assert "faults:ShortTour=" in asked_of_driver["faults"].options["plugins"][1]
    assert not asked_of_driver["faults"].options["self_test"] and asked_of_driver["faults"].steps == SHORT


def test_a_validation_that_the_driver_names_counts_as_a_test_and_no_other_request(tmp_path):
    runs, _ = seen(tmp_path, asked={"planted_errors_reach_the_guard"})
    runs.driver.validation = {"temperature": 0.0}
    run = runs.run("refused")
    journal = Journal(run.records)
    for asked in ({"temperature": 0.0, "max_tokens": 8}, {"max_tokens": 8}):
        journal.write("engine_request", test=False, asked=asked)
    assert [e["test"] for e in run.trace if e["hook"] == "engine_request"][-2:] == [True, False]


def test_a_plugin_that_was_asked_for_is_loaded_beside_the_kits_own(tmp_path):
    runs, asked_of_driver = seen(tmp_path, options={"plugins": ["my_rewards:Plugin"]})
    runs.run("refused")
    recorder, theirs = asked_of_driver["refused"].options["plugins"]
    assert recorder.startswith("spec_plugin_conformance.recorder:Recorder=") and theirs == "my_rewards:Plugin"


def test_the_engine_of_the_refused_run_fails_its_self_test_and_the_others_do_not(tmp_path):
    runs, asked_of_driver = seen(tmp_path)
    for name in ("main", "refused"):
        runs.run(name)
        plants = PlantedErrors(tmp_path / "records" / name)
        assert plants.planted(SELF_TEST) == (name == "refused")
        assert plants.place_of_version == "somewhere:Engine.version"
    assert asked_of_driver["refused"].steps == 1
