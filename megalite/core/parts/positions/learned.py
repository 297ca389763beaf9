"""Learned positions, which are added to the embeddings: attention has nothing to do."""

from __future__ import annotations

from megalite.core.options.choices import Position

POSITION = Position()
