"""Seals to servers, with one-time key pairs that each serve for a minute."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from datetime import timedelta
from typing import Final

from federation.protocol.keys import decode_key
from federation.protocol.sealing import Envelope, SealingKey
from workers.clock import monotonic

USED_FOR: Final = timedelta(minutes=1)
MAX_USES: Final = 10_000
"""Far below what random nonces allow: two of so many are equal with a probability of 2 to the power of -70."""
MAX_KEPT: Final = 1_000


class _Kept:
    """A key, until when it serves, and for how many more texts."""

    __slots__ = ("key", "left", "until")

    def __init__(self, recipient_key: str, until: float) -> None:
        self.key = SealingKey(decode_key(recipient_key, what="encryption key"))
        self.until = until
        self.left = MAX_USES


class Sealer:
    """Seals to servers by their encryption keys, in base64, to each with a one-time key pair that serves for a minute.

    Making such a pair, and what it shares with the recipient's key, costs as much as sealing thirty texts. So one pair
    serves for what a busy server gets within a minute, each envelope with a nonce of its own. Its secret half is not
    kept, and after that minute nothing else of it either, whether or not anything is sealed then.
    A recipient cannot tell: to it every envelope is complete. Keys are kept by the recipient's key, of 1 000 at most,
    so a server that has changed its key gets envelopes for the new one at once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the oldest first
        self._timer: asyncio.TimerHandle | None = None  # while any is kept

    def seal(self, text: str, recipient_key: str) -> Envelope:
        """Seal *text* to the server with that key.

        Raises:
            KeyMaterialError: the key is unusable.
            PayloadError: the text has lone surrogates and therefore no UTF-8 form.
        """
        now = monotonic()
        kept = self._kept.get(recipient_key)
        if kept is None or kept.until <= now or not kept.left:
            kept = self._renew(recipient_key, now)
        kept.left -= 1
        return kept.key.seal(text)

    def _renew(self, recipient_key: str, now: float) -> _Kept:
        self._kept.pop(recipient_key, None)
        while len(self._kept) >= MAX_KEPT:
            self._kept.popitem(last=False)
        kept = self._kept[recipient_key] = _Kept(recipient_key, now + USED_FOR.total_seconds())
        if self._timer is None:
            self._forget_at(kept.until)
        return kept

    def _forget_at(self, until: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(until, self._forget)

    def _forget(self) -> None:
        """Forget all whose time is over, and come back when it is over for the next one."""
        self._timer, now = None, monotonic()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until > now:
                self._forget_at(oldest.until)
                break
            self._kept.popitem(last=False)
