"""The interface of a number format of `--fp8`: what shares a scale, in which format, and what it requires."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.core.base.table import Table


@dataclass(frozen=True)
class Recipe:
    """How the operands of a product are quantized; each is [rows, contracted dimension].

    Attributes:
        activation, weight: (rows, columns) that share a scale; 0: all of them.
        grad_format: format of output gradients, "e4m3" or "e5m2"; everything else is e4m3.
        power_of_2: whether scales are rounded up to a power of 2.
        multiple: what every cut of a matrix, and the tokens of a micro-batch, must be divisible by.
        capabilities: compute capabilities of the GPUs whose products take such scales.
        about: a few words on it, which --help shows.
    """

    activation: tuple[int, int]
    weight: tuple[int, int]
    grad_format: str
    power_of_2: bool
    multiple: int
    capabilities: tuple[tuple[int, int], ...]
    about: str = ""

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


RECIPES: Table[Recipe] = Table("megalite.core.parts.recipes", "RECIPE")
"""Name (`--fp8`) -> recipe."""
