"""The machine that stands in for a GPU: it computes as one, and stops at what a right kernel never does."""

import numpy as np
import pytest
import torch

from tests.cuda_machine import Order
from tests.cuda_machine.machine import decode, run
from tests.cuda_machine.memory import MachineError, Memory
from tests.cuda_machine.nvrtc import CompileError, compile_text
from tests.cuda_machine.ptx import PtxError, parse

THREADS = 64


def execute(
    body: str, data: torch.Tensor, grid: int = 1, order: Order = Order.TOGETHER, architecture: str = "compute_80"
) -> torch.Tensor:
    """Run a kernel on int32 or float32 `data`, in place. i: the number of a thread in the launch."""
    kind = "float" if data.dtype == torch.float32 else "int"
    text = f"""
    __global__ void kernel({kind}* data) {{
        const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
        {body}
    }}"""
    compiled = compile_text(text, "test.cu", "kernel", architecture)
    kernel = parse(compiled.code.decode(), compiled.name)
    memory = Memory([data])
    run(kernel, decode(kernel), grid, THREADS, np.array([data.data_ptr()], np.uint64).tobytes(), memory, order)
    memory.write_back()
    return data


def zeros(numel: int = THREADS) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.int32)


class TestComputes:
    def test_threads_that_part_and_meet_again(self) -> None:
        out = execute(
            "int n = 0; for (int x = i; x > 1; x = x % 2 ? 3 * x + 1 : x / 2) ++n; data[i] = n;", zeros(128), grid=2
        )
        steps = []
        for x in range(128):
            steps.append(0)
            while x > 1:
                x = 3 * x + 1 if x % 2 else x // 2
                steps[-1] += 1
        assert out.tolist() == steps

    @pytest.mark.parametrize(("kind", "root"), [("float", "sqrtf(fabsf(x))"), ("double", "sqrt(x < 0 ? -x : x)")])
    def test_floats_as_ieee_has_them(self, kind: str, root: str) -> None:
        """Denormals too, and without fused multiplication and addition."""
        x = torch.tensor([1e-40, 3.0, 1 + 2**-12, float("inf"), -0.0, 1e-30, 2.0**127, 7.0]).repeat(8)
        computed = execute(f"{kind} x = data[i]; data[i] = (x * x - 1) / 3 + {root} + x * ({kind})0.5;", x.clone())
        v = x.numpy() if kind == "float" else x.numpy().astype(np.float64)
        with np.errstate(all="ignore"):
            expected = ((v * v - 1) / 3 + np.sqrt(np.abs(v)) + v * 0.5).astype(np.float32)
        assert np.array_equal(computed.numpy(), expected, equal_nan=True)

    def test_rounding_to_integers(self) -> None:
        x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1e20, -1e20, float("nan")]).repeat(8)
        nearest = execute("data[i] = (float)__float2int_rn(data[i]);", x.clone())[:8]
        assert nearest.tolist() == [0, 2, 2, 0, -2, 2.0**31, -(2.0**31), 0]

    @pytest.mark.parametrize("order", Order)
    def test_shared_memory_and_barriers(self, order: Order) -> None:
        body = "__shared__ int s[64]; s[t] = i; __syncthreads(); data[i] = s[63 - t];"
        assert execute(body, zeros(128), 2, order).tolist() == [*range(63, -1, -1), *range(127, 63, -1)]

    def test_warps(self) -> None:
        assert execute("data[i] = __shfl_xor_sync(~0u, i, 5);", zeros()).tolist() == [i ^ 5 for i in range(64)]
        assert execute("data[i] = __shfl_up_sync(~0u, i, 3);", zeros()).tolist() == [
            i if i % 32 < 3 else i - 3 for i in range(64)
        ]
        most = [max(i * 7 % 61 for i in lanes) for lanes in (range(32), range(32, 64)) for _ in lanes]
        assert execute("data[i] = __reduce_max_sync(~0u, t * 7 % 61);", zeros()).tolist() == most

    def test_atomics(self) -> None:
        assert execute("atomicAdd(data + i % 3, i);", zeros()).tolist()[:3] == [sum(range(r, 64, 3)) for r in range(3)]
        assert sorted(execute("data[1 + atomicAdd(data, 1)] = i;", zeros(65))[1:].tolist()) == list(range(64))

    def test_eight_bit_floats_of_hopper(self) -> None:
        body = """unsigned short code;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(data[i])); data[i] = code;"""
        x = torch.linspace(-600, 600, 64)
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(execute(body, x.clone(), architecture="compute_90"), expected.to(torch.float32))


STOPS_AT = {
    "the element after a tensor": ("data[i + 1] = 1;", "outside"),
    "the element before a tensor": ("data[-1] = data[i];", "outside"),
    "an element far behind a tensor": ("data[i] = data[i + 4096];", "outside"),
    "an address that is not aligned": ("int4 v = *(int4*)(data + 1); data[i] = v.x + v.y + v.z + v.w;", "aligned"),
    "shared memory that is not there": (
        "__shared__ int s[64]; s[t + data[t] + 1] = i; __syncthreads(); data[i] = s[63 - t];",
        "shared",
    ),
    "stores that disagree": ("data[0] = i;", "different values"),
    "lanes that are not there": ("if (data[i] + t % 2) data[i] = __shfl_xor_sync(~0u, i, 1);", "not all here"),
    "a barrier that not all reach": ("if (t < 32) return; __syncthreads(); data[i] = 1;", "barrier"),
}


class TestStopsAt:
    @pytest.mark.parametrize("what", STOPS_AT)
    def test_what_a_right_kernel_never_does(self, what: str) -> None:
        body, said = STOPS_AT[what]
        with pytest.raises(MachineError, match=said):
            execute(body, zeros())

    def test_loops_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.cuda_machine.machine._STEPS", 1000)
        with pytest.raises(MachineError, match="does not end"):
            execute("volatile int* d = data; while (d[0] == 0); data[i] = 1;", zeros())

    def test_instructions_that_it_does_not_know(self) -> None:
        with pytest.raises(PtxError, match=r"sin\.approx"):
            execute("data[i] = __sinf(data[i]);", torch.zeros(THREADS))
        with pytest.raises(PtxError, match="ftz"):
            execute('asm("add.ftz.f32 %0, %0, %0;" : "+f"(data[i]));', torch.zeros(THREADS))

    def test_local_memory(self) -> None:
        with pytest.raises(PtxError, match="directive"):
            execute("int a[8]; for (int j = 0; j < 8; ++j) a[j] = data[j]; data[i] = a[data[i]];", zeros())

    def test_what_does_not_compile(self) -> None:
        with pytest.raises(CompileError, match=r"test\.cu"):
            execute("no such thing;", zeros())


def test_a_missing_barrier_is_found_by_one_of_the_orders() -> None:
    body = "__shared__ int s[64]; s[t] = i; data[i] = s[63 - t];"
    results = {tuple(execute(body, zeros(), order=order).tolist()) for order in Order}
    assert len(results) > 1
