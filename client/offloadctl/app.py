"""The commands of `offloadctl`, one module a family, in the order in which `--help` lists them."""

from __future__ import annotations

from offloadctl import drawing, hosting, keys, looking, planning
from offloadctl.common import app

__all__ = ["app"]

for command in (
    looking.stats,
    looking.ps,
    looking.jobs,
    looking.models,
    hosting.load,
    planning.plan,
    hosting.unload,
    hosting.pin,
    hosting.unpin,
    drawing.generate,
    drawing.fetch,
    drawing.cancel,
    hosting.drain,
    keys.keygen,
):
    app.command()(command)
