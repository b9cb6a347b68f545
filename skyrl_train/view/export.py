"""One self-contained file: the page with its scripts, and the answers that it would ask the server for."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skyrl_train.errors import ModelError
from skyrl_train.view.answers import Answers, to_json
from skyrl_train.view.pictures import sums_in

_STYLE = re.compile(r'<link rel="stylesheet" href="static/(?P<name>[^"]+)">')
_SCRIPT = re.compile(r'<script src="static/(?P<name>[^"]+)" defer></script>\n?')
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_LIMIT = 200
_MOST = 2000
_MOST_PICTURES = 32_000_000
"""Characters of all images; those that are over are named in their places."""
_SAFE = "!'()*-._~"
"""What `encodeURIComponent` leaves as it is."""


def write_report(answers: Answers, query: Sequence[tuple[str, str]], static: Path) -> str:
    """Return the report of the runs that `query` names (`run`, several times, and filters), with the first `limit`
    trajectories of each whole.

    Raises ValueError where something is asked for that the server would refuse, and where the page has no `index.html`.
    """
    runs = [value for name, value in query if name == "run"] or [
        run["id"] for run in _get(answers, "api/runs", [])["runs"]
    ]
    limit = _limit([value for name, value in query if name == "limit" and value])
    filters = [
        (name, value) for name, value in query if name not in ("run", "limit", "offset", "sort", "order") and value
    ]
    found: dict[str, Any] = {"api/runs": _get(answers, "api/runs", [])}
    found["api/runs"]["runs"] = [run for run in found["api/runs"]["runs"] if run["id"] in runs]
    for run in runs:
        found |= _of_run(answers, run, filters, limit)
    found |= _pictures(answers, found)
    if len(runs) > 1:
        found[_key("api/diff", [("runs", ",".join(runs))])] = _get(answers, "api/diff", [("runs", ",".join(runs))])
    data = {
        "format": 1,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "limit": limit,
        "chosen": "the last steps first"
        + (", filtered by " + "&".join("=".join(each) for each in filters) if filters else ""),
        "answers": found,
    }
    return _inlined(static, to_json(data))


def _of_run(answers: Answers, run: str, filters: Sequence[tuple[str, str]], limit: int) -> dict[str, Any]:
    own = [("run", run)]
    found: dict[str, Any] = {}

    def keep(path: str, arguments: Sequence[tuple[str, str]], *chosen: tuple[str, str]) -> dict[str, Any]:
        """Ask once for what the page asks for by `arguments`, of which `chosen` makes a choice."""
        key = _key(path, arguments)
        if key not in found:
            found[key] = _get(answers, path, [*arguments, *chosen])
        answer: dict[str, Any] = found[key]
        return answer

    for path in ("api/metrics", "api/overview", "api/facets", "api/failures", "api/findings"):
        keep(path, own)
    keep("api/groups", own, *filters, ("limit", str(min(limit, 500))))
    rows = keep("api/trajectories", own, *filters, ("limit", str(min(limit, 500))))["rows"]
    while rows and len(rows) < limit:
        rest = [("offset", str(len(rows))), ("limit", str(min(500, limit - len(rows))))]
        if not (page := _get(answers, "api/trajectories", [*own, *filters, *rest])["rows"]):
            break
        rows += page
    for row in rows:
        group = [*own, ("purpose", row["purpose"]), ("step", str(row["step"])), ("uid", row["uid"])]
        keep("api/trajectory", [*group, ("sample", str(row["sample"]))])
        keep("api/group", group)
        keep("api/prompt", [*own, ("uid", row["uid"])])
    return found


def _pictures(answers: Answers, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images that the answers name, as the page asks for them: each as a `data:` URL, or why it is not there."""
    wanted = {
        (answer["run"], name): None
        for path, answer in found.items()
        if path.startswith(("api/trajectory?", "api/group?", "api/prompt?"))
        for name in sums_in(answer)
    }
    made: dict[str, Any] = {}
    left = _MOST_PICTURES
    for run, name in wanted:
        try:
            url = answers.picture(run, name).url()
            if len(url) > left:
                raise ValueError(
                    f"image {name[:12]} is not in the report, whose images take {_MOST_PICTURES:,} characters"
                )
            left -= len(url)
            picture = {"data": url}
        except (LookupError, ValueError, ModelError) as error:
            picture = {"error": str(error)}
        made[_key("api/image", [("run", run), ("sum", name)])] = picture
    return made


def _get(answers: Answers, path: str, arguments: Sequence[tuple[str, str]]) -> dict[str, Any]:
    status, found = answers.answer(path, arguments)
    if status != 200:
        raise ValueError(f"{path}: {found['error']}")
    return found


def _key(path: str, arguments: Sequence[tuple[str, str]]) -> str:
    return (
        f"{path}?{'&'.join(f'{name}={quote(value, safe=_SAFE)}' for name, value in arguments)}" if arguments else path
    )


def _limit(values: Sequence[str]) -> int:
    text = values[-1] if values else str(_LIMIT)
    if not text.isdigit() or not 1 <= int(text) <= _MOST:
        raise ValueError(f"limit={text[:40]} must be a whole number from 1 to {_MOST}")
    return int(text)


def _inlined(static: Path, data: str) -> str:
    """Return `index.html` with its styles and scripts inside, scripts at the end, and the data before them."""
    page = static / "index.html"
    if not page.is_file():
        raise ValueError(f"{page} is missing: skyrl_train is not installed whole")
    text = page.read_text(encoding="utf-8")

    def content(name: str) -> str:
        return (static / html.unescape(name)).read_text(encoding="utf-8")

    scripts = "".join(
        # "</script" ends a script wherever it stands; in JavaScript's texts and patterns `<\/` is the same.
        "<script>\n" + re.sub(r"</(?=script)", r"<\\/", content(match["name"]), flags=re.IGNORECASE) + "\n</script>\n"
        for match in _SCRIPT.finditer(text)
    )
    text = _STYLE.sub(lambda match: f"<style>\n{content(match['name'])}\n</style>", _SCRIPT.sub("", text))
    safe = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    end = f'<script type="application/json" id="skyrl-view-data">{safe}</script>\n{scripts}'
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    text = re.sub(r"(<head[^>]*>)", lambda match: f"{match[1]}\n{policy}", text, count=1)
    before, body_end, after = text.rpartition("</body>")
    return f"{before}{end}{body_end}{after}" if body_end else f"{text}{end}"
