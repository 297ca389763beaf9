from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.data import BlendedDataset, GPTDataset, build_datasets, prefixes_of
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.data.plain import ids_of

Make = Callable[..., IndexedDataset]
ARGS: dict[str, Any] = {"split": "80,20,0", "seq_len": 10, "seed": 3, "vocab_size": 100_000}


def test_one_prefix_is_split_by_documents(make_dataset: Make) -> None:
    prefix = make_dataset([100] * 10).prefix
    built = build_datasets([prefix], **ARGS)
    assert isinstance(built.train, GPTDataset)
    assert isinstance(built.valid, GPTDataset)
    assert (built.train.documents, built.valid.documents) == ((0, 8), (8, 10))
    seen = np.concatenate([built.train.sample(p) for p in range(built.train.num_samples)])
    assert seen.max() < 800
    # evaluation reads in order
    assert [int(ids_of(built.valid, p)[0]) for p in range(3)] == [800, 810, 820]
    assert [int(ids_of(built.train, p)[0]) for p in range(3)] != [0, 10, 20]


def test_a_blend_splits_each_set(make_dataset: Make) -> None:
    a, b = make_dataset([100] * 10, "a").prefix, make_dataset([100] * 20, "b").prefix
    built = build_datasets(["0.7", a, "0.3", b], **{**ARGS, "split": "80,10,10"})
    for dataset, documents in ((built.train, [(0, 8), (0, 16)]), (built.valid, [(8, 9), (16, 18)])):
        assert isinstance(dataset, BlendedDataset)
        assert [d.documents for d in dataset.datasets] == documents
        assert dataset.weights == [0.7, 0.3]
    assert prefixes_of(["0.7", a, "0.3", b]) == [a, b]


def test_valid_data_leaves_all_documents_to_training(make_dataset: Make) -> None:
    a, b = make_dataset([100] * 10, "a").prefix, make_dataset([50], "b").prefix
    built = build_datasets([a], **ARGS, valid_data=[b])
    assert isinstance(built.train, GPTDataset)
    assert isinstance(built.valid, GPTDataset)
    assert built.train.documents == (0, 10)
    assert (built.valid.indexed.prefix, built.valid.documents) == (b, (0, 1))


def test_a_valid_split_shorter_than_a_sample_is_an_error_only_where_it_is_evaluated(make_dataset: Make) -> None:
    prefix = make_dataset([100]).prefix
    with pytest.raises(UserError, match=r"valid split of .* its 0 of 1 documents hold 0 tokens"):
        build_datasets([prefix], **ARGS)
    built = build_datasets([prefix], **ARGS, evaluate=False)
    assert built.valid is None
    longer = make_dataset([100] * 10, "longer").prefix
    assert build_datasets([longer], **ARGS, evaluate=False).valid is not None, "for the end of the run"
    assert build_datasets(["0.5", longer, "0.5", prefix], **ARGS, evaluate=False).valid is None
    # The test part is read by nobody: it may be as short as it likes.
    assert build_datasets([prefix], **{**ARGS, "split": "99,0,1"}).valid is None
    assert build_datasets([prefix], **{**ARGS, "split": "100,0,0"}).valid is None


def test_the_same_data_twice_in_a_blend_is_refused(make_dataset: Make, caplog: pytest.LogCaptureFixture) -> None:
    """By content, and with its remedy. Until version 2 each sample came twice in a row, and half of them not at all."""
    a, copy, b = (make_dataset([100] * 4, name).prefix for name in ("a", "copy", "b"))
    Path(b + ".bin").write_bytes(Path(b + ".bin").read_bytes()[::-1])
    args = {**ARGS, "split": "1"}
    built = build_datasets(["0.5", a, "0.2", b, "0.3", copy], **args)
    with pytest.raises(UserError, match=rf"--data 0.5 {a} 0.3 {copy}: is the same .* give it once: 0.8 {a}"):
        built.content_hashes()
    assert build_datasets(["0.5", a, "0.5", b], **args).content_hashes()["data_hash"]
    twice = build_datasets([b], **args, valid_data=["1", a, "1", copy])
    with pytest.raises(UserError, match=f"--valid-data 1 {a} 1 {copy}: is the same"):
        twice.content_hashes()
    old = build_datasets(["0.5", a, "0.5", copy], **args)
    old.use_version(2)
    seen = [int(ids_of(old.train, position)[0]) for position in range(39)]
    assert isinstance(old.train, BlendedDataset)
    assert (old.train.datasets[0].num_samples, len(set(seen))) == (39, 20)
    assert old.content_hashes()["data_hash"]
    assert "is the same data twice" in caplog.text


def test_sources_of_one_length_are_walked_in_orders_of_their_own(make_dataset: Make) -> None:
    a, b = (make_dataset([100] * 4, name).prefix for name in ("a", "b"))
    train = build_datasets(["0.5", a, "0.5", b], **{**ARGS, "split": "1"}).train
    assert isinstance(train, BlendedDataset)
    for version, distinct in ((2, 1), (3, 2)):
        train.version = version
        assert len({tuple(int(ids_of(d, p)[0]) for p in range(39)) for d in train.datasets}) == distinct


def test_evaluation_data_that_are_trained_on_are_told(make_dataset: Make, caplog: pytest.LogCaptureFixture) -> None:
    a, copy, b = (make_dataset([size] * 5, name).prefix for name, size in (("a", 100), ("copy", 100), ("b", 70)))
    build_datasets(["0.5", a, "0.5", b], **ARGS).content_hashes()
    assert "evaluation reads" not in caplog.text
    build_datasets(["0.5", b, "0.5", a], **ARGS, valid_data=[copy]).content_hashes()
    assert f"--valid-data {copy} is also in --data" in caplog.text


@pytest.mark.parametrize("data", [[], ["A", "B", "C"], ["A", "B"], ["0.5", "A", "x", "B"]])
def test_a_malformed_data_argument_is_refused(data: list[str]) -> None:
    with pytest.raises(UserError, match="must be one PREFIX, or WEIGHT PREFIX pairs"):
        build_datasets(data, **ARGS)


def test_a_weight_that_is_not_a_number_is_quoted_without_pythons_message() -> None:
    with pytest.raises(UserError, match=r"PREFIX pairs, and 'x' is not a number; use"):
        build_datasets(["0.5", "A", "x", "B"], **ARGS)


def test_data_of_a_larger_vocabulary_is_refused_before_a_batch_is_read(make_dataset: Make) -> None:
    prefix = make_dataset([100] * 10).prefix
    Path(f"{prefix}.json").write_text(json.dumps({"vocab_size": 32001, "tokenizer_sha256": "0"}))
    with pytest.raises(UserError, match="--vocab-size 32000: .* made by a tokenizer of 32001 entries"):
        build_datasets([prefix], **{**ARGS, "vocab_size": 32000})
    assert build_datasets([prefix], **{**ARGS, "vocab_size": 32001}).valid is not None
