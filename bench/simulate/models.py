"""The models whose training is simulated: the number of elements and of operations of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Weight(NamedTuple):
    """One parameter: its number of elements, and its multiply-adds per sample in the forward pass."""

    numel: int
    operations: int = 0


Weights = Iterator[Weight]


def _convolution(inputs: int, outputs: int, kernel: tuple[int, int], side: int, *, normed: bool = True) -> Weights:
    """Yield the weight of a convolution, then the two tensors of its batch norm or, if not normed, its bias.

    side: the height and width of the output."""
    numel = inputs * outputs * kernel[0] * kernel[1]
    yield Weight(numel, numel * side * side)
    yield Weight(outputs)
    if normed:
        yield Weight(outputs)


def _dense(inputs: int, outputs: int) -> Weights:
    yield Weight(inputs * outputs, inputs * outputs)
    yield Weight(outputs)


def _resnet(blocks: Sequence[int]) -> Weights:
    """Yield the weights of a ResNet with bottlenecks (He et al., 2016) in forward order, for 224 x 224 pixels."""
    yield from _convolution(3, 64, (7, 7), 112)
    inputs = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            enters = 2 * side if stage and block == 0 else side
            yield from _convolution(inputs, width, (1, 1), enters)
            yield from _convolution(width, width, (3, 3), side)
            yield from _convolution(width, 4 * width, (1, 1), side)
            if block == 0:
                yield from _convolution(inputs, 4 * width, (1, 1), side)
            inputs = 4 * width
    yield from _dense(inputs, 1000)


def _vgg16() -> Weights:
    """Yield the weights of VGG-16 (Simonyan and Zisserman, 2015, configuration D), for 224 x 224 pixels."""
    inputs = 3
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))):
        for _ in range(count):
            yield from _convolution(inputs, width, (3, 3), 224 >> stage, normed=False)
            inputs = width
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        yield from _dense(inputs, outputs)


#: The convolutions of Inception-v3, block by block: the side of the output, and the inputs, outputs and kernel of each.
_INCEPTION: tuple[tuple[int, str], ...] = (
    (149, "3>32:3x3"),
    (147, "32>32:3x3 32>64:3x3"),
    (73, "64>80:1x1"),
    (71, "80>192:3x3"),
    *(
        (35, f"{n}>64:1x1 {n}>48:1x1 48>64:5x5 {n}>64:1x1 64>96:3x3 96>96:3x3 {n}>{pooled}:1x1")
        for n, pooled in ((192, 32), (256, 64), (288, 64))
    ),
    (17, "288>384:3x3"),
    (35, "288>64:1x1 64>96:3x3"),
    (17, "96>96:3x3"),
    *(
        (
            17,
            f"768>192:1x1 768>{n}:1x1 {n}>{n}:1x7 {n}>192:7x1 768>{n}:1x1 {n}>{n}:7x1 {n}>{n}:1x7 {n}>{n}:7x1 {n}>192:1x7"
            " 768>192:1x1",
        )
        for n in (128, 160, 160, 192)
    ),
    (17, "768>192:1x1"),
    (8, "192>320:3x3"),
    (17, "768>192:1x1 192>192:1x7 192>192:7x1"),
    (8, "192>192:3x3"),
    *(
        (
            8,
            f"{n}>320:1x1 {n}>384:1x1 384>384:1x3 384>384:3x1 {n}>448:1x1 448>384:3x3 384>384:1x3 384>384:3x1 {n}>192:1x1",
        )
        for n in (1280, 2048)
    ),
)


def _inception() -> Weights:
    """Yield the weights of Inception-v3 (Szegedy et al., 2016) without its auxiliary classifier, for 299 x 299 pixels."""
    for side, convolutions in _INCEPTION:
        for described in convolutions.split():
            channels, _, kernel = described.partition(":")
            inputs, outputs = map(int, channels.split(">"))
            height, width = map(int, kernel.split("x"))
            yield from _convolution(inputs, outputs, (height, width), side)
    yield from _dense(2048, 1000)


def _bert(layers: int, width: int) -> Weights:
    """Yield the weights of BERT (Devlin et al., 2019), uncased; operations are those of one token."""
    for rows in (30522, 512, 2):
        yield Weight(rows * width)
    norm = (Weight(width), Weight(width))
    yield from norm
    for _ in range(layers):
        for _ in range(4):
            yield from _dense(width, width)
        yield from norm
        yield from _dense(width, 4 * width)
        yield from _dense(4 * width, width)
        yield from norm
    yield from _dense(width, width)


#: The weights of each model, by name, in the order of the forward pass.
MODELS: dict[str, tuple[Weight, ...]] = {
    "resnet50": tuple(_resnet((3, 4, 6, 3))),
    "resnet101": tuple(_resnet((3, 4, 23, 3))),
    "resnet152": tuple(_resnet((3, 8, 36, 3))),
    "vgg16": tuple(_vgg16()),
    "inception3": tuple(_inception()),
    "bert-base": tuple(_bert(12, 768)),
    "bert-large": tuple(_bert(24, 1024)),
}
