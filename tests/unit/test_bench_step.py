"""The flags and the table of `bench step`."""

from functools import partial
from types import SimpleNamespace

import pytest

from gradwire.bench.training import step
from gradwire.bench.training.step import StepRow, StepSpeedup, builders, configured, format_table, parse_arguments

META = {
    "preset": "13m",
    "parameters": 12_900_000,
    "batch": 1,
    "context": 64,
    "backend": "gloo",
    "rounds": 9,
    "steps": 2,
}


def row(competitor: str) -> StepRow:
    return StepRow(competitor, 4, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, True)


def test_codecs_are_chosen_by_name_each_once() -> None:
    assert parse_arguments([]).compression == ()
    assert parse_arguments(["--compression", "topk,int8,topk"]).compression == ("topk", "int8")
    everything = parse_arguments(["--compression", "all"]).compression
    assert {"fp16", "int8", "powersgd"} < set(everything)
    assert not {"none", "auto"} & set(everything)


@pytest.mark.parametrize("name", ["none", "int9", ""])
def test_what_is_no_codec_is_named_with_the_codecs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--compression", f"int8,{name}"])
    assert f"{name!r} is not one of fp16, bf16, " in capsys.readouterr().err


def test_every_codec_and_the_fp16_hook_take_part_only_where_codecs_do() -> None:
    assert list(builders(())) == ["gradwire", "gradwire+ddp", "ddp", "compute"]
    with_codecs = ["gradwire", "gradwire+int8", "gradwire+topk", "gradwire+ddp", "ddp", "ddp+fp16", "compute"]
    assert list(builders(("int8", "topk"))) == with_codecs
    choosing = builders(("int8", "auto", "powersgd"))["gradwire+auto"]
    assert isinstance(choosing, partial)
    assert choosing.keywords == {"compression": "auto", "allow": ["int8"]}
    telling = ["gradwire+on_step", "gradwire+check", "gradwire+timeline"]
    ddp = ["gradwire+ddp", "ddp"]
    assert list(builders((), parse_arguments(["--reports"]).reports)) == ["gradwire", *telling, *ddp, "compute"]
    commits = parse_arguments(["--commits"]).commits
    assert list(builders((), commits=commits)) == ["gradwire", "gradwire+commits", *ddp, "compute"]
    sharded = parse_arguments(["--shard-states"]).shard_states
    assert list(builders((), shard_states=sharded)) == ["gradwire", "gradwire+shards", *ddp, "ddp+zero", "compute"]
    overlapping = parse_arguments(["--overlap"]).overlap
    names = list(builders(("int8",), overlap=overlapping))
    assert names[:4] == ["gradwire", "gradwire+int8", "gradwire+next_forward", "gradwire+next_forward+int8"]
    both_ways = [name for name in builders(("int8", "dgc"), shard_states=sharded) if "shards+" in name]
    assert both_ways == ["gradwire+shards+int8"]


def test_batch_and_context_are_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "hvd", SimpleNamespace(size=lambda: 4))
    config = configured(parse_arguments(["--preset", "13m", "--batch", "1", "--context", "64"]))
    assert (config.batch, config.context, config.width) == (4, 64, 512)
    default = configured(parse_arguments(["--preset", "13m"]))
    assert (default.batch, default.context) == (16, 128)


def test_columns_are_as_wide_as_their_longest_name() -> None:
    rows = [row("gradwire"), row("gradwire+threshold"), row("ddp")]
    speedups = [StepSpeedup("gradwire+threshold", "ddp", 3.333, (3.1, 3.52)), StepSpeedup("gradwire", "ddp", 1.0, None)]
    lines = format_table(rows, speedups, {**META, "network": None})
    assert (
        "12.90 M parameters, 1 sequences of 64 bytes a rank, world size 4 backend gloo, 9 turns of 2 steps" in lines[0]
    )
    assert len({line.index("1.00 ") for line in lines[4:7]}) == 1
    assert lines[-2:] == [
        "# gradwire+threshold is 3.33 times as fast as ddp  [3.10, 3.52]",
        "# gradwire is 1.00 times as fast as ddp",
    ]
