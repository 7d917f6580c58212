"""Where a thread is, what was raised where, and who is told of an exception that ends the process."""

import gc
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.whereabouts import ExceptHook

DEADLINE_S = 30.0


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_main_thread_is_in_the_users_line_and_in_one_of_a_library() -> None:
    with ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def ask() -> str:
            assert began.wait(DEADLINE_S)
            while "threading.py" not in (said := whereabouts.of_main_thread()):
                pass
            return said

        future = pool.submit(ask)
        began.set()
        said = future.result(DEADLINE_S)
    users = r"at .*test_whereabouts\.py:\d+, test_the_main_thread_is_in_the_users_line_and_in_one_of_a_library"
    assert re.fullmatch(users + r" \(in .*threading\.py:\d+, wait\)", said), said


class Broken:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return int("not a number")


def test_an_exception_is_told_in_a_line_with_the_users_place() -> None:
    with pytest.raises(ValueError, match="not a number") as caught:
        next(iter(DataLoader(Broken())))  # type: ignore[arg-type]
    said = whereabouts.of_exception(caught.value)
    what = re.escape("raised ValueError: invalid literal for int() with base 10: 'not a number' at ")
    assert re.fullmatch(what + r".*test_whereabouts\.py:\d+, __getitem__", said), said


def test_the_line_is_that_of_the_raise_not_where_it_was_caught() -> None:
    error = raised(KeyError("key"))
    assert f"test_whereabouts.py:{raised.__code__.co_firstlineno + 2}, raised" in whereabouts.of_exception(error)


def test_a_message_is_made_short_and_of_one_line() -> None:
    said = whereabouts.of_exception(raised(RuntimeError("a\n  b\n" + "long " * 1000)))
    assert said.startswith("raised RuntimeError: a b long long ")
    assert len(said) < 500
    assert "\n" not in said
    assert whereabouts.of_exception(RuntimeError("never raised")) == "raised RuntimeError: never raised"


@pytest.mark.parametrize("code", [None, 0])
def test_an_end_in_order_is_no_exception(code: int | None) -> None:
    assert whereabouts.of_exception(SystemExit(code)) == ""
    assert whereabouts.of_exception(SystemExit(3)) == "raised SystemExit: 3"


class Leaver:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def leave(self, why: str) -> None:
        self.heard.append(why)


def test_everyone_is_told_and_then_the_former_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    formers: list[str] = []

    def former(kind: object, error: BaseException, trace: object) -> None:
        formers.append(str(error))

    monkeypatch.setattr(sys, "excepthook", former)
    first, second, gone = Leaver(), Leaver(), Leaver()
    hooks = [ExceptHook.register(each) for each in (first, second, gone)]
    assert all(hook is sys.excepthook for hook in hooks), "one for all"
    del gone
    gc.collect()
    error = raised(ValueError("told"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert all(re.match("raised ValueError: told at ", each.heard[0]) for each in (first, second))
    assert formers == ["told"]
    hooks[0].dismiss(first)
    sys.excepthook(ValueError, error, error.__traceback__)
    assert (len(first.heard), len(second.heard), len(formers)) == (1, 2, 2)
    hooks[0].dismiss(second)
    assert sys.excepthook is former


def test_who_came_between_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    leaver = Leaver()
    hook = ExceptHook.register(leaver)

    def newer(kind: object, error: BaseException, trace: object) -> None:
        hook(type(error), error, error.__traceback__)

    sys.excepthook = newer  # type: ignore[assignment]
    hook.dismiss(leaver)
    assert sys.excepthook is newer


@pytest.mark.parametrize(
    "prompt", [{"ps1": ">>> "}, {"flags": SimpleNamespace(inspect=1)}], ids=["console", "python -i"]
)
def test_at_a_prompt_nothing_ends(monkeypatch: pytest.MonkeyPatch, prompt: dict[str, object]) -> None:
    formers: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: formers.append(raised))
    leaver = Leaver()
    hook = ExceptHook.register(leaver)
    error = raised(ValueError("wrong"))
    with monkeypatch.context() as patch:
        for name, value in prompt.items():
            patch.setattr(sys, name, value, raising=False)
        hook(ValueError, error, error.__traceback__)
    assert (leaver.heard, len(formers)) == ([], 1)
    hook.dismiss(leaver)
