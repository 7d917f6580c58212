"""Published runs: their inputs, and their results. Every figure is from a source, except those marked as fitted. A fitted input
is chosen to match the rows that are marked as fitted, so these rows predict nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire.bench.simulate.exchange import Network
from gradwire.bench.simulate.models import MODELS
from gradwire.bench.simulate.scenario import TCP_SHARE, Device, Scenario, predict
from gradwire.collectives.tuning.cost_model import LinkCost

#: The latency of a message between hosts and inside a host: the greatest and the least of a network hop in NCCL 2.30's model.
HOP_S, NEAR_HOP_S = 14e-6, 2.7e-6
_GBIT = 1e9 / 8


def network(
    gbit: float, inside_gbytes: float, ranks_per_host: int, *, share: float = TCP_SHARE, hop_s: float = HOP_S
) -> Network:
    """Return links of `gbit` Gbit/s between hosts and `inside_gbytes` GB/s inside them. share: the part of gbit for payload."""
    byte_s = 1 / (gbit * _GBIT * share)
    return Network(
        LinkCost(hop_s, byte_s, 0, 0), LinkCost(NEAR_HOP_S, 1 / (inside_gbytes * 1e9), 0, 0), byte_s, ranks_per_host
    )


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure. published: samples per second or, if at most 1, the efficiency. label: the source's name of the
    method. fitted: whether an input was chosen to match the figure."""

    scenario: Scenario
    ranks: int
    label: str
    published: float
    fitted: bool = False


@dataclass(frozen=True)
class Preset:
    """Published runs. source: the source of the runs and the inputs. inputs: a description of the inputs."""

    source: str
    inputs: str
    rows: Sequence[PublishedFigure]


@dataclass(frozen=True)
class Compared:
    """The prediction for a published figure. error: predicted over published, less 1."""

    preset: str
    model: str
    ranks: int
    method: str
    published: float
    predicted: float
    error: float
    fitted: bool


def compare(name: str) -> list[Compared]:
    """Return the rows of a preset beside their predictions."""
    found = []
    for row in PRESETS[name].rows:
        point = predict(row.scenario, row.ranks)
        predicted = point.efficiency if row.published <= 1 else point.samples_per_s
        told = (name, row.scenario.model, row.ranks, row.label, row.published)
        found.append(Compared(*told, predicted, predicted / row.published - 1, row.fitted))
    return found


def _runs(
    model: str,
    device: Device,
    links: Network,
    method: tuple[str, str, str],
    published: Mapping[int, float],
    fitted: Sequence[int] = (),
) -> list[PublishedFigure]:
    """Return the figures of one method. method: its name, exchange and algorithm. published: by the number of ranks. fitted: the
    numbers of ranks whose figures an input was chosen to match."""
    label, exchange, algorithm = method
    scenario = Scenario(model, device, links, exchange, algorithm, steps=1)
    return [PublishedFigure(scenario, ranks, label, figure, ranks in fitted) for ranks, figure in published.items()]


_HKBU = "HKBU-HPML/ddl-benchmarks, results/2020-05-29 (2020)"
#: The default speed of a rank, by model.
DEVICES = {
    "resnet50": Device(64, 253.1, _HKBU),
    "bert-base": Device(64, 212.8, _HKBU),
    "bert-large": Device(8, 49.0, _HKBU),
}
#: Fitted: GB/s between the GPUs of a host, and the latency of a message over TCP.
_PCIE_GBYTES, _TCP_HOP_S = 4.57, 70e-6
_BSP = ("BSP-A2A", "bsp", "ring")


def _hkbu_10gbe() -> list[PublishedFigure]:
    table = (
        ("resnet50", _BSP, (925.0, 1282.3, 2485.1, 4920.8), ()),
        ("resnet50", ("WFBP-A2A", "wfbp", "ring"), (1015.4, 1795.7, 3146.8, 5113.2), (16,)),
        ("resnet50", ("MG-WFBP", "mg-wfbp", "ring"), (1003.2, 1980.6, 3785.0, 6883.6), ()),
        ("resnet50", ("WFBP-PS", "wfbp", "hierarchical(direct)"), (1017.3, 2021.4, 3812.0, 6945.4), ()),
        ("bert-base", _BSP, (555.5, 518.9, 984.9, 1926.6), ()),
        ("bert-large", _BSP, (53.04, 28.96, 54.30, 105.1), (4,)),
    )
    links = network(10, _PCIE_GBYTES, 4, hop_s=_TCP_HOP_S)
    runs = (
        _runs(model, DEVICES[model], links, method, dict(zip((4, 8, 16, 32), figures, strict=True)), fitted)
        for model, method, figures, fitted in table
    )
    return [figure for each in runs for figure in each]


def _hkbu_100gib() -> list[PublishedFigure]:
    links = network(100, _PCIE_GBYTES, 4, share=1.0)
    figures = {"resnet50": 7126.5, "bert-base": 4184.4, "bert-large": 375.2}
    runs = (_runs(model, DEVICES[model], links, _BSP, {32: published}) for model, published in figures.items())
    return [figure for each in runs for figure in each]


#: The images per second of one K80, by model (TensorFlow benchmarks, 2017).
_K80 = {"inception3": 29.7, "resnet50": 52.4, "resnet152": 19.4}
#: Fitted for a batch of 64: GB/s of a pair of GPUs inside a host, and Gbit/s of a host's link. They depend on the batch only.
_K80_GBYTES, _K80_GBIT, _K80_BATCH = 0.192, 5.77, 64


def _tensorflow_k80() -> list[PublishedFigure]:
    """Return rows of synchronous servers that are spread over the hosts. Each host pushes to all hosts and pulls from all."""
    table = {
        "inception3": {8: 229, 16: 459, 32: 902, 64: 1783},
        "resnet50": {8: 378, 16: 751, 32: 1388, 64: 2744},
        "resnet152": {8: 146, 16: 291, 32: 565, 64: 981},
    }
    links, method = network(_K80_GBIT, _K80_GBYTES, 8), ("servers", "bsp", "hierarchical(direct)")
    rows: list[PublishedFigure] = []
    for model, figures in table.items():
        device = Device(_K80_BATCH, _K80[model], "TensorFlow benchmarks (2017)")
        rows += _runs(model, device, links, method, figures, fitted=(8, 64) if model == "resnet50" else ())
    return rows


#: Fitted: the time of a step on a Pascal GPU, over the time of an image on a K80.
_PASCAL_STEP = 4.0


def _horovod_512() -> list[PublishedFigure]:
    """Return rows in which a GPU is faster than a K80 by the same factor for both models. The K80's table lacks ResNet-101: the
    time of its multiply-add is the mean of the times of ResNet-50 and ResNet-152."""
    operations = {name: sum(weight.operations for weight in weights) for name, weights in MODELS.items()}
    each_s = (1 / (_K80[name] * operations[name]) for name in ("resnet50", "resnet152"))
    images_s = {"inception3": 1 / _K80["inception3"], "resnet101": sum(each_s) / 2 * operations["resnet101"]}
    links, rows = network(25, _PCIE_GBYTES, 4, share=1.0), list[PublishedFigure]()
    for model, image_s in images_s.items():
        device = Device(1, 1 / (_PASCAL_STEP * image_s), "fitted")
        rows += _runs(
            model, device, links, ("ring", "buckets", "ring"), {512: 0.90}, (512,) if model == "inception3" else ()
        )
    return rows


#: In Goyal et al. (2017), backward of ResNet-50 takes 120 ms, and forward takes half of that.
_FACEBOOK = Device(1, 1 / (0.120 * 3 / 2), "Goyal et al. (2017)")

PRESETS = {
    "hkbu-10gbe": Preset(
        _HKBU,
        "8 hosts of 4 GPUs, 10GbE with TCP, and what one GPU computes; bandwidth inside a host and latency fitted",
        _hkbu_10gbe(),
    ),
    "hkbu-100gib": Preset(
        _HKBU, "the same hosts with 100 Gbit/s InfiniBand; bandwidth inside a host as there", _hkbu_100gib()
    ),
    "tensorflow-k80": Preset(
        "TensorFlow benchmarks, p2.8xlarge with parameter servers (2017)",
        "what one K80 computes; bandwidth inside a host, and that of its link for a batch, fitted",
        _tensorflow_k80(),
    ),
    "horovod-512": Preset(
        "Horovod, docs (2018): 128 hosts of 4 Pascal GPUs, 25 GbE with RoCE",
        "the hosts and their links; how much quicker a GPU is than a K80, and its batch, fitted as one number",
        _horovod_512(),
    ),
    "facebook-256": Preset(
        "Goyal et al., Accurate, Large Minibatch SGD (2017): 256 P100, 50 Gbit/s",
        "time of backward, link rate; each GPU as if it had a link to itself",
        _runs("resnet50", _FACEBOOK, network(50, 1e3, 1), ("ring", "mg-wfbp", "ring"), {256: 0.90}),
    ),
}
