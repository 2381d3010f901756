"""A container in which offloadd is installed from its wheel, as docs/installation.md says."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from system.container import Container, booted

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "systemd"
MEMBER, STRANGER = "painter", "stranger"
"""People in the container: one of the group `offloadd`, and one who isn't."""

PEOPLE = f"""\
u {MEMBER} - "may draw" /home/{MEMBER}
m {MEMBER} offloadd
u {STRANGER} - "may not" /home/{STRANGER}
"""

OPEN_DOOR = "account required pam_permit.so\nsession required pam_permit.so\n"
"""PAM's rule for starting a user's manager; the distribution's own needs more of its /etc."""

RUNTIME = "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n"
"""What PAM would have said to a user's manager."""


@contextmanager
def installed(directory: Path) -> Iterator[Container]:
    """The container, up and with offloadd in /opt/offloadd; the service isn't started yet.

    The wheel is installed by pip into an environment of its own. Its dependencies are those of the
    environment that runs the tests, bound read-only: copies of torch and its like would need 1.4 GB
    of memory and a minute for bytes that are the same. Raises `CannotBoot`.
    """
    wheel = _build_wheel(directory)
    places = {
        "/opt/wheels": wheel.parent,
        "/opt/dependencies": Path(sysconfig.get_path("purelib")),
        "/etc/systemd/system/offloadd.service": UNITS / "offloadd.service",
        "/etc/systemd/user/offloadd.service": UNITS / "user" / "offloadd.service",
        "/etc/sysusers.d/offloadd.conf": UNITS / "offloadd.sysusers.conf",
        "/etc/sysusers.d/people.conf": _file(directory / "people", PEOPLE),
        "/etc/pam.d/systemd-user": _file(directory / "door", OPEN_DOOR),
        "/etc/systemd/system/user@.service.d/runtime.conf": _file(directory / "runtime", RUNTIME),
        "/etc/tmpfiles.d/offloadd.conf": UNITS / "offloadd.tmpfiles.conf",
    }
    interpreter = Path(sys.base_prefix)
    if not interpreter.is_relative_to("/usr"):
        places["/opt/python"] = interpreter
    with booted("offloadd-test", places, directory / "console") as container:
        _install(container, wheel.name, places)
        yield container


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _build_wheel(directory: Path) -> Path:
    target = directory / "wheels"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    (wheel,) = target.glob("*.whl")
    return wheel


def _install(container: Container, wheel: str, places: dict[str, Path]) -> None:
    prefix = "/opt/python" if "/opt/python" in places else sys.base_prefix
    # An interpreter that has moved may find the libpython of another one in /usr before its own.
    container.call("sh", "-c", f"echo {prefix}/lib >/etc/ld.so.conf && ldconfig")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    container.call(f"{prefix}/bin/{version}", "-m", "venv", "--without-pip", "/opt/offloadd")
    python = "/opt/offloadd/bin/python"
    where = f"/opt/offloadd/lib/{version}/site-packages/dependencies.pth"
    container.call("sh", "-c", f"echo /opt/dependencies >{where}")
    # Among the dependencies is the checkout's own offloadd, which is neither enough nor in the way.
    pip = (python, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-deps")
    container.call(*pip, "--no-index", f"/opt/wheels/{wheel}", limit_s=120)
