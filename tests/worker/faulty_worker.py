"""A worker in which a layer raises the error that a file asks for, as often as it says (once)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from offloadd.worker.__main__ import main

ERRORS: dict[str, Any] = {
    "out_of_memory": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    ),
    "sticky": lambda: torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered"
    ),
    "memory": MemoryError,
    "bug": lambda: KeyError("hidden_states"),
    "disk": lambda: FileNotFoundError(2, "No such file or directory", "/gone/group_1.safetensors"),
}
FAULT = Path(os.environ["FAULT_FILE"])


def fail_once(module: torch.nn.Module, arguments: Any) -> None:
    if isinstance(module, torch.nn.Conv2d) and FAULT.exists():
        kind, _, times = FAULT.read_text().partition(" ")
        if int(times or 1) > 1:
            FAULT.write_text(f"{kind} {int(times) - 1}")
        else:
            FAULT.unlink()
        raise ERRORS[kind]()


register_module_forward_pre_hook(fail_once)
main(sys.argv[1:])
