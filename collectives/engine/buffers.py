"""Check which tensors can be moved, and copy or view them as the contiguous 1-D buffers that a transport moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives.torch_internals import plain


def refusal(tensor: torch.Tensor) -> str | None:
    """Return the error text for a tensor that cannot be moved; None for one that can.

    Transports and kernels use bare addresses, so the elements must lie at data_ptr(). Subclasses with a __torch_dispatch__ of
    their own (DTensor, FakeTensor, nested tensors) store their elements elsewhere or have none; a plain subclass such as
    Parameter can be moved.
    """
    nested = tensor.is_nested
    if not nested and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        if tensor.layout != torch.strided:
            return f"a dense tensor is needed, not one of layout {tensor.layout}"
        try:
            if tensor.numel() == 0 or tensor.data_ptr() != 0:
                return None
        except RuntimeError:  # wrapper tensors of torch.func, inside vmap for example
            pass
    kind = "nested tensor" if nested else type(tensor).__name__
    return (
        f"this {kind} on {tensor.device} has no memory of its own; give ordinary tensors instead: to_local() of a "
        "DTensor, values() of a nested tensor, a tensor on a device with memory instead of a meta tensor"
    )


def apart(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """Return source, or a copy of it if it shares memory with destination. Both are contiguous."""
    begin, other = source.data_ptr(), destination.data_ptr()
    shared = begin < other + destination.nbytes and other < begin + source.nbytes
    return source.clone() if shared else source


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor for an asynchronous operation.

    The view keeps the memory alive and in place, even if set_() or .data gives the tensor other memory. On the CPU, the storage
    can no longer be resized, as after Tensor.numpy(): resize_() raises RuntimeError if it needs more memory.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.resizable():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return plain(tensor)


class Buffer:
    """Holds one tensor, or several of one dtype and device end to end, as `flat`: contiguous, 1-D, in memory that the transport
    can use.

    flat shares the memory of a single tensor if possible. Strided tensors, several tensors, and tensors whose memory holds the
    negative or the conjugate of their elements (Tensor.is_neg, Tensor.is_conj) are copied, on the current stream.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, fill: bool = True) -> None:
        """fill=False leaves a copy's contents undefined, for buffers that are only written."""
        self._tensors = [plain(tensor) for tensor in tensors]
        self._whole = whole = self._joined(fill)
        if whole.is_contiguous() and not whole.is_neg() and not whole.is_conj():
            self.flat = whole.as_strided((whole.numel(),), (1,))  # view(-1) would keep the stride of a single element
        else:
            self.flat = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
            if fill:
                self.flat.view(whole.shape).copy_(whole)

    def _joined(self, fill: bool) -> torch.Tensor:
        first = self._tensors[0]
        if len(self._tensors) == 1:
            return first
        if fill:
            return torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        return torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=first.dtype, device=first.device)

    def expendable(self) -> torch.Tensor:
        """Return flat, or a copy of it if it shares a tensor's memory, for an operation that overwrites its input."""
        return self.flat.clone() if self.flat.data_ptr() == self._tensors[0].data_ptr() else self.flat

    def store(self) -> None:
        """Copy the contents of flat back to the tensors."""
        if self.flat.data_ptr() != self._whole.data_ptr():
            self._whole.copy_(self.flat.view(self._whole.shape))
        if len(self._tensors) > 1:
            parts = self._whole.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
