"""Client of a DFlash model behind Triton, for programs and for the command line.

`DFlashClient` talks to a running server over gRPC or HTTP and needs neither torch nor the engine.
`dflash_client.launcher.TritonServer` starts a server on this machine; it is not imported here because it reads the
engine's settings.
"""

from dflash_client.client import DFlashClient
from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    Internal,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from dflash_client.results import Delta, GenerationResult

__all__ = [
    "Cancelled",
    "ClientError",
    "ConnectionFailed",
    "DFlashClient",
    "Delta",
    "GenerationResult",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "RequestTimeout",
    "Unavailable",
]
