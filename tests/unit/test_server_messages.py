"""What a server does with what no worker says."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.trainer.servers.key_value.messages import ROWS, KeyServer
from gradwire.trainer.servers.messages import SETTINGS, Server


def test_a_kind_that_nobody_says_is_not_taken_for_another() -> None:
    nothing: Any = None
    server, keys = Server(nothing, nothing, {}), KeyServer(nothing, {})
    for serving, last in ((server, SETTINGS), (keys, ROWS)):
        with pytest.raises(ValueError, match=f"rank 3 says {last + 1}, which is n.* PUSH"):
            serving._answer(3, nothing, last + 1, [0.0, 0.0, 0.0])
