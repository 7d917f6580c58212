"""What becomes of calls on a thread of their own."""

from __future__ import annotations

import pytest

from gradwire.collectives.daemon_thread import DaemonThread


@pytest.mark.parametrize("or_callers", [False, True])
def test_a_closed_thread_refuses_calls(or_callers: bool) -> None:
    thread = DaemonThread("gradwire-exchange", or_callers=or_callers)
    done = thread.submit(lambda: 1)
    thread.close()
    with pytest.raises(RuntimeError, match="gradwire-exchange is closed"):
        thread.submit(lambda: 2)
    assert done.result(10) == 1
