"""A Python that has imported torch and gradwire already: what a test starts as a command, without the seconds of imports.

python() is the path of a command. It takes what a Python takes (-c, -m, a script, -u, -I, -S), and has its own standard streams,
environment, folder, exit status, signals and namespaces; what it starts as sys.executable is the same command. Behind it
stands a process forked from the harness's server, which forks once more for each call.

It differs from the interpreter where a test of that needs the interpreter: environment variables that torch or Numba read
when they are imported come too late, gradwire is always the one of this clone, the parent is the server, all commands share
one hash seed, and SIGKILL of the command ends, some milliseconds later, all of the session behind it.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import gc
import io
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.harness import connected

#: A variable that makes the interpreter itself end the process, which takes a fifth of a second: all its objects go.
FINALIZE = "GRADWIRE_TESTS_FINALIZE"

#: The command. It hands over its streams, hands on signals, and ends as the process ends that runs in its place.
_COMMAND = f"""#!{sys.executable} -IS
import os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(repr((sys.argv, dict(os.environ), os.getcwd(), os.getpid())).encode() + b"\\n")
answers = server.makefile("rb")  # of one line each, which may arrive together
pid = int(answers.readline())


def hand_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended, which the server is about to say
        pass


for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hand_on)
status = int(answers.readline() or -signal.SIGKILL)
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""

#: How long a command may take to say what it runs.
_SAY_S = 10.0

_libc = ctypes.CDLL(None)


@cache
def python() -> str:
    """Return the path of the command, beside which is a torchrun of it. This process keeps their server until its end."""
    folder = tempfile.TemporaryDirectory(prefix="python-")
    atexit.register(folder.cleanup)
    command = Path(folder.name, "python")
    torchrun = f"#!{command}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
    for path, text in ((command, _COMMAND), (command.with_name("torchrun"), torchrun)):
        path.write_text(text)
        path.chmod(0o755)
    _, listens = connected(_serve, str(command.with_name("socket")), name="python")
    listens.recv()
    atexit.register(listens.close)
    return str(command)


def _serve(address: str, tests: Connection) -> None:
    """Fork a process for each command that connects, until the tests have gone."""
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    ended, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    tests.send("listens")
    callers: dict[int, socket.socket] = {}
    while tests not in (ready := wait([listener, tests, ended, *callers.values()])):
        for pid, caller in callers.items():
            if caller in ready:  # its command was killed
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if ended in ready:
            os.read(ended, 1000)
        while callers and (found := os.waitpid(-1, os.WNOHANG))[0]:
            with suppress(OSError), callers.pop(found[0]) as caller:
                caller.sendall(b"%d\n" % os.waitstatus_to_exitcode(found[1]))
        if listener in ready:
            caller, _ = listener.accept()
            caller.settimeout(_SAY_S)
            streams: list[int] = []
            try:
                _, streams, _, _ = socket.recv_fds(caller, 1, 3)
                with caller.makefile() as said:
                    request = ast.literal_eval(said.readline())
            except (
                OSError,
                SyntaxError,
                ValueError,
            ):  # the command was killed, or stopped, before it had said what to run
                caller.close()
                for stream in streams:
                    os.close(stream)
                continue
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for open_one in (listener, tests, caller, *callers.values()):
                    open_one.close()
                os.close(ended)
                os.close(woken)
                try:
                    _be(streams, *request)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            for stream in streams:
                os.close(stream)
            with suppress(OSError):
                caller.sendall(b"%d\n" % pid)
            callers[pid] = caller
    for pid in callers:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _be(streams: list[int], argv: list[str], environment: dict[str, str], folder: str, caller: int) -> None:
    """Be the command, to the end of the process."""
    os.setsid()
    for kind in ("net", "uts", "mnt"):
        if os.readlink(there := f"/proc/{caller}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            assert _libc.setns(os.open(there, os.O_RDONLY | os.O_CLOEXEC), 0) == 0
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path in sys.path]
    os.environ.clear()
    os.environ.update(environment)
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = given + [path for path in sys.path if path not in (*before, *given, "", folder)]
    sys.executable, sys.orig_argv = argv[0], argv[:]
    arguments = argv[1:]
    while arguments[0] in ("-I", "-S"):  # what they leave out disturbs nothing here
        del arguments[0]
    if unbuffered := arguments[:1] == ["-u"]:
        del arguments[0]
    sys.stdin = os.fdopen(0, closefd=False)
    if unbuffered or environment.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)  # type: ignore[type-var]
    else:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    status = 0
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = arguments[1:]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            is_text = arguments[0] == "-c"
            sys.path.insert(0, "" if is_text else str(Path(arguments[0]).absolute().parent))
            sys.argv = ["-c", *arguments[2:]] if is_text else arguments
            name, text = ("<string>", arguments[1]) if is_text else (arguments[0], Path(arguments[0]).read_text())
            main.__dict__.update({} if is_text else {"__file__": name})
            exec(compile(text, name, "exec"), main.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if FINALIZE in environment and status >= 0:
        ctypes.pythonapi.Py_Exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
