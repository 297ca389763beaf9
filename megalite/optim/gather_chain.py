"""Gathers of weights that stay whole, each behind the computation with those before it."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.optim.bucket import Bucket


class GatherChain:
    """Gathers the weights of buckets in the order of the forward pass, one bucket ahead of what is waited for.

    Not all at once: a GPU with one hardware queue (`device.wants_one_queue`) starts no kernel before all that were
    enqueued earlier have started, and the last of many gathers starts when all others are done. Source: Megatron-LM's
    `finish_param_sync`.

    Args:
        buckets: the last layers first, as `make_buckets` returns them.
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
        """Wait until the weights of a bucket are whole; the gather of the next one is under way then."""
        self._post(self._place[id(bucket)] + 2)
        bucket.wait_weights()

    def wait_all(self) -> None:
        """Wait until all weights are whole."""
        for bucket in self._order:
            self.wait(bucket)

    def _post(self, end: int) -> None:
        for bucket in self._order[self._posted : end]:
            bucket.gather()
        self._posted = max(self._posted, min(end, len(self._order)))
