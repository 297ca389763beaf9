"""Global batches by position: the samples of a batch depend only on how many were consumed before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from types import TracebackType

import numpy as np

from megalite.core.rows import Rows, share_of
from megalite.runtime.data.samples import Dataset


class BatchLoader:
    """Read ahead one data-parallel rank's share of each global batch, in a background thread.

    A global batch of B samples that follows N consumed samples takes positions N .. N + B - 1 of the dataset's order;
    data-parallel rank r of d takes some B / d of them, see `share_of`. So the samples of a step do not depend on d, and
    a run resumes from N alone, even with another d or B.

    Args:
        dataset: samples by position.
        global_batch_size: samples per step over all ranks, B; or an endless iterable of it, one per step.
        dp_rank, dp_size: index of this rank, r, and number of ranks, d.
        consumed_samples: samples used before the first batch, N.
        prefetch: batches read ahead, at least 1.
        reads: read the samples; otherwise, where nothing looks at them (a middle pipeline stage), rows are zeros.
        micro_batch_size: samples that ranks share out as one.

    Attributes:
        reads: as above.
        consumed_samples: samples of all ranks up to the end of the last batch returned; saved in checkpoints.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int | Iterable[int],
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        prefetch: int = 2,
        reads: bool = True,
        micro_batch_size: int = 1,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch {prefetch} must be at least 1")
        self.dataset = dataset
        self.consumed_samples = consumed_samples
        self._sizes = iter(repeat(global_batch_size) if isinstance(global_batch_size, int) else global_batch_size)
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._micro_batch_size = micro_batch_size
        self._size = 0
        self.reads = reads
        self._next_start = consumed_samples
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: deque[tuple[int, Future[Rows]]] = deque()
        for _ in range(prefetch):
            self._submit()

    def next_batch(self) -> Rows:
        """Return this rank's rows of the next global batch.

        Raises:
            Exception: any error of reading (a `UserError` for bad ids); every later call raises it again.
        """
        if not self._ahead:
            raise RuntimeError("the loader is closed")
        # A batch leaves the queue only after it was read, so a failure cannot skip samples.
        size, future = self._ahead[0]
        batch = future.result()
        self._ahead.popleft()
        self.consumed_samples += size
        self._size = size
        self._submit()
        return batch

    def next(self) -> tuple[Rows, Exception | None]:
        """Return the next batch and None, or rows of zeros and the failure.

        A rank whose read fails still has to take part in the step, where the other ranks learn of the failure.
        """
        try:
            return self.next_batch(), None
        except Exception as e:
            if not self._ahead:
                raise
            return self._zeros(self._share(self._ahead[0][0], self._dp_rank)), e

    def read_share(self, dp_rank: int) -> tuple[Rows, Exception | None]:
        """Read the rows of the last batch that another rank has; like `next`, return zeros if that fails."""
        share = self._share(self._size, dp_rank)
        try:
            return self._reader.submit(self._read_rows, self.consumed_samples - self._size, share).result(), None
        except Exception as e:
            return self._zeros(share), e

    def _share(self, size: int, dp_rank: int) -> range:
        return share_of(size, self._dp_size, dp_rank, self._micro_batch_size)

    def _zeros(self, share: range) -> Rows:
        return Rows.of(np.zeros((len(share), self.dataset.seq_len + 1), np.int64))

    def close(self) -> None:
        """Stop reading ahead; the loader cannot be used afterwards."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _submit(self) -> None:
        size = next(self._sizes)
        self._ahead.append((size, self._reader.submit(self._read, self._next_start, size)))
        self._next_start += size

    def _read(self, start: int, size: int) -> Rows:
        return self._read_rows(start, self._share(size, self._dp_rank))

    def _read_rows(self, start: int, share: range) -> Rows:
        if not self.reads:
            return self._zeros(share)
        return Rows.stack([self._sample(start + number) for number in share])

    def _sample(self, position: int) -> Rows:
        sample = self.dataset.sample(position)
        return (sample if isinstance(sample, Rows) else Rows.of(sample)).check_inputs(f"sample {position}")
