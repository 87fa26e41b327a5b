"""Sealing of secrets that leave this process (to a client, or to Redis): AES-256-GCM, keys from ``auth.secret_keys``.

An envelope is ``rmw1.<key id>.<base64url of nonce and ciphertext>``. The first key seals, all open: a key is rotated by rolling
out ``old,new`` first and ``new,old`` then. What an envelope is for, and whose it is, are associated data: an envelope of one
owner, or for another purpose, does not open.

What is no secret, but must come back unchanged, is signed: ``rmw1.<key id>.<base64url of HMAC-SHA256>``, by the same rules.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

logger = logging.getLogger(__name__)

LEAST_SECRET = 32
_SCHEME = "rmw1"
_NONCE = 12


class _Key(NamedTuple):
    cipher: AESGCM
    signing: bytes


class Unsealable(ValueError):
    """An envelope that does not open here: not one of ours, damaged, another owner's, or of a key that is not known."""


class Sealer:
    """Seals and opens by the given secrets (each at least 32 characters); with none, by a key of this process alone."""

    def __init__(self, secret_keys: Sequence[str] = ()) -> None:
        self.is_shared = bool(secret_keys)
        if not secret_keys:
            logger.warning("auth.secret_keys is not set: what is sealed here can be opened by this process only")
            secret_keys = [secrets.token_hex(LEAST_SECRET)]
        self._keys = dict(_derive(secret) for secret in secret_keys)
        self._first = next(iter(self._keys))

    @property
    def key_ids(self) -> list[str]:
        """What tells the keys from others without telling anything of them; that of the key that seals comes first."""
        return list(self._keys)

    def seal(self, data: bytes, *, purpose: str, owner: str) -> str:
        nonce = secrets.token_bytes(_NONCE)
        sealed = nonce + self._keys[self._first].cipher.encrypt(nonce, data, _associated(purpose, owner))
        return f"{_SCHEME}.{self._first}.{base64.urlsafe_b64encode(sealed).decode()}"

    def open(self, envelope: str, *, purpose: str, owner: str) -> bytes:
        """Raises ``Unsealable``."""
        scheme, _, rest = envelope.partition(".")
        key_id, _, encoded = rest.partition(".")
        key = self._keys.get(key_id)
        if scheme != _SCHEME or key is None:
            raise Unsealable("not an envelope of ours, or its key is not known")
        try:
            sealed = base64.b64decode(encoded, altchars=b"-_", validate=True)
            return key.cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _associated(purpose, owner))
        except (binascii.Error, ValueError, InvalidTag):
            raise Unsealable("the envelope is damaged, or somebody else's") from None

    def sign(self, data: bytes, *, purpose: str, owner: str) -> str:
        """The signature that proves later that ``data`` is ours, and this owner's. The same data has the same."""
        return self._signature(self._first, data, purpose, owner)

    def is_signed(self, signature: str, data: bytes, *, purpose: str, owner: str) -> bool:
        """Whether ``signature`` is what ``sign`` gave for this, here or where the keys are the same."""
        key_id = signature.removeprefix(f"{_SCHEME}.").partition(".")[0]
        if key_id not in self._keys:
            return False
        return hmac.compare_digest(self._signature(key_id, data, purpose, owner).encode(), signature.encode(errors="replace"))

    def _signature(self, key_id: str, data: bytes, purpose: str, owner: str) -> str:
        mac = hmac.digest(self._keys[key_id].signing, _associated(purpose, owner) + b"\0" + data, "sha256")
        return f"{_SCHEME}.{key_id}.{base64.urlsafe_b64encode(mac).decode()}"


def _derive(secret: str) -> tuple[str, _Key]:
    """The id and the key of a secret; the id tells nothing of it."""
    material = _expanded(secret, 36, b"responses_mw sealing")
    return material[32:].hex(), _Key(AESGCM(material[:32]), _expanded(secret, 32, b"responses_mw signing"))


def _expanded(secret: str, length: int, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret.encode())


def _associated(purpose: str, owner: str) -> bytes:
    return f"{_SCHEME}\0{purpose}\0{owner}".encode()
