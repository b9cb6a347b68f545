"""An answer as the events of a stream: what is known of it as it comes, and comments in between, which keep clients that
wait for bytes from giving up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

from skyrl_train.rollout.agents.chat_wire import Answered
from skyrl_train.rollout.agents.http_server import RequestError

SAYS_SOMETHING_WITHIN_S = 10.0
"""After a request, or the last thing that was said. A request that is refused before has a status that says so."""
COMMENT = ": the answer is on its way\n\n"
Events = Generator[str, "str | Answered", None]
"""The wording of a stream in one API: it yields what comes first, is then given pieces of text, and the whole answer at the
end, and yields what is told of each."""


class Progress:
    """What is known of an answer before it is there."""

    def __init__(self) -> None:
        self.number = 0
        """Of the answer within its session."""
        self.prompt_tokens = 0
        self.text = ""
        """Its beginning, as far as nothing that comes can change it."""
        self.changed = asyncio.Event()

    def tell(self, text: str) -> None:
        """Have more of the text. What was told before stays."""
        if text.startswith(self.text) and text != self.text:
            self.text = text
            self.changed.set()

    async def change(self) -> bool:
        """Wait until there is something new, or for long enough that something must be said; whether there is."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), SAYS_SOMETHING_WITHIN_S)
        is_changed = self.changed.is_set()
        self.changed.clear()
        return is_changed


async def begun(
    ask: Callable[[Progress], Awaitable[Answered]],
    word: Callable[[Progress], Events],
    deliver: Callable[[Answered], None],
) -> AsyncGenerator[str, None]:
    """Return the events of an answer once there is something to tell, or nothing to tell for so long that something must be
    said. Raises RequestError for what is refused before that. `deliver` is called when the end of the answer is taken."""
    progress = Progress()
    asking = asyncio.ensure_future(ask(progress))
    asking.add_done_callback(lambda _: progress.changed.set())
    try:
        await progress.change()
        if asking.done():
            await asking
    except BaseException:
        asking.cancel()
        raise
    return _events(asking, progress, word(progress), deliver)


async def _events(
    asking: asyncio.Future[Answered], progress: Progress, events: Events, deliver: Callable[[Answered], None]
) -> AsyncGenerator[str, None]:
    told = 0
    try:
        yield next(events)
        while not asking.done():
            if len(progress.text) > told:
                piece, told = progress.text[told:], len(progress.text)
                yield events.send(piece)
            elif not await progress.change():
                yield COMMENT
        try:
            answered = await asking
        except RequestError as error:  # the status has been sent
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': error.body})}\n\n"
            return
        deliver(answered)
        yield events.send(answered)
    finally:
        asking.cancel()
