"""Shapes of the tensors that pipeline stages exchange, from the plan of the step instead of a message before each.

Packed micro batches differ in length, so Megatron's stages send a shape before every tensor, wait for the GPU and read
the shape on the host. The host can then prepare nothing while the GPU works: packing the next micro batch and launching
its first kernels come on top of every micro batch, on every stage. All ranks have the plan, so the shapes are known.
The first pass forward and the first one with backward still exchange them and compare; later passes of the same kind
rely on the plan if all stages have agreed.

Below megatron-core 0.18 the interleaved schedule frees what it sends before it has waited for the send. Only the wait
for the GPU in the next exchange of shapes protects the message, so virtual stages continue to exchange there.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from packaging.version import Version

from swift_megatron_grpo.runtime.replaced import replaced

logger = logging.getLogger(__name__)
_EXCHANGE = "_communicate_shapes"  # Megatron's method
Shape = list[int]
_NO_TENSOR: Shape = [0, 0, 0]  # as Megatron writes it
# The interleaved schedule waits for a send before it frees the tensor.
SENDS_END_BEFORE_MEMORY_IS_FREED = Version(megatron.core.__version__) >= Version("0.18")


class UnplannedShape(RuntimeError):
    """A stage has computed hidden states of another shape than the plan of the step has."""

    def __init__(self, computed: Shape, planned: Shape) -> None:
        self.difference = f"{computed} where the plan has {planned}"
        super().__init__(
            f"a pipeline stage computed a tensor of shape {self.difference}, although the first pass of its kind had "
            "the planned shapes; --pipeline_model_parallel_size 1 works with this model, please report it"
        )


class StageShapes:
    """Provides the shapes of each pass, once they have been compared with those that the stages exchange.

    Passes with backward are compared by themselves: a forward pass shows no gradient's shape.
    """

    def __init__(self, hidden_size: int, chunks: int, group_size: int) -> None:
        self._hidden_size = hidden_size
        self._chunks = chunks  # virtual pipeline stages of this rank
        self._group_size = group_size  # micro batches that the interleaved schedule processes together
        self._group = mpu.get_pipeline_model_parallel_group()
        # True: later passes rely on the plan. False: all passes exchange. None: the next pass compares.
        at_first = None if chunks == 1 or SENDS_END_BEFORE_MEMORY_IS_FREED else False
        self._agreed: dict[bool, bool | None] = {False: at_first, True: at_first}  # by whether passes have backward

    @contextmanager
    def of_pass(self, rows: Callable[[], Sequence[int]], train: bool) -> Iterator[None]:
        """Take the shapes of a pass from the plan. `rows`: of hidden states and their gradients, by micro batch."""
        agreed = self._agreed[train]
        if self._group.size() == 1 or agreed is False:
            yield
            return
        shapes = [[count, 1, self._hidden_size] for count in rows()]
        stage = self._group.rank()
        stages = self._group.size()
        planned = PlannedExchanges(shapes, stage, stages, self._chunks, self._group_size)
        if agreed:
            with replaced(P2PCommunicator, _EXCHANGE, planned.shapes):
                yield
            return
        differences: list[str] = []
        with replaced(P2PCommunicator, _EXCHANGE, _exchanged_and_compared(planned, differences)):
            yield
        first = torch.tensor(stage if differences else stages, device=torch.device(torch.cuda.current_device()))
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN, group=self._group)
        self._agreed[train] = int(first) == stages
        if int(first) == stage:  # one rank of each pipeline, since those of other pipelines may agree
            logger.warning(
                f"the pipeline of rank {torch.distributed.get_rank()} continues to exchange the shape of every tensor "
                f"in {'training passes' if train else 'log-prob passes'}, which costs time: this rank had "
                f"{differences[0]}"
            )


class PlannedExchanges:
    """The shapes of one pass, in the order in which Megatron's schedules send and receive them on one stage."""

    def __init__(self, shapes: Sequence[Shape], stage: int, stages: int, chunks: int, group_size: int) -> None:
        # (micro batch, chunk) in the order of forward; backward has the same with chunks counted from the last one
        table = get_schedule_table(len(shapes), chunks, group_size)

        def without(chunk: int | None) -> Iterator[Shape]:
            return iter([shapes[micro_batch] for micro_batch, of in table if of != chunk])

        is_first = stage == 0
        is_last = stage == stages - 1
        self._from_previous = without(0 if is_first else None)  # the model begins in the first stage's first chunk
        self._to_next = without(chunks - 1 if is_last else None)  # and ends in the last stage's last one
        self._from_next = without(0 if is_last else None)
        self._to_previous = without(chunks - 1 if is_first else None)

    def shapes(
        self, to_next: torch.Tensor | None, to_previous: torch.Tensor | None, from_previous: bool, from_next: bool
    ) -> tuple[Shape, Shape]:
        """Return the shapes that one exchange receives from the previous and from the next stage."""
        for sent, planned in ((to_next, self._to_next), (to_previous, self._to_previous)):
            if sent is not None and list(sent.shape) != (expected := next(planned, _NO_TENSOR)):
                raise UnplannedShape(list(sent.shape), expected)
        received = next(self._from_previous, _NO_TENSOR) if from_previous else _NO_TENSOR
        return received, next(self._from_next, _NO_TENSOR) if from_next else _NO_TENSOR


def _exchanged_and_compared(planned: PlannedExchanges, differences: list[str]) -> Callable[..., tuple[Shape, Shape]]:
    """Let Megatron exchange the shapes, and note where the plan has others."""
    exchange = P2PCommunicator._communicate_shapes

    def shapes(communicator: P2PCommunicator, *exchanged: Any) -> tuple[Shape, Shape]:
        received: tuple[Shape, Shape] = exchange(communicator, *exchanged)
        try:
            if (expected := planned.shapes(*exchanged)) != received:
                differences.append(f"{received} where the plan has {expected}")
        except UnplannedShape as error:
            differences.append(error.difference)
        return received

    return shapes
