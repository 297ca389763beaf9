"""Input of a run: vocabulary and token data, checked for consistency."""

from __future__ import annotations

import dataclasses
import hashlib

from megalite.core.base.errors import UserError, require
from megalite.core.mesh.rendezvous import local_world_size
from megalite.core.options.names import dashed
from megalite.runtime.base.child import num_cores
from megalite.runtime.base.permitted import permitted
from megalite.runtime.data import (
    Dataset,
    Datasets,
    IndexedDataset,
    MockDataset,
    OwnDataset,
    Samples,
    TextOptions,
    Tokenizer,
    bring_prefix,
    build_datasets,
    check_tokenizer_matches,
    is_text_path,
    load_tokenizer,
    prefixes_of,
    read_sidecar,
    split_of,
    stream_prefixes_of,
    texts_of,
)
from megalite.runtime.options.run import Config
from megalite.runtime.places.downloads import bring_tree


def digest_of(text: str) -> str:
    """Return a short hash, to compare ranks by."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity_of(datasets: Datasets, tokenizer: Tokenizer | None, tasks: str = "") -> str:
    """Return what is compared of the data: samples, tokenizer, and the identity of `--eval-tasks`, "" without."""
    return "; ".join([datasets.identity(), tokenizer.identity if tokenizer else "", tasks])


@permitted()
def resolve_vocabulary(cfg: Config, own_data: bool = False) -> tuple[Config, Tokenizer | None]:
    """Resolve the vocabulary size from the tokenizer or the data's description, unless given; load the tokenizer."""
    bring_data(cfg)
    check_text_options(cfg)
    tokenizer = load_tokenizer(path) if (path := cfg.local_data.tokenizer) else None
    given = cfg.model.vocab_size
    if given is not None:
        if tokenizer is not None and tokenizer.vocab_size > given:
            raise UserError(
                f"--vocab-size {given}",
                f"is smaller than the tokenizer's {tokenizer.vocab_size} entries",
                f"use --vocab-size {tokenizer.vocab_size}",
            )
        return cfg, tokenizer
    if tokenizer is not None:
        size = tokenizer.vocab_size
    elif cfg.data.mock_data:
        size = 1024
    elif own_data:
        rule = "the vocabulary size cannot be inferred from train_data"
        raise UserError("no vocab_size", rule, "give vocab_size to configure, or a tokenizer")
    else:
        prefixes = data_prefixes(cfg)
        for prefix in prefixes:
            IndexedDataset(prefix, check=False)
        sidecars = [read_sidecar(prefix) for prefix in prefixes]
        if any(d is None for d in sidecars):
            raise UserError(
                "no --vocab-size",
                "the vocabulary comes from a tokenizer or from PREFIX.json beside the data, and there is neither",
                "give --tokenizer or --vocab-size",
            )
        size = max(int(d["vocab_size"]) for d in sidecars if d is not None)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=size)), tokenizer


def with_vocab_size(cfg: Config) -> Config:
    """Resolve the vocabulary size when a tokenizer or data is given; otherwise return cfg unchanged."""
    has_source = cfg.data.tokenizer or cfg.data.data or cfg.data.mock_data
    return resolve_vocabulary(cfg)[0] if has_source else cfg


def data_prefixes(cfg: Config) -> list[str]:
    """List the token files of the training data."""
    if not cfg.data.data:
        raise UserError("no --data", "training requires tokens", "give --data PREFIX, or --mock-data to try without")
    return prefixes_of(cfg.local_data.data)


_OF_TEXT = {"data": ("key", "skip_bad", "chat_template", "data_grows"), "run": ("data_workers",)}
_OF_STREAMS = {"data": ("data_lanes", "shuffle_tokens")}


def check_text_options(cfg: Config) -> None:
    """Refuse text without a tokenizer, and options of text without text."""
    named = cfg.local_data.data, cfg.local_data.valid_data
    texts = [word for words in named for word in texts_of(words)]
    if not texts:
        for section, names in (*_OF_TEXT.items(), *_OF_STREAMS.items()):
            options = getattr(cfg, section)
            for name in names:
                if (value := getattr(options, name)) != getattr(type(options), name):
                    if name in _OF_STREAMS.get(section, ()) and any(map(stream_prefixes_of, named)):
                        continue
                    given = f"--{dashed(name)} {value}" if value is not True else f"--{dashed(name)}"
                    raise UserError(
                        given, "applies to text as data, and this run reads none", "drop it, or give --data FOLDER"
                    )
    elif cfg.data.tokenizer is None:
        rule = "is text, which is tokenized while training reads it, and there is no tokenizer"
        remedy = "give --tokenizer (megalite tokenizer trains one), or make token files with megalite preprocess"
        raise UserError(f"--data {texts[0]}", rule, remedy)


def bring_data(cfg: Config) -> None:
    """Make local stand-ins for the data and the tokenizer that are in a store."""
    d, cache = cfg.data, cfg.run.cache_dir
    for word in (*d.data, *d.valid_data):
        if is_text_path(word):
            bring_tree(split_of(word)[0], cache, deep=True)
        else:
            bring_prefix(word, cache, int(cfg.run.cache_gb * 1e9), cfg.run.read_patience)
    if d.tokenizer is not None:
        bring_tree(d.tokenizer, cache)


@permitted()
def open_data(
    cfg: Config,
    tokenizer: Tokenizer | None,
    train_data: Samples | None = None,
    valid_data: Samples | None = None,
    share: tuple[int, int] = (0, 1),
) -> Datasets:
    """Open the data sets, and check them against the tokenizer and the vocabulary; or wrap those of the caller.

    Args:
        share: (rank, world): the ranks divide the checking of the files among them.
    """
    d = cfg.data
    model = cfg.model
    seed = cfg.train.seed
    if train_data is not None:
        rule = "learns from pairs of answers, which samples of your own do not mark"
        given, remedy = f"stage {cfg.train.stage} with train_data", "give data of megalite preprocess --pairs"
        require(not cfg.train.of_pairs, given, rule, remedy)
        datasets = _own_datasets(cfg, train_data, valid_data)
    elif d.mock_data:
        given, rule = f"--mock-data with --stage {cfg.train.stage}", "synthetic sequences are no pairs of answers"
        require(not cfg.train.of_pairs, given, rule, "give --data PREFIX of megalite preprocess --pairs")
        mock: Dataset = MockDataset(model.vocab, model.seq_len, seed)
        datasets = Datasets(mock, MockDataset(model.vocab, model.seq_len, seed + 1) if cfg.run.evaluates else None)
    else:
        datasets = _token_files(cfg, tokenizer, share)
    # Tasks are enough to evaluate, but no checkpoint is the best by them.
    needed = cfg.run.evaluates and (not cfg.run.eval_tasks or cfg.run.keep_best > 0)
    if needed and datasets.valid is None:
        given = "no valid_data" if train_data is not None else f"--split {d.split}"
        raise UserError(
            f"--eval-every {cfg.run.eval_every} with {given}",
            "leaves no documents to evaluate on",
            "give --split a second part (99,1,0), or --valid-data (valid_data in Python)",
        )
    return datasets


def _own_datasets(cfg: Config, train: Samples, valid: Samples | None) -> Datasets:
    """Wrap the samples of a caller."""
    d, model = cfg.data, cfg.model
    if d.data or d.valid_data or d.mock_data:
        given = "--mock-data" if d.mock_data else f"--data {' '.join(d.data + d.valid_data)}"
        raise UserError(f"{given} with train_data", "a run has one source of samples", "drop one of the two")
    if d.within_documents:
        given = f"document_mask {d.document_mask}, loss_on {d.loss_on}, loss_per {d.loss_per} with train_data"
        rule = "data of your own marks documents and targets in the Rows that its sample(i) returns"
        raise UserError(given, rule, "drop these options")
    evaluated = OwnDataset(valid, model.seq_len, model.vocab, shuffle=False) if valid is not None else None
    return Datasets(OwnDataset(train, model.seq_len, model.vocab, cfg.train.seed, d.shuffle), evaluated)


def _token_files(cfg: Config, tokenizer: Tokenizer | None, share: tuple[int, int]) -> Datasets:
    """Open the token files of `--data`."""
    d = cfg.local_data
    model = cfg.model
    seed = cfg.train.seed
    prefixes = data_prefixes(cfg)
    if tokenizer is not None:
        check_tokenizer_matches(prefixes + (prefixes_of(d.valid_data) if d.valid_data else []), tokenizer)
    return build_datasets(
        d.data,
        split=d.split,
        seq_len=model.seq_len,
        seed=seed,
        shuffle=d.shuffle,
        vocab_size=model.vocab,
        valid_data=d.valid_data,
        evaluate=cfg.run.evaluates,
        document_mask=d.document_mask,
        loss_on=d.loss_on,
        loss_per=d.loss_per,
        long_documents=d.long_documents,
        share=share,
        text=_text_options(cfg, tokenizer),
        pairs=None if cfg.train.stage == "lm" else cfg.train.stage,
    )


def _text_options(cfg: Config, tokenizer: Tokenizer | None) -> TextOptions:
    workers = cfg.run.data_workers
    if workers is None:
        workers = max(1, num_cores() // (2 * local_world_size()))
    return TextOptions(
        tokenizer,
        cfg.data.key,
        cfg.data.skip_bad,
        cfg.data.data_lanes,
        cfg.data.shuffle_tokens,
        cfg.run.cache_dir,
        int(cfg.run.cache_gb * 1e9),
        workers,
        cfg.data.chat_template,
        cfg.data.data_grows,
    )
