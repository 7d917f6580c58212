"""Every tensor that this package makes names its dtype and device, so torch.set_default_dtype() and torch.set_default_device()
do not reach it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

#: The functions of torch that make tensors or generators, and the arguments that each needs: some have the dtype of their data.
#: (Tensors over given memory, as of torch.frombuffer, have no device of their own.)
NEEDED: list[tuple[str, set[str]]] = [
    ("empty zeros ones full eye empty_strided tensor scalar_tensor complex", {"dtype", "device"}),
    ("arange linspace logspace tril_indices triu_indices", {"dtype", "device"}),
    ("rand randn randint randperm normal", {"dtype", "device"}),
    ("as_tensor asarray Generator sparse_coo_tensor sparse_csr_tensor sparse_compressed_tensor", {"device"}),
    ("frombuffer", {"dtype"}),
]
FACTORIES = {name: needed for names, needed in NEEDED for name in names.split()}


def calls_in(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of torch's functions, each with the function's name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)):
                yield node, name


def lacking(source: str) -> list[str]:
    """Return what calls lack, as lines of text. torch.where() of two numbers has the default dtype, and cannot name another."""
    found = []
    for call, name in calls_in(ast.parse(source)):
        lacks = FACTORIES.get(name, set()) - {keyword.arg for keyword in call.keywords}
        if name == "where" and not any(_may_be_tensor(given) for given in call.args[1:]):
            lacks = {"a tensor"}
        found += [f"line {call.lineno}: torch.{name} lacks {what}" for what in sorted(lacks)]
    return found


def _may_be_tensor(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _may_be_tensor(node.operand)
    return not (isinstance(node, ast.Constant) and isinstance(node.value, float))


@pytest.mark.parametrize("folder", ["collectives", "trainer"])
def test_factories_name_dtype_and_device(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(ROOT)}, {said}" for file in files for said in lacking(file.read_text())]
    assert not found, "\n".join(found)


def test_what_lacks_them_is_found() -> None:
    source = (
        "import torch\ntorch.zeros(2, dtype=int)\ntorch.tensor([1])\ntorch.where(x, -1.0, 0.0)\ntorch.where(x, y, 0.0)"
    )
    assert lacking(source) == [
        "line 2: torch.zeros lacks device",
        "line 3: torch.tensor lacks device",
        "line 3: torch.tensor lacks dtype",
        "line 4: torch.where lacks a tensor",
    ]
    assert not lacking(Path(__file__).read_text())
