"""What pyarrow cannot ask of S3: to write an object only if there is none of that name.

The header is `If-None-Match: *`. Botocore signs the request, with the credentials that pyarrow finds, too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from federation.analytics.errors import StoreUnusable

if TYPE_CHECKING:
    from federation.analytics.data.store_urls import StoreUrl

_CONNECT_SECONDS: Final = 3
_READ_SECONDS: Final = 30
_ATTEMPTS: Final = 4
_TAKEN: Final = 412
_IN_CONFLICT: Final = 409
"""Another one is writing that object, and nobody knows yet who wins."""
_CONFLICT_SECONDS: Final = 0.2


class S3Puts:
    """Writes objects below `url`, each of them whole."""

    def __init__(self, url: StoreUrl) -> None:
        try:
            from botocore.config import Config
            from botocore.session import get_session
        except ImportError:
            raise StoreUnusable(f"{url} needs the extra `s3` (botocore), which commits what was written") from None
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            s3={"addressing_style": "path"} if url.endpoint else None,
        )
        self._url = url
        self._bucket, _, self._folder = url.folder.partition("/")
        self._client = get_session().create_client(
            "s3", endpoint_url=url.endpoint, region_name=url.region, config=config
        )

    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        """Write the object. Return False if there is one of that name, unless it is to be written `over`.

        If an answer was lost and the request sent again, that one may be ours.

        Raises:
            StoreUnusable: it is not known whether it was written.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        key = f"{self._folder}/{name}".lstrip("/")
        condition = {} if over else {"IfNoneMatch": "*"}
        for attempt in range(_ATTEMPTS):
            try:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=data, **condition)
            except ClientError as error:
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                if status == _TAKEN:
                    return False
                if status != _IN_CONFLICT or attempt == _ATTEMPTS - 1:
                    raise StoreUnusable(f"{self._url} cannot be written to: {error}") from None
                time.sleep(_CONFLICT_SECONDS)
            except BotoCoreError as error:
                raise StoreUnusable(f"{self._url} cannot be written to: {error}") from None
            else:
                return True
        raise AssertionError("the last attempt returns or raises")
