"""Open the datasets of a run from the command line's data arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger, warn_on_rank_0
from megalite.runtime.data.binary import AT_START
from megalite.runtime.data.blend import BlendedDataset
from megalite.runtime.data.packing import LossMask, PackedDataset, mask_path
from megalite.runtime.data.pairs import PairDataset, RewardedPairs, are_pairs
from megalite.runtime.data.samples import Dataset, GPTDataset, split_documents
from megalite.runtime.data.sidecar import read_sidecar, read_stream_pieces
from megalite.runtime.data.stream.catalogue import is_text_path
from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.stream.opening import Grown, Streams, TextOptions
from megalite.runtime.data.stream.sources import Split
from megalite.runtime.data.stream.workers import Workers
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.data.tokens import IndexedDataset

_DATA_RULE = "must be one PREFIX, or WEIGHT PREFIX pairs"
_DATA_REMEDY = "use --data books, for example, or --data 0.7 web 0.3 books"


@dataclass(frozen=True)
class Datasets:
    """Training and evaluation data; the latter is None if its part of the split is 0 or it was not requested.

    Attributes:
        train, valid: as above.
        workers: processes that tokenize text, None without text.
        reopen: opens the same with some of the files of text; None where all is as it was preprocessed.
        grows: files may have been added while this rank listed them: see `Datasets.reopen`.
    """

    train: Dataset
    valid: Dataset | None
    workers: Workers | None = None
    reopen: Callable[[Grown], Datasets] | None = None
    grows: bool = False

    def use_version(self, version: int) -> None:
        """Read the samples in the order of a version of the data, and hash the files as it does."""
        for dataset in (self.train, self.valid):
            if dataset is not None:
                dataset.version = version

    def identity(self) -> str:
        """Return what the ranks compare, see `Dataset.identity`; of files that may be added meanwhile, nothing."""
        if self.grows and isinstance(self.train, StreamDataset):
            return repr([source.name for source in self.train.sources])
        return self.train.identity() + (f"; {self.valid.identity()}" if self.valid is not None else "")

    def close(self) -> None:
        """End the processes that tokenize; samples cannot be read afterwards."""
        if self.workers is not None:
            self.workers.close()

    @property
    def is_stream(self) -> bool:
        """Whether each rank knows a part of the position: of text, the lanes that it has read."""
        return isinstance(self.train, StreamDataset)

    def position_meta(self, consumed_samples: int, elsewhere: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
        """Return what a checkpoint records so that a resumed run need not follow its data from their beginning.

        Args:
            consumed_samples: position to go on from.
            elsewhere: of text, what all ranks know (their "windows"); what none of them does, this one finds by
                reading. None: leave that out.
        """
        if isinstance(self.train, StreamDataset):
            return self.train.order.state(consumed_samples, elsewhere) | self.files_meta()
        if not isinstance(self.train, BlendedDataset):
            return {}
        position, taken = self.train.order.mark_before(consumed_samples)
        return {"blend": {"position": position, "taken": taken.tolist()}}

    def files_meta(self) -> dict[str, Any]:
        """Return what a checkpoint records of the files that a stream reads: the fields of `Grown`."""
        if not isinstance(self.train, StreamDataset):
            return {}
        return {"files": [[*source.last_files] for source in self.train.sources], "passes": self.train.passes}

    def resume_position(self, meta: Mapping[str, Any]) -> None:
        """Start where `position_meta` was taken, if a checkpoint has it and it is of this blend."""
        if isinstance(self.train, StreamDataset):
            self.train.order.resume(meta)
            return
        recorded = meta.get("blend", {})
        if isinstance(self.train, BlendedDataset) and len(recorded.get("taken", ())) == len(self.train.weights):
            self.train.order.start_from(recorded["position"], recorded["taken"])

    def chat_templates(self) -> dict[str, str]:
        """Return the templates, for inference, of chats that are trained on as text, by their names in `--data`."""
        sources = self.train.sources if isinstance(self.train, StreamDataset) else []
        return {source.name: source.template.served for source in sources if source.template is not None}

    def content_hashes(self) -> dict[str, str | None]:
        """Return what identifies the data in a checkpoint's metadata."""
        train, valid = self.train.content_hash(), self.valid.content_hash() if self.valid is not None else None
        trained_on = _sources(self.train)
        for content, prefix in _sources(self.valid).items():
            if content in trained_on:
                logger.warning(f"--valid-data {prefix} is also in --data: evaluation reads what is trained on")
        return {"data_hash": train, "valid_data_hash": valid}


def parse_data(data: Sequence[str]) -> list[tuple[float, str]]:
    """Return (weight, prefix) of each set of `--data PREFIX` or `--data 0.7 A 0.3 B`.

    Raises:
        UserError: the argument has neither form.
    """
    given = f"--data {' '.join(data)}"
    if len(data) == 1:
        return [(1.0, data[0])]
    if not data or len(data) % 2:
        raise UserError(given, _DATA_RULE, _DATA_REMEDY)
    blend = []
    for weight, prefix in zip(data[::2], data[1::2]):
        try:
            blend.append((float(weight), prefix))
        except ValueError:
            raise UserError(given, f"{_DATA_RULE}, and {weight!r} is not a number", _DATA_REMEDY) from None
    return blend


def prefixes_of(data: Sequence[str]) -> list[str]:
    """List the prefixes of token files named by `--data`, in order."""
    return [word for _, word in parse_data(data) if not is_text_path(word)]


def texts_of(data: Sequence[str]) -> list[str]:
    """List the folders and files of text named by `--data`, in order."""
    return [word for _, word in parse_data(data) if is_text_path(word)] if data else []


def stream_prefixes_of(data: Sequence[str]) -> list[str]:
    """List the prefixes named by `--data` that are read in the order of the text that they were made of."""
    return [word for word in prefixes_of(data) if read_stream_pieces(word) is not None] if data else []


def build_datasets(
    data: Sequence[str],
    *,
    split: str,
    seq_len: int,
    seed: int,
    shuffle: bool = True,
    vocab_size: int | None = None,
    valid_data: Sequence[str] = (),
    evaluate: bool = True,
    document_mask: bool = False,
    loss_on: Literal["answers", "all", "last"] | None = None,
    loss_per: Literal["token", "sample"] = "token",
    long_documents: Literal["cut", "drop"] = "cut",
    share: tuple[int, int] = (0, 1),
    text: TextOptions | None = None,
    pairs: Literal["dpo", "reward"] | None = None,
) -> Datasets:
    """Open, check and split the data.

    Args:
        data: the words after `--data`: [PREFIX] or ["0.7", "A", "0.3", "B"]; a folder or file of text is a stream,
            token files that `--order stream` made of text are, and a blend that has either.
        split: parts of train, valid, test, by documents of each set; not applied when `valid_data` is given. The test
            part is held out and never read here.
        seq_len, seed: tokens per sample, and seed of the order of samples.
        shuffle: shuffle samples within an epoch; evaluation always reads in order.
        vocab_size: ids must be below it.
        valid_data: evaluation data, as `data`; all of its documents are used.
        evaluate: whether evaluation data is required: then a split of it that is shorter than a sample is an error,
            otherwise there is no evaluation data.
        document_mask: mark where documents begin in samples of continuous text; packed samples always do.
        loss_on, loss_per, long_documents: see `LossMask`, `PackedDataset` and `ChatOptions`. By default, chats and data
            with a loss mask learn their answers, others every token.
        share: (rank, world): the ranks share the checking of the files, see `IndexedDataset.verify`.
        text: how text is read.
        pairs: the stage that learns from pairs of answers, of which one is preferred: the data are these.

    Raises:
        UserError: files missing, changed, damaged or of a larger vocabulary, a split shorter than one sample.
    """
    if any(texts_of(words) or stream_prefixes_of(words) for words in (data, valid_data)):
        rule = "learns from pairs of answers, and text has none"
        require(not pairs, f"--stage {pairs} with text as data", rule, "make pairs with megalite preprocess --pairs")
        streams = Streams(
            text or TextOptions(),
            lambda prefix: _prefix_of_stream(prefix, vocab_size, share),
            vocab_size=vocab_size,
            seq_len=seq_len,
            seed=seed,
            document_mask=document_mask,
            loss_on=loss_on,
            loss_per=loss_per,
            long_documents=long_documents,
        )
        return _streams(streams, data, valid_data, split if not valid_data else None, shuffle, evaluate)
    sources = _open(data, vocab_size, share)
    train, valid, _ = zip(*(_split(indexed.num_documents, split, bool(pairs)) for _, indexed in sources))
    options: dict[str, Any] = {"on": loss_on, "per": loss_per, "long_documents": long_documents}
    kind = (
        partial(_pairs_of, stage=pairs, **options)
        if pairs
        else partial(_dataset_of, document_mask=document_mask, **options)
    )
    make = partial(_dataset, kind, seq_len=seq_len, seed=seed, vocab_size=vocab_size)
    if valid_data:
        logger.info("--valid-data is given: training uses all documents of --data, --split is not applied")
        valid_set = make("valid", _open(valid_data, vocab_size, share), shuffle=False)
        return Datasets(make("train", sources, shuffle=shuffle), valid_set)
    has_valid = any(float(weight) > 0 for weight in split.split(",")[1:2])
    if has_valid and not evaluate and _short(sources, valid, seq_len):
        logger.info(f"no evaluation at the end: the validation part of --split {split} is shorter than a sample")
        has_valid = False
    evaluation = make("valid", sources, valid, shuffle=False) if has_valid else None
    return Datasets(make("train", sources, train, shuffle=shuffle), evaluation)


def _split(documents: int, split: str, pairs: bool) -> list[tuple[int, int]]:
    """Split documents, those of a pair together."""
    size = 2 if pairs else 1
    return [(size * first, size * stop) for first, stop in split_documents(documents // size, split)]


def _streams(
    streams: Streams,
    data: Sequence[str],
    valid_data: Sequence[str],
    split: str | None,
    shuffle: bool,
    evaluate: bool,
    grown: Grown | None = None,
) -> Datasets:
    """Open text, and token files that are blended with it; evaluation reads in order, and what was there first."""
    train, valid = streams.open(parse_data(data), split, 0, shuffle, grown), None
    grows = streams.grows and grown is None
    if not grows:
        train.log_pool()
    if valid_data:
        logger.info("--valid-data is given: training uses all documents of --data, --split is not applied")
        valid = streams.open(parse_data(valid_data), None, 1, shuffle=False)
    elif evaluate and any(float(part) > 0 for part in (split or "").split(",")[1:2]):
        valid = streams.open(parse_data(data), split, 1, shuffle=False, grown=grown.first() if grown else None)
    streams.require_used()
    reopen = partial(_streams, streams, data, valid_data, split, shuffle, evaluate)
    return Datasets(train, valid, streams.workers, reopen, grows)


def _prefix_of_stream(prefix: str, vocab_size: int | None, share: tuple[int, int]) -> IndexedDataset:
    """Open token files; of marked answers, those that are in the order of a folder of chats."""
    if mask_path(prefix).exists() and read_stream_pieces(prefix) is None:
        rule = f"has marked answers ({mask_path(prefix)}), which a blend with text cannot pack"
        raise UserError(f"--data {prefix}", rule, "blend token files alone, or preprocess with --order stream")
    return _open([prefix], vocab_size, share)[0][1]


def _sources(dataset: Dataset | None) -> dict[str, str]:
    """Return the prefixes of a dataset's token files by the hash of their content; none where there are no files."""
    if isinstance(dataset, StreamDataset):
        # Parts of --split have no document in common.
        return {source.content_hash(): source.name for source in dataset.sources} if dataset.split == Split() else {}
    sets = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return {d.content_hash(): d.indexed.prefix for d in sets if isinstance(d, GPTDataset | PackedDataset)}


def _short(sources: Sequence[tuple[float, IndexedDataset]], documents: Sequence[tuple[int, int]], seq_len: int) -> bool:
    """Whether a range of documents, one per source, is too short for a sample."""
    for (_, source), (first, stop) in zip(sources, documents):
        tokens = source.index.start_of(stop) - source.index.start_of(first)
        if tokens <= (0 if mask_path(source.prefix).exists() else seq_len):
            return True
    return False


def _dataset_of(
    indexed: IndexedDataset, *, document_mask: bool, on: Any, per: str, long_documents: Any, **options: Any
) -> GPTDataset | PackedDataset:
    """Pack whole documents of data with a loss mask; take samples from the continuous text of other data."""
    marked = mask_path(indexed.prefix).exists()
    given, rule = f"--data {indexed.prefix}", "has pairs of answers, of which one is preferred"
    require(not are_pairs(indexed.prefix), given, rule, "give --stage dpo or reward, or preprocess without --pairs")
    if marked and on is None:
        logger.info(f"{indexed.prefix} has marked answers and they alone are learned (all tokens with --loss-on all)")
    if marked or on not in (None, "all") or per == "sample":
        mask = LossMask(indexed, on or "answers")
        return PackedDataset(indexed, mask=mask, per_sample=per == "sample", long_documents=long_documents, **options)
    return GPTDataset(indexed, document_mask=document_mask, **options)


def _pairs_of(
    indexed: IndexedDataset, *, stage: str, on: Any, per: str, long_documents: Any, **options: Any
) -> PairDataset:
    """Pack pairs of answers."""
    given, rule = f"--loss-on {on} --loss-per {per} with --stage {stage}", "the loss of a pair is of both its answers"
    require(on in (None, "answers") and per == "token", given, rule, "drop --loss-on and --loss-per")
    given, rule = f"--stage {stage} with --data {indexed.prefix}", "learns from pairs of answers, and these are none"
    require(are_pairs(indexed.prefix), given, rule, "make them with megalite preprocess --pairs")
    kind = RewardedPairs if stage == "reward" else PairDataset
    return kind(indexed, mask=LossMask(indexed, "answers"), long_documents=long_documents, **options)


def _dataset(
    kind: Callable[..., GPTDataset | PackedDataset],
    name: str,
    sources: Sequence[tuple[float, IndexedDataset]],
    documents: Sequence[tuple[int, int] | None] | None = None,
    **options: Any,
) -> Dataset:
    """Make one split of the sources, blended if there are several. `documents`: range of each, all by default."""
    datasets = [
        kind(indexed, split=name, documents=bounds, source=number, **options)
        for number, ((_, indexed), bounds) in enumerate(zip(sources, documents or [None] * len(sources)))
    ]
    return datasets[0] if len(datasets) == 1 else BlendedDataset(datasets, [weight for weight, _ in sources])


def _open(data: Sequence[str], vocab_size: int | None, share: tuple[int, int]) -> list[tuple[float, IndexedDataset]]:
    opened = []
    rank, world = share
    sources = parse_data(data)
    for number, (weight, prefix) in enumerate(sources):
        indexed, sidecar = IndexedDataset(prefix, check=False), read_sidecar(prefix)
        # A small source has one block: not all of them on rank 0.
        turn = (rank + number) % world if indexed.sums else rank
        indexed.verify(turn, world, AT_START // len(sources))
        if sidecar is not None and vocab_size is not None and sidecar["vocab_size"] > vocab_size:
            raise UserError(
                f"--vocab-size {vocab_size}",
                f"{prefix} was made by a tokenizer of {sidecar['vocab_size']} entries",
                f"use --vocab-size {sidecar['vocab_size']} or pass its --tokenizer",
            )
        opened.append((weight, indexed))
    return opened


def check_tokenizer_matches(prefixes: str | Path | Sequence[str], tokenizer: Tokenizer) -> None:
    """Refuse data that another tokenizer made; warn once, on rank 0, about data without `PREFIX.json`.

    Raises:
        UserError: the tokenizer's SHA-256 is not the data's.
    """
    unchecked = []
    for prefix in [prefixes] if isinstance(prefixes, str | Path) else prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None:
            # Missing data are reported by whoever opens them.
            unchecked += [f"{prefix}.json"] if Path(f"{prefix}.idx").exists() else []
        elif sidecar["tokenizer_sha256"] != tokenizer.sha256:
            made_by = f"{sidecar.get('tokenizer_kind')} tokenizer with SHA-256 {sidecar['tokenizer_sha256']}"
            raise UserError(
                f"--tokenizer {tokenizer.path} with SHA-256 {tokenizer.sha256}",
                f"{prefix} was made by a {made_by}",
                "use that tokenizer, or preprocess the text again with this one",
            )
    if unchecked:
        others = len(unchecked) - 1
        more = f" (so {'is 1 other' if others == 1 else f'are {others} others'})" if others else ""
        warn_on_rank_0(f"{unchecked[0]} is missing{more}: cannot check that {tokenizer.path} made this data")
