"""CUDA kernels without a GPU: NVRTC compiles them to PTX, and a machine in numpy runs that.

So what is tested is what the compiler made of a file, and neither a driver nor a C++ compiler is needed. Every form of
instruction that the machine does not know is an error.
"""

from tests.cuda_machine.launch import MachineLaunch
from tests.cuda_machine.machine import Order

__all__ = ["MachineLaunch", "Order"]
