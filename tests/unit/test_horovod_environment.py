"""What Horovod's environment variables do here, and how they are told."""

import logging
import os
import re
import subprocess

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.world.environment import Settings, notice, read_settings
from gradwire.trainer.world.world import current_world
from tests.interpreter import python

HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "node01",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, Settings()),
        ({"HOROVOD_FUSION_THRESHOLD": ""}, Settings()),
        ({"HOROVOD_FUSION_THRESHOLD": "67108864"}, Settings(fusion_bytes=64 << 20)),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, Settings(fusion_bytes=1)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, Settings(stall_warning_s=7.0)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}, Settings(stall_warning_s=None)),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_STALL_CHECK_DISABLE": "1"}, Settings(stall_warning_s=None)),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, Settings()),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, Settings(stall_shutdown_s=90.0)),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, Settings()),
        ({"HOROVOD_LOG_LEVEL": "trace"}, Settings(log_level=logging.DEBUG)),
        ({"HOROVOD_LOG_LEVEL": "WARNING"}, Settings(log_level=logging.WARNING)),
        ({"HOROVOD_TIMELINE": "/tmp/t.json"}, Settings(timeline="/tmp/t.json")),
        ({"HOROVOD_GLOO_IFACE": "eth1"}, Settings(interface="eth1")),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}, Settings()),  # gloo's, and horovodrun always sets it
        (
            {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
            Settings(timeline="t.json", marks_cycles=True),
        ),
        (HOROVODRUN, Settings()),
    ],
)
def test_settings(environment: dict[str, str], settings: Settings) -> None:
    assert read_settings(environment) == settings


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "a whole number of bytes >= 0"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "a whole number of bytes >= 0"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon", "a number of seconds >= 0"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-3", "a number of seconds >= 0"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "inf", "a number of seconds >= 0"),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes", "0 or 1"),
        ("HOROVOD_LOG_LEVEL", "loud", "one of trace, debug, info, warning, error, fatal"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "yes", "0 or 1"),
    ],
)
def test_values_that_cannot_be_meant(name: str, text: str, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    for read in (lambda: read_settings({name: text}), hvd.init):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be {allowed}, not {text!r}")):
            read()
    assert not hvd.is_initialized()


def test_notice() -> None:
    assert notice({"PATH": "/bin"} | HOROVODRUN) is None
    assert notice({"HOROVOD_CYCLE_TIME": "1"}) == ("of Horovod's environment variables, ignored are HOROVOD_CYCLE_TIME")
    given = {"HOROVOD_TIMELINE": "t.json", "HOROVOD_FUSION_THRESHOLD": "1024"}
    assert notice(given) == (
        "of Horovod's environment variables, used are HOROVOD_FUSION_THRESHOLD=1024, HOROVOD_TIMELINE=t.json"
    )
    assert notice({**given, "HOROVOD_CYCLE_TIME": "1", "HOROVOD_AUTOTUNE": "1"}) == (
        "of Horovod's environment variables, used are HOROVOD_FUSION_THRESHOLD=1024, HOROVOD_TIMELINE=t.json; "
        "ignored are HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME"
    )


def test_a_level_that_is_asked_for_shows_lines_also_where_no_logging_is_configured() -> None:
    program = (
        "import logging, gradwire as hvd; hvd.init(); logging.getLogger('gradwire').info('a line'); hvd.shutdown()"
    )
    environment = {**os.environ, "HOROVOD_LOG_LEVEL": "info"}
    done = subprocess.run([python(), "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines().count("a line") == 1


def test_init(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The world keeps what variables say, but for what init() is given; optimizers take their buckets from it."""
    logger = logging.getLogger("gradwire")
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the end of the test also removes what init() sets
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, text in [
        ("FUSION_THRESHOLD", "4096"),
        ("STALL_CHECK_TIME_SECONDS", "7"),
        ("STALL_SHUTDOWN_TIME_SECONDS", "8"),
        ("GLOO_IFACE", "lo"),
        ("LOG_LEVEL", "info"),
        ("CACHE_CAPACITY", "5"),
    ]:
        monkeypatch.setenv(f"HOROVOD_{name}", text)
    seen: list[hvd.reports.StepMetrics] = []
    hvd.init()
    try:
        assert current_world().settings == Settings(4096, 7.0, 8.0, logging.INFO, None, False, "lo")
        assert logger.level == logging.INFO
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        two = [torch.nn.Parameter(torch.zeros(600)) for _ in range(2)]  # together more than 4096 bytes
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(two, lr=0.1), on_step=seen.append)
        for _ in range(2):
            (two[0].sum() + two[1].sum()).backward()
            optimizer.step()
        assert len(seen[-1].buckets) == 2
        optimizer.close()
    finally:
        hvd.shutdown()
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    (said,) = [record for record in caplog.records if "Horovod" in record.message]
    assert "HOROVOD_FUSION_THRESHOLD=4096" in said.message
    assert said.message.endswith("ignored are HOROVOD_CACHE_CAPACITY")
    hvd.init(timeout_s=20, stall_warning_s=0, stall_shutdown_s=0)
    settings = current_world().settings
    hvd.shutdown()
    assert (settings.timeout_s, settings.stall_warning_s, settings.stall_shutdown_s) == (20, None, None)
    hvd.init(timeout_s=20, stall_shutdown_s=7)
    patience_s = current_world().communicator().timeout_s
    hvd.shutdown()
    assert patience_s == 7  # a rank gives up after the shorter of the two


@pytest.mark.parametrize("name", ["timeout_s", "stall_warning_s", "stall_shutdown_s"])
def test_arguments_that_cannot_be_meant(name: str) -> None:
    for wrong in (-1.0, float("inf"), float("nan"), *([0] if name == "timeout_s" else [])):
        with pytest.raises(ValueError, match=f"{name} must be a finite number of seconds >"):
            hvd.init(**{name: wrong})  # type: ignore[arg-type]
