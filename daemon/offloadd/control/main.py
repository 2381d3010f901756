"""From the command line to a running server: configuration, endpoint, signals, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from offload_protocol.endpoints import daemon_endpoint
from offload_protocol.errors import OffloadError
from offloadd.config import Config
from offloadd.config_files import config_file, describe, load_config
from offloadd.control.clients.entrances import (
    Entrance,
    close_entrances,
    open_entrances,
    read_keys,
)
from offloadd.control.clients.listener import Access
from offloadd.control.clients.roles import group_entry, roles
from offloadd.control.server import Server, Setting
from offloadd.control.workers.supervisor import WORKER_COMMAND
from offloadd.observe.logs import start_log

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_FORCED = 130


def run(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Do what the command line says; gives the exit code."""
    try:
        file = config_file(options.config, environ)
        config = _effective(load_config(file, environ, _overrides(options, environ)), environ)
        if options.print_config:
            print("\n".join(describe(config)))
            return EXIT_STOPPED
        start_log(config.log.level, environ)
        return _serve(config, environ, worker_command)
    except OffloadError as error:
        print(f"offloadd: {error}", file=sys.stderr)
        return EXIT_FAILED


def _overrides(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    given = {
        "device": options.device,
        "state_dir": options.state_dir,
        "endpoint": options.endpoint or environ.get("OFFLOADD_ENDPOINT"),
    }
    return {f"daemon.{key}": value for key, value in given.items() if value}


def _effective(config: Config, environ: Mapping[str, str]) -> Config:
    # What is empty goes by the rules; from here on, their answers stand in the configuration.
    found = {
        "endpoint": daemon_endpoint(config.daemon.endpoint, environ),
        "state_dir": str(_state_directory(config.daemon.state_dir, environ)),
    }
    return config.model_copy(update={"daemon": config.daemon.model_copy(update=found)})


def _serve(config: Config, environ: Mapping[str, str], worker_command: Sequence[str]) -> int:
    group = config.daemon.socket_group
    access = Access(
        mode=config.daemon.socket_mode,
        group_id=group_entry(group, "daemon.socket_group").gr_gid if group else None,
    )
    state_dir = _prepare_state_directory(Path(config.daemon.state_dir))
    keys = read_keys(config.remote, time.monotonic)
    holders = roles(config.daemon.admin_group, keys.allowed if keys is not None else None)
    entrances = open_entrances(config.daemon, config.remote, access, keys)
    setting = Setting(version("offloadd"), entrances, state_dir, holders, environ, worker_command)
    try:
        return asyncio.run(_run_until_signalled(config, setting))
    finally:
        close_entrances(entrances)


async def _run_until_signalled(config: Config, setting: Setting) -> int:
    server = Server(config, setting)
    signals_seen = 0

    def on_signal() -> None:
        nonlocal signals_seen
        signals_seen += 1
        if signals_seen > 1:
            _leave_at_once(setting.entrances)
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        # Not a reason to leave at once: kernel and shell both send it when a terminal closes.
        loop.add_signal_handler(signal.SIGHUP, server.stop)
    # What is there now stays; to look through it again and again would hold up some jobs.
    gc.freeze()
    await server.run()
    return EXIT_STOPPED


def _leave_at_once(entrances: tuple[Entrance, ...]) -> None:
    # The worker notices the closed channel, and nothing else may hold us up.
    close_entrances(entrances)
    os._exit(EXIT_FORCED)


def _prepare_state_directory(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(
            f"cannot make the state directory {directory}: {error.strerror}",
            hint="give another with --state-dir",
        ) from None
    return directory


def _state_directory(given: str, environ: Mapping[str, str]) -> Path:
    if given:
        return Path(given).expanduser().absolute()
    if environ.get("STATE_DIRECTORY"):
        # systemd joins several directories with colons; ours is the first.
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "offloadd"
    return Path.home() / ".local" / "state" / "offloadd"
