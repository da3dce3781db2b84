"""Stands in for the Python interpreter: has the fork server run this command line, and lives and dies with that process.

Called by a script that :class:`spec_plugin.conformance.forks.ForkServer` writes, with the real interpreter and the server's
address before the interpreter's own arguments. Standard library only, and little of it: it starts once per process.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def parsed(arguments):
    """(what, its value, the program's arguments) of an interpreter's command line; None: the real one must read it."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-B"):
        rest.pop(0)
    if len(rest) >= 2 and rest[0] in ("-c", "-m"):
        return rest[0], rest[1], rest[2:]
    return ("script", rest[0], rest[1:]) if rest and not rest[0].startswith("-") else None


def inherited():
    """Numbers of the files that a program started by us would inherit."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
        except OSError:
            continue  # the folder's own
    return sorted(numbers)


def request(server, program, files):
    """Send what to run, and our open files; returns the number of the process."""
    what = {"program": program, "cwd": os.getcwd(), "env": dict(os.environ), "files": files, "umask": os.umask(0o022)}
    os.umask(what["umask"])
    body = json.dumps(what).encode()
    socket.send_fds(server, [len(body).to_bytes(8, "big")], files)
    server.sendall(body)
    return int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")


def main():
    """Ask, wait, and end as the process ended; without a server, become the real interpreter."""
    python, address, *arguments = sys.argv[1:]
    program = parsed(arguments)
    files = inherited()
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
        pid = request(server, program, files) if program else 0
    except OSError:
        pid = 0
    if not pid:
        server.close()
        os.execv(python, [python, *arguments])
    for number in FORWARDED:
        signal.signal(number, lambda received, frame: os.kill(pid, received))
    for file in files:
        os.close(file)  # the process has them: whoever waits for their end must not wait for us
    status = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


main()
