"""What is said while kernels are compiled, and that all of them can be compiled ahead."""

import io
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwire.collectives import precompile
from gradwire.collectives.kernels import first_use
from gradwire.collectives.kernels.cpu import compiling
from gradwire.collectives.kernels.cpu.calling import kernel_of
from gradwire.collectives.kernels.first_use import FirstUse
from tests.harness import wait_until


class Terminal(io.StringIO):
    """Keeps what is written to it, as a terminal does that shows no colours."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What can be read in the end: a line that is cleared is gone."""
        return [line.rpartition("\r\x1b[K")[2] for line in self.getvalue().split("\n")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(first_use, "sys", SimpleNamespace(stderr=terminal))  # pytest has the other one
    return terminal


def compile_two(told: FirstUse) -> None:
    with told.together("about 20 s"), told.together("about 10 s"):
        for kernel in ("sum", "product"):
            with told.compiling(kernel, kept=True):
                pass


def test_one_line_on_a_terminal(terminal: Terminal) -> None:
    told = FirstUse()
    compile_two(told)
    assert terminal.lines() == [
        "gradwire: compiled kernels in 0 s; `gradwire precompile` does it ahead",
        "",
    ]
    assert told.compiled == ["sum", "product"]


def test_later_lines_are_gone_when_all_is_compiled(terminal: Terminal) -> None:
    told = FirstUse()
    compile_two(told)
    with told.compiling("int8", kept=True):
        assert terminal.lines()[-1] == "gradwire: compiling kernels for this and later runs, some seconds: 0 s so far"
    assert terminal.lines()[1:] == [""]


def test_the_seconds_are_counted_while_a_kernel_is_compiled(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_use, "_REDRAW_S", 0.001)
    with FirstUse().compiling("sum", kept=True):
        wait_until(lambda: terminal.getvalue().count("so far") >= 3)


def test_nothing_where_nothing_is_compiled(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gradwire")
    with FirstUse().together("about 20 s"):
        pass
    assert terminal.getvalue() == ""
    assert not caplog.records


def test_nothing_where_another_process_of_the_host_says_it(terminal: Terminal) -> None:
    told = FirstUse()
    told.reports = False
    compile_two(told)
    assert terminal.getvalue() == ""
    assert told.compiled == ["sum", "product"]


def test_the_log_has_the_first_kernels_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_use, "sys", SimpleNamespace(stderr=io.StringIO()))
    monkeypatch.setattr(first_use, "_LOG_S", 0.001)
    told = FirstUse()
    with told.together("about 20 s"), told.compiling("sum", kept=True):
        wait_until(lambda: len(caplog.records) >= 3)
    begun, *meanwhile, done = caplog.messages
    compile_two(told)
    assert (
        begun == "gradwire: compiling kernels for this and later runs, about 20 s; `gradwire precompile` does it ahead"
    )
    assert set(meanwhile) == {"gradwire: compiling kernels for this and later runs, about 20 s: 0 s so far"}
    assert done == "gradwire: compiled kernels in 0 s"
    assert caplog.messages[-1] == done
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_once_is_not_said_where_nothing_is_kept(terminal: Terminal) -> None:
    with FirstUse().compiling("sum", kept=False):
        assert terminal.lines()[0].startswith("gradwire: compiling kernels, some seconds: ")


def test_a_failure_ends_the_line(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), FirstUse().compiling("sum", kept=True):
        raise KeyboardInterrupt
    assert terminal.lines()[-1] == ""


def test_precompiling_leaves_no_kernel_to_compile(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that the links use are compiled when their modules are loaded; a test of the console starts the command."""
    used = {
        (path.stem, name)
        for path in Path(compiling.__file__).parent.glob("*.py")
        for name in re.findall(r"\b(?:kernel_of|Encoder|Decoder)\((\w+)", path.read_text())
        if path.stem != "calling"
    }
    assert len(used) > 20
    monkeypatch.setattr(first_use.FIRST_USE, "reports", False)
    for _ in range(2):
        kernel_of.cache_clear()
        assert precompile.precompile() == 0
    assert kernel_of.cache_info().currsize == len(used)
    told = capfd.readouterr().out.splitlines()
    assert told[-2] == "all kernels were compiled already"
    (folder,) = re.findall(r"saved in (.*); for another folder, set NUMBA_CACHE_DIR", told[-1])
    assert list(Path(folder).glob("*.o"))


def test_progress_needs_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    done: list[str] = []
    for step in precompile._shown([("one", lambda: done.append("one")), ("two", lambda: done.append("two"))]):
        step()
    assert done == ["one", "two"]
    assert capsys.readouterr().err == "1/2 one\n2/2 two\n"
