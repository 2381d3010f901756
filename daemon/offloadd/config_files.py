"""Reads the configuration from file, environment and command line, and writes it out.

`OFFLOADD_SECTION_KEY` in the environment goes before the TOML file. What is not known or not of its
kind is refused with file, key, what was found and what was expected.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offload_protocol.errors import InvalidRequest
from offloadd.channel.checked_specs import HUB_ID, model_spec
from offloadd.channel.specs import ModelSpec
from offloadd.config import BUILT_IN_MODEL, SECTIONS, Config, environment_name

SYSTEM_FILE = Path("/etc/offloadd/offloadd.toml")


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
