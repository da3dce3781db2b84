"""The fork server: a forked process is to its starter what an interpreter would have been."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from spec_plugin_conformance import launch
from spec_plugin_cpu import forks
from spec_plugin_cpu.forks import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["json.tool", "multiprocessing"])  # anything that a cold interpreter has not imported
    yield server
    server.close()


def run(python: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], text=True, capture_output=True, timeout=60, **options)


def start(python: str, script: str) -> tuple[subprocess.Popen[str], int]:
    """A process that has written its number."""
    code = f"import os\nprint(os.getpid(), flush=True)\n{textwrap.dedent(script)}"
    process = subprocess.Popen([python, "-c", code], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int) -> bool:
    """Whether a process ends within five seconds; when its entry goes is a matter of who inherited it."""
    for _ in range(250):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_process_finds_the_modules_imported_and_an_interpreter_does_not(server: ForkServer) -> None:
    code = "import sys; print('json.tool' in sys.modules)"
    assert [run(python, "-c", code).stdout.strip() for python in (server.python, sys.executable)] == ["True", "False"]


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_arguments_path_main_and_output_are_those_of_an_interpreter(
    server: ForkServer, tmp_path: Path, how: str
) -> None:
    source = "import sys, os, helper; print(sys.argv, sys.path[:2], __name__, os.getcwd(), os.environ['X'], sys.stdin.read())"
    (tmp_path / "program.py").write_text(source)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "helper.py").touch()
    words = {"-c": ["-c", source], "-m": ["-m", "program"], "script": ["-u", "program.py"]}[how]
    environment = {**os.environ, "X": "x y", "PYTHONPATH": str(tmp_path / "path")}
    warm, cold = (
        run(python, *words, "a", "b c", cwd=tmp_path, env=environment, input="input")
        for python in (server.python, sys.executable)
    )
    assert cold.returncode == 0, cold.stderr
    assert (warm.stdout, warm.stderr, warm.returncode) == (cold.stdout, cold.stderr, 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a reason')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import atexit; atexit.register(print, 'at exit')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()", 0),
    ],
)
def test_a_process_ends_as_it_would_alone(server: ForkServer, code: str, expected: int) -> None:
    warm, cold = (run(python, "-c", code) for python in (server.python, sys.executable))
    assert warm.returncode == cold.returncode == expected
    assert warm.stdout == cold.stdout
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_files_keep_their_numbers(server: ForkServer) -> None:
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'through the pipe')"
    done = run(server.python, "-c", code, pass_fds=[write])
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert os.read(read, 99) == b"through the pipe" and os.read(read, 99) == b""  # nobody else holds the other end
    os.close(read)


def test_a_process_starts_others_warm_too(server: ForkServer) -> None:
    code = """
    import multiprocessing, sys

    def answer(queue):
        queue.put("json.tool" in sys.modules)

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=answer, args=(queue,))
        process.start()
        print(queue.get(timeout=30))
        process.join()
        print(process.exitcode)
    """
    path = Path(server.python).parent / "spawns.py"
    path.write_text(textwrap.dedent(code))
    done = run(server.python, str(path))
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_a_signal_reaches_the_process(server: ForkServer) -> None:
    process, pid = start(
        server.python,
        "import signal, time\nsignal.signal(15, lambda *_: os._exit(5))\nprint('ready', flush=True)\ntime.sleep(60)",
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(10) == 5 and gone(pid)


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_is_not_lost_while_the_server_is_asked(tmp_path: Path, times: int) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1.5)")
    slow = ForkServer(["slow"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([slow.python, "-c", code])
    time.sleep(0.5)  # it has asked, and waits
    for _ in range(times):
        process.terminate()
        time.sleep(0.1)
    if times == 2:
        assert process.poll() == -signal.SIGTERM
    assert process.wait(20) == -signal.SIGTERM
    slow.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("leads", [True, False])
def test_a_signal_to_the_group_reaches_what_the_process_started(server: ForkServer, number: int, leads: bool) -> None:
    code = "import os, subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([server.python, "-c", code], text=True, stdout=subprocess.PIPE, start_new_session=leads)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.killpg(process.pid, number) if leads else process.send_signal(number)
    assert process.wait(10) == -number
    if leads:
        assert gone(child)
    else:
        os.kill(child, signal.SIGKILL)  # it was there: nobody had signalled a group


def test_a_process_dies_with_its_stand_in_and_with_the_server(server: ForkServer) -> None:
    process, pid = start(server.python, "import time\ntime.sleep(60)")
    process.kill()
    assert process.wait(10) == -signal.SIGKILL and gone(pid)
    other = ForkServer([])
    process, pid = start(other.python, "import time\ntime.sleep(60)")
    other.close()
    assert process.wait(10) != 0 and gone(pid)
    assert not Path(other.python).exists()


@pytest.mark.parametrize("raylet", [True, False])
def test_a_worker_of_ray_ends_with_its_raylet_and_other_processes_outlive_their_starter(
    server: ForkServer, raylet: bool
) -> None:
    code = f"""
        import subprocess, time
        code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        env = {{**os.environ, **({{"RAY_RAYLET_PID": str(os.getpid())}} if {raylet} else {{}})}}
        subprocess.Popen([{server.python!r}, "-c", code], env=env)
        time.sleep(60)
    """
    starter, _ = start(sys.executable, code)
    assert starter.stdout is not None
    worker = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    assert gone(worker) == raylet
    if not raylet:
        os.kill(worker, signal.SIGKILL)


def test_a_server_dies_with_the_process_that_started_it() -> None:
    code = """
    import os, signal, subprocess
    from spec_plugin_cpu.forks import ForkServer
    server = ForkServer([])
    child = subprocess.Popen([server.python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"])
    print(server._process.pid, flush=True)
    os.wait()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    numbers = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    assert all(map(gone, numbers))


def test_a_server_whose_starter_was_gone_before_it_could_ask_to_be_told_ends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        nobody = "1"  # this process is no child of init's
        words = [
            sys.executable,
            str(Path(forks.__file__).with_name("server.py")),
            str(listener.fileno()),
            "python",
            nobody,
        ]
        server = subprocess.Popen(words, pass_fds=[listener.fileno()])
        assert server.wait(30) == 0


@dataclass(frozen=True)
class Starter:
    """What starts a run of the kit: one server."""

    server: ForkServer

    def executable(self, env: Mapping[str, str]) -> str:
        return self.server.python

    def processes(self) -> set[int]:
        return {self.server.pid}


def test_a_server_outlives_a_run_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STALL_S", 3.0)
    monkeypatch.setattr(launch, "PATIENCE_S", 0.5)
    asks = "import sys; print('warm' if 'wave' in sys.modules else 'cold', flush=True)\n"
    hangs = "def hangs_in_here():\n  import time; time.sleep(600)\nhangs_in_here()"
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    server = ForkServer(["wave"], env)
    hanging = launch.Launch((sys.executable, "-c", asks + hangs), env, tmp_path, 1, "trainer", Starter(server))
    try:
        with pytest.raises(launch.RunFailed, match="completed no step for 3 s") as failure:
            list(launch.follow(hanging, launch.Steps(tmp_path / "steps", lambda line: None)))
        assert run(server.python, "-c", asks).stdout.strip() == "warm"
    finally:
        server.close()
    assert "warm" in str(failure.value) and "in hangs_in_here" in str(failure.value)


def test_where_an_import_fails_everything_starts_cold(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(["json.tool", "no_such_module"])
    done = run(server.python, "-c", "import sys; print('json.tool' in sys.modules); sys.exit(4)")
    server.close()
    assert (done.stdout.strip(), done.returncode) == ("False", 4)
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_server_may_begin_as_a_fork_of_another(server: ForkServer) -> None:
    second = ForkServer(["wave"], python=server.python)
    code = "import sys; print('json.tool' in sys.modules, 'wave' in sys.modules)"
    process, pid = start(second.python, "import time\ntime.sleep(60)")
    assert run(second.python, "-c", code).stdout.split() == ["True", "True"]
    second.close()
    assert process.wait(10) != 0 and gone(pid)
    assert run(server.python, "-c", code).stdout.split() == ["True", "False"]


def test_forks_give_rays_objects_ids_of_their_own(tmp_path: Path) -> None:
    """A class that is declared while the server imports must not draw from the generator that forks inherit."""
    pytest.importorskip("ray")
    (tmp_path / "declares.py").write_text("import ray\n\n\n@ray.remote\nclass A:\n    pass\n")
    server = ForkServer(["ray", "declares"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    code = "import sys; from ray._raylet import JobID, PlacementGroupID\n"
    code += "print('declares' in sys.modules, PlacementGroupID.of(JobID.from_int(1)).hex())"
    try:
        drawn = [run(server.python, "-c", code).stdout.split() for _ in range(3)]
    finally:
        server.close()
    assert [warm for warm, _ in drawn] == ["True"] * 3 and len({drawn_id for _, drawn_id in drawn}) == 3
