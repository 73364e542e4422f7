"""The sizes of the benchmarks' GPT and what follows from them, without JAX, so that the PyTorch program can import it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sizes:
    """A GPT without position vectors: embedding, pre-norm blocks, norm and output layer, with biases everywhere but in the embedding.

    Attributes:
        layers: number of blocks.
        width: of the residual stream.
        heads: of the attention.
        sequence: tokens of a sequence.
        rows: sequences of a microbatch.
        vocabulary: number of tokens.
        compute_dtype: in which matrices are multiplied; parameters, norms and the loss are float32 always.
        attention: which implementation `jax.nn.dot_product_attention` takes.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    rows: int
    vocabulary: int = 256
    compute_dtype: str = "float32"
    attention: Literal["xla", "cudnn"] = "xla"

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        block = 12 * self.width**2 + 13 * self.width
        return self.vocabulary * self.width + self.layers * block + 2 * self.width + (self.width + 1) * self.vocabulary

    @property
    def sequence_flops(self) -> int:
        """The FLOPs of forward and backward of one sequence, without recomputation.

        These are 6 for each weight of a matrix and token, and 12 · layers · sequence · width for each token's attention, counted as if it
        were not causal.
        """
        matrices = 12 * self.layers * self.width**2 + self.width * self.vocabulary
        return self.sequence * (6 * matrices + 12 * self.layers * self.sequence * self.width)


def warm_up(microbatches: int) -> int:
    """Return the steps to run before timing: in all programs the memory of a process grows for some twenty microbatches.

    Args:
        microbatches: microbatches per step.
    """
    return max(-(-24 // microbatches), 2)


PEERS = Sizes(layers=8, width=256, heads=8, sequence=128, rows=4)
GPU = Sizes(layers=24, width=1024, heads=16, sequence=1024, rows=4, vocabulary=24_064, compute_dtype="bfloat16")  # 352M parameters
TINY = Sizes(layers=2, width=16, heads=2, sequence=8, rows=2)
