"""How parameters and gradients lie in the buffers that travel between workers and servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Flat:
    """Lays tensors out one after the other, on the CPU, in one buffer for each dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._dtypes = list(dict.fromkeys(dtype for dtype, _ in self._shapes))

    def empty(self) -> list[Tensor]:
        """Return new buffers."""
        sizes = {dtype: sum(shape.numel() for its, shape in self._shapes if its == dtype) for dtype in self._dtypes}
        return [torch.empty(sizes[dtype], dtype=dtype) for dtype in self._dtypes]

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with these tensors, zeros for None."""
        buffers = self.empty()
        for view, tensor in zip(self.views(buffers), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in buffers."""
        by_dtype = dict(zip(self._dtypes, buffers, strict=True))
        begun = dict.fromkeys(self._dtypes, 0)
        views = []
        for dtype, shape in self._shapes:
            start = begun[dtype]
            begun[dtype] += shape.numel()
            views.append(by_dtype[dtype][start : begun[dtype]].view(shape))
        return views
