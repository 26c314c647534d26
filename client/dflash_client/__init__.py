"""Client of a DFlash model behind Triton, for programs and for the command line.

`DFlashClient` and `AsyncDFlashClient` talk to a running server over gRPC or HTTP and need neither torch nor the engine.
`dflash_client.launcher.TritonServer` starts a server on this machine; it is not imported here because it reads the
engine's settings.
"""

from dflash_client.client import AsyncDFlashClient, DFlashClient
from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Internal,
    InvalidArgument,
    NotFound,
    RequestTimeout,
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
    "RequestTimeout",
    "Sampling",
    "Stream",
    "Unavailable",
]
