"""Token files in the order of text and chats as data: training on them reads the samples that training on these would.

The text is cut into the pieces that a run cuts it into, and tokenized into the cache of runs: what a run has made is
taken from there, and what this makes a run finds. `PREFIX.json` says which documents are of which piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError, require
from megalite.extras.prepare.preprocess import chat_entries, sidecar_of
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.sidecar import max_bytes
from megalite.runtime.data.stream.catalogue import Catalogue
from megalite.runtime.data.stream.opening import TextOptions, open_text
from megalite.runtime.data.stream.sources import Ints, TextSource
from megalite.runtime.data.stream.workers import Workers
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.data.tokens import token_dtype

# Pieces that each worker has ahead of the one that is written.
_AHEAD = 2


def preprocess_stream(word: str, chats: bool, tokenizer_path: str, out_prefix: str, options: TextOptions) -> str:
    """Write `out_prefix.bin`, `.idx` and `.json`.

    Args:
        word: FOLDER, FILE or FOLDER:SPLIT, as in `--data`.
        chats: it holds conversations; then also `out_prefix.mask.bin` is written.
        tokenizer_path: see `load_tokenizer`.
        options: how the text is read; the tokenizer is left out.

    Returns:
        What was written.

    Raises:
        UserError: the text, tokenizer or output cannot be used, a record is bad, or there is no document.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    documents = tokens = learned = 0
    catalogue = Catalogue(word, options.key)
    given, remedy = f"--order stream with --input {word}", "add --chat" if catalogue.chats else "drop --chat"
    rule = f"holds {'chats' if catalogue.chats else 'text'}, by the first records of its files"
    require(chats == catalogue.chats, given, rule, remedy)
    with (
        closing(Workers(options.workers, tokenizer)) as workers,
        IndexedDatasetWriter(out_prefix, token_dtype(tokenizer.vocab_size), masked=chats) as writer,
    ):
        source = open_text(catalogue, options, tokenizer, workers)
        pieces: list[list[tuple[int, str]]] = [[] for _ in range(source.num_pieces)]
        for piece, key, sizes, ids, marks in _parts(source, _AHEAD * options.workers):
            writer.add_documents(ids, sizes, marks)
            pieces[piece].append((len(sizes), key))
            documents, tokens = documents + len(sizes), tokens + len(ids)
            learned += int(np.count_nonzero(marks)) if marks is not None else 0
        if not documents:
            raise UserError(f"--input {word}", "contains no document", "check the files and --key")
        # Half of it: the rest is for what else is there.
        if len(json.dumps(pieces, indent=2)) > max_bytes(documents) // 2:
            rule = f"has {source.num_pieces} pieces of {documents} documents: more than {out_prefix}.json may hold"
            raise UserError(f"--input {word}", rule, "put more text into each file or row group")
        stream = {"text_bytes": source.tokens, "pieces": pieces}
        of_chats = chat_entries(source.template, learned) if source.template is not None else {}
        writer.finalize(sidecar_of(tokenizer, documents, tokens, **of_chats, stream=stream))
    what = f"{documents} {'conversations' if chats else 'documents'}"
    of_tokens = f"{learned} of them in answers" if chats else "one end of text each"
    return f"{what}, {tokens} tokens ({of_tokens}), in {source.num_pieces} pieces"


def _parts(source: TextSource, ahead: int) -> Iterator[tuple[int, str, Ints, Ints, npt.NDArray[np.uint8] | None]]:
    """Yield (piece, key of a part, tokens of each of its documents, their ids, of chats their marks), in order."""
    none = np.zeros(0, np.uint8)
    for piece in range(source.num_pieces):
        for following in range(piece, min(piece + ahead, source.num_pieces)):
            source.ahead(following, 0)
        part, last = 0, False
        while not last:
            sizes, last = source.sizes(piece, part)
            count = int(sizes.sum())
            ids = source.read(piece, part, 0, 0, count) if count else np.zeros(0, np.int64)
            marks = [source.marks(piece, part, row) for row in range(len(sizes))] if source.marked else None
            of_part = np.concatenate([none, *marks]) if marks is not None else None
            yield piece, source.key(piece, part), sizes, ids, of_part
            part += 1
