"""Benchmarks and tuning for one GPU; they need only torch, triton, numpy and transformers beside this package.

Such a machine has nothing of ours installed. So `tournant` is made of the repository's folders here, and where the gguf
package is missing an empty stand-in takes its place: nothing here reads a .gguf file.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

if importlib.util.find_spec("tournant") is None:
    _tournant = ModuleType("tournant")
    _tournant.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["tournant"] = _tournant
if importlib.util.find_spec("gguf") is None:
    sys.modules["gguf"] = MagicMock(name="gguf")
