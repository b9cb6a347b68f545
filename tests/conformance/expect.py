"""What several checks expect in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from driver import Answer, RequestFailed, StatusError

RETRIED = {408, 409, 429}  # statuses after which the SDK sends the same request again, for five minutes
BAD = {400, 404, 410, 413, 415, 422}  # statuses that tell a client to change its request


def refused(call: Callable[[], Any]) -> str:
    """The message by which a server refuses what is wrong with a request.

    It may do so at once, by a status that the SDK does not answer with a retry, or later, by a future that ends in an error
    of the category `user`. Both must say why: an SDK takes an empty 400 for a proxy's, and retries it.
    """
    with pytest.raises((StatusError, RequestFailed)) as caught:
        call()
    if isinstance(caught.value, StatusError):
        return told(caught.value.answer)
    failed = caught.value
    assert isinstance(failed, RequestFailed)
    assert failed.category == "user", f"a request that is wrong fails in the category {failed.category!r}, not 'user'"
    assert failed.message.strip(), "the error says nothing"
    return failed.message


def told(answer: Answer) -> str:
    """The message of an HTTP error that blames the request."""
    assert answer.status not in RETRIED, f"HTTP {answer.status} makes the SDK send it again"
    assert answer.status in BAD, f"HTTP {answer.status} is no status of a wrong request"
    assert answer.body.strip(), f"HTTP {answer.status} without a body is taken for a proxy's, and sent again"
    said = json.loads(answer.body)
    assert isinstance(said, dict), f"the error is no JSON object: {answer.body[:100]!r}"
    return json.dumps(said)
