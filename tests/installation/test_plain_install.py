"""`pip install offloadd` is the light client: what it brings, how fast it is, what it says."""

from __future__ import annotations

import json

from installation.plain_install import PlainInstall

HEAVY = {
    "accelerate",
    "diffusers",
    "nvidia-ml-py",
    "peft",
    "psutil",
    "safetensors",
    "torch",
    "transformers",
}
"""What only the daemon needs. pydantic isn't here, since newer releases of typer bring it along."""

LONGEST_IMPORT_S = 0.3


def test_the_plain_install_brings_nothing_of_the_daemon(plain: PlainInstall) -> None:
    listing = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    installed = set(plain.python(listing).split())
    assert "offloadd" in installed
    assert not HEAVY & installed


def test_importing_the_client_takes_under_three_tenths_of_a_second(plain: PlainInstall) -> None:
    # Processor time, and the least of a few tries: what other programs do meanwhile isn't counted.
    timed = (
        "import time; start = time.process_time(); import offload_client;"
        "print(time.process_time() - start)"
    )
    assert min(float(plain.python(timed)) for _ in range(5)) < LONGEST_IMPORT_S


def test_importing_the_client_loads_no_library_that_only_some_calls_need(
    plain: PlainInstall,
) -> None:
    loaded = plain.python(
        "import json, sys, offload_client; print(json.dumps([*sys.modules]))",
    )
    assert not {"numpy", "PIL", "pydantic", "typer", "rich"} & set(json.loads(loaded))


def test_the_command_line_explains_itself(plain: PlainInstall) -> None:
    done = plain.run("offloadctl", "--help")
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_the_command_line_says_that_no_daemon_is_there(plain: PlainInstall) -> None:
    endpoint = f"ipc://{plain.directory}/none.sock"
    done = plain.run("offloadctl", "--endpoint", endpoint, "stats")
    assert done.returncode == 3, done.stderr
    assert endpoint in done.stderr


def test_the_daemon_without_its_extra_says_what_to_install(plain: PlainInstall) -> None:
    done = plain.run("offloadd")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "offloadd[daemon]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
