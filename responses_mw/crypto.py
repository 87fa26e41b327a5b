"""Encryption and signatures for data that is sent to clients or stored in Redis.

- `seal` encrypts data with AES-256-GCM. The result, an envelope, is `rmw1.<key id>.<base64url of nonce and ciphertext>`.
- `sign` authenticates readable data with HMAC-SHA256. A signature is `rmw1.<key id>.<base64url of the HMAC>`.

The keys are derived from `auth.secret_keys`. The first key seals and signs. All keys open envelopes and verify signatures. To
rotate a key, deploy `old,new` to every replica, then `new,old`. Envelopes and signatures are bound to an owner and a purpose,
and are invalid for any other.
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

_SCHEME = "rmw1"
_NONCE_BYTES = 12


class _SealingKey(NamedTuple):
    cipher: AESGCM
    signing: bytes


class InvalidEnvelope(ValueError):
    """The envelope is malformed or damaged, belongs to another owner or purpose, or was sealed with an unknown key."""


def is_envelope(text: str) -> bool:
    """Return whether `text` looks like an envelope. It may still be damaged or sealed with an unknown key."""
    return text.startswith(f"{_SCHEME}.")


class Sealer:
    """Encryption and signatures with keys that are derived from secrets."""

    def __init__(self, secret_keys: Sequence[str] = (), default: str | None = None) -> None:
        """Derive the keys from `secret_keys`. The first secret is used to seal and sign.

        If `secret_keys` is empty, log a warning and use `default`, which the processes of one server can share. If there is no
        `default` either, use a random secret.
        """
        self.is_shared = bool(secret_keys)
        if not secret_keys:
            logger.warning("auth.secret_keys is not set: encrypted data cannot be read by other servers or after a restart")
            secret_keys = [default or secrets.token_hex(32)]
        self._keys = dict(_derive(secret) for secret in secret_keys)
        self._first = next(iter(self._keys))

    @property
    def key_ids(self) -> list[str]:
        """The ids of the keys, beginning with the key that seals and signs. The ids reveal nothing about the keys."""
        return list(self._keys)

    def seal(self, data: bytes, *, purpose: str, owner: str) -> str:
        """Encrypt `data` and return the envelope."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._keys[self._first].cipher.encrypt(nonce, data, _associated(purpose, owner))
        return f"{_SCHEME}.{self._first}.{base64.urlsafe_b64encode(sealed).decode()}"

    def open(self, envelope: str, *, purpose: str, owner: str) -> bytes:
        """Return the data in `envelope`.

        Raises `InvalidEnvelope` if the envelope is damaged, its key is unknown, or its `purpose` or `owner` is a different one.
        """
        scheme, _, rest = envelope.partition(".")
        key_id, _, encoded = rest.partition(".")
        key = self._keys.get(key_id)
        if scheme != _SCHEME or key is None:
            raise InvalidEnvelope("not an envelope, or sealed with an unknown key")
        try:
            sealed = base64.b64decode(encoded, altchars=b"-_", validate=True)
            return key.cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _associated(purpose, owner))
        except (binascii.Error, ValueError, InvalidTag):
            raise InvalidEnvelope("the envelope is damaged, or for another owner or purpose") from None

    def sign(self, data: bytes, *, purpose: str, owner: str) -> str:
        """Return a signature of `data`. The signature is deterministic."""
        return self._signature(self._first, data, purpose, owner)

    def is_signed(self, signature: str, data: bytes, *, purpose: str, owner: str) -> bool:
        """Return whether `signature` is valid for `data`, `purpose` and `owner`. A signature by any of the keys is accepted."""
        key_id = signature.removeprefix(f"{_SCHEME}.").partition(".")[0]
        if key_id not in self._keys:
            return False
        return hmac.compare_digest(self._signature(key_id, data, purpose, owner).encode(), signature.encode(errors="replace"))

    def _signature(self, key_id: str, data: bytes, purpose: str, owner: str) -> str:
        mac = hmac.digest(self._keys[key_id].signing, _associated(purpose, owner) + b"\0" + data, "sha256")
        return f"{_SCHEME}.{key_id}.{base64.urlsafe_b64encode(mac).decode()}"


def _derive(secret: str) -> tuple[str, _SealingKey]:
    """Return the id of the keys that are derived from `secret`, and the keys."""
    sealing = HKDF(algorithm=SHA256(), length=36, salt=None, info=b"responses_mw sealing").derive(secret.encode())
    signing = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"responses_mw signing").derive(secret.encode())
    return sealing[32:].hex(), _SealingKey(AESGCM(sealing[:32]), signing)


def _associated(purpose: str, owner: str) -> bytes:
    return f"{_SCHEME}\0{purpose}\0{owner}".encode()
