"""A tensor of any strides and device as the contiguous 1-D buffer that a transport moves."""

from __future__ import annotations

import torch


class Buffer:
    """`flat` is contiguous, 1-D and where the transport can reach it; `store` brings its contents back to the tensor.

    flat shares the tensor's memory when it can. A strided tensor is copied; a CUDA tensor that must travel through the host
    is copied to pinned memory on the current stream.
    """

    def __init__(self, tensor: torch.Tensor, *, via_host: bool, fill: bool = True) -> None:
        """fill=False leaves a copy's contents undefined: for buffers that will only be written."""
        self._tensor = tensor.detach()
        if via_host:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            if fill:
                self.flat.view(tensor.shape).copy_(self._tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
        elif tensor.is_contiguous():
            self.flat = self._tensor.view(-1)
        elif fill:
            self.flat = self._tensor.contiguous().view(-1)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def store(self) -> None:
        if self.flat.data_ptr() != self._tensor.data_ptr() or not self._tensor.is_contiguous():
            self._tensor.copy_(self.flat.view(self._tensor.shape), non_blocking=True)
            if self._tensor.is_cuda:
                torch.cuda.current_stream().synchronize()
