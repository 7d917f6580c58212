"""A GPU without one: it checks the order in which CUDA code uses memory, and computes on the CPU.

install(), in a process of its own, makes torch believe in two GPUs. Their tensors lie in the memory of the CPU, and every
operator runs at once, in the order of the program, so results are right where that order is. What the GPU would guarantee is
recorded beside it: each stream has a vector clock, an event is a snapshot of one, and every use of memory is compared with the
uses before it. A `Report` names two uses that nothing orders, memory that is given back too early, or a wait of the host inside
`asynchronous()`. Code under test needs no change, and knows nothing of this.

It does not find: a race between two threads of the host; an order that only holds because the program waited elsewhere in this
run; and what a kernel does with memory that its launch does not name.
"""

from tests.simulated_gpu.clocks import Report, check, reports
from tests.simulated_gpu.install import install
from tests.simulated_gpu.waits import asynchronous

__all__ = ["Report", "asynchronous", "check", "install", "reports"]
