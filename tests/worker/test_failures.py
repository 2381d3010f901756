"""What a pipeline raises becomes a code; only what poisons the device counts as a device fault."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from offload_protocol.errors import Cancelled
from offloadd.worker.failures import is_device_fault, is_out_of_memory, to_offload_error

GIB = 1 << 30


def raised(make: Callable[[], BaseException]) -> Exception:
    try:
        raise make()
    except Exception as error:  # noqa: BLE001 - the test wants a traceback on whatever was made
        return error


def accelerator(text: str) -> Callable[[], BaseException]:
    return lambda: torch.AcceleratorError(text)


@pytest.mark.parametrize(
    ("make", "is_fault"),
    [
        (accelerator("CUDA error: an illegal memory access was encountered"), True),
        (accelerator("CUDA error: device-side assert triggered"), True),
        (lambda: RuntimeError("CUDA error: unspecified launch failure"), True),
        (lambda: RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (accelerator("CUDA error: out of memory"), False),
        (lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), False),
        (lambda: torch.OutOfMemoryError("CUDA out of memory."), False),
        (lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (lambda: ValueError("CUDA error"), False),
    ],
)
def test_case_27_device_faults_are_told_from_errors(
    make: Callable[[], BaseException], is_fault: bool
) -> None:
    assert is_device_fault(raised(make)) == is_fault


@pytest.mark.parametrize(
    ("make", "needed_bytes"),
    [
        (
            lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
            2.5 * GIB,
        ),
        (
            lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
            20 << 20,
        ),
        (accelerator("CUDA error: out of memory"), 0),
        (MemoryError, 0),
    ],
)
def test_case_28_out_of_memory_carries_needed_and_free_bytes(
    make: Callable[[], BaseException], needed_bytes: float
) -> None:
    error = to_offload_error(raised(make), 3 * GIB, "cuda:0")
    assert error.code == "out_of_memory"
    assert error.details == {
        "needed_bytes": needed_bytes,
        "free_bytes": 3 * GIB,
        "device": "cuda:0",
    }
    assert "3.0 GiB" in error.message
    assert error.hint


def test_a_refused_allocation_on_the_cpu_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert to_offload_error(refused.value, 0, "cpu").details["needed_bytes"] == 1 << 50


def test_coded_errors_stay_as_they_are() -> None:
    error = Cancelled("stop", hint="why not")
    assert to_offload_error(error, 0, "cpu") is error


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOENT, "model_load_failed"),
        (errno.EACCES, "model_load_failed"),
        (errno.EIO, "storage_failed"),
        (errno.ENOSPC, "storage_failed"),
    ],
)
def test_a_file_that_cannot_be_opened_is_about_the_model_and_a_bad_disk_is_not(
    number: int, code: str
) -> None:
    refused = OSError(number, "no", "/models/unet/config.json")
    error = to_offload_error(refused, 0, "cpu", loads=True)
    assert error.code == code
    assert to_offload_error(refused, 0, "cpu").code == "storage_failed"
    assert "/models/unet/config.json" in error.message


def test_errors_of_our_own_are_internal() -> None:
    assert to_offload_error(raised(lambda: ValueError("x")), 0, "cpu").code == "internal"
    assert to_offload_error(raised(lambda: KeyError("x")), 0, "cpu").code == "internal"


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
        lambda: torch.conv2d(torch.zeros(3), torch.zeros(1, 1, 1, 1)),
    ],
)
def test_a_wrong_shape_is_about_the_arguments(compute: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError) as refused:
        compute()
    assert to_offload_error(refused.value, 0, "cpu").code == "invalid_request"


def test_a_complaint_of_the_libraries_is_about_the_arguments() -> None:
    from diffusers import DDIMScheduler

    with pytest.raises(ValueError, match="cannot be larger") as refused:
        DDIMScheduler().set_timesteps(5000)
    error = to_offload_error(refused.value, 0, "cpu")
    assert error.code == "invalid_request"
    assert "5000" in error.message


def test_long_texts_are_cut_and_made_one_line() -> None:
    error = to_offload_error(RuntimeError("a\nb" * 1000), 0, "cpu")
    assert "\n" not in error.message
    assert len(error.message) < 600


def test_the_coded_error_does_not_keep_the_failed_frames_alive() -> None:
    def fail() -> None:
        held = torch.zeros(3)
        alive.append(weakref.ref(held))
        raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    alive: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except torch.OutOfMemoryError as error:
        told = to_offload_error(error, 0, "cpu")
    gc.collect()
    assert told.code == "out_of_memory"
    assert alive[0]() is None
