"""The command `offloadd` as it is, but with the scripted worker: for tests that need no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from offloadd.__main__ import parse
from offloadd.control.main import run

if __name__ == "__main__":
    worker = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))
    sys.exit(run(parse(), os.environ, worker))
