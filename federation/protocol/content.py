"""The blocks a post is made of."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, FailFast, Field

from federation.protocol.models import Text, WireModel

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_SCHEMES_WITH_HOST = frozenset({"http", "https", "ws", "wss", "ftp"})


def _absolute(url: str) -> str:
    """Accept what JavaScript's `new URL` parses without a base: any scheme, and a host where the scheme needs one.

    `javascript:` passes, as with every peer; whoever renders a post follows http and https only.
    """
    match = _SCHEME.match(url.strip())
    if match is None:
        raise ValueError("must be an absolute URL")
    if match[0][:-1].lower() in _SCHEMES_WITH_HOST and not url.strip()[match.end() :].strip("/\\"):
        raise ValueError("must name a host")
    urlsplit(url)  # raises ValueError on a malformed IPv6 host
    return url


def _finite(number: int | float) -> int | float:
    try:
        finite = math.isfinite(float(number))
    except OverflowError:  # an integer that JavaScript would read as Infinity
        finite = False
    if not finite:
        raise ValueError("must be finite")
    return number


AbsoluteUrl = Annotated[Text, AfterValidator(_absolute)]
Count = Annotated[int | float, Field(ge=0), AfterValidator(_finite)]


class TextBlock(WireModel):
    type: Literal["text"]
    value: Annotated[Text, Field(min_length=1)]


class ImageBlock(WireModel):
    type: Literal["image", "video"]
    url: AbsoluteUrl
    size: Count
    index: Count


class AudioBlock(WireModel):
    type: Literal["audio"]
    url: AbsoluteUrl
    size: Count


class LinkBlock(WireModel):
    type: Literal["link"]
    url: AbsoluteUrl


Block = Annotated[TextBlock | ImageBlock | AudioBlock | LinkBlock, Field(discriminator="type")]
# FailFast: a megabyte of wrong blocks must not become a megabyte of errors.
Content = Annotated[list[Block], Field(min_length=1), FailFast()]
