"""The daemon's configuration: one typed model; each key has a file name, an environment name, help.

Read from a TOML file; `OFFLOADD_SECTION_KEY` in the environment goes before the file. What is not
known or not of its kind is refused with file, key, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from offload_protocol.errors import InvalidRequest
from offload_protocol.sizes import parse_duration_s, parse_size_bytes
from offloadd.channel.checked_specs import HUB_ID, keep_alive_s, model_spec
from offloadd.channel.specs import ModelSpec

SYSTEM_FILE = Path("/etc/offloadd/offloadd.toml")
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


def config_file(explicit: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: `--config`, `OFFLOADD_CONFIG`, the user's if it exists, the system's."""
    given = explicit or environ.get("OFFLOADD_CONFIG")
    if given:
        return Path(given).expanduser()
    home = environ.get("XDG_CONFIG_HOME") or (
        f"{environ['HOME']}/.config" if environ.get("HOME") else ""
    )
    candidates = [Path(home) / "offloadd" / "offloadd.toml"] if home else []
    # Not Path.is_file, which raises where the home directory may not be searched.
    return next((path for path in [*candidates, SYSTEM_FILE] if os.path.isfile(path)), None)  # noqa: PTH113


def load_config(
    file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str] | None = None
) -> Config:
    """Read file and environment; `overrides` (`section.key`) go before both.

    Raises `InvalidRequest` that says where the fault is.
    """
    data = _read(file) if file is not None else {}
    models = _models(data.pop("models", []), str(file))
    origins: dict[tuple[str, str], str] = {}
    for section, key, name in _environment_keys(environ):
        data = _set(data, section, key, environ[name])
        origins[section, key] = f"environment variable {name}"
    for place, value in (overrides or {}).items():
        section, _, key = place.partition(".")
        data = _set(data, section, key, value)
        origins[section, key] = f"option --{key.replace('_', '-')}"
    try:
        return Config.model_validate({**data, "models": models})
    except ValidationError as error:
        raise _invalid(error.errors()[0], origins, str(file)) from None


def describe(config: Config) -> Iterator[str]:
    """The lines of `--print-config`: TOML that gives this configuration, with names and help."""
    for section, kind in SECTIONS.items():
        yield f"[{section}]"
        for key, field in kind.model_fields.items():
            value = getattr(getattr(config, section), key)
            yield f"# {field.description} [{environment_name(section, key)}]"
            yield f"{key} = {_toml(key, value)}"
        yield ""
    for spec in config.models:
        yield "[[models]]"
        yield f"name = {json.dumps(spec.name)}"
        yield f"source = {json.dumps(spec.source)}"
        yield from (f"{key} = {_toml(key, value)}" for key, value in _model_options(spec).items())
        yield ""


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the configuration {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # Bad TOML, bad UTF-8, a number of thousands of digits; lists in lists without an end.
        raise InvalidRequest(f"{file} is not TOML: {error}") from None


def _environment_keys(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted(environ):
        for section in SECTIONS:
            prefix = environment_name(section, "")
            if name.startswith(prefix):
                yield section, name.removeprefix(prefix).lower(), name


def _set(data: dict[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    held = data.get(section, {})
    return {**data, section: {**held, key: value}} if isinstance(held, dict) else data


def _models(entries: Any, file: str) -> tuple[ModelSpec, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequest(f"{file}: models is no list of tables", hint="write [[models]]")
    specs: dict[str, ModelSpec] = {BUILT_IN_MODEL.name: BUILT_IN_MODEL}
    named: set[str] = set()
    for number, entry in enumerate(entries, 1):
        options = dict(entry)
        name, source = options.pop("name", None), options.pop("source", None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise InvalidRequest(f"{file}: [[models]] entry {number} needs name and source")
        if name in named:
            raise InvalidRequest(f"{file}: [[models]] has two entries named {name!r}")
        named.add(name)
        try:
            specs[name] = model_spec(name, checked_source(source, f"model {name!r}"), options)
        except InvalidRequest as error:
            raise InvalidRequest(f"{file}: {error.message}", hint=error.hint) from None
    return tuple(specs.values())


def checked_source(source: str, place: str) -> str:
    """A model's source with `~` resolved; raises `InvalidRequest` for a relative path."""
    if source.startswith("builtin:") or HUB_ID.fullmatch(source):
        return source
    path = Path(source).expanduser()
    if path.is_absolute():
        return str(path)
    raise InvalidRequest(
        f"{place}: the source {source!r} is neither an absolute path, nor owner/name of a model "
        "in the hub cache, nor builtin:NAME",
        hint="the daemon has a working directory of its own: write the whole path",
    )


def _invalid(
    details: ErrorDetails, origins: Mapping[tuple[str, str], str], file: str
) -> InvalidRequest:
    names = [str(part) for part in details["loc"]]
    section, key = names[0], names[1] if len(names) > 1 else ""
    place = origins.get((section, key)) or f"{file}: {'.'.join(names[:2])}"
    if details["type"] == "extra_forbidden":
        known = list(SECTIONS[section].model_fields) if key else [*SECTIONS, "models"]
        near = difflib.get_close_matches(key or section, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
        return InvalidRequest(f"{place} is not a known key", hint=hint)
    expected = details["msg"].removeprefix("Value error, ")
    return InvalidRequest(
        f"{place} is {_found(details['input'])}", hint=expected[:1].lower() + expected[1:]
    )


def _found(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _toml(key: str, value: Any) -> str:
    if key == "socket_mode":
        return f'"{value:04o}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(k, v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(key, one) for one in value) + "]"
    return json.dumps(value)


def _model_options(spec: ModelSpec) -> dict[str, Any]:
    import msgspec

    defaults = ModelSpec(name=spec.name, source=spec.source)
    options = {}
    for key in ModelSpec.__struct_fields__:
        value = getattr(spec, key)
        if key not in ("name", "source") and value != getattr(defaults, key):
            options[key] = _without_none(msgspec.to_builtins(value))
    return options


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}
