"""The worker's log: one line per event on stderr, as journald and a terminal both like it.

Warnings of the model libraries come through in the same form; their progress bars and the notes
that this process causes by design do not.
"""

from __future__ import annotations

import logging
import os
import re
import sys

_BY_DESIGN = re.compile(
    r"requires torchvision \(not installed\)"
    r"|was created on 'cpu' even though"  # noise is drawn on the CPU on purpose
    r"|We cannot verify whether it has the correct type"  # it is the class that the index names
    r"|^Failed to load .*torchao"  # kernels for other devices than there are
    r"|^Unable to import `torchao` Tensor objects"  # older forms, which are not hosted
    r"|is an Enum subclass and is now natively supported"  # between torchao and torch
    r"|^Warning: Detected no triton"  # its kernels are for devices alone
    r"|part of your input was truncated"  # it quotes the prompt, which is its client's alone
    r"|^You are trying to set torch_dtype to .* for integer quantization"  # it works in any
)


def start_log(level: int = logging.INFO) -> None:
    """Send this process's log to stderr; call it before any model library is imported."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(levelname)s worker[{os.getpid()}] %(name)s: %(message)s"))
    handler.addFilter(_is_news)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    # Torch gives its own logs a handler of their own.
    logging.getLogger("torch.utils._pytree").addFilter(_is_news)
    # Read by the libraries when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Until `quieten_libraries`: what it says while it is imported goes past our filter.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")


def quieten_libraries() -> None:
    """Route the logs of diffusers and transformers into ours; call it once they are imported."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.disable_default_handler()
        library.enable_propagation()
        library.set_verbosity_warning()


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n\t")


def _is_news(record: logging.LogRecord) -> bool:
    return _BY_DESIGN.search(record.getMessage()) is None
