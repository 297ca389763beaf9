"""The recipes of `--fp8`: what shares a scale, in which format, and what it requires."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How the operands of a product are quantized; each is [rows, contracted dimension].

    Attributes:
        activation, weight: (rows, columns) that share a scale; 0: all of them.
        grad_format: format of output gradients, "e4m3" or "e5m2"; everything else is e4m3.
        power_of_2: whether scales are rounded up to a power of 2.
        multiple: what every cut of a matrix, and the tokens of a micro-batch, must be divisible by.
        capabilities: compute capabilities of the GPUs whose products take such scales.
    """

    activation: tuple[int, int]
    weight: tuple[int, int]
    grad_format: str
    power_of_2: bool
    multiple: int
    capabilities: tuple[tuple[int, int], ...]

    @property
    def square(self) -> bool:
        """Whether blocks of weights are squares, so that the codes of one direction are those of the other."""
        return self.weight[0] == self.weight[1] > 0

    def spans(self, dims: str) -> str:
        """Return those dimensions of an operand that a scale covers whole: sharded ones need the amax of all ranks.

        Args:
            dims: letters of the rows and of the contracted dimension, "NI".
        """
        return "".join(dim for dim, size in zip(dims, self.activation) if size == 0)


_ADA = (8, 9)
_HOPPER = (9, 0)
_BLACKWELL = ((10, 0), (10, 3), (12, 0))

RECIPES = {
    "blockwise": Recipe((1, 128), (128, 128), "e4m3", True, 128, (_HOPPER, *_BLACKWELL[:2])),
    "rowwise": Recipe((1, 0), (1, 0), "e4m3", True, 16, (_HOPPER, *_BLACKWELL)),
    "tensorwise": Recipe((0, 0), (0, 0), "e5m2", False, 16, (_ADA, _HOPPER, *_BLACKWELL)),
    "mxfp8": Recipe((1, 32), (1, 32), "e4m3", True, 32, _BLACKWELL),
}
