"""Tensors of any strides and device as the contiguous 1-D buffer that a transport moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Buffer:
    """One tensor, or several of one dtype and device end to end, as `flat`: contiguous, 1-D, where the transport can reach it.

    flat shares the memory of a single tensor when it can. Strided tensors and several are copied; what is on CUDA and must
    travel through the host is copied to pinned memory on the current stream.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, via_host: bool, fill: bool = True) -> None:
        """fill=False leaves a copy's contents undefined: for buffers that will only be written."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._whole = whole = self._joined(fill)
        if via_host:
            self.flat = torch.empty(whole.numel(), dtype=whole.dtype, pin_memory=True)
            if fill:
                self.flat.view(whole.shape).copy_(whole, non_blocking=True)
                torch.cuda.current_stream().synchronize()
        elif whole.is_contiguous():
            self.flat = whole.view(-1)
        elif fill:
            self.flat = whole.contiguous().view(-1)
        else:
            self.flat = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)

    def _joined(self, fill: bool) -> torch.Tensor:
        first = self._tensors[0]
        if len(self._tensors) == 1:
            return first
        if fill:
            return torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        return torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=first.dtype, device=first.device)

    def expendable(self) -> torch.Tensor:
        """flat, or a copy of it where it shares a tensor's memory: for what overwrites its input."""
        return self.flat.clone() if self.flat.data_ptr() == self._tensors[0].data_ptr() else self.flat

    def store(self) -> None:
        """Bring the contents of flat back to the tensors."""
        if self.flat.data_ptr() != self._whole.data_ptr():
            self._whole.copy_(self.flat.view(self._whole.shape), non_blocking=True)
            if self._whole.is_cuda:
                torch.cuda.current_stream().synchronize()
        if len(self._tensors) > 1:
            parts = self._whole.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
