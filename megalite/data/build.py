"""From the command line's data arguments to the data sets of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.data.blend import BlendedDataset
from megalite.data.samples import Dataset, GPTDataset, split_documents
from megalite.data.sidecar import read_sidecar
from megalite.data.tokens import IndexedDataset
from megalite.errors import UserError
from megalite.log import logger

_DATA_RULE = "must be one PREFIX, or WEIGHT PREFIX pairs"
_DATA_REMEDY = "for instance --data books, or --data 0.7 web 0.3 books"


@dataclass(frozen=True)
class Datasets:
    """Training data, and what evaluation reads: None where its part of the split is 0 or it was not asked for."""

    train: Dataset
    valid: Dataset | None


def parse_data(data: Sequence[str]) -> list[tuple[float, str]]:
    """(weight, prefix) of each set of `--data PREFIX` or `--data 0.7 A 0.3 B`.

    Raises:
        UserError: neither of the two forms.
    """
    given = f"--data {' '.join(data)}"
    if len(data) == 1:
        return [(1.0, data[0])]
    if not data or len(data) % 2:
        raise UserError(given, _DATA_RULE, _DATA_REMEDY)
    try:
        return [(float(weight), prefix) for weight, prefix in zip(data[::2], data[1::2])]
    except ValueError as e:
        raise UserError(given, f"{_DATA_RULE} ({e})", _DATA_REMEDY) from None


def prefixes_of(data: Sequence[str]) -> list[str]:
    """The prefixes named by `--data`, in order."""
    return [prefix for _, prefix in parse_data(data)]


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
) -> Datasets:
    """Open, check and split the data.

    Args:
        data: `--data` word for word: [PREFIX] or ["0.7", "A", "0.3", "B"].
        split: parts of train, valid, test, by documents of each set; not applied when `valid_data` is given. The test
            part is held out, and read by nobody here.
        seq_len: tokens a sample.
        seed: of the order of samples.
        shuffle: shuffle samples within an epoch; evaluation always reads in order.
        vocab_size: ids must be below it.
        valid_data: evaluation data, as `data`; all of its documents are used.
        evaluate: build the evaluation split too (one shorter than a sample is an error only then).

    Raises:
        UserError: files missing, damaged or of a larger vocabulary, a split shorter than one sample, a malformed
            argument.
    """
    sources = _open(data, vocab_size)
    parts = [split_documents(d.num_documents, split) for _, d in sources]

    def gather(sources: list[tuple[float, IndexedDataset]], name: str, index: int | None) -> Dataset:
        datasets = [
            GPTDataset(
                indexed,
                seq_len,
                documents=None if index is None else parts[i][index],
                seed=seed,
                shuffle=shuffle and name == "train",
                vocab_size=vocab_size,
                split=name,
            )
            for i, (_, indexed) in enumerate(sources)
        ]
        return datasets[0] if len(datasets) == 1 else BlendedDataset(datasets, [w for w, _ in sources])

    if valid_data:
        logger.info("--valid-data is given: training uses all documents of --data, --split is not applied")
        valid = gather(_open(valid_data, vocab_size), "valid", None) if evaluate else None
        return Datasets(gather(sources, "train", None), valid)
    asked = [float(part) > 0 for part in split.split(",")]
    has_valid = evaluate and len(asked) > 1 and asked[1]
    return Datasets(gather(sources, "train", 0), gather(sources, "valid", 1) if has_valid else None)


def _open(data: Sequence[str], vocab_size: int | None) -> list[tuple[float, IndexedDataset]]:
    opened = []
    for weight, prefix in parse_data(data):
        indexed, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
        if sidecar is not None and vocab_size is not None and sidecar["vocab_size"] > vocab_size:
            raise UserError(
                f"--vocab-size {vocab_size}",
                f"{prefix} was made by a tokenizer of {sidecar['vocab_size']} entries",
                f"use --vocab-size {sidecar['vocab_size']} or give its --tokenizer",
            )
        opened.append((weight, indexed))
    return opened
