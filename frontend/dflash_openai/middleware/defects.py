"""Turns errors that nothing expects into answers."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_openai.errors import defect


class DefectsMiddleware:
    """Answers 500, in OpenAI's form, where the application fails otherwise than by an error for its client, and logs
    why. Goes inside of all that counts requests, names them or writes their errors in another form. A response that
    has begun breaks off, and counts as 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        has_begun = False
        of_client: Exception | None = None

        async def watch(message: Message) -> None:
            nonlocal has_begun, of_client
            has_begun = True
            try:
                await send(message)
            except Exception as error:
                of_client = error
                raise

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if error is of_client:
                raise
            answer = defect(f"{scope['method']} {scope['path']}", error)
            scope.setdefault("state", {})["failed_with"] = answer.status
            if has_begun:
                raise
            await answer.response()(scope, receive, send)
