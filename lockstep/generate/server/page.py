"""The page at `/`: a chat in the browser that uses the server's routes."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page, and headers that restrict it to its inline code and to this server."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    allowed = {tag: _digest(text, tag) for tag in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Content-Type": "text/html; charset=utf-8",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return text.encode(), headers


def page_response() -> Response:
    """The page. It contains no secret: its user enters the key."""
    body, headers = _page()
    return Response(body, headers=headers)


def _digest(text: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.S)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
