"""Shows the whole way of a picture: a daemon of its own, clients in other processes, a verdict.

    make demo        (or: python tools/demo.py [--pictures DIRECTORY])

Starts `offloadd` on a private endpoint, draws through `offloadctl`, prints the daemon's statistics,
judges each picture against its prompt, and stops the daemon. The last line is the path of the first
picture. Exit 0 when every picture fits its prompt, else 1 with the reason on standard error.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from judge_shapes import judge, parse_prompt
from offload_client import Client, OffloadError

READY_LIMIT_S = 120.0
DRAW_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
PROGRAMS = Path(sys.executable).parent


class DemoFailed(Exception):
    """What did not work, in a sentence for the person who ran the demo."""


@dataclass(frozen=True, slots=True)
class Order:
    """A picture to draw, and where it goes."""

    prompt: str
    seed: int
    file: str


FIRST = Order("a red circle on a white background", 7, "red-circle.png")
AT_ONCE = (
    Order("a large blue star on a yellow background", 7, "blue-star.png"),
    Order("a green triangle on a black background", 7, "green-triangle.png"),
    Order("a small white square on a purple background", 7, "white-square.png"),
)
"""Drawn by client processes that run at the same time."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a few pictures through a daemon.")
    parser.add_argument("--pictures", type=Path, default=Path("build/demo"), metavar="DIRECTORY")
    pictures: Path = parser.parse_args().pictures
    try:
        make_directory(pictures)
        show(pictures)
    except DemoFailed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    print(f"\n{(pictures / FIRST.file).resolve()}")
    return 0


def make_directory(pictures: Path) -> None:
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoFailed(f"no folder for the pictures can be made: {error}") from error


def show(pictures: Path) -> None:
    """The demo itself. Raises `DemoFailed`."""
    with temporary_directory() as directory, running_daemon(directory) as endpoint:
        heading(f"one client draws: {FIRST.prompt}")
        finish(draw(endpoint, FIRST, pictures), FIRST)
        heading(f"{len(AT_ONCE)} client processes draw at once")
        clients = [(draw(endpoint, order, pictures, quiet=True), order) for order in AT_ONCE]
        for client, order in clients:
            finish(client, order)
        heading("offloadctl stats")
        subprocess.run([*offloadctl(endpoint), "stats"], check=True, timeout=DRAW_LIMIT_S)
    heading("do the pictures show what was asked for?")
    judge_all((FIRST, *AT_ONCE), pictures)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    # A short name, since a socket's path may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="offloadd-") as directory:
        yield Path(directory)


@contextmanager
def running_daemon(directory: Path) -> Iterator[str]:
    """The endpoint of a daemon that is ready; it is stopped, and has to end well."""
    endpoint = f"ipc://{directory}/offloadd.sock"
    log = directory / "log"
    heading(f"offloadd --endpoint {endpoint}")
    command = [str(PROGRAMS / "offloadd"), "--endpoint", endpoint]
    command += ["--state-dir", str(directory / "state")]
    started = time.monotonic()
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until_ready(endpoint, daemon, started)
        yield endpoint
    except (DemoFailed, subprocess.SubprocessError) as failure:
        end(daemon)
        raise DemoFailed(f"{failure}\nThe daemon's log ends with:\n{tail(log)}") from failure
    except BaseException:
        end(daemon)
        raise
    status = end(daemon)
    if status != 0:
        raise DemoFailed(f"the daemon ended with {status} on SIGTERM:\n{tail(log)}")
    print("\nThe daemon ended cleanly on SIGTERM.")


def wait_until_ready(endpoint: str, daemon: subprocess.Popen[bytes], started: float) -> None:
    """Until the worker has found its device; says when the daemon first answered."""
    has_answered = False
    while daemon.poll() is None:
        waited_s = time.monotonic() - started
        if waited_s > READY_LIMIT_S:
            raise DemoFailed(f"the daemon was not ready after {READY_LIMIT_S:.0f} s")
        state = daemon_state(endpoint)
        if state is not None and not has_answered:
            print(f"answers after {waited_s:.1f} s, its state is {state!r}")
            has_answered = True
        if state == "ready":
            print(f"ready after {time.monotonic() - started:.1f} s")
            return
        time.sleep(0.05)
    raise DemoFailed(f"the daemon ended with {daemon.returncode} before it was ready")


def daemon_state(endpoint: str) -> Any:
    """What the daemon says its state is; None while there is none to answer."""
    try:
        with Client(endpoint, program="demo", connect_timeout_s=0.5) as client:
            return client.stats()["daemon"]["state"]
    except OffloadError:
        return None


def draw(
    endpoint: str, order: Order, pictures: Path, *, quiet: bool = False
) -> subprocess.Popen[str]:
    """Start a client process that draws the picture; a quiet one keeps its progress to itself."""
    file = pictures / order.file
    # Else a picture of an earlier demo could pass for this one's.
    file.unlink(missing_ok=True)
    command = [*offloadctl(endpoint), "generate", "shapes", "--prompt", order.prompt]
    command += ["--seed", str(order.seed), "-o", str(file)]
    output = subprocess.PIPE if quiet else None
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
    )


def finish(client: subprocess.Popen[str], order: Order) -> None:
    """Wait for a client process and show what it said."""
    try:
        said, complaint = client.communicate(timeout=DRAW_LIMIT_S)
    except subprocess.TimeoutExpired as late:
        client.kill()
        raise DemoFailed(f"no picture of {order.prompt!r} after {DRAW_LIMIT_S:.0f} s") from late
    if client.returncode != 0:
        # Without a pipe it has been shown already.
        reason = f":\n{complaint.strip()}" if complaint else ""
        raise DemoFailed(f"offloadctl gave {client.returncode} for {order.prompt!r}{reason}")
    if said:
        print(said.strip())


def offloadctl(endpoint: str) -> list[str]:
    return [str(PROGRAMS / "offloadctl"), "--endpoint", endpoint]


def judge_all(orders: tuple[Order, ...], pictures: Path) -> None:
    """Raises `DemoFailed` when a picture does not show what its prompt says."""
    misfits = []
    for order in orders:
        with Image.open(pictures / order.file) as picture:
            verdict = judge(picture.convert("RGB"), parse_prompt(order.prompt))
        print(f"{'yes' if verdict.fits else 'NO':4} {order.file:20} {order.prompt}")
        if not verdict.fits:
            misfits.append(f"{order.file}: {', '.join(verdict.reasons)}")
    if misfits:
        raise DemoFailed("; ".join(misfits))


def end(daemon: subprocess.Popen[bytes]) -> int:
    """Ask the daemon to stop, insist if it must be, and give its exit status."""
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
    try:
        return daemon.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return daemon.wait()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
