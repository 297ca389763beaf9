"""A dict as one HTML file that nothing in it can break out of, with a policy that lets only its own script run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.core.base.redact import mask_fields
from megalite.extras.view.page.curves import Numbers

_HERE = Path(__file__).parent
# In this order: each uses what stands above it.
_SCRIPTS = (
    *("words", "text", "page", "curves", "grid", "schedule", "messages", "memory", "experts", "checkpoints", "why"),
    *("live", "main"),
)
_LONGEST_TEXT = 2_000
# ASCII: Chinese stands before a path without a space.
_PATH = re.compile(r"(?:(?<![\w./])|(?<=file://))/(?:[^\s/\"'<>|]+/)+", re.ASCII)
# A text that is a path and nothing else may have blanks and quotes in it.
_WHOLE_PATH = re.compile(r"/(?:[^/\n:;,]+/)+(?=[^/\n:;,]*$)")


def page(data: dict[str, Any], title: str, hide: str | None = None, live: bool = False) -> str:
    """Return the page.

    Args:
        data: what it shows; texts in it may be anything.
        title: of the window.
        hide: the paths of folders of this machine are replaced by this; None: they stay.
        live: let the script ask the server that the page came from.
    """
    library, style = _vendored("uPlot.iife.min.js"), _vendored("uPlot.min.css") + _own("page.css")
    parts = "\n".join(_own(f"app/{name}.js") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    policy = {
        "default-src": "'none'",
        "script-src": f"{_hash(library)} {_hash(script)}",
        "style-src": _hash(style),
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        **({"connect-src": "'self'"} if live else {}),
    }
    written = "; ".join(f"{name} {value}" for name, value in policy.items())
    # Where the server reads on; a copy of the run has the same page without.
    runs = [{name: part for name, part in run.items() if live or name != "live"} for run in data["runs"]]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{written}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{_escaped(_text(title, hide))}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript; it asks no server for anything.</noscript>
<script type="application/json" id="data">{to_json({**data, "runs": runs, "live": live}, hide)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def to_json(data: Any, hide: str | None = None) -> str:
    """Return strict JSON in ASCII, without <, > and &, which HTML does not see into; what is no number becomes text."""
    text = json.dumps(_clean(data, hide), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_parts() -> Iterator[tuple[str, str]]:
    """Yield name and text of each part of the page's own script."""
    for name in _SCRIPTS:
        yield name, _own(f"app/{name}.js")


def _clean(value: Any, hide: str | None) -> Any:
    if isinstance(value, dict):
        return {_text(str(key), hide): _clean(item, hide) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, hide) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _text(value, hide) if isinstance(value, str) else value


def _text(text: str, hide: str | None) -> str:
    if isinstance(text, Numbers):
        return text
    text = mask_fields(text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…")
    if hide is None:
        return text
    return hide + text[whole.end() :] if (whole := _WHOLE_PATH.match(text)) else _PATH.sub(hide, text)


def _vendored(name: str) -> str:
    return _read(_HERE / "vendor" / name)


def _own(name: str) -> str:
    return _read(_HERE / name)


def _read(path: Path) -> str:
    # Bytes: hashes are of the exact text, whatever a platform's line ends are.
    return path.read_bytes().decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escaped(text: str) -> str:
    return "".join(f"&#{ord(c)};" if c in "<>&\"'" or not c.isprintable() else c for c in text[:200])
