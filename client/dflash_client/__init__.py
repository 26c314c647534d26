"""Client of a DFlash model behind Triton, for programs and for the command line.

`DFlashClient` and `AsyncDFlashClient` talk to a running server over gRPC or HTTP and need neither torch nor the engine.
`dflash_cli.launcher.server.TritonServer` starts a server on this machine; it is not imported here because it reads the
engine's settings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_client.client import AsyncDFlashClient as AsyncDFlashClient
    from dflash_client.client import DFlashClient as DFlashClient
    from dflash_client.errors import Cancelled as Cancelled
    from dflash_client.errors import ClientError as ClientError
    from dflash_client.errors import ConnectionFailed as ConnectionFailed
    from dflash_client.errors import ConnectionLost as ConnectionLost
    from dflash_client.errors import Internal as Internal
    from dflash_client.errors import InvalidArgument as InvalidArgument
    from dflash_client.errors import NotFound as NotFound
    from dflash_client.errors import PermissionDenied as PermissionDenied
    from dflash_client.errors import QueueFull as QueueFull
    from dflash_client.errors import RequestTimeout as RequestTimeout
    from dflash_client.errors import Unauthenticated as Unauthenticated
    from dflash_client.errors import Unavailable as Unavailable
    from dflash_client.results import Completion as Completion
    from dflash_client.results import Delta as Delta
    from dflash_client.results import GenerationResult as GenerationResult
    from dflash_client.results import Logprob as Logprob
    from dflash_client.results import Step as Step
    from dflash_client.sampling import NULL as NULL
    from dflash_client.sampling import Sampling as Sampling
    from dflash_client.stream import AsyncStream as AsyncStream
    from dflash_client.stream import Stream as Stream

_HOME = {
    "client": ("AsyncDFlashClient", "DFlashClient"),
    "errors": (
        *("Cancelled", "ClientError", "ConnectionFailed", "ConnectionLost", "Internal", "InvalidArgument", "NotFound"),
        *("PermissionDenied", "QueueFull", "RequestTimeout", "Unauthenticated", "Unavailable"),
    ),
    "results": ("Completion", "Delta", "GenerationResult", "Logprob", "Step"),
    "sampling": ("NULL", "Sampling"),
    "stream": ("AsyncStream", "Stream"),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: gRPC and httpx take a while, and the command line must be able to
    end before they are there."""
    if name not in _MODULES:
        raise AttributeError(f"module 'dflash_client' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dflash_client.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
