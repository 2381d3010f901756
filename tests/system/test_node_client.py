"""The second client, written from docs/protocol.md alone, in another language."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.peer import Caller, Peer, info_of
from PIL import Image, ImageChops
from system.daemons import Daemon

from offload_protocol.limits import DEFAULT_LIMITS
from offload_protocol.messages import Finished, Progress, Read, Reply, Submit
from offload_protocol.records import Outcome

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "node"
PROMPT = "a red circle on a white background"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not (shutil.which("node") and shutil.which("npm")), reason="node or npm is not installed"
    ),
]


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its two packages, as its reader would install them."""
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "generate.js"):
        shutil.copy(EXAMPLE / name, directory)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=directory, check=True)
    return directory


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="offload-") as directory:
        yield Path(directory) / "s.sock"


def begin(example: Path, endpoint: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["node", str(example / "generate.js"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OFFLOADD_ENDPOINT": endpoint},
    )


def run(example: Path, endpoint: str, *words: str) -> tuple[int, str, str]:
    child = begin(example, endpoint, *words)
    out, errors = child.communicate(timeout=120)
    return child.returncode, out, errors


def test_it_draws_the_same_picture_as_the_python_client_and_follows_progress(
    example: Path, daemon: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "node.png"
    status, out, errors = run(example, daemon.endpoint, "shapes", PROMPT, str(file), "7")
    assert status == 0, errors
    lines = out.splitlines()
    assert lines[-1] == f"done seed 7 {file}"
    steps = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("running")]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1, "progress was followed"
    with daemon.client() as client, Image.open(file) as drawn:
        expected = client.generate("shapes", PROMPT, seed=7).image
        assert ImageChops.difference(drawn.convert("RGB"), expected).getbbox() is None


def test_it_tells_a_refusal_by_its_code(example: Path, daemon: Daemon, tmp_path: Path) -> None:
    status, _, errors = run(example, daemon.endpoint, "no such model", "x", str(tmp_path / "a.png"))
    assert status == 1
    assert errors.startswith("unknown_model: ")


def test_it_says_at_once_that_no_daemon_is_there(example: Path, socket_path: Path) -> None:
    status, _, errors = run(example, f"ipc://{socket_path}", "shapes", "x", "a.png")
    assert (status, errors) == (3, f"no daemon at ipc://{socket_path}: ENOENT\n")


def test_it_reads_a_large_picture_piece_by_piece(
    example: Path, socket_path: Path, tmp_path: Path
) -> None:
    size = (700, 600)
    data = random.Random(3).randbytes(3 * size[0] * size[1])
    frames = [b"before", data]
    image = {"$image": 1, "mode": "RGB", "size": list(size)}
    outcome = Outcome(outputs={"images": [image]}, seeds=[7])
    offsets = []

    def end(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))
        sizes = [len(frame) for frame in frames]
        caller.send(Finished(job=request.job, state="done", outcome=outcome, sizes=sizes))

    def give(caller: Caller, request: Read) -> None:
        offsets.append((request.frame, request.offset))
        rest = frames[request.frame][request.offset :]
        reply = Reply(rid=request.rid, result={})
        caller.send(reply, rest[: DEFAULT_LIMITS.max_piece_bytes])

    peer = Peer(f"ipc://{socket_path}")
    peer.answers |= {"submit": end, "read": give}
    peer.start()
    file = tmp_path / "a.png"
    status, _, errors = run(example, peer.endpoint, "shapes", "x", str(file))
    assert status == 0, errors
    assert offsets == [(0, 0), (1, 0), (1, DEFAULT_LIMITS.max_piece_bytes)]
    with Image.open(file) as drawn:
        assert drawn.tobytes() == data
    assert peer.ops()[-1] == "taken"
    peer.stop()


def test_its_job_outlives_a_restart_of_the_daemon(
    example: Path, socket_path: Path, tmp_path: Path
) -> None:
    def hold(caller: Caller, request: Submit) -> None:
        caller.reply(request, info_of(request, "running"))
        caller.send(Progress(job=request.job, state="running", step=1, steps=9))

    first = Peer(f"ipc://{socket_path}")
    first.answers["submit"] = hold
    first.start()
    child = begin(example, first.endpoint, "shapes", "x", str(tmp_path / "a.png"))
    assert child.stdout is not None
    assert child.stdout.readline() == "running 1/9\n"
    first.stop()
    second = Peer(first.endpoint, "second")
    second.start()
    out, errors = child.communicate(timeout=60)
    second.stop()
    assert child.returncode == 0, errors
    assert "done seed 7" in out
    said = [r.job for peer in (first, second) for r in peer.heard if isinstance(r, Submit)]
    assert len(said) == 2
    assert said[0] == said[1], "the same job under the same id"
