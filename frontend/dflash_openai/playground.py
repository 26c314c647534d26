"""The playground: the page at `/` and the files that it loads, read once from the package.

The page is static and holds nothing secret, so it is served without an API key; its requests to `/v1` carry one.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# The page loads its own files and talks to its own server. No inline script or style, no frame, no form, no plug-in.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Kept by the browser, but asked about each time: a new version of the server brings its own page at once.
    "cache-control": "no-cache",
}
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class StaticFile:
    """A file of the page, in memory, with a tag that names its content."""

    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        self.headers = {**HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:20]}"'}
        self.media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    def respond(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        if request.headers.get("if-none-match") == self.headers["etag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers, media_type=self.media_type)


def playground_routes() -> list[Route]:
    """`/` and `/static/NAME` for each file."""
    folder = resources.files("dflash_openai") / "static"
    files = {
        entry.name: StaticFile(entry.name, entry.read_bytes())
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in MEDIA_TYPES
    }

    async def page(request: Request) -> Response:
        return files["index.html"].respond(request)

    async def asset(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        return Response("no such file", 404, HEADERS) if file is None else file.respond(request)

    return [Route("/", page, name="playground"), Route("/static/{name}", asset, name="playground-file")]
