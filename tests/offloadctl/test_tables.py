"""Answers as tables, and words as values; pure."""

from __future__ import annotations

import io
import json

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from offload_client import ComponentInfo, JobInfo, ModelInfo, Progress
from offload_protocol.errors import UnknownJob
from offload_protocol.records import ErrorInfo
from offloadctl.arguments import parse_adapters, parse_pairs, parse_picture_size, pipeline_arguments
from offloadctl.output import Table, plain_text, print_error, print_json, print_line
from offloadctl.pictures import file_names
from offloadctl.progress import description
from offloadctl.tables import jobs_table, models_table, models_tables, ps_tables, stats_tables


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a=1.5", {"a": 1.5}),
        ("a=true", {"a": True}),
        ("a=null", {"a": None}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ("a=words with = signs", {"a": "words with = signs"}),
        ('a="1"', {"a": "1"}),
        ("a=", {"a": ""}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
    ],
)
def test_pairs_are_read_as_json_or_text(pair: str, expected: object) -> None:
    assert parse_pairs([pair], "--set") == expected


@pytest.mark.parametrize("pairs", [["a"], ["=1"], ["a..b=1"], ["a=1", "a=2"], ["a=1", "a.b=2"]])
def test_pairs_that_make_no_sense_are_wrong_usage(pairs: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        parse_pairs(pairs, "--set")


def test_an_adapter_is_a_name_with_a_weight_of_one_unless_given() -> None:
    assert parse_adapters(["ink", "oil:-0.5"]) == [
        {"name": "ink", "weight": 1.0},
        {"name": "oil", "weight": -0.5},
    ]


@pytest.mark.parametrize("text", ["", ":1", "ink:", "ink:much", "ink:nan", "ink:inf"])
def test_an_adapter_without_name_or_number_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME or NAME:WEIGHT"):
        parse_adapters([text])


@given(st.integers(0, 999_999), st.integers(0, 999_999))
def test_a_size_is_width_and_height(width: int, height: int) -> None:
    assert parse_picture_size(f"{width}x{height}") == (width, height)


@pytest.mark.parametrize("text", ["", "8", "8x", "x8", "8x8x8", "-8x8", "8 x 8", "٣x٣"])
def test_what_is_no_size_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_picture_size(text)


def test_shorthands_become_arguments_of_the_pipeline() -> None:
    def call(model: str) -> None: ...

    arguments = pipeline_arguments(["eta=0.5"], 3, "8x16", call)
    assert arguments == {"eta": 0.5, "num_inference_steps": 3, "width": 8, "height": 16}
    with pytest.raises(typer.BadParameter):
        pipeline_arguments(["model=x"], None, None, call)


def test_several_pictures_are_numbered() -> None:
    assert file_names("a.png", 1) == ["a.png"]
    assert file_names("d/a.b.png", 2) == ["d/a.b-1.png", "d/a.b-2.png"]


def test_plain_columns_are_aligned_and_numbers_stand_to_the_right() -> None:
    table = Table("t", ("NAME", ">SIZE"), [("a", "1 B"), ("long", "10 B")])
    assert plain_text(table, titled=False) == "NAME  SIZE\na      1 B\nlong  10 B\n"


def test_ps_adds_up_a_models_bytes_and_names_what_runs() -> None:
    parts = [
        ComponentInfo(name="unet", bytes=3 << 20, resident_bytes=1 << 20, streamed_bytes=2 << 20),
        ComponentInfo(name="vae", bytes=1 << 20, resident_bytes=1 << 20, host_bytes=1 << 20),
        ComponentInfo(name="scheduler"),
    ]
    model = ModelInfo(
        name="m", state="ready", offload="group", components=parts, pinned=True, reason="loaded"
    )
    jobs = [
        JobInfo(job="j1", model="m", state="running", step=2, steps=4),
        JobInfo(job="j2", model="m", state="queued", position=1),
        JobInfo(job="j3", model="other", state="running"),
    ]
    table, components = ps_tables([model], jobs)
    assert table.rows == [
        ("m", "ready", "group", "2.0 MiB", "2.0 MiB", "1.0 MiB", "j1 2/4", "pinned", "loaded")
    ]
    assert [row[0] for row in components.rows] == ["m/unet", "m/vae"]


def test_ps_shows_where_a_components_bytes_are_and_nothing_of_what_is_not_loaded() -> None:
    part = ComponentInfo(
        name="unet",
        bytes=4 << 20,
        host_bytes=3 << 20,
        pinned_bytes=2 << 20,
        disk_bytes=1 << 20,
        shared_bytes=3 << 20,
        read_bytes=4 << 20,
        read_bytes_per_s=1 << 30,
    )
    gone = ModelInfo(name="n", components=[ComponentInfo(name="unet", bytes=4 << 20)])
    kept = ModelInfo(name="k", components=[ComponentInfo(name="vae", bytes=1, host_bytes=4096)])
    _, table = ps_tables([ModelInfo(name="m", state="ready", components=[part]), gone, kept], [])
    assert [row[0] for row in table.rows] == ["m/unet", "k/vae"]
    shown = dict(zip(table.headings, table.rows[0], strict=True))
    figures = {
        ">SIZE": "4.0 MiB",
        ">HOST": "3.0 MiB",
        ">PINNED": "2.0 MiB",
        ">DISK": "1.0 MiB",
        ">SHARED": "3.0 MiB",
        ">READ": "4.0 MiB",
        ">RATE": "1.0 GiB/s",
    }
    assert shown.items() >= figures.items()


def test_notes_on_a_models_settings_stand_below_the_models() -> None:
    noted = ModelInfo(name="m", notes=["use_stream of offload change nothing"])
    _, notes = models_tables([noted, ModelInfo(name="other")])
    assert notes.rows == [("m", "use_stream of offload change nothing")]
    assert len(models_tables([ModelInfo(name="other")])) == 1


def test_a_waiting_job_shows_its_place() -> None:
    table = jobs_table([JobInfo(job="j", model="m", state="queued", position=3)])
    assert table.rows[0][3] == "#3"


def test_stats_show_sizes_and_times_for_people_and_survive_missing_keys() -> None:
    stats = {
        "daemon": {"version": "1", "uptime_s": 200.0},
        "store": {"host_used_bytes": 1 << 30, "disk_read_bytes_total": 0},
        "devices": [{"id": "cpu", "free_bytes": 1 << 20, "note": None}],
        "embeddings": {"limit_bytes": 1 << 28, "size_bytes": 1 << 20, "hits_total": 3},
        "workers": [{"device": "cpu", "restarts_total": 0}, {"device": "cuda:0"}],
    }
    tables = {table.title: table for table in stats_tables(stats)}
    assert ("uptime", "3m 20s") in tables["daemon"].rows
    assert ("host used", "1.0 GiB") in tables["store"].rows
    assert tables["devices"].rows == [["cpu", "1.0 MiB", "-"]]
    assert tables["embeddings"].headings == (">LIMIT", ">SIZE", ">HITS")
    assert tables["embeddings"].rows == [["256.0 MiB", "1.0 MiB", "3"]]
    assert tables["workers"].rows[1] == ["cuda:0", "-"]
    assert tables["jobs"].rows == []
    assert stats_tables({})[0].rows == []


def test_two_counts_do_not_get_one_heading() -> None:
    counts = {"results_kept": 1, "results_kept_bytes": 2, "completed_total": 3}
    tables = {table.title: table for table in stats_tables({"jobs": counts})}
    assert tables["jobs"].headings == (">RESULTS KEPT", ">RESULTS KEPT BYTES", ">COMPLETED")


def test_a_failed_load_takes_a_word_of_its_column() -> None:
    error = ErrorInfo(code="model_load_failed", message="a long story " * 20)
    table = models_table([ModelInfo(name="m", state="failed", error=error)])
    assert table.rows[0][1] == "failed (model_load_failed)"


def test_progress_is_told_in_words() -> None:
    assert description(Progress("queued", 2, 0, 0)) == "queued, place 2"
    assert description(Progress("loading", None, 0, 0)) == "loading"


def test_nothing_that_others_chose_commands_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_line("a \x1b[2J b")
    print_error(UnknownJob("no job '\x1b]0;title\x07'", hint="a\nb"))
    text = plain_text(Table("t", ("A",), [("\x1b[31m red \u202e",)]), titled=False)
    shown = text.replace("\n", "") + "".join(capsys.readouterr()).replace("\n", "")
    assert shown.isprintable()
    assert r"a \x1b[2J b" in shown
    assert r"\x1b[31m red \u202e" in shown


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_stays_json_whatever_a_file_is_called(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    print_json({"files": ["/tmp/\udcff.png", "grün.png"]})
    assert json.loads(raw.getvalue().decode(encoding)) == {"files": ["/tmp/\udcff.png", "grün.png"]}


def test_words_reach_a_terminal_that_cannot_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    print_line("grün")
    assert raw.getvalue() == rb"gr\xfcn" + b"\n"
