"""What the package promises to those who import it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import offload_client
from offload_client import AsyncClient, AsyncJob, Client, Job
from offload_protocol import errors


def test_every_error_class_is_exported() -> None:
    classes = {kind.__name__ for kind in errors.OffloadError.__subclasses__()}
    assert classes <= set(offload_client.__all__)


def test_all_that_is_announced_is_there() -> None:
    for name in offload_client.__all__:
        assert getattr(offload_client, name) is not None
    with pytest.raises(AttributeError):
        _ = offload_client.not_there


@pytest.mark.parametrize(("plain", "awaited"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_the_twins_have_the_same_methods_and_parameters(plain: type, awaited: type) -> None:
    def face(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert face(plain) == face(awaited)


def test_every_public_method_is_explained() -> None:
    for kind in (Client, AsyncClient, Job, AsyncJob):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"


def test_help_of_generate_teaches_by_example() -> None:
    for text in (inspect.getdoc(Client.generate), inspect.getdoc(AsyncClient.generate)):
        assert text is not None
        assert "client.generate(" in text


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = (
        "import sys, offload_client\n"
        "heavy = {'torch', 'diffusers', 'numpy', 'PIL', 'pydantic', 'asyncio', 'rich', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_the_client_is_quick() -> None:
    code = (
        "import time; start = time.process_time(); import offload_client\n"
        "print(time.process_time() - start)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.3, "the promise is 0.3 s; processor time, since other tests may run"
