"""How an outbound exchange may end without a response, and the map from exceptions to network error codes."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator

import httpx

from federation.http.threat_policy import NetworkErrorCode


class OutboundError(Exception):
    """An outbound exchange ended without a usable response."""


class BlockedUrl(OutboundError):
    """The URL itself may not be fetched, whatever DNS says; trying again cannot help."""


class BodyTooLarge(OutboundError):
    """The response body exceeds the limit, so it cannot be what was asked for; trying again cannot help."""


class NetworkError(OutboundError):
    """No complete response came from `origin`; worth another try. The message never holds a byte of any body."""

    def __init__(self, code: NetworkErrorCode, origin: str, detail: str) -> None:
        super().__init__(f"{code} from {origin}: {detail}")
        self.code = code
        self.origin = origin
        self.detail = detail


class RelayFailed(OutboundError):
    """No peer passed the request on; the message says what each of them answered, or why none was asked.

    `code` is that of the one peer that failed, or None if no single peer did.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class BlockedAddress(NetworkError):
    """The host name leads to an address that is not public, right now.

    The code is DNS_BLOCKED: a name filter that answers with a sinkhole address is the usual cause, and a relay with
    another resolver may see the true address. A name moved back to a public address works again at the next try.
    """

    def __init__(self, host: str, detail: str) -> None:
        super().__init__(NetworkErrorCode.DNS_BLOCKED, host, detail)


class ServerDisconnected(OutboundError):
    """The server closed the connection instead of answering."""


class BrokenBody(OutboundError):
    """The connection was closed in the middle of a body."""


class MalformedResponse(OutboundError):
    """What came is no HTTP/1.1 response."""


# Everything that the transport may raise because of the network or the peer; all else is a bug, passed on unchanged.
TRANSPORT_FAILURES = (
    ServerDisconnected,
    BrokenBody,
    MalformedResponse,
    httpx.TransportError,  # of a transport that was injected
    OSError,  # includes TimeoutError, ssl.SSLError and socket.gaierror
)

# Our own machine ran out of something: the peer is not to blame and must not be marked unhealthy.
_LOCAL_EXHAUSTION = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_RESET = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ESHUTDOWN, errno.ETIMEDOUT})


def network_error(exc: Exception, origin: str, phase: str) -> NetworkError | None:
    """Return the classified error to raise from *exc*, or None if the fault is this machine's (out of descriptors)."""
    # A deadline is raised from the cancellation that it is made of, which describes nothing.
    chain = [link for link in _causes(exc) if isinstance(link, Exception)]
    if any(isinstance(link, OSError) and link.errno in _LOCAL_EXHAUSTION for link in chain):
        return None
    return NetworkError(classify(exc), origin, f"{phase}: {_describe(chain[-1])}")


def classify(exc: BaseException) -> NetworkErrorCode:
    """Return the network error code of *exc*, judged by the types and errno values in its chain of causes."""
    chain = list(_causes(exc))
    return next((code for link in chain if (code := _classify_one(link))), NetworkErrorCode.UNKNOWN)


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield *exc* and what it was raised from.

    `__context__` is left out on purpose: it also holds errors that are just being handled elsewhere, such as the direct
    failure while a relay is tried.
    """
    link: BaseException | None = exc
    while link is not None:
        yield link
        link = link.__cause__


def _classify_one(exc: BaseException) -> NetworkErrorCode | None:
    if isinstance(exc, ssl.SSLError):
        return NetworkErrorCode.TLS_ERROR
    if isinstance(exc, socket.gaierror):
        return NetworkErrorCode.DNS_BLOCKED
    if isinstance(exc, BrokenBody):
        return NetworkErrorCode.CONN_RESET  # it does not matter how the connection ended
    if isinstance(exc, OSError):
        return _classify_os_error(exc)
    if isinstance(exc, httpx.TimeoutException):
        return NetworkErrorCode.TIMEOUT
    return None


def _classify_os_error(exc: OSError) -> NetworkErrorCode | None:
    if exc.errno == errno.ECONNREFUSED or isinstance(exc, ConnectionRefusedError):
        return NetworkErrorCode.CONN_REFUSED
    if exc.errno in _RESET or isinstance(exc, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return NetworkErrorCode.CONN_RESET  # includes ETIMEDOUT: the kernel gave up, which is not our own deadline
    if isinstance(exc, TimeoutError):
        return NetworkErrorCode.TIMEOUT
    return None


def _describe(exc: BaseException) -> str:
    """Return the type and the system's name for the error. Messages are left out: they may quote what the peer sent."""
    name = type(exc).__name__
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"{name} ({exc.verify_message})"
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return f"{name} ({exc.reason})"
    if isinstance(exc, socket.gaierror):
        return f"{name} ({exc.strerror})"
    if isinstance(exc, OSError) and exc.errno is not None and exc.errno in errno.errorcode:
        return f"{name} ({errno.errorcode[exc.errno]})"
    return name
