"""The daemon's configuration: one typed model; each key has a file name, an environment name, help.

`config_files` reads it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from offload_protocol.errors import InvalidRequest
from offload_protocol.sizes import parse_duration_s, parse_size_bytes
from offloadd.channel.checked_specs import keep_alive_s
from offloadd.channel.specs import ModelSpec

ENVIRONMENT_PREFIX = "OFFLOADD_"
BUILT_IN_MODEL = ModelSpec(name="shapes", source="builtin:shapes")


def _size(value: Any) -> Any:
    try:
        return parse_size_bytes(value) if isinstance(value, str) else value
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _duration(value: Any) -> Any:
    try:
        return parse_duration_s(value) if isinstance(value, str) else value
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _keep_alive(value: Any) -> Any:
    try:
        return keep_alive_s(value)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _mode(value: Any) -> Any:
    # In TOML, 0o660 is a number and "0660" what people know from chmod.
    try:
        return int(value, 8) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"{value!r} is not a mode such as 0660") from None


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda:[0-9]{1,3}", value):
        raise ValueError("write auto, cpu or cuda:N")
    return value


def _without_zero(value: str) -> str:
    # Neither a path nor a group can hold it, and the system's calls raise whatever they like.
    if "\0" in value:
        raise ValueError("leave the zero byte out")
    return value


Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
Duration = Annotated[float, BeforeValidator(_duration), Field(ge=0, allow_inf_nan=False)]
KeepAlive = Annotated[float, BeforeValidator(_keep_alive)]
Mode = Annotated[int, BeforeValidator(_mode), Field(ge=0o600, le=0o777)]
Device = Annotated[str, AfterValidator(_device)]
Text = Annotated[str, AfterValidator(_without_zero)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DaemonSection(_Section):
    """Where the daemon is reached and what it runs on."""

    endpoint: Text = Field(
        "", description="where clients connect, ipc://PATH or tcp://HOST:PORT; empty: by the rules"
    )
    device: Device = Field("auto", description="auto, cpu or cuda:N")
    state_dir: Text = Field("", description="the workers' directory; empty: by the rules")
    socket_mode: Mode = Field(0o600, description="mode of the socket: who may connect")
    socket_group: Text = Field("", description="group that the socket is given to; empty: our own")
    admin_group: Text = Field("", description="group whose members may administrate, beside root")


class RemoteSection(_Section):
    """How clients on other machines are let in; tcp is never served without these keys."""

    endpoint: Text = Field("", description="served beside daemon.endpoint, as tcp://HOST:PORT")
    key_file: Text = Field("", description="the daemon's own key, made by offloadctl keygen server")
    clients: Text = Field(
        "", description="directory of the clients' keys: use/NAME.pub, administrate/NAME.pub"
    )


class QueueSection(_Section):
    """How much may wait."""

    limit: int = Field(256, ge=1, description="jobs that may wait")
    per_user_limit: int = Field(64, ge=1, description="jobs of one user that may wait")
    max_bytes: Size = Field(1 << 30, description="bytes of all requests that wait")
    model_turn: Duration = Field(
        30.0, description="how long jobs on the loaded model go before older ones on others"
    )
    max_parked: int = Field(
        4, ge=0, description="jobs that may wait in the middle of their work; 0: none gives way"
    )
    max_sweep: int = Field(
        8, ge=1, description="jobs on one model that may share what it streams; 1: none do"
    )


class LimitsSection(_Section):
    """What one job may ask for."""

    max_steps: int = Field(1000, ge=1, description="inference steps")
    max_pixels: int = Field(4096 * 4096, ge=1, description="height times width")
    max_images: int = Field(16, ge=1, description="pictures of one request")
    max_frames: int = Field(1024, ge=1, description="frames of one video")


class ResultsSection(_Section):
    """How long results are kept that nobody has taken."""

    keep: Duration = Field(3600.0, description="how long a result waits for its client")
    max_bytes: Size = Field(1 << 30, description="bytes of all results; older ones give way")


def _share(value: str) -> str:
    if value:
        # A percentage is of the machine's memory, which is known only where the budget is measured.
        try:
            parse_size_bytes(value, whole_bytes=0)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
    return value


Share = Annotated[str, AfterValidator(_share)]


class StoreSection(_Section):
    """Where weights are kept."""

    host_budget: Share = Field(
        "", description="host memory for weights, such as 8GiB or 80%; empty: what is available"
    )
    pack_cache: Share = Field(
        "50%", description="disk for packs, such as 200GiB, or a share of their file system"
    )


class JournalSection(_Section):
    """How accepted jobs are written down."""

    sync: Literal["normal", "full"] = Field(
        "normal", description="normal outlives a killed daemon; full also a loss of power"
    )


class ClientsSection(_Section):
    """What becomes of the jobs of clients that leave."""

    lease: Duration = Field(
        30.0, ge=10.0, description="how long a silent client's attached jobs go on"
    )


class HostingSection(_Section):
    """How models stay in memory."""

    keep_alive: KeepAlive = Field(
        1800.0, description="how long an unused model stays; 0: not at all, forever: always"
    )
    embeddings: Size = Field(
        256 << 20,
        description="host memory for prompt embeddings that are used again; 0: none are",
    )
    download: bool = Field(
        True, description="whether models that are not in the hub cache are downloaded from the hub"
    )


class LogSection(_Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error"
    )


class Config(_Section):
    """Everything that can be set, with its defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    daemon: DaemonSection = DaemonSection()
    remote: RemoteSection = RemoteSection()
    queue: QueueSection = QueueSection()
    limits: LimitsSection = LimitsSection()
    results: ResultsSection = ResultsSection()
    store: StoreSection = StoreSection()
    journal: JournalSection = JournalSection()
    clients: ClientsSection = ClientsSection()
    hosting: HostingSection = HostingSection()
    log: LogSection = LogSection()
    models: tuple[ModelSpec, ...] = (BUILT_IN_MODEL,)


SECTIONS: dict[str, type[_Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, _Section)
}


def environment_name(section: str, key: str) -> str:
    """The name of a key in the environment."""
    return f"{ENVIRONMENT_PREFIX}{section}_{key}".upper()
