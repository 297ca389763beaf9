"""Text to tokens to batches. Nothing here needs torch."""

from megalite.core.rows import Rows
from megalite.runtime.data.blend import BlendedDataset
from megalite.runtime.data.build import (
    Datasets,
    build_datasets,
    check_tokenizer_matches,
    prefixes_of,
    stream_prefixes_of,
    texts_of,
)
from megalite.runtime.data.loader import BatchLoader
from megalite.runtime.data.own import OwnDataset, Samples
from megalite.runtime.data.packing import LossMask, PackedDataset, mask_path
from megalite.runtime.data.samples import Dataset, GPTDataset, MockDataset, split_documents
from megalite.runtime.data.shuffle import VERSION_OF_DATA
from megalite.runtime.data.sidecar import chat_template_of, read_sidecar
from megalite.runtime.data.stand_in import bring_prefix
from megalite.runtime.data.stream.catalogue import is_text_path, split_of
from megalite.runtime.data.stream.opening import TextOptions
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer
from megalite.runtime.data.tokens import IndexedDataset, token_dtype

__all__ = [
    "VERSION_OF_DATA",
    "BatchLoader",
    "BlendedDataset",
    "Dataset",
    "Datasets",
    "GPTDataset",
    "IndexedDataset",
    "LossMask",
    "MockDataset",
    "OwnDataset",
    "PackedDataset",
    "Rows",
    "Samples",
    "TextOptions",
    "Tokenizer",
    "bring_prefix",
    "build_datasets",
    "chat_template_of",
    "check_tokenizer_matches",
    "is_text_path",
    "load_tokenizer",
    "mask_path",
    "prefixes_of",
    "read_sidecar",
    "split_documents",
    "split_of",
    "stream_prefixes_of",
    "texts_of",
    "token_dtype",
]
