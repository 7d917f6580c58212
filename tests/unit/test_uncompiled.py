"""What torch.compile neither traces nor compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
from torch import Tensor

import gradwire as hvd
from gradwire.collectives.torch_internals import uncompiled


@pytest.mark.parametrize("marks_code", [True, False], ids=["marked", "disabled"])
def test_a_compiled_caller_leaves_out_a_function_and_what_it_calls(
    marks_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a version of torch does not have the mark; and the second call compiles nothing."""
    torch._dynamo.reset()

    def inner(values: Tensor) -> Tensor:
        return values * 3

    def outer(values: Tensor) -> Tensor:
        return inner(values) + 1

    with monkeypatch.context() as patches:
        if not marks_code:
            patches.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
        called = uncompiled(outer)

    compiled: list[str] = []

    def record(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        compiled.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def caller(values: Tensor) -> Tensor:
        return called(values - 1) / 2

    run = torch.compile(caller, backend=record)
    for _ in range(2):
        assert torch.equal(run(torch.ones(4)), torch.full((4,), 0.5))
    assert compiled == ["sub", "truediv"]


def test_a_function_that_a_context_manager_decorates_is_still_compiled() -> None:
    """All such functions of the process have the same code around them, as have some of gradwire's."""
    assert hvd.DistributedOptimizer  # whose methods are marked by now
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.profiler.record_function("a range")
    def decorated(values: Tensor) -> Tensor:
        return values * 3

    assert torch.equal(torch.compile(decorated, backend="eager")(torch.ones(4)), torch.full((4,), 3.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_code_of_a_decorator_is_not_marked() -> None:
    with pytest.raises(AssertionError):
        uncompiled(torch.no_grad()(lambda: None))
