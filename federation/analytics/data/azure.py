"""What pyarrow cannot ask of Azure: to write a blob only if there is none of its name; to delete one without a lease.

The header is `If-None-Match: *`. Azure's library signs the request, with the credentials that pyarrow finds, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from federation.analytics.data.store_urls import azure_key, blob_host
from federation.analytics.errors import StoreUnusable

if TYPE_CHECKING:
    from federation.analytics.data.store_urls import StoreUrl

_CONNECT_SECONDS: Final = 3
_READ_SECONDS: Final = 30
_RETRIES: Final = 3
_PAUSE_SECONDS: Final = 1
_TAKEN: Final = "BlobAlreadyExists"


class AzurePuts:
    """Writes blobs below `url`, each of them whole: pyarrow empties a blob first."""

    def __init__(self, url: StoreUrl) -> None:
        try:
            from azure.identity import DefaultAzureCredential
            from azure.storage.blob import ContainerClient, LinearRetry
        except ImportError:
            raise StoreUnusable(
                f"{url} needs the extra `azure` (azure-storage-blob, azure-identity), which commits what was written"
            ) from None
        if url.is_plain and azure_key() is None:
            raise StoreUnusable(f"{url} needs AZURE_STORAGE_KEY over http://, where a token could be read by everybody")
        container, _, self._folder = url.folder.partition("/")
        self._url = url
        self._client = ContainerClient(
            f"{url.endpoint}/{url.account}" if url.endpoint else f"https://{blob_host(url)}",
            container,
            credential=azure_key() or DefaultAzureCredential(),
            connection_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retry_policy=LinearRetry(backoff=_PAUSE_SECONDS, retry_total=_RETRIES, random_jitter_range=0),
        )

    def put(self, name: str, data: bytes, *, over: bool = False) -> bool:
        """Write the blob. Return False if there is one of that name, unless it is to be written `over`.

        If an answer was lost and the request sent again, that one may be ours.

        Raises:
            StoreUnusable: it is not known whether it was written.
        """
        from azure.core.exceptions import AzureError, HttpResponseError

        try:
            self._client.upload_blob(f"{self._folder}/{name}".lstrip("/"), data, overwrite=over)
        except HttpResponseError as error:
            if getattr(error, "error_code", None) == _TAKEN:  # none, if it was no answer of Azure's
                return False
            raise self._unusable(error) from None
        except AzureError as error:
            raise self._unusable(error) from None
        return True

    def delete(self, name: str) -> None:
        """Delete the blob, if it is there.

        Pyarrow leases it first, so that of two who delete it at once one fails.

        Raises:
            StoreUnusable: it is not known whether it is gone.
        """
        from azure.core.exceptions import AzureError, ResourceNotFoundError

        try:
            with contextlib.suppress(ResourceNotFoundError):
                self._client.delete_blob(f"{self._folder}/{name}".lstrip("/"))
        except AzureError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> StoreUnusable:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return StoreUnusable(f"{self._url} cannot be written to: {first_line}")
