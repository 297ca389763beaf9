"""Text to tokens to batches. Nothing here needs torch."""

from megalite.data.blend import BlendedDataset
from megalite.data.build import (
    Datasets,
    build_datasets,
    check_tokenizer_matches,
    prefixes_of,
)
from megalite.data.loader import BatchLoader
from megalite.data.own import OwnDataset, Samples
from megalite.data.packing import LossMask, PackedDataset, mask_path
from megalite.data.rows import Rows, share_of
from megalite.data.samples import Dataset, GPTDataset, MockDataset, split_documents
from megalite.data.shuffle import VERSION_OF_DATA
from megalite.data.sidecar import chat_template_of, read_sidecar
from megalite.data.stand_in import bring_prefix
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.data.tokens import IndexedDataset, token_dtype

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
    "Tokenizer",
    "bring_prefix",
    "build_datasets",
    "chat_template_of",
    "check_tokenizer_matches",
    "load_tokenizer",
    "mask_path",
    "prefixes_of",
    "read_sidecar",
    "share_of",
    "split_documents",
    "token_dtype",
]
