"""The scripts of docs/integrations as a user runs them. Those of a framework that is not installed are skipped: `make
test-integrations` installs all."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.interpreter import python
from tests.pages import ROOT
from tests.ports import unused_port
from tests.ranks.programs import DEADLINE_S, ended, launch, launch_text, start

FOLDER = ROOT / "docs" / "integrations"
RUNNER = Path(__file__).with_name("run_integration.py")


def needs(package: str) -> Any:
    """Skip a test without a package. It is only looked for: importing it takes seconds, and is for the ranks to do."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def call(command: list[str], *folders: Path, deadline_s: float = DEADLINE_S, **environment: str) -> str:
    """Run a command that may start the test's python, torchrun too, and what is in the folders; return its output."""
    first = [*folders, Path(python()).parent, Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, first), os.environ["PATH"]])
    status, output = ended(start(command, FOLDER, PATH=path, HF_HUB_OFFLINE="1", **environment), deadline_s)
    assert status == 0, output
    return output


def run(script: str, out: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a script on ranks, check that it prints the statistics of its exchanges once, and return each rank's results."""
    out.mkdir()
    output = launch(RUNNER, FOLDER, str(out), str(FOLDER / script), *arguments, processes=ranks)
    assert len(re.findall(r"\d+ exchanges", output)) == 1, output
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def assert_compressed_and_alike(ends: list[dict[str, Any]], exchanges: int) -> None:
    for end in ends:
        assert end["weights"].isfinite().all()
        assert end["weights"].equal(ends[0]["weights"])
        assert end["exchanges"] == exchanges
        assert 0 < end["bytes_sent"] < 0.5 * end["bytes_uncompressed"]


@pytest.mark.parametrize("script", [path.name for path in sorted(FOLDER.glob("*.py"))])
def test_a_script_is_short(script: str) -> None:
    assert len((FOLDER / script).read_text().splitlines()) < 60


@pytest.mark.parametrize(
    ("script", "exchanges"),
    [
        ("ddp.py", 20),
        pytest.param("timm_train.py", 12, marks=needs("timm")),
        pytest.param("lightning_module.py", 16, marks=needs("lightning")),
        pytest.param("ignite_engine.py", 20, marks=needs("ignite")),
        pytest.param("fastai_learner.py", 20, marks=needs("fastai")),
        pytest.param("muon_train.py", 20, marks=needs("muon")),
        pytest.param("nanogpt_loop.py", 12, marks=pytest.mark.wide),
    ],
)
def test_a_script(tmp_path: Path, script: str, exchanges: int) -> None:
    assert_compressed_and_alike(run(script, tmp_path / "out"), exchanges)


@needs("sentence_transformers")
def test_sentence_transformers(tmp_path: Path) -> None:
    ends = run("sentence_transformers_train.py", tmp_path / "out", "--output_dir", str(tmp_path / "saved"))
    assert_compressed_and_alike(ends, exchanges=12)


@needs("trl")
def test_a_lora_of_trl_and_peft(tmp_path: Path) -> None:
    first, second = run("trl_lora.py", tmp_path / "out", "--output_dir", str(tmp_path / "saved"))
    assert first["weights"].equal(second["weights"])
    assert first["exchanges"] == 12
    assert 0 < first["bytes_sent"] == first["bytes_uncompressed"] < 12 * 4 * first["weights"].numel() / 10


@pytest.mark.wide
def test_fsdp2_between_groups(tmp_path: Path) -> None:
    ends = run("fsdp2.py", tmp_path / "out", ranks=4)
    for shard in (0, 1):
        assert_compressed_and_alike(ends[shard::2], exchanges=12)
    assert not ends[0]["weights"].equal(ends[1]["weights"])


BACKEND_FIRST = 'import gradwire\nimport torch.distributed as dist\ndist.init_process_group("gradwire")\n'


@pytest.mark.parametrize(
    ("script", "exchanges", "before", "old", "new"),
    [
        pytest.param(
            "accelerate_loop.py", 16, BACKEND_FIRST, "accelerator.end_training()", "", marks=needs("accelerate")
        ),
        pytest.param("hugging_face_trainer.py", 12, BACKEND_FIRST, "", "", marks=needs("transformers")),
        pytest.param(
            "lightning_module.py", 16, "", "DDP()", 'DDP(process_group_backend="gradwire")', marks=needs("lightning")
        ),
    ],
)
def test_a_framework_over_the_backend(
    script: str, exchanges: int, before: str, old: str, new: str, tmp_path: Path
) -> None:
    """As docs/torch_backend.md says how."""
    text = (FOLDER / script).read_text()
    assert old in text
    check = '\nimport torch.distributed as dist\nassert dist.get_backend() == "gradwire"\n'
    (tmp_path / script).write_text(before + text.replace(old, new) + check)
    arguments = ["--output_dir", str(tmp_path / "saved")] if script == "hugging_face_trainer.py" else []
    ends = run(str(tmp_path / script), tmp_path / "out", *arguments)
    assert_compressed_and_alike(ends, exchanges)


@needs("lightning")
def test_lightning_alone_does_not_use_a_hook_on_cpus(tmp_path: Path) -> None:
    """Should it do so one day, the strategy of four lines is needed no more."""
    script = (FOLDER / "lightning_module.py").read_text()
    plain = script.replace("strategy=CompressedDDP()", "strategy=DDPStrategy(ddp_comm_hook=hook)")
    assert plain != script
    (tmp_path / "plain.py").write_text(plain)
    for end in run(str(tmp_path / "plain.py"), tmp_path / "out"):
        assert (end["exchanges"], end["bytes_sent"]) == (0, 0)


@needs("ignite")
def test_ignite_alone_does_not_synchronize_over_the_backend(tmp_path: Path) -> None:
    """Should it do so one day, its page need not warn of it any more."""
    text = (FOLDER / "ignite_engine.py").read_text().replace('idist.initialize("horovod")', "")
    text = text.replace(', compression="int8"', "").replace("; {optimizer.stats}", "; 0 exchanges")
    text += (
        "\nfrom types import SimpleNamespace\noptimizer = SimpleNamespace(stats=gradwire.ddp_comm_hook('none').stats)\n"
    )
    (tmp_path / "plain.py").write_text(BACKEND_FIRST + text)
    first, second = run(str(tmp_path / "plain.py"), tmp_path / "out")
    assert not first["weights"].equal(second["weights"])


@needs("accelerate")
@pytest.mark.timeout(2 * DEADLINE_S + 20)
def test_accelerate_saves_what_each_rank_owes(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert_compressed_and_alike(run("accelerate_loop.py", tmp_path / "a", first), exchanges=16)
    assert_compressed_and_alike(run("accelerate_loop.py", tmp_path / "b", second, first), exchanges=16)
    states = [torch.load(Path(second, f"gradwire.rank{rank}.pt"), weights_only=True) for rank in range(2)]
    assert [(state["rank"], state["step"]) for state in states] == [(0, 32), (1, 32)]


@needs("transformers")
@needs("accelerate")
@pytest.mark.timeout(3 * DEADLINE_S + 20)
def test_hugging_face_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    """From the checkpoint that the arguments name, and, by True, from the last one."""
    script, out = "hugging_face_trainer.py", tmp_path / "straight"
    straight = run(script, tmp_path / "a", "--output_dir", str(out))
    assert_compressed_and_alike(straight, exchanges=12)
    again = ["--output_dir", str(tmp_path / "resumed"), "--resume_from_checkpoint", f"{out}/checkpoint-6"]
    named = run(script, tmp_path / "b", *again)
    (out / "checkpoint-12").rename(out / "end")
    text = (FOLDER / script).read_text()
    assert text.count("=arguments.resume_from_checkpoint") == 1
    (tmp_path / script).write_text(text.replace("=arguments.resume_from_checkpoint", "=True"))
    last = run(str(tmp_path / script), tmp_path / "c", "--output_dir", str(out))
    for resumed in (named, last):
        assert_compressed_and_alike(resumed, exchanges=6)
        assert resumed[0]["weights"].equal(straight[0]["weights"])


@pytest.mark.parametrize(
    ("call", "gloo"),
    [
        ("all_gather([torch.empty(2), torch.empty(3)], torch.ones(2 + dist.get_rank()))", "invalid tensor size"),
        (
            "reduce_scatter_single(torch.empty(1), torch.ones(2), dist.ReduceOp.AVG, async_op=True).get_future().wait()",
            "getFuture not implemented",
        ),
    ],
    ids=["Muon", "nanochat"],
)
@pytest.mark.wide
def test_what_optimizers_call_fails_on_gloo_only(call: str, gloo: str, tmp_path: Path) -> None:
    """Should gloo support it one day, docs/integrations need not warn of it any more."""
    script = (
        "import gradwire, torch\nimport torch.distributed as dist\ndist.init_process_group({!r})\n"
        f"try:\n    dist.{call}\nexcept RuntimeError as error:\n    print(error)\ndist.destroy_process_group()\n"
    )
    assert gloo in launch_text(script.format("gloo"), tmp_path)
    assert gloo not in launch_text(script.format("gradwire"), tmp_path)


TRACKED = """
import torch, wandb
import gradwire as hvd
hvd.init()
if hvd.rank() == 0:
    wandb.init(mode="offline")
{fragments}
def report(metrics):
    for to in (to_tensorboard, to_wandb, to_prometheus):
        to(metrics)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
on_step = report if hvd.rank() == 0 else None
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), on_step=on_step)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
hvd.shutdown()
if on_step:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    writer.close()
    board = EventAccumulator(writer.log_dir).Reload()
    (sent,) = {{event.value for event in board.Scalars("exchange/bytes_sent")}}
    assert prometheus_client.REGISTRY.get_sample_value("exchange_bytes_sent") == sent > 0
    assert wandb.run.summary["exchange/bytes_sent"] == sent
    print("steps:", len(board.Scalars("exchange/seconds")), "last:", wandb.run.summary["exchange/step"])
"""


@needs("wandb")
@needs("tensorboard")
@needs("prometheus_client")
def test_the_trackers_of_the_guide(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "reports.md").read_text()
    fragments = re.findall(r'^```python title="fragment"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)
    trackers = [each for each in fragments if "\ndef to_" in each]
    assert len(trackers) == 3
    guarded = "\n".join("if hvd.rank() == 0:\n" + textwrap.indent(each, "    ") for each in trackers)
    port = str(unused_port())
    assert guarded.count("9400") == 1
    script = TRACKED.format(fragments=guarded.replace("9400", port))
    output = launch_text(script, tmp_path)
    assert "steps: 3 last: 3" in output, output


# What starts them


@pytest.mark.parametrize(
    "script",
    [pytest.param("ray_train.py", marks=needs("ray")), pytest.param("dask_workers.py", marks=needs("distributed"))],
)
@pytest.mark.timeout(3 * DEADLINE_S + 20)
def test_a_cluster_starts_its_ranks(script: str) -> None:
    """Ray starts and ends a dozen processes beside the ranks, which takes minutes on busy cores."""
    assert "20 exchanges" in call([sys.executable, str(FOLDER / script)], deadline_s=3 * DEADLINE_S)


@needs("nbclient")
def test_a_cell_of_a_notebook_starts_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is given, as another test may have the default one."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = (FOLDER / "notebook.py").read_text()
    assert text.count("num_processes=2") == 1
    cell = text.replace("num_processes=2", f'num_processes=2, use_port="{unused_port()}"')
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    NotebookClient(notebook, timeout=int(DEADLINE_S), kernel_name="python3").execute()
    assert "20 exchanges" in str(notebook.cells[0].outputs)


def test_slurm_starts_a_torchrun_on_each_node(tmp_path: Path) -> None:
    """On one node, with stand-ins for Slurm's commands."""
    for name, does in (("scontrol", "echo localhost"), ("srun", 'exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    slurm["SLURM_CPUS_PER_TASK"] = "2"
    output = call(["bash", str(FOLDER / "slurm.sh")], tmp_path, SCRIPT=str(FOLDER / "ddp.py"), **slurm)
    assert "20 exchanges" in output


ELASTIC = ROOT / "tests" / "ranks" / "horovod_programs" / "elastic.py"


@pytest.mark.wide
def test_slurm_starts_an_elastic_job(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_PER_TASK": "2"}
    output = call(["bash", str(FOLDER / "slurm_elastic.sh")], tmp_path, SCRIPT=str(ELASTIC), **slurm)
    assert "generation 0: 2 ranks" in output


@pytest.mark.wide
def test_pods_of_kubernetes_meet_in_a_store_that_is_none_of_theirs() -> None:
    """Two pods of one rank each, on this machine. The port is replaced, as another test may have it."""
    _, deployment, job = yaml.safe_load_all((FOLDER / "kubernetes_elastic.yaml").read_text())
    keeps, trains = (each["spec"]["template"]["spec"]["containers"][0] for each in (deployment, job))
    store, pod = keeps["command"], trains["command"]
    environment = {each["name"]: each["value"] for each in trains["env"]}
    port = str(unused_port())
    assert store[-1].count("29500") == 1
    replaced = {
        "--nproc-per-node=2": "--nproc-per-node=1",
        "--rdzv-endpoint=gradwire-store:29500": f"--rdzv-endpoint=127.0.0.1:{port}",
        "/train/train.py": str(ELASTIC),
    }
    assert replaced.keys() < set(pod)
    keeper = start([sys.executable, *store[1:-1], store[-1].replace("29500", port)], FOLDER)
    try:
        command = [replaced.get(word, word) for word in pod]
        with ThreadPoolExecutor(2) as pods:
            list(pods.map(lambda _: call(command, **environment), range(2)))
        assert keeper.poll() is None
    finally:
        keeper.kill()
        keeper.communicate()


def read_yaml(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return document


def test_the_train_job_is_of_its_schema() -> None:
    """By the models that Kubeflow generates of it. They drop what they do not know, which must be nothing."""
    api = pytest.importorskip("kubeflow_trainer_api.models")
    job = read_yaml("kubeflow.yaml")
    assert api.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_the_train_job_starts_its_ranks() -> None:
    """In place of two pods one process; PET_* are what Kubeflow Trainer sets."""
    trainer = read_yaml("kubeflow.yaml")["spec"]["trainer"]
    command = [word.replace("/train", str(FOLDER)) for word in trainer["command"]]
    pet = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]), "PET_STANDALONE": "1"}
    assert "20 exchanges" in call(command, **pet)


def test_skypilot_starts_its_ranks() -> None:
    """On one node. The port is replaced, as another test may have it."""
    task = read_yaml("skypilot.yaml")
    script = task["run"].replace("ddp.py", str(FOLDER / "ddp.py"))
    assert script.count("29500") == 1
    port = str(unused_port())
    envs = {name: str(value) for name, value in task["envs"].items()}
    sky = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    assert "20 exchanges" in call(["bash", "-euc", script.replace("29500", port)], **envs, **sky)
