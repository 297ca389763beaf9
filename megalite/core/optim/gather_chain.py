"""Gathers of unsharded weights, each overlapped with the computation on those before it."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.core.optim.bucket import Bucket


class GatherChain:
    """Gathers the weights of buckets in forward order, one bucket ahead of the one waited for.

    Not all at once: on a GPU with one hardware queue (`device.wants_one_queue`) a kernel starts only after all kernels
    enqueued before it have started, and the last of many gathers would start only after the others are done. Source:
    Megatron-LM's `finish_param_sync`.

    Args:
        buckets: buckets as `make_buckets` returns them, last layers first.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._order = [bucket for bucket in buckets if not bucket.sharded.weights][::-1]
        self._place = {id(bucket): i for i, bucket in enumerate(self._order)}
        self._posted = len(self._order)

    def start(self) -> None:
        """Start the first gathers after an update."""
        self._posted = 0
        self._post(2)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the gather of a bucket, after starting that of the next one."""
        self._post(self._place[id(bucket)] + 2)
        bucket.store.wait()

    def wait_all(self) -> None:
        """Wait until all weights are gathered."""
        for bucket in self._order:
            self.wait(bucket)

    def _post(self, end: int) -> None:
        for bucket in self._order[self._posted : end]:
            bucket.store.gather()
        self._posted = max(self._posted, min(end, len(self._order)))
