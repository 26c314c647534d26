"""What the log says of requests that are answered otherwise than they ask: each thing once, however often it comes."""

from __future__ import annotations

import logging
from collections.abc import Callable

_LOG = logging.getLogger("dflash_openai")
# Clients choose some of the words: those after this many different notices are not logged.
MAX_NOTICES = 1000
_logged: set[str] = set()


def log_once(about: str, notice: Callable[[], str]) -> None:
    """Log a sentence, unless one about the same was logged before."""
    if about not in _logged and len(_logged) < MAX_NOTICES:
        _logged.add(about)
        _LOG.warning("%s", notice())
