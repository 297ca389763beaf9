"""`PREFIX.json` beside the token files: which tokenizer made them, so that training can refuse another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megalite import __version__
from megalite.data.tokenizer import Tokenizer
from megalite.errors import UserError
from megalite.log import logger


def sidecar_of(tokenizer: Tokenizer, documents: int, tokens: int) -> dict[str, Any]:
    """What preprocessing writes to `PREFIX.json`."""
    return {
        "tokenizer_kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id,
        "documents": documents,
        "tokens": tokens,
        "megalite_version": __version__,
    }


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """Contents of `PREFIX.json`, None where there is no such file (data made by Megatron-LM).

    Raises:
        UserError: the file is not one that preprocessing wrote.
    """
    path = Path(f"{prefix}.json")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(str(path), f"cannot be read ({e})", "preprocess the text again, or remove the file") from e
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("vocab_size"), int)
        or "tokenizer_sha256" not in content
    ):
        rule = "must hold tokenizer_sha256 and vocab_size, as preprocess_data.py writes them"
        raise UserError(str(path), rule, "preprocess the text again, or remove the file")
    return content


def check_tokenizer_matches(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse data that another tokenizer made; without `PREFIX.json` one warning says that nothing was checked.

    Raises:
        UserError: the tokenizer's SHA-256 is not the data's.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        logger.warning(f"{prefix}.json is missing: whether {tokenizer.path} made this data is not checked")
    elif sidecar["tokenizer_sha256"] != tokenizer.sha256:
        made_by = f"{sidecar.get('tokenizer_kind')} tokenizer with SHA-256 {sidecar['tokenizer_sha256']}"
        raise UserError(
            f"--tokenizer {tokenizer.path} with SHA-256 {tokenizer.sha256}",
            f"{prefix} was made by a {made_by}",
            "give that tokenizer, or preprocess the text again with this one",
        )
