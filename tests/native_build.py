"""A pytest plugin that tests another build of the core: `PARROT_CORE=path pytest -p tests.native_build`.

An editable install resolves ``parrot._core`` itself, so the other build is put in place before anything
imports it. `make sanitize` runs the native tests this way against a build with AddressSanitizer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def load_core(path: Path) -> None:
    """Make the extension at ``path`` the module ``parrot._core`` of this process."""
    if "parrot._core" in sys.modules:
        raise RuntimeError("parrot._core is imported already; the plugin has to come first")
    spec = importlib.util.spec_from_file_location("parrot._core", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["parrot._core"] = module
    spec.loader.exec_module(module)


load_core(Path(os.environ["PARROT_CORE"]))
