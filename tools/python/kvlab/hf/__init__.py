"""Traces of a loaded transformers model, and eviction while it runs. Needs torch and transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.hf.cache import Cache
    from kvlab.hf.capturing import capture
    from kvlab.hf.evicting_block import evicting
    from kvlab.hf.presses import KvlabPress, from_press
    from kvlab.hf.refused import Refused

__all__ = ["Cache", "KvlabPress", "Refused", "capture", "evicting", "from_press"]

_HOMES = {
    "capture": "capturing",
    "evicting": "evicting_block",
    "Cache": "cache",
    "Refused": "refused",
    "from_press": "presses",
    "KvlabPress": "presses",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"kvlab.hf.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvlab.hf' has no attribute '{name}'")
