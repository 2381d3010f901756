"""The configuration: where values come from, and what is said about wrong ones."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from offload_protocol.errors import InvalidRequest
from offloadd.channel.checked_specs import model_spec
from offloadd.channel.specs import ComponentSpec, OffloadSpec
from offloadd.config import SECTIONS, Config, environment_name
from offloadd.config_files import checked_source, config_file, describe, load_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "offloadd.toml"


def test_without_file_and_environment_the_defaults_hold() -> None:
    config = load_config(None, {})
    assert config == Config()
    assert [spec.name for spec in config.models] == ["shapes"]


def test_sizes_durations_and_modes_are_read_from_text(file: Path) -> None:
    file.write_text(
        '[queue]\nmax_bytes = "2GiB"\nmodel_turn = "1.5m"\n[daemon]\nsocket_mode = "0660"\n'
    )
    config = load_config(file, {})
    assert config.queue.max_bytes == 2 << 30
    assert config.queue.model_turn == 90.0
    assert config.daemon.socket_mode == 0o660


def test_the_environment_goes_before_the_file_and_options_before_both(file: Path) -> None:
    file.write_text('[daemon]\ndevice = "cpu"\n[queue]\nlimit = 5\n[log]\nlevel = "debug"\n')
    environ = {"OFFLOADD_QUEUE_LIMIT": "7", "OFFLOADD_DAEMON_DEVICE": "cuda:1"}
    config = load_config(file, environ, {"daemon.device": "auto"})
    assert (config.log.level, config.queue.limit, config.daemon.device) == ("debug", 7, "auto")


def test_other_names_of_the_environment_do_not_matter() -> None:
    environ = {"OFFLOADD_ENDPOINT": "ipc:///x", "OFFLOADD_CONFIG": "y", "OFFLOADD_OTHER": "z"}
    assert load_config(None, environ) == Config()


def test_every_key_can_be_set_by_its_environment_name() -> None:
    for section, kind in SECTIONS.items():
        for key, field in kind.model_fields.items():
            value = field.default
            text = f"{value:04o}" if key == "socket_mode" else str(value)
            config = load_config(None, {environment_name(section, key): text})
            assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[deamon]\n", r"offloadd.toml: deamon is not a known key \(did you mean 'daemon'"),
        ("[queue]\nlimt = 3\n", r"queue.limt is not a known key \(did you mean 'limit'"),
        ("[queue]\nzzz = 3\n", r"queue.zzz is not a known key \(known are: limit, "),
        ("[queue]\nlimit = 'x'\n", "queue.limit is 'x' .*valid integer"),
        ("[queue]\nlimit = 0\n", "queue.limit is 0 .*greater than or equal to 1"),
        ("[queue]\nmax_bytes = '3 pounds'\n", "queue.max_bytes is '3 pounds' .*as 8GiB"),
        ("[results]\nkeep = '5y'\n", "results.keep is '5y' .*as 30s, 5m"),
        ("[results]\nkeep = nan\n", "results.keep is nan"),
        ("[daemon]\nsocket_mode = '9'\n", "socket_mode is '9' .*mode such as 0660"),
        ("[daemon]\ndevice = 'gpu'\n", "daemon.device is 'gpu' .*write auto, cpu or cuda:N"),
        ("[daemon]\ndevice = 'cpu\\n'\n", "daemon.device is"),
        ('[daemon]\nstate_dir = "a\\u0000"\n', "daemon.state_dir is .*leave the zero byte out"),
        ('[daemon]\nadmin_group = "\\u0000"\n', "daemon.admin_group is .*zero byte"),
        (f"x = {'9' * 5000}\n", "offloadd.toml is not TOML: "),
        (f"x = {'[' * 3000}{']' * 3000}\n", "offloadd.toml is not TOML: "),
        ("[log]\nlevel = 'loud'\n", "log.level is 'loud' .*'debug', 'info'"),
        ("queue = 3\n", "offloadd.toml: queue is 3"),
        ("[queue\n", "offloadd.toml is not TOML: "),
        ("models = 3\n", "models is no list of tables"),
        ("[[models]]\nname = 'm'\n", "entry 1 needs name and source"),
        ("[[models]]\nname = 'm'\nsource = 'x'\n", "'x' is neither an absolute path, nor"),
        ("[[models]]\nname = 'm'\nsource = '/x'\ndtyp = 'y'\n", "model 'm' has a setting.*dtyp"),
        ("[[models]]\nname='m'\nsource='/x'\n[[models]]\nname='m'\nsource='/y'\n", "two entries"),
    ],
)
def test_wrong_files_are_refused_with_file_key_found_and_expected(
    file: Path, text: str, says: str
) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=says) as caught:
        load_config(file, {})
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("0", 0.0), ("90", 90.0), ("forever", -1.0), ("-1", -1.0), ("-7.5", -1.0)],
)
def test_a_keep_alive_is_a_duration_or_for_ever(file: Path, text: str, seconds: float) -> None:
    config = load_config(None, {"OFFLOADD_HOSTING_KEEP_ALIVE": text})
    assert config.hosting.keep_alive == seconds
    file.write_text(f"[[models]]\nname = 'm'\nsource = '/x'\nkeep_alive = {text!r}\n")
    assert load_config(file, {}).models[-1].keep_alive == seconds
    file.write_text("[[models]]\nname = 'm'\nsource = '/x'\nkeep_alive = 'always'\n")
    with pytest.raises(InvalidRequest, match="always"):
        load_config(file, {})


def test_wrong_environment_names_and_values_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"OFFLOADD_QUEUE_LIMT is not a known key .*'limit'"):
        load_config(None, {"OFFLOADD_QUEUE_LIMT": "3"})
    with pytest.raises(InvalidRequest, match="variable OFFLOADD_QUEUE_LIMIT is 'many'"):
        load_config(None, {"OFFLOADD_QUEUE_LIMIT": "many"})


def test_wrong_options_are_named() -> None:
    with pytest.raises(InvalidRequest, match="option --device is 'gpu'"):
        load_config(None, {}, {"daemon.device": "gpu"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*missing.toml: No such file"):
        load_config(tmp_path / "missing.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match=r"binary.toml is not TOML"):
        load_config(tmp_path / "binary.toml", {})


def test_models_are_read_with_their_options(file: Path) -> None:
    file.write_text(
        '[[models]]\nname = "m"\nsource = "/x"\npreload = true\n'
        'offload = "model"\ncomponents = { vae = { mode = "group", num_blocks_per_group = 2 } }\n'
    )
    models = {spec.name: spec for spec in load_config(file, {}).models}
    assert set(models) == {"shapes", "m"}
    assert models["m"].preload
    assert models["m"].offload == OffloadSpec(mode="model")
    assert models["m"].components["vae"] == ComponentSpec(mode="group", num_blocks_per_group=2)


def test_the_built_in_model_can_be_configured(file: Path) -> None:
    file.write_text('[[models]]\nname = "shapes"\nsource = "builtin:shapes"\npreload = true\n')
    (shapes,) = load_config(file, {}).models
    assert shapes.preload


def test_what_is_printed_gives_the_same_configuration_again(file: Path) -> None:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "offload": {"mode": "group", "use_stream": True},
        "components": {"vae": "none"},
    }
    spec = model_spec("m", "/x", options)
    config = Config.model_validate(
        {
            "queue": {"limit": 3, "model_turn": 0.25},
            "daemon": {"socket_mode": 0o640, "endpoint": 'ipc:///a"b\\c'},
            "models": (*Config().models, spec),
        }
    )
    text = "\n".join(describe(config))
    tomllib.loads(text)
    file.write_text(text)
    assert load_config(file, {}) == config


def test_every_key_is_printed_with_its_environment_name_and_help() -> None:
    text = "\n".join(describe(Config()))
    for section, kind in SECTIONS.items():
        for key, field in kind.model_fields.items():
            assert field.description
            assert f"# {field.description} [{environment_name(section, key)}]\n{key} = " in text


def test_the_file_is_found_by_option_environment_and_home(tmp_path: Path) -> None:
    mine = tmp_path / "offloadd" / "offloadd.toml"
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert config_file(None, environ) in (None, Path("/etc/offloadd/offloadd.toml"))
    mine.parent.mkdir()
    mine.write_text("")
    assert config_file(None, environ) == mine
    assert config_file(None, {**environ, "OFFLOADD_CONFIG": "/a.toml"}) == Path("/a.toml")
    assert config_file("/b.toml", {**environ, "OFFLOADD_CONFIG": "/a.toml"}) == Path("/b.toml")


def test_a_home_that_may_not_be_searched_holds_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_permission(path: object, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", no_permission)
    assert config_file(None, {"HOME": "/closed"}) is None


def test_a_source_may_name_a_model_in_the_hub_cache() -> None:
    assert checked_source("owner/Some-Model_1.5", "m") == "owner/Some-Model_1.5"
    with pytest.raises(InvalidRequest, match="neither an absolute path"):
        checked_source("a/b/c", "m")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_budget": "lots"}, r"model 'm': device_budget: .*lots"),
        ({"offload": "bogus"}, r"offload is 'bogus', .*the modes are auto, none, stream"),
        ({"offload": {"mode": "streem"}}, r"offload is 'streem', .*did you mean 'stream'"),
        ({"components": {"vae": "bogus"}}, r"components.vae is 'bogus', which is no mode"),
    ],
)
def test_a_models_setting_that_is_none_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        model_spec("m", "/m", options)
