"""Client of a DFlash model behind Triton, for programs and for the command line.

`DFlashClient` and `AsyncDFlashClient` talk to a running server over gRPC or HTTP and need neither torch nor the engine.
`dflash_cli.launcher.server.TritonServer` starts a server on this machine; it is not imported here because it reads the
engine's settings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_client.client import AsyncDFlashClient, DFlashClient
    from dflash_client.errors import (
        Cancelled,
        ClientError,
        ConnectionFailed,
        ConnectionLost,
        Internal,
        InvalidArgument,
        NotFound,
        PermissionDenied,
        QueueFull,
        RequestTimeout,
        Unauthenticated,
        Unavailable,
    )
    from dflash_client.results import Completion, Delta, GenerationResult, Logprob
    from dflash_client.sampling import Sampling
    from dflash_client.stream import AsyncStream, Stream

__all__ = [
    "AsyncDFlashClient",
    "AsyncStream",
    "Cancelled",
    "ClientError",
    "Completion",
    "ConnectionFailed",
    "ConnectionLost",
    "DFlashClient",
    "Delta",
    "GenerationResult",
    "Internal",
    "InvalidArgument",
    "Logprob",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "RequestTimeout",
    "Sampling",
    "Step",
    "Stream",
    "Unauthenticated",
    "Unavailable",
]

_HOME = {
    "client": ("AsyncDFlashClient", "DFlashClient"),
    "results": ("Completion", "Delta", "GenerationResult", "Logprob", "Step"),
    "sampling": ("Sampling",),
    "stream": ("AsyncStream", "Stream"),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: gRPC and httpx take a while, and the command line must be able to
    end before they are there."""
    if name not in __all__:
        raise AttributeError(f"module 'dflash_client' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dflash_client.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
